"""A batch as one short message, over the channel of a worker.

`pack` makes the message in the worker. It pickles the batch as torch's queue does, with
a number in the place of each tensor. The pickle visits every object, so tensors are
found in objects of any class. The bytes of the tensors have one of three places:

1. the message, if the batch is small: a slab would cost more than the copy;
2. a slab of the ring. It is claimed at the first larger allocation, so that collate
   functions write into it, and tensors that were created there are not copied;
3. new shared memory, if no slab is free or large enough. Its descriptor is pickled as
   by `multiprocessing`.

`unpack` creates views of that memory in the parent, and unpickles the batch with a view
for each number. Small batches of plain types need no pickle (`pack_small`).
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from .. import backend
from ..backend.plain import can_pack
from ..core.errors import BatchValueError
from ..transfer import to_device
from . import memfd
from . import ring as ring_module
from .ring import Range, RingMemory, Slab

#: The most bytes of tensors that travel in a message.
INLINE_NBYTES = 16 * 1024
#: Smaller NumPy arrays are pickled with the batch.
_SMALL_ARRAY = 4096
#: The reducers of `ForkingPickler`, which has no public name for them.
_REDUCERS: Any = ChainMap(
    vars(ForkingPickler)["_extra_reducers"], copyreg.dispatch_table
)


class RingMiss(NamedTuple):
    """The reason why a batch is not in the ring.

    Attributes:
        reason: ``"full"`` (no slab is free), ``"large"`` (the batch does not fit into a
            slab), ``"memory"`` (the system has no memory left), ``"kept"`` (the worker
            keeps a tensor of the batch), ``"off"`` (there is no ring) or
            ``"unsupported"`` (torch sends some of the tensors).
        nbytes: bytes that the batch needs; 0 if unknown.
    """

    reason: str
    nbytes: int


class LazySlab:
    """The slab of one batch, which is claimed when it is needed.

    Args:
        ring: the ring of the loader, None without one.
        holder: the number of this worker in the ring.
        limit: the most bytes of tensors that travel in a message.

    Attributes:
        miss: the reason why `empty` allocated no memory for a large tensor, or None.
    """

    miss: RingMiss | None = None

    def __init__(self, ring: RingMemory | None, holder: int, limit: int) -> None:
        self.slab: Slab | None = None
        self.ring: RingMemory | None = ring
        self.limit: int = limit
        self._holder = holder

    def claim(self) -> Slab | None:
        """Return the slab, None if no slab is free."""
        if self.slab is None and self.ring is not None:
            self.slab = self.ring.claim(self._holder)
        return self.slab

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a tensor in the slab, None if it is small or does not fit."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.slab is None and nbytes <= self.limit:
            return None
        slab = self.claim()
        found = None if slab is None else slab.empty(shape, dtype)
        if found is None and self.ring is not None and nbytes > self.limit:
            self.miss = self.missed(nbytes)
        return found

    def missed(self, nbytes: int) -> RingMiss:
        """Return the reason why bytes are not in the slab that was claimed for them."""
        slab = self.slab
        if slab is None:
            return RingMiss("off" if self.ring is None else "full", nbytes)
        is_large = slab.requested > slab.ring.slab_nbytes
        return RingMiss("large" if is_large else "memory", slab.requested)

    def release(self) -> None:
        """Free the slab of a batch that is not sent."""
        slab, self.slab = self.slab, None
        if slab is not None:
            slab.release()


class Packed(NamedTuple):
    """A batch as bytes.

    Attributes:
        body: the bytes.
        nbytes: the bytes of its tensors; in a slab, with the gaps between them.
        miss: the reason why they are neither in a slab nor in the message, or None.
        was_shared: a large tensor was in shared memory of torch.
    """

    body: bytes
    nbytes: int
    miss: RingMiss | None = None
    was_shared: bool = False


class SlabLocation(NamedTuple):
    """The first bytes of a slab. ``gaps``: those without a tensor, if checked."""

    ring: str
    slab: int
    holder: int
    nbytes: int
    gaps: tuple[Range, ...] = ()


class Message(NamedTuple):
    """The content of a message from a worker to the parent.

    Attributes:
        location: the memory with the bytes of the leaves; None if there are no bytes.
            Bytes: the encoded leaves themselves.
        plan: the layout of the leaves in the memory; None if there is no memory.
        order: the index in ``plan`` of each number; None if both are the same.
        body: the pickled batch, with a number for each leaf.
        permuted: the order of dimensions in memory, by number, of leaves that are not
            row-major.
        buffers: the numbers of leaves that are buffers of NumPy arrays.
        unsupported: pickled tensors and storages that torch sends: those of a device,
            sparse and nested ones.
    """

    location: SlabLocation | memfd.SharedMemory | bytes | None
    plan: Any
    order: tuple[int, ...] | None
    body: bytes
    permuted: dict[int, tuple[int, ...]]
    buffers: list[int]
    unsupported: bytes | None


# ------------------------------------------------------------ in the worker


def pack_small(held: list[Any], lazy: LazySlab) -> Packed | None:
    """Return a batch without a slab as a message, None if only `pack` can.

    Args:
        held: a list with the batch, which stays in it.
        lazy: the slab that the batch was allocated from.
    """
    encoded = backend.encode(held[0], lazy.limit) if lazy.slab is None else None
    return None if encoded is None else Packed(*encoded)


def pack(held: list[Any], lazy: LazySlab) -> Packed:
    """Return a batch as a message, and free the slab unless the batch is in it.

    Note: [references to a batch]. A tensor in the slab that lives on after this call
    may change, so the batch is then copied out of the ring. An argument stays on the
    stack of the caller in Python 3.10, so the batch is popped from a list.

    Args:
        held: a list with the batch. No other variable of a frame may refer to it.
        lazy: the slab that the batch was allocated from.

    Raises:
        ValueError: a tensor has an autograd graph.
        RuntimeError: the system has no memory or no file descriptor left.
        Exception: any error of pickling.
    """
    try:
        batch = held.pop()
        try:
            message, packed = _write(batch, lazy, trust=True)
        except (TypeError, ValueError):  # for example, a tensor is a conjugate view
            message, packed = _write(batch, lazy, trust=False)
        del batch
        slab = lazy.slab
        is_kept = slab is not None and not slab.finish()
        if isinstance(message.location, SlabLocation):
            if slab is not None and is_kept:
                nbytes = message.location.nbytes
                message = message._replace(location=_write_new(nbytes, slab.copy_to))
                packed = packed._replace(miss=RingMiss("kept", nbytes))
            else:
                lazy.slab = None  # the parent frees it
    finally:
        lazy.release()
    body = pickle.dumps(tuple(message), pickle.HIGHEST_PROTOCOL)
    return packed._replace(body=body)


def _write(batch: Any, lazy: LazySlab, *, trust: bool) -> tuple[Message, Packed]:
    """Write the leaves of a batch. Return its message, and `Packed` without a body."""
    leaves, file = _Leaves(memfd.is_supported(), trust), io.BytesIO()
    pickler = _Pickler(file, 5, buffer_callback=leaves.add_array)
    pickler.leaves = leaves
    pickler.dump(batch)
    tensors, encoded = leaves.packed, None
    if lazy.slab is None and sum([leaf.nbytes for leaf in tensors]) <= lazy.limit:
        encoded = backend.encode(list(map(_contiguous, tensors)), lazy.limit)
    if encoded is not None:
        location, nbytes = encoded
        plan = order = miss = None
    else:
        location, plan, order, miss = _place(tensors, lazy)
        nbytes = 0 if plan is None else plan.nbytes
    unsupported = None
    if leaves.unsupported:
        unsupported = bytes(ForkingPickler.dumps(leaves.unsupported))
        miss = miss or RingMiss("unsupported", 0)
    was_shared = encoded is None and any(map(_was_shared, tensors))
    rest = file.getvalue(), leaves.permuted, leaves.buffers, unsupported
    message = Message(location, plan, order, *rest)
    return message, Packed(b"", nbytes, miss, was_shared)


def _was_shared(leaf: torch.Tensor) -> bool:
    return leaf.nbytes > INLINE_NBYTES and leaf.is_shared()


def _contiguous(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.is_contiguous():
        return leaf
    if leaf.itemsize == 1:  # torch cannot copy integers of fewer bits
        return leaf.view(torch.uint8).contiguous().view(leaf.dtype)
    return leaf.contiguous()


class _Leaves:
    """The tensors and arrays of a batch, to which its pickle refers by number.

    Args:
        can_pack: False if this system has no shared memory for slabs.
        trust: accept tensors after a quick check. The backend checks each tensor
            before it writes any, and raises an error if it cannot pack one.
    """

    def __init__(self, can_pack: bool, trust: bool) -> None:
        self.can_pack: bool = can_pack
        self.trust: bool = can_pack and trust
        self.packed: list[torch.Tensor] = []  # numbers 0, 1, ...
        self.unsupported: list[Any] = []  # numbers -1, -2, ...
        self.permuted: dict[int, tuple[int, ...]] = {}
        self.buffers: list[int] = []
        self._storages: dict[tuple[int, int], int] = {}  # by address and size

    def add_tensor(self, tensor: torch.Tensor) -> int | None:
        """Add a tensor and return its number, None to pickle it with its storage."""
        if (
            self.trust
            and type(tensor) is torch.Tensor
            and tensor.is_cpu
            and not tensor.requires_grad
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            return self._add(tensor)
        return self._add_checked(tensor)

    def _add(self, tensor: torch.Tensor) -> int:
        self.packed.append(tensor)
        return len(self.packed) - 1

    def _add_checked(self, tensor: torch.Tensor) -> int | None:
        if tensor.requires_grad and not tensor.is_leaf:
            raise BatchValueError(
                "DataLoader: a tensor of a batch must be detached, because an autograd "
                "graph cannot be sent to another process, but one of shape "
                f"{tuple(tensor.shape)} has a graph. Call detach() in the dataset."
            )
        if type(tensor) is torch.Tensor and (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.resolve_conj().resolve_neg()  # torch's queue drops both
        if not (
            self.can_pack
            and type(tensor) is torch.Tensor
            and not tensor.requires_grad
            and can_pack(tensor)
            and tensor.nbytes <= tensor.untyped_storage().nbytes()  # not expanded
        ):
            return None if self._has_bytes(tensor) else self._add_unsupported(tensor)
        if not tensor.is_contiguous():
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            permuted = tensor.permute(order)
            if permuted.is_contiguous():  # for example, channels_last
                self.permuted[len(self.packed)] = tuple(order)
                tensor = permuted
        return self._add(tensor)

    def _has_bytes(self, tensor: torch.Tensor) -> bool:
        """Return True if all memory of a tensor is in storages of the host."""
        is_strided = tensor.layout is torch.strided and not tensor.is_nested
        return self.can_pack and is_strided and tensor.device.type in ("cpu", "meta")

    def add_storage(self, storage: torch.UntypedStorage) -> int:
        """Add the bytes of a storage, and return its number."""
        if not self.can_pack or storage.device.type != "cpu":
            return self._add_unsupported(storage)
        # Tensors that share a storage share it after they have arrived.
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            flat: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._storages[key] = self._add(flat.set_(storage))
        return self._storages[key]

    def _add_unsupported(self, value: Any) -> int:
        self.unsupported.append(value)
        return -len(self.unsupported)

    def add_array(self, buffer: pickle.PickleBuffer) -> bool:
        """Add the bytes of a large array; return True to pickle them instead."""
        raw, numpy = buffer.raw(), sys.modules.get("numpy")
        if not self.can_pack or raw.readonly or raw.nbytes < _SMALL_ARRAY:
            return True
        if numpy is None or not isinstance(raw.obj, numpy.ndarray):
            return True  # its class may need the bytearray that a pickle contains
        self.buffers.append(self._add(torch.frombuffer(raw, dtype=torch.uint8)))
        return False


class _Pickler(pickle.Pickler):
    """Pickle a batch as torch's queue does, with numbers for its tensors.

    `ForkingPickler` copies the table of reducers for each batch.
    """

    dispatch_table = _REDUCERS
    leaves: _Leaves

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle an object that is not of a builtin type."""
        if isinstance(value, torch.Tensor):
            number = self.leaves.add_tensor(value)
            # torch's queue would put each storage into a file of its own.
            if number is None:
                return value.__reduce_ex__(5)
            return tensor_placeholder, (number,)
        if isinstance(value, torch.TypedStorage):
            number = self.leaves.add_storage(value._untyped_storage)
            return storage_placeholder, (number, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            return storage_placeholder, (self.leaves.add_storage(value), None)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap):
            if not value.flags.writeable:  # the receiver gets a writable copy
                return value.copy("K").__reduce_ex__(5)
        return NotImplemented


