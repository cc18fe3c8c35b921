"""The contract of both backends; `_python.py` is its other implementation.

Errors read the same from both. ``TypeError``: an argument is of the wrong kind, also a
tensor that is nested, sparse, quantized, a wrapper (of torch.func, or with a
``__torch_dispatch__``), on the meta device, or has its conjugate or negative bit set.
``ValueError``: it is of the right kind and does not fit. Nothing is written unless all
arguments are good.

Gradients are neither used nor recorded.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

def pad_copy(
    dst: Tensor,
    samples: Sequence[Tensor],
    fills: bytes,
    starts: Sequence[Sequence[int]] | None = None,
    mask: Tensor | None = None,
) -> None:
    """Write samples into their places in ``dst`` and fill the rest.

    The native one writes every byte of ``dst`` and of ``mask`` exactly once. Bits are
    copied, whatever the dtype. Copies above 64 KiB release the GIL; other threads may
    meanwhile call ``set_`` on the samples, but not shrink their storages in place.

    Args:
        dst: contiguous, ``(n, *target)``.
        samples: n tensors with the dtype and device of ``dst``, each of at most shape
            ``target`` in as many dimensions. Any strides; none may overlap ``dst``.
        fills: the bytes of one item, or of one for each sample, in native order.
        starts: for each sample, one start per dimension of ``target``: sample i fills
            ``dst[i][start : start + size]`` in every dimension. None: all start at 0.
        mask: contiguous ``torch.bool`` tensor ``(n, *target[-k:])`` for some k of at
            least 1, on the device of ``dst``; must not overlap ``dst`` or a sample. It
            becomes True where the start and size of sample i in its last k dimensions
            place it, whatever its size in the others, and False elsewhere.

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

    The native one always returns None: its one pass is fast for few samples too. The
    other one takes up to 16 plain contiguous CPU tensors of up to 16384 elements
    together, to be padded with 0 or 1, of which autograd wants nothing.

    Args:
        samples: at least one tensor.
        pad_dims: number of trailing dimensions that may differ, or None.
        values: padding value of every sample.
    """

def stack_equal(samples: Sequence[Tensor]) -> Tensor | None:
    """Return what ``torch.stack(samples)`` does, contiguous, or None.

    None means that there is more to it: `pad_copy`, or torch, must have a look. The
    native one stacks plain contiguous CPU tensors of one shape and dtype of which
    autograd wants nothing, a sixth of torch's time for many small ones. The other one
    stacks whatever torch stacks, but for quantized and meta tensors and freed memory.

    Args:
        samples: any number of anything.

    Raises:
        TypeError: native only; they are not tensors.
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

    Of image i, channel c of ``dst[i]`` becomes ``(image[k] - mean[c]) / std[c]`` in
    float32, rounded to the dtype of ``dst`` (to the nearest, ties to even), where k is
    c, or C - 1 - c with ``swap_channels``. Everywhere else it becomes ``fill[c]``,
    rounded alike. All numbers are rounded to float32 first.

    Args:
        dst: ``(n, C, H, W)`` with C of 1 to 4, float32, float16 or bfloat16, contiguous
            or of the channels_last format.
        images: n tensors ``(C, h, w)``, h and w at most H and W, all uint8 or all
            float32, on the device of ``dst``. Each is contiguous, or a permuted view of
            a contiguous ``(h, w, C)``; none may overlap ``dst``.
        mask: contiguous ``torch.bool`` tensor ``(n, H, W)`` on the device of ``dst``,
            or None; must not overlap ``dst`` or an image. It becomes True where the
            images are and False elsewhere.
        mean: of every channel of ``dst``.
        std: of every channel of ``dst``.
        fill: of every channel of ``dst``.
        swap_channels: whether channels are read in the opposite order.
        exact: whether results have the very bits of torch's subtraction and division.
            Otherwise it is ``x * scale + bias`` (fused, or rounded in between), with
            ``scale = 1 / std`` and ``bias = -mean / std`` computed in float64 and
            rounded to float32: in float32 at most
            ``2**-22 * (abs(x) + abs(mean)) / abs(std)`` from the exact value.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream: as `pad_copy`.
    """

class SlabPlan:
    """Where leaves lie in one slab: a frozen value.

    Plans of one backend compare and hash by value, pickle and print. That a plan is
    good is checked when it is made.

    Args:
        offsets: first byte of every leaf, ascending, multiples of 64, so that no leaf
            starts before the one before it ends.
        shapes: of the leaves.
        dtypes: of the leaves; not a quantized one.
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

    All other bytes of the slab become zero. The GIL: as for `pad_copy`.

    Args:
        dst: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)``; on a GPU, the native
            one wants it at a multiple of 16 bytes.
        leaves: tensors on the device of ``dst`` with the shapes and dtypes of the plan,
            of any strides; none may overlap ``dst``.
        plan: where they go.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream:
        As for `pad_copy`. Natively one kernel packs the leaves (more from 169 leaves
        on, or 1363 where launches carry so much), behind one more for each leaf that is
        not contiguous.
    """

def views(slab: Tensor, plan: SlabPlan) -> list[Tensor]:
    """Return contiguous tensors on the bytes of ``slab``.

    They have no autograd history, and each that is not empty keeps the whole slab
    alive. On the CPU every tensor has a storage of its own, of its own size and not
    resizable. On other devices they share the storage of ``slab``, because
    ``Tensor.record_stream`` ignores every other storage. In pure Python they also share
    it on pinned memory of torch's allocator.

    Args:
        slab: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)`` on any device.
        plan: the places of the tensors.
    """

def memory_of(tensor: Tensor) -> Tensor:
    """Return all bytes of the memory of a tensor as ``torch.uint8`` ``(nbytes,)``.

    The memory is the slab of a tensor that `views` returned, and else the storage.
    """

def columns(dicts: list[Any], stack: bool) -> dict[Any, list[Any] | Tensor] | None:
    """Return for every key the values of all dicts, or None.

    None means that somebody must have a closer look. The native one takes dicts (of
    exactly that class) with the same keys in the same order. The other one takes none.

    Args:
        dicts: exactly a list.
        stack: whether values that `stack_equal` takes, up to 64 KiB of them, are to be
            stacked at once: then there is a tensor in place of their list.

    Raises:
        TypeError: native only; ``dicts`` is not a list.
    """

class Structure:
    """The containers of a nest: a frozen value. Native only.

    Structures compare, hash and print by value; the order in which keys were inserted
    into dicts is kept, but does not count.
    """

    @property
    def num_leaves(self) -> int: ...
    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Return new containers around leaves, with keys in the order of insertion.

        Raises:
            ValueError: there are not `num_leaves` of them.
        """

