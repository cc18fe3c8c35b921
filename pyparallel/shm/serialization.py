"""Serialize a batch in a worker and deserialize it in the parent process.

The worker writes the tensors of the batch into one slab, unless they were created
there. It pickles the rest of the batch as torch's queue does, with a number in the
place of each tensor. One short message carries the pickle and the layout of the slab.

The parent creates views of the slab and unpickles the batch with a view for each
number. The pickle visits every object, so tensors are found in objects of any class.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from .. import backend
from ..backend.plain import can_pack
from ..core.errors import BatchValueError
from ..transfer import to_device
from . import memfd
from . import ring as ring_module
from .ring import Range, Slab


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
        body: the pickled batch, with a number for each leaf.
        plan: the layout of the leaves in the memory; None if there is no memory.
        order: the index in ``plan`` of each number; None if both are the same.
        permuted: the order of dimensions in memory, by number, of leaves that are not
            row-major.
        buffers: the numbers of leaves that are buffers of NumPy arrays.
        unsupported: pickled tensors and storages that torch sends: those of a device,
            sparse and nested ones.
        miss: the reason why the batch is not in the ring, or None.
    """

    location: SlabLocation | memfd.SharedMemory | bytes | None
    body: bytes
    plan: Any
    order: tuple[int, ...] | None
    permuted: dict[int, tuple[int, ...]]
    buffers: tuple[int, ...]
    unsupported: bytes | None
    miss: RingMiss | None

    @property
    def is_in_ring(self) -> bool:
        """Return True if the bytes are in a slab of the ring."""
        return isinstance(self.location, SlabLocation)


def receive(message: Message) -> tuple[Any, bool]:
    """Return the batch of a message, and whether all its tensors are in pinned memory.

    Its tensors are views of the slab, which is free again when all of them are gone.
    """
    sent = message.unsupported
    unsupported = [] if sent is None else pickle.loads(sent)
    to_device.release_done()  # free slabs whose last copy to a device is done
    leaves, is_pinned = _leaves(message)
    is_pinned = is_pinned and not (unsupported or message.buffers)

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

    names = {"tensor_placeholder": tensor, "storage_placeholder": storage}
    buffers = [leaves[number].numpy() for number in message.buffers]
    return _Unpickler(message.body, names, buffers).load(), is_pinned


def _leaves(message: Message) -> tuple[list[torch.Tensor], bool]:
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
    """Unpickle a batch and replace the numbers by tensors.

    Args:
        body: the pickle.
        names: the functions to call in place of those of this module.
        buffers: the buffers of arrays.
    """

    def __init__(
        self, body: bytes, names: Mapping[str, Any], buffers: Sequence[Any]
    ) -> None:
        super().__init__(io.BytesIO(body), buffers=buffers)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of this name, or the lookup of tensors."""
        if module == __name__ and name in self._names:
            return self._names[name]
        return super().find_class(module, name)


def storage_placeholder(number: int, dtype: torch.dtype | None) -> Any:
    """Represent a storage in a pickle; ``dtype`` is None if it is untyped."""
    return tensor_placeholder(number)


def tensor_placeholder(number: int) -> Any:
    """Represent a tensor in a pickle; `receive` replaces it."""
    raise pickle.UnpicklingError(
        f"tensor {number} of a pickled batch is missing. Use `receive` to unpickle."
    )


# ------------------------------------------------------------ in the worker


#: The reducers of `ForkingPickler`, which has no public name for them.
_REDUCERS: Any = ChainMap(
    vars(ForkingPickler)["_extra_reducers"], copyreg.dispatch_table
)
#: Smaller NumPy arrays are pickled with the batch.
_SMALL_ARRAY = 4096


class LeafCollector:
    """Collect the tensors and arrays that the pickle of a batch refers to by number.

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
            self.packed.append(tensor)
            return len(self.packed) - 1
        return self._add_checked(tensor)

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
            return None if self._has_bytes(tensor) else self.add_unsupported(tensor)
        if not tensor.is_contiguous():
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            permuted = tensor.permute(order)
            if permuted.is_contiguous():  # for example, channels_last
                self.permuted[len(self.packed)] = tuple(order)
                tensor = permuted
        self.packed.append(tensor)
        return len(self.packed) - 1

    def _has_bytes(self, tensor: torch.Tensor) -> bool:
        """Return True if all memory of a tensor is in storages of the host."""
        is_strided = tensor.layout is torch.strided and not tensor.is_nested
        return self.can_pack and is_strided and tensor.device.type in ("cpu", "meta")

    def add_storage(self, storage: torch.UntypedStorage) -> int:
        """Add the bytes of a storage, and return its number."""
        if not self.can_pack or storage.device.type != "cpu":
            return self.add_unsupported(storage)
        # Tensors that share a storage share it after they have arrived.
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            flat: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._storages[key] = len(self.packed)
            self.packed.append(flat.set_(storage))
        return self._storages[key]

    def message(
        self, location: Any, body: bytes, plan: Any, order: Any, miss: RingMiss | None
    ) -> Message:
        """Return the message of a batch whose leaves are at a location."""
        unsupported = self.unsupported and bytes(ForkingPickler.dumps(self.unsupported))
        others = self.permuted, tuple(self.buffers), unsupported or None
        return Message(location, body, plan, order, *others, miss)

    def add_unsupported(self, value: Any) -> int:
        """Add a tensor or storage that torch sends, and return its number."""
        self.unsupported.append(value)
        return -len(self.unsupported)

    def add_array(self, buffer: pickle.PickleBuffer) -> bool:
        """Add the bytes of a large array; return True to pickle them instead."""
        raw = buffer.raw()
        if not self.can_pack or raw.readonly or raw.nbytes < _SMALL_ARRAY:
            return True
        self.buffers.append(len(self.packed))
        self.packed.append(torch.frombuffer(raw, dtype=torch.uint8))
        return False