def _place(
    tensors: list[torch.Tensor], lazy: LazySlab
) -> tuple[Any, Any, tuple[int, ...] | None, RingMiss | None]:
    """Write leaves into the slab, or into new memory.

    Returns:
        The first three entries of the `Message`, and the reason why the leaves are not
        in the slab.
    """
    if not tensors:
        return None, None, None, None
    slab = lazy.claim()
    if slab is not None and (placed := _write_to_slab(tensors, slab)) is not None:
        return *placed, None
    plan = backend.plan_slab(tensors)
    location = None
    if plan.nbytes:
        location = _write_new(
            plan.nbytes, lambda memory: backend.pack(memory, tensors, plan)
        )
    return location, plan, None, lazy.missed(plan.nbytes)


def _write_to_slab(
    tensors: list[torch.Tensor], slab: Slab
) -> tuple[SlabLocation | None, Any, tuple[int, ...] | None] | None:
    """Write the tensors that are not yet in a slab into it.

    Returns:
        The first three entries of the `Message`. None if the tensors do not fit or the
        system has no memory left.
    """
    placed = _leaves_in_slab(tensors, slab) if slab.used else {}
    others = [i for i in range(len(tensors)) if i not in placed]
    packed = [tensors[i] for i in others]
    plan, order = backend.plan_slab(packed), None
    start = slab.next_start
    memory = slab.take(plan.nbytes)
    if memory is None:
        return None
    backend.pack(memory, packed, plan)
    end = 0
    for i, offset in placed.items():  # bytes of earlier batches must not be visible
        slab.gaps.append((end, offset))
        end = offset + tensors[i].nbytes
    slab.gaps.append((end, start))
    if placed or start:
        numbers = [*placed, *others]
        leaves = [tensors[i] for i in numbers]
        plan = backend.SlabPlan(
            [*placed.values(), *(start + offset for offset in plan.offsets)],
            [leaf.shape for leaf in leaves],
            [leaf.dtype for leaf in leaves],
            start + plan.nbytes,
        )
        if placed:
            order = tuple(sorted(range(len(numbers)), key=numbers.__getitem__))
    if not plan.nbytes:
        return None, plan, order
    gaps: tuple[Range, ...] = ()
    if slab.ring.poison_enabled:  # writes to any gap are errors
        slab.gaps = _gaps(plan)
        gaps = tuple(slab.gaps)
    place = slab.ring.name, slab.index, slab.holder, plan.nbytes, gaps
    return SlabLocation(*place), plan, order