def flatten(
    tree: Any, leaf_types: AbstractSet[type]
) -> tuple[list[Any], Structure] | None:
    """Return the leaves of a nest and its structure, or None.

    None means that optree must do it. The native one walks dicts in the order of their
    sorted keys. It takes nests whose containers are all exactly dict (with keys that
    are all exactly str, or all exactly int), list or tuple, at most 200 deep. The other
    one takes none.

    Args:
        tree: anything.
        leaf_types: a set of the classes that are leaves. An object of another class
            might be a container.

    Raises:
        TypeError: native only; ``leaf_types`` is not a set.
    """

def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous tensor on the CPU.

    The native one takes 1 MiB and more from a cache of blocks that earlier tensors
    gave back (`cache_info`), at a multiple of 2 MiB from that size on.

    Args:
        shape: of the tensor.
        dtype: of the tensor.

    Raises:
        RuntimeError: a negative size, or no memory.
    """

def cache_info() -> tuple[int, int, int, int, int]:
    """Return bytes in use, bytes cached, their limit, and blocks found and not found.

    Zeros in pure Python, which has no cache.
    """

def bound_cache(limit: int, idle_seconds: float) -> None:
    """Keep at most ``limit`` bytes, each block for at most ``idle_seconds``."""

def clear_cache() -> int:
    """Give all cached bytes back to the system; return how many they were."""

def ring_format(header: Tensor, num_slots: int) -> None:
    """Make memory, before anybody else sees it, the header of a ring of free slots.

    A ring is memory in equal slots that processes share; its header says who holds
    which. Line 0, of 64 bytes, says what the memory is and which backend formatted it;
    line 1 + i is slot i. Its first 8 bytes are its holder: 0 is nobody, other numbers
    are never used again for somebody else. The other 56 belong to the holder, and no
    operator touches them after this one, which makes them zero.

    Nobody waits for another process, which may be killed at any instruction.

    Args:
        header: contiguous ``torch.uint8`` tensor ``(64 * (1 + num_slots),)`` on the
            CPU, at a multiple of 64 bytes. The other operators on rings want the same,
            formatted by either backend.
        num_slots: between 1 and 65536.
    """

def ring_claim(header: Tensor, holder: int, fd: int) -> int:
    """Take the first free slot; return its index, or -1 if there is none.

    What the last holder wrote into the slot is visible. -1 too if the other backend
    formatted the header, or pure Python runs where the system has no POSIX record
    locks: the caller uses ordinary memory.

    Args:
        header: of a ring.
        holder: who claims, 1 or more.
        fd: file descriptor of the shared memory, open for writing; native: ignored.

    Raises:
        OSError: pure Python only; ``fd`` cannot be locked.
    """

def ring_pass(header: Tensor, slot: int, holder: int, to: int) -> bool:
    """Give a slot to somebody else, or to nobody.

    Return False, having changed nothing, if the slot is not held by ``holder``. What
    ``holder`` wrote is visible to whom the slot is given. In pure Python only
    ``holder`` itself may call this, and whoever knows that it is dead.

    Args:
        header: of a ring.
        slot: index of the slot.
        holder: who has it now, 1 or more.
        to: who has it then; 0 makes it free.
    """

def ring_reclaim(header: Tensor, holder: int) -> list[int]:
    """Make every slot of ``holder`` free, which is dead; return which they were."""

def ring_holders(header: Tensor) -> list[int]:
    """Return the holder of every slot, each as it was at some moment of this call."""

class RecordedEvent:
    """The end of all work that was queued on a stream before the event.

    No method ends a graph capture in another thread. The methods that call the driver
    release the GIL. They raise RuntimeError in a process that was forked after the
    first event.
    """

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait.

        Return False for ever if the device took no event after copies of `send`.
        """

    def wait(self, stream: Any) -> None:
        """Make ``stream``, as `send` takes it, wait; the host does not.

        Raises:
            RuntimeError: ``stream`` is under graph capture, and is not the stream of
                the event.
        """

    def synchronize(self) -> None:
        """Block the host until that work is done."""

    def check(self) -> None:
        """Raise the error that stopped the copies of `send` half way, if one did."""

