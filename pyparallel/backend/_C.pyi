"""The contract of both backends: the extension, and `_python.py` in pure Python.

Both raise the same errors. ``TypeError`` means an argument of a wrong type. It also
means a tensor that is nested, sparse, quantized, a wrapper (of torch.func, or with a
``__torch_dispatch__``), on the meta device, or has its conjugate or negative bit set.
``ValueError`` means an argument of the right type with a wrong value. All arguments are
checked before the first write.

Gradients are neither used nor recorded.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

# What `pyparallel.backend` exports: it calls the functions of the end by itself.
__all__ = [
    "BatchCopy",
    "RecordedEvent",
    "ReturnJob",
    "Runtime",
    "SlabPlan",
    "are_compact",
    "are_on_one_device",
    "bound_cache",
    "bound_pinned",
    "cache_info",
    "clear_cache",
    "columns",
    "copy_compact",
    "decode",
    "empty",
    "encode",
    "find_unpackable",
    "flatten",
    "forbid_use",
    "image_batch",
    "memory_of",
    "pack",
    "pad_copy",
    "pad_small_batch",
    "pinned_info",
    "plan_copy",
    "plan_slab",
    "prepare_return",
    "replace_tensors",
    "ring_claim",
    "ring_format",
    "ring_holders",
    "ring_pass",
    "ring_reclaim",
    "select_tensors",
    "send",
    "stack_equal",
    "views",
]

def pad_copy(
    dst: Tensor,
    samples: Sequence[Tensor],
    fills: bytes,
    starts: Sequence[Sequence[int]] | None = None,
    mask: Tensor | None = None,
) -> None:
    """Write samples into their places in ``dst`` and fill the rest.

    The native backend writes every byte of ``dst`` and of ``mask`` exactly once. It
    copies bits, for every dtype, or casts numbers as ``Tensor.to`` does. Copies above
    64 KiB release the GIL. Meanwhile other threads may call ``set_`` on the samples,
    but must not shrink their storages.

    Args:
        dst: contiguous, ``(n, *target)``.
        samples: n tensors on the device of ``dst``. All have its dtype, or on the CPU
            one other dtype of a pair in `plain.CASTS`. Each has the number of
            dimensions of ``target`` and at most its sizes. Any strides are allowed; no
            sample may overlap ``dst``.
        fills: the bytes of one item, or of one item per sample, in native byte order.
        starts: for each sample, one start per dimension of ``target``: sample i fills
            ``dst[i][start : start + size]`` in every dimension. None: all start at 0.
        mask: contiguous ``torch.bool`` tensor ``(n, *target[-k:])`` with k of at least
            1, on the device of ``dst``. It must not overlap ``dst`` or a sample. In row
            i the range of sample i in its last k dimensions becomes True, whatever its
            size in the other dimensions; all else becomes False.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream:
        On a GPU the work is queued on the current stream of the device of ``dst``, and
        the samples may be released at once if they belong to that stream.
    """

def pad_small_batch(
    samples: Sequence[Tensor], pad_dims: int | None, values: Sequence[object]
) -> Tensor | None:
    """Return samples padded at their ends and stacked, or None for `pad_copy` to do it.

    The native backend always returns None, because `pad_copy` is fast for few samples
    too. Pure Python takes up to 16 plain contiguous CPU tensors without gradients to
    record, of up to 16384 elements together, padded with 0 or 1.

    Args:
        samples: at least one tensor.
        pad_dims: number of trailing dimensions that may differ, or None.
        values: padding value of every sample.
    """

def stack_equal(samples: Sequence[Tensor]) -> Tensor | None:
    """Return the result of ``torch.stack(samples)``, contiguous, or None.

    None means that the caller must use `pad_copy` or torch. The native backend stacks
    plain contiguous CPU tensors of one shape and dtype without gradients to record. For
    many small ones it takes a sixth of torch's time. Pure Python stacks all samples
    that torch stacks, except quantized and meta tensors and freed memory.

    Args:
        samples: any number of objects.

    Raises:
        TypeError: native only; a sample is not a tensor.
    """

def image_batch(
    dst: Tensor,
    images: Sequence[Tensor],
    mask: Tensor | None,
    mean: Sequence[float],
    std: Sequence[float],
    fill: Sequence[float],
    swap_channels: bool,
    exact: bool,
) -> None:
    """Write images into the low corners of ``dst``, normalised, and fill the rest.

    Channel c of ``dst[i]`` becomes ``(image[k] - mean[c]) / std[c]`` in float32,
    rounded to the dtype of ``dst`` (to nearest, ties to even). Here k is c, or
    C - 1 - c with ``swap_channels``. Outside image i it becomes ``fill[c]``, rounded
    likewise. All numbers are rounded to float32 first.

    Args:
        dst: ``(n, C, H, W)`` with C of 1 to 4, float32, float16 or bfloat16, contiguous
            or of the channels_last format.
        images: n tensors ``(C, h, w)``, h and w at most H and W, all uint8 or all
            float32, on the device of ``dst``. Each is contiguous, or a permuted view of
            a contiguous ``(h, w, C)``; none may overlap ``dst``.
        mask: contiguous ``torch.bool`` tensor ``(n, H, W)`` on the device of ``dst``,
            or None. It must not overlap ``dst`` or an image. Pixels of images become
            True, all others False.
        mean: one number per channel of ``dst``.
        std: one number per channel of ``dst``.
        fill: one number per channel of ``dst``.
        swap_channels: whether channels are read in reverse order.
        exact: whether results have the bits of torch's subtraction and division. If
            not, they are ``x * scale + bias`` (fused, or rounded in between). Here
            ``scale = 1 / std`` and ``bias = -mean / std`` are computed in float64 and
            rounded to float32. In float32 their distance from the exact value is at
            most ``2**-22 * (abs(x) + abs(mean)) / abs(std)``.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream: as `pad_copy`.
    """

class SlabPlan:
    """The places of leaves in one slab: a frozen value.

    Plans of one backend compare and hash by value, pickle and print. The constructor
    checks the plan.

    Args:
        offsets: first byte of every leaf: ascending multiples of 64. No leaf may start
            before the end of the leaf before it.
        shapes: of the leaves.
        dtypes: of the leaves; no quantized dtype.
        nbytes: size of the slab, a multiple of 64.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        nbytes: int,
    ) -> None: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def nbytes(self) -> int: ...