def _gaps(plan: Any) -> list[Range]:
    """Return the ranges of a slab that no leaf covers."""
    found, end = [], 0
    for offset, shape, dtype in zip(
        plan.offsets, plan.shapes, plan.dtypes, strict=True
    ):
        found.append((end, offset))
        end = offset + math.prod(shape) * dtype.itemsize
    return [(i, j) for i, j in [*found, (end, plan.nbytes)] if i < j]


def _leaves_in_slab(tensors: list[torch.Tensor], slab: Slab) -> dict[int, int]:
    """Return the offsets of the leaves that are already in a slab, in memory order."""
    found = sorted(
        (offset, i)
        for i, leaf in enumerate(tensors)
        if leaf.nbytes and leaf.is_contiguous()
        for offset in [slab.offset(leaf)]
        if offset is not None and offset % backend.ALIGNMENT == 0
    )
    placed: dict[int, int] = {}
    end = 0
    for offset, i in found:
        if offset >= end:  # otherwise it overlaps the previous leaf and is copied
            placed[i] = offset
            end = offset + tensors[i].nbytes
    return placed


def _write_new(nbytes: int, write: Callable[[torch.Tensor], Any]) -> memfd.SharedMemory:
    try:
        return memfd.write_new(nbytes, write)
    except OSError as error:
        raise RuntimeError(
            f"DataLoader: a batch must get {nbytes} bytes of shared memory, but "
            f"{memfd.limit_text(error)}."
        ) from error