class Fence:
    """The end of all work on the streams that were current in a thread."""

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait.

        While a graph is captured on one of the streams, the result is False.
        """

class Runtime:
    """Pins memory and records events for one device type, without the GIL.

    No method opens a context on a device that the process does not use, ends a graph
    capture, or leaves an error behind for the next call of its thread.

    Args:
        device_type: one of `transfers`.

    Raises:
        NotImplementedError: it is another type.
    """

    def __init__(self, device_type: str) -> None: ...
    def pin(self, address: int, nbytes: int) -> int:
        """Pin memory for all devices of the type.

        Returns:
            0, or the code of the error if the system refuses.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

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
    home: Any,
    chunk_nbytes: int = 4194304,
    lands_at_once: bool = False,
) -> RecordedEvent:
    """Queue copies of CPU tensors to a device.

    The leaves are packed, as `pack` does it, into page-locked memory in chunks, while
    the device copies the chunk before: one copy for each chunk. They may be changed and
    dropped when this returns. The GIL is released. The host waits for the device only
    at the limit of page-locked memory (`bound_pinned`), and then for copies on
    ``stream`` alone.

    Args:
        slab: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)`` on the device of
            ``stream``.
        leaves: as for `pack`.
        plan: where they go, or None: then nothing is packed.
        targets: contiguous tensors on that device.
        sources: for each target a contiguous CPU tensor of as many bytes. The device
            reads it in place: it should be page-locked, and must be neither changed nor
            dropped until the copies are done.
        stream: of the copies: a ``torch.Stream``, or any object that has its
            ``stream_id``, ``device_index`` and ``device_type``.
        home: the stream, of the same device, on which slab and targets were allocated.
        chunk_nbytes: between 1 and 4 MiB, the default: enough for eight threads to
            pack, and for a copy to take twenty times as long as to queue it.
        lands_at_once: ``home`` is made to wait as soon as this returns. Then fewer than
            8 copies in place are queued on ``home`` itself, if it is idle and nothing
            is packed: events and waits would cost more than they save.

    Raises:
        RuntimeError: one of the streams is under graph capture, or the process was
            forked. Whatever is raised here, no copy has been queued; errors after the
            first are in the result (`RecordedEvent.check`).
        NotImplementedError: the device of ``stream`` is not in `transfers`.

    Stream: the copies wait for what was queued on ``home`` when this was called.
    """

def pinned_info() -> tuple[int, int, int, int]:
    """Return bytes in use, bytes idle, their limit, and how often the host waited.

    They are of the page-locked blocks that `send` packs into, of all devices. In use
    are those that are written, read by copies, or lost because a failed device may read
    them for ever. All but the limit are 0 in a forked process, and in pure Python.
    """

def bound_pinned(limit: int) -> None:
    """Let the blocks of every device type take at most ``limit`` bytes.

    Idle blocks above it are freed now, others when they have been read. A stream that
    has no block gets one of up to 4 MiB all the same, so that it never waits for
    another stream: with n streams of copies ``limit`` may be exceeded by n - 1 blocks.

    Args:
        limit: 4 MiB or more. Before the first call it is 1 GiB, or an eighth of the
            machine's memory if that is less.
    """

def transfers() -> tuple[str, ...]:
    """Return the device types that `send` can send to.

    The CPU is one, on which all is done at once: for tests.
    """

def devices() -> tuple[str, ...]:
    """Return the device types that this build has kernels for, ``"cpu"`` first.

    Native only, as are `transfers` and `build_info`.
    """

def build_info() -> dict[str, str]:
    """Return what the extension was built with.

    Keys: ``version``, ``torch``, ``cuda`` (empty in a CPU build), ``compiler``,
    ``cxx_standard`` (``"17"``), ``archs``, ``sanitize`` (empty but in tests).
    """
