"""Parcels: a batch on its way from a worker, its bytes in one slab.

The batch is pickled as any other object that crosses processes, but for its tensors:
each is written into the slab (or was made there), and the pickle has its number. What
crosses is one short message; the parent makes views of the slab and puts them where the
numbers are. So the tensors of a batch are found wherever they are, in objects of any
class, and all else crosses as it does with torch.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from .. import backend
from ..core.errors import BatchValueError
from ..core.torch_private import pin_memory
from ..transfer import to_device
from . import memfd
from . import ring as ring_module
from .ring_memory import Slab


class Miss(NamedTuple):
    """Why a batch does not lie in the ring.

    Attributes:
        reason: ``"full"``, ``"large"``, ``"memory"``, ``"kept"`` or ``"off"``.
        nbytes: what the batch needs.
    """

    reason: str
    nbytes: int


class InRing(NamedTuple):
    """The first bytes of a slab."""

    ring: str
    slab: int
    holder: int
    nbytes: int


class Message(NamedTuple):
    """What crosses.

    Attributes:
        place: where the bytes are; None: there are none.
        body: the pickled batch.
        plan: where in these bytes the leaves lie; None: there are none.
        order: for every number in the pickle, which of the leaves it is; None: itself.
        turned: for leaves that are not row-major, the order of their dimensions.
        buffers: which numbers are the buffers of arrays.
        foreign: pickled tensors of other kinds, as torch sends them.
        miss: why it does not lie in the ring, or None.
        note: what the loader wants to know besides.
    """

    place: InRing | memfd.Sent | None
    body: bytes
    plan: Any
    order: tuple[int, ...] | None
    turned: dict[int, tuple[int, ...]]
    buffers: tuple[int, ...]
    foreign: bytes | None
    miss: Miss | None
    note: Any = None

    @property
    def is_in_ring(self) -> bool:
        """Tell whether the bytes are in a slab of the ring."""
        return isinstance(self.place, InRing)


_CLOSED = object()


class Parcel:
    """A batch that has arrived; its slab is free again when it and its tensors die."""

    def __init__(self, *message: Any) -> None:
        self.message = Message(*message)
        self.is_locked = False
        self._opened: Any = _CLOSED
        foreign, place = self.message.foreign, self.message.place
        self._foreign = pickle.loads(foreign) if foreign is not None else []
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if isinstance(place, InRing):
            ring = ring_module.find(place.ring)
            self._bytes = ring.adopt(place.slab, place.holder, place.nbytes)
            self.is_locked = ring.is_locked(place.slab)
        elif place is not None:
            self._bytes = memfd.receive(place)

    def open(self) -> Any:
        """Return the batch; its tensors are views of the slab."""
        if self._opened is _CLOSED:
            self._opened = self._unpickle()
        return self._opened

    def pin_memory(self, device: Any = None) -> Parcel:
        """Open the batch, and page-lock what is not: torch's pinning thread asks so."""
        batch = self.open()
        if not self.is_locked or self._foreign or self.message.buffers:
            self._opened = pin_memory(batch, device)
        return self

    def _unpickle(self) -> Any:
        message = self.message
        leaves: list[torch.Tensor] = []
        if message.plan is not None:
            leaves = backend.views(self._bytes, message.plan)
        if message.order is not None:
            leaves = [leaves[place] for place in message.order]
        for number, order in message.turned.items():
            back = sorted(range(len(order)), key=order.__getitem__)
            leaves[number] = leaves[number].permute(back)
        buffers = [leaves[number].numpy() for number in message.buffers]
        foreign = self._foreign

        def tensor(number: int) -> Any:
            return leaves[number] if number >= 0 else foreign[-1 - number]

        self._bytes = torch.empty(0, dtype=torch.uint8)  # the views keep the slab
        return _Unpickler(message.body, tensor, buffers).load()