def plan_slab(leaves: Sequence[Tensor]) -> SlabPlan:
    """Plan the smallest slab for leaves of these shapes and dtypes.

    Args:
        leaves: tensors on any device, of any strides.
    """

def pack(dst: Tensor, leaves: Sequence[Tensor], plan: SlabPlan) -> None:
    """Write the bytes of leaves, in row-major order, into one slab on their device.

    All other bytes of the slab become zero. The GIL is released as by `pad_copy`.

    Args:
        dst: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)``. On a GPU the native
            backend requires an alignment of 16 bytes.
        leaves: tensors on the device of ``dst`` with the shapes and dtypes of the plan,
            of any strides; none may overlap ``dst``.
        plan: the places of the leaves.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream:
        As for `pad_copy`. In the native backend one kernel packs up to 168 leaves, or
        1362 on devices with large kernel parameters. Each leaf that is not contiguous
        needs one more kernel before it.
    """

def views(slab: Tensor, plan: SlabPlan) -> list[Tensor]:
    """Return contiguous tensors on the bytes of ``slab``.

    They have no autograd history. Each tensor that is not empty keeps the whole slab
    alive. On the CPU every tensor has its own storage, of its own size and not
    resizable. On other devices the tensors share the storage of ``slab``, because
    ``Tensor.record_stream`` ignores every other storage. In pure Python they also share
    it if the slab is pinned memory of torch's allocator.

    Args:
        slab: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)`` on any device.
        plan: the places of the tensors.
    """

def forbid_use(tensors: Sequence[Tensor], message: str) -> None:
    """Make every later use of tensors raise a RuntimeError with a message.

    The native backend forbids the use of their storages, so views raise it as well. In
    pure Python only the objects in ``tensors`` do.
    """

def memory_of(tensor: Tensor) -> Tensor:
    """Return all bytes of the memory of a tensor as ``torch.uint8`` ``(nbytes,)``.

    The memory is the slab for tensors that `views` returned, and the storage otherwise.
    """

def columns(dicts: list[Any], stack: bool) -> dict[Any, list[Any] | Tensor] | None:
    """Return for every key the values of all dicts, or None.

    None means that the caller must compare the dicts itself. The native backend takes
    dicts, no subclasses, with the same keys in the same order. Pure Python takes none.

    Args:
        dicts: exactly a list.
        stack: whether to stack the values of a key, if `stack_equal` takes them and
            they have at most 64 KiB. The result then has a tensor in place of the list.

    Raises:
        TypeError: native only; ``dicts`` is not a list.
    """