# ------------------------------------------------------------ in the parent


def unpack(body: Any) -> tuple[Any, bool]:
    """Return a batch, and whether all its tensors are in pinned memory.

    Tensors in a slab are views of it. It is free again when all of them are gone.

    Args:
        body: the bytes of `pack`, of any bytes-like class. They may change afterwards.

    Raises:
        OSError: no file descriptor or no memory is left.
        RuntimeError: the ring is not in this process, or was damaged.
        Exception: any error of unpickling.
    """
    if body[:1] != pickle.PROTO:
        return backend.decode(body), False
    message = Message(*pickle.loads(body))
    sent = message.unsupported
    unsupported = [] if sent is None else pickle.loads(sent)
    to_device.release_done()  # free slabs whose last copy to a device is done
    leaves, is_pinned = _leaves_of(message)

    def tensor(number: int) -> Any:
        return leaves[number] if number >= 0 else unsupported[-1 - number]

    def storage(number: int, dtype: torch.dtype | None) -> Any:
        found = tensor(number)
        if isinstance(found, torch.Tensor):
            flat = found.untyped_storage()
            if flat.nbytes() != found.nbytes:  # it has the bytes of others, too
                flat = found.clone().untyped_storage()
            found = flat
        if dtype is None:
            return found
        return torch.TypedStorage(wrap_storage=found, dtype=dtype, _internal=True)

    buffers = [leaves[number].numpy() for number in message.buffers]
    unpickler = _Unpickler(io.BytesIO(message.body), buffers=buffers)
    unpickler.placeholders = {tensor_placeholder: tensor, storage_placeholder: storage}
    is_pinned = is_pinned and not (unsupported or message.buffers)
    return unpickler.load(), is_pinned