class _Unpickler(pickle.Unpickler):
    """Unpickles a batch and puts tensors in the place of numbers."""

    def __init__(
        self, body: bytes, tensors: Callable[[int], Any], buffers: Sequence[Any]
    ) -> None:
        super().__init__(io.BytesIO(body), buffers=buffers)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the pickle stands for."""
        if name == "numbered" and module == __name__:
            return self._tensors
        return super().find_class(module, name)


def numbered(number: int) -> Any:
    """Stand for a tensor in a pickle; `Parcel.open` has what it stands for."""
    raise pickle.UnpicklingError(f"the pickle of a parcel has no tensor {number}.")


# --- Sealing: a worker writes the tensors of a batch into a slab and pickles the rest.


#: Arrays of fewer bytes are pickled.
_SMALL_ARRAY = 4096


class Sealed:
    """A message, ready to be put into a queue; it arrives as a `Parcel`."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def __reduce__(self) -> Any:
        return Parcel, tuple(self.message)


class _Leaves:
    """What the pickle of a batch only has numbers for.

    Args:
        packs: whether there are slabs at all.
        trusts: whether a quick look at a tensor is enough: the backend looks at every
            one before it writes, and refuses what it cannot pack.
    """

    def __init__(self, packs: bool, trusts: bool) -> None:
        self.packs, self.trusts = packs, packs and trusts
        self.own: list[torch.Tensor] = []  # numbered from 0 up
        self.foreign: list[Any] = []  # numbered from -1 down
        self.turned: dict[int, tuple[int, ...]] = {}
        self.buffers: list[int] = []

    def tensor(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor."""
        if (
            self.trusts
            and type(tensor) is torch.Tensor
            and tensor.is_cpu
            and not tensor.requires_grad
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
        ):
            self.own.append(tensor)
            return len(self.own) - 1
        return self._after_a_closer_look(tensor)

    def _after_a_closer_look(self, tensor: torch.Tensor) -> int:
        if tensor.requires_grad and not tensor.is_leaf:
            raise BatchValueError(
                "a tensor of a batch must not have a graph in a DataLoader worker, "
                f"because it cannot cross processes, but one of shape "
                f"{tuple(tensor.shape)} has. Detach it in the dataset."
            )
        if type(tensor) is torch.Tensor and (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.resolve_conj().resolve_neg()  # torch's queue forgets it
        if not (
            self.packs
            and type(tensor) is torch.Tensor
            and not tensor.requires_grad
            and to_device.can_pack(tensor)
            and tensor.nbytes <= tensor.untyped_storage().nbytes()  # not expanded
        ):
            return self.other(tensor)
        if not tensor.is_contiguous():
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            turned = tensor.permute(order)
            if turned.is_contiguous():  # channels_last, say: it arrives as such
                self.turned[len(self.own)] = tuple(order)
                tensor = turned
        self.own.append(tensor)
        return len(self.own) - 1

    def other(self, value: Any) -> int:
        """Return the number of what torch is to send."""
        self.foreign.append(value)
        return -len(self.foreign)

    def array(self, buffer: pickle.PickleBuffer) -> bool:
        """Take the bytes of a large array; True: pickle them instead."""
        raw = buffer.raw()
        if not self.packs or raw.readonly or raw.nbytes < _SMALL_ARRAY:
            return True
        self.buffers.append(len(self.own))
        self.own.append(torch.frombuffer(raw, dtype=torch.uint8))
        return False


class _Pickler(ForkingPickler):
    """Pickles a batch as a queue does, but its tensors by number."""

    def __init__(self, file: io.BytesIO, leaves: _Leaves) -> None:
        super().__init__(file, 5, True, leaves.array)
        self._leaves = leaves

    def reducer_override(self, value: Any) -> Any:
        """Say how an object is pickled that is no builtin value or container."""
        if isinstance(value, torch.Tensor):
            return numbered, (self._leaves.tensor(value),)
        if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            return numbered, (self._leaves.other(value),)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap):
            if not value.flags.writeable:  # by torch's queue, every array becomes so
                return value.copy("K").__reduce_ex__(5)
        return NotImplemented


def seal(batch: Any, slab: Slab | None, miss: Miss | None) -> Message:
    """Write a batch into a slab, or into fresh memory, and say where.

    Nothing of the batch is kept: what was made on the slab may die when this returns.

    Args:
        batch: anything that pickles.
        slab: where some of its tensors may lie already; None: there is none.
        miss: why there is none.

    Raises:
        ValueError: a tensor has a graph.
        RuntimeError: the system has no memory or no descriptor left.
        Exception: what pickling raised.
    """
    try:
        return _seal(batch, slab, miss, trusts=True)
    except (TypeError, ValueError):  # one of them is conjugated, say
        return _seal(batch, slab, miss, trusts=False)


def _seal(batch: Any, slab: Slab | None, miss: Miss | None, trusts: bool) -> Message:
    leaves = _Leaves(memfd.is_supported(), trusts)
    file = io.BytesIO()
    _Pickler(file, leaves).dump(batch)
    own = leaves.own
    place: InRing | memfd.Sent | None = None
    plan, order = None, None
    if own and slab is not None:
        plan, order = _write(own, slab)
        if plan is None:
            is_large = slab.asked > slab.capacity
            miss = Miss("large" if is_large else "memory", slab.asked)
        elif plan.nbytes:
            place = InRing(slab.ring_name, slab.index, slab.holder, plan.nbytes)
    if own and plan is None:
        plan = backend.plan_slab(own)
        miss = miss and miss._replace(nbytes=miss.nbytes or plan.nbytes)
        if plan.nbytes:
            fresh = _fresh(plan.nbytes)
            backend.pack(fresh.bytes, own, plan)
            place = fresh.send()
    foreign = bytes(ForkingPickler.dumps(leaves.foreign)) if leaves.foreign else None
    return Message(
        place,
        file.getvalue(),
        plan,
        order,
        leaves.turned,
        tuple(leaves.buffers),
        foreign,
        miss if own else None,
    )


def keep(message: Message, slab: Slab) -> Message:
    """Return a message with the bytes in fresh memory, for a slab that is still used.

    Somebody in this process has kept a tensor of the batch, to give it out again
    perhaps, and the next batch must not be written over it.
    """
    nbytes = message.plan.nbytes
    fresh = _fresh(nbytes)
    fresh.bytes.copy_(slab.written(nbytes))
    slab.clear_gaps(fresh.bytes)
    return message._replace(place=fresh.send(), miss=Miss("kept", nbytes))


def _write(own: list[torch.Tensor], slab: Slab) -> tuple[Any, tuple[int, ...] | None]:
    """Write into a slab what does not lie there yet; return the plan and the order.

    No plan: it does not fit.
    """
    placed = _placed(own, slab) if slab.used else {}
    others = [i for i in range(len(own)) if i not in placed]
    packed = [own[i] for i in others]
    plan = backend.plan_slab(packed)
    start = slab.next_start
    memory = slab.take(plan.nbytes)
    if memory is None:
        return None, None
    backend.pack(memory, packed, plan)
    end = 0
    for i, offset in placed.items():  # no byte of an earlier batch is ever visible
        slab.gaps.append((end, offset))
        end = offset + own[i].nbytes
    slab.gaps.append((end, start))
    if not placed:
        if start:  # memory that a collate function took and then did not use
            plan = _shifted(plan, start)
        return plan, None
    order = [*placed, *others]
    leaves = [own[i] for i in order]
    whole = backend.SlabPlan(
        [*placed.values(), *(start + offset for offset in plan.offsets)],
        [leaf.shape for leaf in leaves],
        [leaf.dtype for leaf in leaves],
        start + plan.nbytes,
    )
    places = sorted(range(len(order)), key=order.__getitem__)
    return whole, tuple(places)


def _placed(own: list[torch.Tensor], slab: Slab) -> dict[int, int]:
    """Return which leaves lie in a slab already, ascending, and where."""
    there = sorted(
        (offset, i)
        for i, leaf in enumerate(own)
        if leaf.nbytes and leaf.is_contiguous()
        for offset in [slab.offset(leaf)]
        if offset is not None and offset % backend.ALIGNMENT == 0
    )
    placed: dict[int, int] = {}
    end = 0
    for offset, i in there:
        if offset >= end:  # else a view of the one before it, which is copied
            placed[i] = offset
            end = offset + own[i].nbytes
    return placed


def _shifted(plan: Any, start: int) -> Any:
    offsets = [start + offset for offset in plan.offsets]
    return backend.SlabPlan(offsets, plan.shapes, plan.dtypes, start + plan.nbytes)


def _fresh(nbytes: int) -> memfd.Fresh:
    try:
        return memfd.Fresh(nbytes)
    except OSError as error:
        raise RuntimeError(
            f"a batch must get {nbytes} bytes of shared memory, but the system says "
            f"{error.strerror!r}. Raise the limit of open files (ulimit -n) or of "
            "memory, or make batches smaller."
        ) from error