class Structure:
    """The containers of a nest: a frozen value. Native only.

    Structures compare, hash and print by value. They keep the order of insertion of
    dict keys, but ignore it in comparisons.
    """

    @property
    def num_leaves(self) -> int: ...
    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Return new containers around leaves, with keys in the order of insertion.

        Raises:
            ValueError: their number is not `num_leaves`.
        """

def flatten(
    tree: Any, leaf_types: AbstractSet[type], roots: int = 0
) -> tuple[list[Any], Structure, tuple[type, ...]] | None:
    """Return the leaves of a nest, its structure and the leaves' classes, or None.

    None means that the caller must use optree. The native backend visits dicts in the
    order of their sorted keys. It takes nests, at most 200 deep, with containers that
    are exactly dict, list or tuple. The keys of a dict must be all exactly str, or all
    exactly int. Pure Python takes none.

    Args:
        tree: any object.
        leaf_types: a set of the classes that are leaves. An object of another class
            may be a container, so the result is None.
        roots: 1: ``tree`` is a root; 2: its items are roots. Then the empty items of a
            root are leaves. If the root is no list, so are the empty values of each
            dict that the root contains directly or through dicts alone.

    Raises:
        TypeError: native only; ``leaf_types`` is not a set.
        ValueError: native only; ``roots`` is not 0, 1 or 2.
    """

def copy_compact(
    tree: Any, leaf_types: AbstractSet[type], roots: int, on_cpu: bool
) -> tuple[Any, tuple[type, ...]] | None:
    """Return a nest with new containers around its leaves, and their classes, or None.

    The result is that of `flatten` and `Structure.unflatten`, in one walk. None means
    that `flatten` returns None, or that `are_compact` of the leaves is False. Pure
    Python always returns None.

    Args:
        tree: as for `flatten`.
        leaf_types: as for `flatten`.
        roots: as for `flatten`.
        on_cpu: as for `are_compact`.

    Raises:
        TypeError: as `flatten`.
        ValueError: as `flatten`.
    """

def select_tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the leaves that are exactly tensors or parameters, in order."""