class _Pickler(pickle.Pickler):
    """Pickle a batch as torch's queue does, with numbers for its tensors.

    `ForkingPickler` copies the table of reducers for each batch.
    """

    dispatch_table = _REDUCERS

    def __init__(self, file: io.BytesIO, leaves: LeafCollector) -> None:
        super().__init__(file, 5, buffer_callback=leaves.add_array)
        self._leaves = leaves

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle an object that is not of a builtin type."""
        if isinstance(value, torch.Tensor):
            number = self._leaves.add_tensor(value)
            # torch's queue would put each storage into a file of its own.
            if number is None:
                return value.__reduce_ex__(5)
            return tensor_placeholder, (number,)
        if isinstance(value, torch.TypedStorage):
            number = self._leaves.add_storage(value._untyped_storage)
            return storage_placeholder, (number, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            return storage_placeholder, (self._leaves.add_storage(value), None)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap):
            if not value.flags.writeable:  # the receiver gets a writable copy
                return value.copy("K").__reduce_ex__(5)
        return NotImplemented


def collect(batch: Any, *, trust: bool = True) -> tuple[bytes, LeafCollector]:
    """Pickle a batch, and collect its leaves."""
    leaves = LeafCollector(memfd.is_supported(), trust)
    file = io.BytesIO()
    _Pickler(file, leaves).dump(batch)
    return file.getvalue(), leaves


def miss_of(slab: Slab | None, has_ring: bool, nbytes: int) -> RingMiss:
    """Return the reason why bytes are not in the slab that was claimed for them."""
    if slab is None:
        return RingMiss("full" if has_ring else "off", nbytes)
    is_large = slab.requested > slab.capacity
    return RingMiss("large" if is_large else "memory", slab.requested)


def place(
    body: bytes, leaves: LeafCollector, slab: Slab | None, has_ring: bool
) -> Message:
    """Write leaves into a slab, or into new memory, and return the message."""
    tensors = leaves.packed
    location: SlabLocation | memfd.SharedMemory | None = None
    plan, order, miss = None, None, None
    if tensors and slab is not None:
        plan, order = _write_to_slab(tensors, slab)
        if plan is not None and plan.nbytes:
            gaps: tuple[Range, ...] = ()
            if slab.checks_gaps:
                slab.gaps = _gaps(plan)
                gaps = tuple(slab.gaps)
            location = SlabLocation(
                slab.ring_name, slab.index, slab.holder, plan.nbytes, gaps
            )
    if tensors and plan is None:
        plan = backend.plan_slab(tensors)
        miss = miss_of(slab, has_ring, plan.nbytes)
        if plan.nbytes:
            location = _write_new(
                plan.nbytes, lambda memory: backend.pack(memory, tensors, plan)
            )
    return leaves.message(location, body, plan, order, miss)


def move_out_of_ring(message: Message, slab: Slab) -> Message:
    """Copy the bytes of a batch from its slab to other shared memory.

    This process keeps a tensor of the batch and may return it again, so the next batch
    must not overwrite it.
    """
    nbytes = message.plan.nbytes

    def write(memory: torch.Tensor) -> None:
        memory.copy_(slab.leading_bytes(nbytes))
        slab.clear_gaps(memory)

    location = _write_new(nbytes, write)
    return message._replace(location=location, miss=RingMiss("kept", nbytes))


def _write_to_slab(
    tensors: list[torch.Tensor], slab: Slab
) -> tuple[Any, tuple[int, ...] | None]:
    """Write the tensors that are not yet in a slab into it.

    Returns:
        The layout of all tensors and their order in it (`Message.order`). The layout is
        None if the tensors do not fit or the system has no memory left.
    """
    placed = _leaves_in_slab(tensors, slab) if slab.used else {}
    others = [i for i in range(len(tensors)) if i not in placed]
    packed = [tensors[i] for i in others]
    plan = backend.plan_slab(packed)
    start = slab.next_start
    memory = slab.take(plan.nbytes)
    if memory is None:
        return None, None
    backend.pack(memory, packed, plan)
    end = 0
    for i, offset in placed.items():  # bytes of earlier batches must not be visible
        slab.gaps.append((end, offset))
        end = offset + tensors[i].nbytes
    slab.gaps.append((end, start))
    if not placed and not start:
        return plan, None
    order = [*placed, *others]
    leaves = [tensors[i] for i in order]
    whole = backend.SlabPlan(
        [*placed.values(), *(start + offset for offset in plan.offsets)],
        [leaf.shape for leaf in leaves],
        [leaf.dtype for leaf in leaves],
        start + plan.nbytes,
    )
    places = sorted(range(len(order)), key=order.__getitem__)
    return whole, tuple(places) if placed else None


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