def _leaves_of(message: Message) -> tuple[list[torch.Tensor], bool]:
    """Return the tensors by number, and whether their memory is pinned."""
    location, is_pinned = message.location, False
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    if isinstance(location, SlabLocation):
        ring = ring_module.find(location.ring)
        memory = ring.adopt(*location[1:])
        is_pinned = ring.is_pinned(location.slab)
    elif isinstance(location, memfd.SharedMemory):
        memory = memfd.receive(location)
    leaves: list[torch.Tensor] = []
    if message.plan is not None:
        leaves = backend.views(memory, message.plan)
    elif isinstance(location, bytes):
        leaves = backend.decode(location)
    if message.order is not None:
        leaves = [leaves[index] for index in message.order]
    for number, order in message.permuted.items():
        inverse = sorted(range(len(order)), key=order.__getitem__)
        leaves[number] = leaves[number].permute(inverse)
    return leaves, is_pinned


class _Unpickler(pickle.Unpickler):
    """Unpickle a batch, with other functions in the place of those of this module."""

    placeholders: dict[Any, Any]

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of this name, or the lookup of tensors."""
        found: Any = super().find_class(module, name)
        return self.placeholders.get(found, found) if module == __name__ else found


def storage_placeholder(number: int, dtype: torch.dtype | None) -> Any:
    """Represent a storage in a pickle; ``dtype`` is None if it is untyped."""
    return tensor_placeholder(number)


def tensor_placeholder(number: int) -> Any:
    """Represent a tensor in a pickle; `unpack` replaces it."""
    raise pickle.UnpicklingError(
        f"tensor {number} of a pickled batch is missing. Use `unpack` to unpickle."
    )