def replace_tensors(leaves: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Return the leaves with ``tensors`` in place of those of `select_tensors`.

    Raises:
        ValueError: their number differs.
    """

def find_unpackable(tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of tensors whose bytes are not all that a copy needs.

    A copy needs more if the tensor is not plain (the ``TypeError`` of all operators),
    has another class than `select_tensors` takes, is not on the CPU, has a tangent, or
    requires a gradient while gradients are enabled.
    """

def are_on_one_device(tensors: Sequence[Tensor]) -> bool:
    """Return True if there are tensors, and all are plain and on one device.

    They have the classes that `select_tensors` takes, and are not on the meta device.
    """

def are_compact(leaves: Sequence[Any], on_cpu: bool) -> bool:
    """Return True if the tensors among leaves need no copy on the host.

    They are contiguous. The native backend returns False if one is not plain or not
    within its storage; pure Python does so only with ``on_cpu``.

    Args:
        leaves: objects; those that `select_tensors` does not take are ignored.
        on_cpu: whether the tensors have to be on the CPU.
    """

def encode(tree: Any, limit: int) -> tuple[bytes, int] | None:
    """Return a small batch as bytes, and the bytes of its tensors alone, or None.

    The native backend takes nests as `flatten` does, of tensors, None and objects that
    are exactly bool, int (of 64 bits), float, str or bytes. Pure Python takes lists of
    tensors, with the same bytes. Both take tensors that are exactly ``torch.Tensor``,
    plain, contiguous, on the CPU and without gradients, and no container or tensor
    twice. The first byte is not that of a pickle.

    Args:
        tree: any object.
        limit: the most bytes of all tensors together.
    """

def decode(message: Any) -> Any:
    """Return the batch of the bytes of `encode`. Its tensors have memory of their own.

    Args:
        message: the bytes, of any bytes-like class. They may change afterwards.

    Raises:
        ValueError: `encode` of this backend does not return such bytes.
    """

def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous tensor on the CPU.

    The native backend takes 1 MiB and more from a cache of blocks of earlier tensors
    (`cache_info`). From 2 MiB on, blocks are aligned to 2 MiB.

    Args:
        shape: of the tensor.
        dtype: of the tensor.

    Raises:
        RuntimeError: a size is negative, or the system has no memory left.
    """

def cache_info() -> tuple[int, int, int, int, int]:
    """Return bytes in use, bytes cached, their limit, cache hits and cache misses.

    All are zero in pure Python, which has no cache.
    """

def bound_cache(limit: int, idle_seconds: float) -> None:
    """Keep at most ``limit`` bytes, each block for at most ``idle_seconds``."""

def clear_cache() -> int:
    """Give all cached bytes back to the system; return their number."""

def ring_format(header: Tensor, num_slots: int) -> None:
    """Format memory as the header of a ring of free slots.

    A ring is shared memory in equal slots. Its header stores the holder of each slot in
    lines of 64 bytes. Line 0 identifies the memory and the backend that formatted it;
    line 1 + i belongs to slot i. The first 8 bytes are the number of the holder, or 0
    for a free slot. A number is never reused for another holder. The other 56 bytes
    belong to the holder. This operator sets them to zero, and no other one writes them.

    Format the header before other processes can access it. No operator waits for
    another process, because that may be killed at any instruction.

    Args:
        header: contiguous ``torch.uint8`` tensor ``(64 * (1 + num_slots),)`` on the
            CPU, aligned to 64 bytes. The other ring operators require such a header,
            formatted by either backend.
        num_slots: between 1 and 65536.
    """

def ring_claim(header: Tensor, holder: int, fd: int) -> int:
    """Take the first free slot; return its index, or -1 if no slot is free.

    The writes of the last holder into the slot are visible. The result is also -1 if
    the other backend formatted the header, or if pure Python runs on a system without
    POSIX record locks. The caller then uses ordinary memory.

    Args:
        header: of a ring.
        holder: number of the new holder, 1 or more.
        fd: file descriptor of the shared memory, open for writing; native: ignored.

    Raises:
        OSError: pure Python only; ``fd`` cannot be locked.
    """

def ring_pass(header: Tensor, slot: int, holder: int, to: int) -> bool:
    """Give a slot to another holder, or free it.

    Return False, without a change, if ``holder`` does not hold the slot. The new holder
    sees the writes of ``holder``. In pure Python only ``holder`` itself may call this,
    or another process after ``holder`` died.

    Args:
        header: of a ring.
        slot: index of the slot.
        holder: number of the present holder, 1 or more.
        to: number of the new holder; 0 frees the slot.
    """

def ring_reclaim(header: Tensor, holder: int) -> list[int]:
    """Free every slot of ``holder``, which is dead; return their indices."""

def ring_holders(header: Tensor) -> list[int]:
    """Return the holder of every slot, each read at some moment of this call."""

class RecordedEvent:
    """The end of all work that was queued on a stream before the event. Native only.

    No method ends a graph capture in another thread. The methods that call the driver
    release the GIL. They raise RuntimeError in a process that was forked after the
    first event.
    """

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait.

        The result stays False if the device accepted no event after copies of `send`.
        """

    def wait(self, stream: Any) -> None:
        """Make ``stream``, as `send` takes it, wait; the host does not wait.

        Raises:
            RuntimeError: ``stream`` is under graph capture, and is not the stream of
                the event.
        """

    def synchronize(self) -> None:
        """Block the host until that work is done."""

    def check(self) -> None:
        """Raise the error that stopped the copies of `send` half way, if one did."""

class Fence:
    """The end of queued work: see `Runtime.fence` and `take_copies`. Native only."""

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait.

        While a graph is captured on one of the streams, the result is False.
        """

class Runtime:
    """Memory, streams and events of one device type, without the GIL. Native only.

    No method opens a context on a device that the process does not use, ends a graph
    capture, or leaves an error behind for the next call of its thread.

    Args:
        device_type: one of `transfers`.

    Raises:
        NotImplementedError: ``device_type`` is not in `transfers`.
    """

    def __init__(self, device_type: str) -> None: ...
    def pin(self, address: int, nbytes: int) -> int:
        """Pin memory for all devices of the type.

        Returns:
            0, or the code of the error if the system refuses.

        Raises:
            RuntimeError: the device has failed before.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def observe_copies(self) -> bool:
        """Track the copies that torch queues from and to pinned memory from now on.

        For CUDA this replaces torch's host allocator by one that forwards all calls.

        Returns:
            False if this torch offers no way. It needs torch 2.11.
        """

    def take_copies(self, address: int) -> Fence | None:
        """Return a fence behind torch's copies of memory since the last call.

        Args:
            address: of memory that this class has pinned, after `observe_copies`.

        Returns:
            None if the end of a copy is unknown: a graph has captured it, or the device
            accepted no event behind it.
        """

    def allocate(self, sizes: Sequence[int], stream: Any) -> list[Tensor]:
        """Allocate device memory on ``stream``, which must not be under graph capture.

        Dropped memory is reused after the work of all streams given to `keep`. At most
        as many bytes as are in use wait for that; beyond it ``stream`` waits.

        Returns:
            For each size a ``torch.uint8`` tensor ``(nbytes,)`` of torch's caching
            allocator. Their storages cannot be resized.
        """

    def keep(self, tensors: Sequence[Tensor], stream: Any) -> list[Tensor]:
        """Keep memory of `allocate`, once dropped, from reuse while ``stream`` uses it.

        Returns:
            The tensors with other memory. For these, nothing was done.
        """

    def create_stream(self, device: int) -> int:
        """Return the handle of a new stream that no other code has."""

    def exchange_capture_mode(self, mode: int, device: int) -> int:
        """Set the mode of this thread during graph captures; return the mode before.

        In mode 2, no call of this thread ends a capture in another thread.
        """

    def is_capturing(self, stream: Any) -> bool:
        """Return True if a graph is captured on ``stream``."""

    def is_idle(self, stream: Any) -> bool:
        """Return True if ``stream``, which is not under capture, has no work left."""

    def refused_batch(self) -> int:
        """Return the error code with which a batch of copies was refused, or 0.

        Since then each copy in place is a call of its own.
        """

    def record(self, stream: Any) -> RecordedEvent:
        """Record an event on ``stream``, which must not be under graph capture."""

    def fence(self) -> Fence:
        """Return a fence behind the current streams of this thread.

        There is one such stream on each device that the process uses.
        """

def send(
    slab: Tensor,
    leaves: Sequence[Tensor],
    plan: SlabPlan | None,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    stream: Any,
    chunk_nbytes: int = 4194304,
) -> RecordedEvent:
    """Queue copies of CPU tensors to a device. Native only.

    The leaves are packed, as by `pack`, into pinned memory in chunks, with one copy per
    chunk. The device copies a chunk while the host packs the next one. The leaves may
    be changed and dropped when this returns. The GIL is released. The host waits for
    the device only at the limit of pinned memory (`bound_pinned`), and then for copies
    on ``stream`` alone.

    Args:
        slab: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)`` on the device of
            ``stream``.
        leaves: as for `pack`.
        plan: the places of the leaves, or None to pack none.
        targets: contiguous tensors on that device.
        sources: for each target a contiguous CPU tensor with the same number of bytes.
            The device reads it in place. It should be pinned, and must be neither
            changed nor dropped until the copies are done.
        stream: of the copies: a ``torch.Stream``, or any object that has its
            ``stream_id``, ``device_index`` and ``device_type``. No other stream may
            still use the memory of slab and targets.
        chunk_nbytes: between 1 and 4 MiB, the default. A chunk of 4 MiB keeps eight
            threads busy, and its copy takes twenty times as long as its queueing.

    Raises:
        RuntimeError: ``stream`` is under graph capture, or the process was
            forked. If this function raises any error, no copy was queued. Errors after
            the first copy are in the result (`RecordedEvent.check`).
        NotImplementedError: the device of ``stream`` is not in `transfers`.

    Stream: the copies wait for no other stream.
    """

class BatchCopy:
    """The copy of one batch to one device, by `plan_copy`. Native only."""

    @property
    def sources(self) -> object:
        """An object that keeps the memory that `start` may read in place, or None.

        Hold it from before `start` until `reading` is done. Available before `start`.
        """

    @property
    def reading(self) -> RecordedEvent | None:
        """The event behind copies that read `sources`; None if no copy does."""

    @property
    def num_in_place(self) -> int:
        """The number of copies that read `sources`."""

    @property
    def pageable_nbytes(self) -> int:
        """The bytes that `start` packed only because they are not pinned."""

    def start(self, waits_here: bool, may_go_home: bool) -> None:
        """Allocate memory of the device and queue the copy. Call this once.

        The result is that of `plan_slab`, `Runtime.allocate`, `send` and `views`.

        Args:
            waits_here: whether the current stream will wait for the copy at once. Then
                it must not be under graph capture.
            may_go_home: with ``waits_here``, whether the copy may be on the current
                stream. It is if that stream is idle and a few copies in place are all.

        Raises:
            RuntimeError: as `send`, also for an error after the first copy.
        """

    def wait(self) -> Any:
        """Return the tensors; the current stream of the device waits, the host not.

        Those that were packed, or that are in one span, are `views` of one slab. The
        memory is kept as by `Runtime.keep`.

        Returns:
            A list of the tensors, or with a structure new containers around them and
            the other leaves.
        """

def plan_copy(
    leaves: Sequence[Tensor],
    stream: Any,
    leaf_nbytes: int,
    mean_nbytes: int,
    dtype: torch.dtype | None = None,
    structure: Structure | None = None,
) -> BatchCopy | None:
    """Plan the copy of leaves to the device of ``stream``; call no device.

    Two kinds of pinned memory are read in place: a span of all leaves, if they have
    ``mean_nbytes`` on average, and contiguous leaves of ``leaf_nbytes``. In a span, the
    leaves are contiguous in one storage or slab, share no bytes, and start at multiples
    of 64 bytes from the first one. At most a fifth of it may belong to no leaf.

    Args:
        leaves: as for `send`.
        stream: of the copy, as for `send`.
        leaf_nbytes: see above.
        mean_nbytes: see above.
        dtype: of floating-point leaves that are packed. Those that are read in place
            keep their own.
        structure: of `flatten`, for these leaves. Then leaves may be other objects than
            tensors, and stay as they are.

    Returns:
        None if `find_unpackable` finds a tensor among the leaves, if a cast to
        ``dtype`` is not in `plain.CASTS`, or with a structure if no leaf is a tensor.

    Raises:
        ValueError: the memory of a leaf was freed.
        NotImplementedError: as `send`.
    """

class ReturnJob:
    """A copy to the host that `prepare_return` has planned. Native only."""

    @property
    def plan(self) -> SlabPlan:
        """The layout of the result."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return a ``torch.uint8`` tensor of torch's pinned memory for the result."""

    def run(self, host: Tensor, stream: Any) -> RecordedEvent:
        """Pack the leaves on their device, and queue a copy of the slab to ``host``.

        Call it once. The leaves may be changed and dropped when this returns. The GIL
        is released, and the host does not wait.

        Args:
            host: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)`` on the CPU. It
                must live until the copy is done. torch's pinned memory does.
            stream: of the copy, as for `send`; it waits for the current stream. None:
                the current stream of the device, where the leaves are packed.

        Raises:
            RuntimeError: ``stream`` is under graph capture. After any error of this
                function nothing was queued. Later errors are in the result
                (`RecordedEvent.check`).
            ValueError: ``host`` is not as above, or this is the second call.
        """

def prepare_return(
    leaves: Sequence[Tensor], most_leaf_nbytes: int | None
) -> ReturnJob | None:
    """Plan a copy of leaves of one device to the host.

    Args:
        leaves: tensors.
        most_leaf_nbytes: see below.

    Returns:
        None if not `are_on_one_device`, if the slab would have no bytes, if a
        contiguous leaf has at least ``most_leaf_nbytes``, or if the current stream of
        the device is under graph capture.

    Raises:
        NotImplementedError: the device is not in `transfers`.
        ValueError: a leaf does not lie within its storage.
    """

def pinned_info() -> tuple[int, int, int, int]:
    """Return bytes in use, bytes idle, their limit, and the number of host waits.

    They count the pinned blocks into which `send` packs, for all devices. Blocks in use
    are being written, are read by copies, or are abandoned because a failed device may
    read them for ever. All but the limit are 0 in a forked process and in pure Python.
    """

def bound_pinned(limit: int) -> None:
    """Limit the blocks of every device type to ``limit`` bytes.

    Idle blocks above the limit are freed now, other blocks after their copies. A stream
    without blocks gets one of up to 4 MiB in any case, so that it never waits for
    another stream. With n streams, n - 1 blocks may exceed the limit.

    Args:
        limit: 4 MiB or more. Before the first call it is 1 GiB, or an eighth of the
            memory of the machine if that is less.
    """

def transfers() -> tuple[str, ...]:
    """Return the device types that `send` copies to.

    The CPU is one of them, with synchronous copies, for tests.
    """

def devices() -> tuple[str, ...]:
    """Return the device types that this build has kernels for, ``"cpu"`` first.

    Native only, as are `transfers` and `build_info`.
    """

def build_info() -> dict[str, str]:
    """Return the versions and settings of the extension's build.

    Keys: ``version``, ``torch``, ``cuda`` (empty in a CPU build), ``compiler``,
    ``cxx_standard`` (``"17"``), ``archs``, ``sanitize`` (empty but in tests).
    """
