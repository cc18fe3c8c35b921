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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import _backend, _ring, _shared
from ._torch_private import pin_memory


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

    place: InRing | _shared.Sent | None
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
            ring = _ring.find(place.ring)
            self._bytes = ring.adopt(place.slab, place.holder, place.nbytes)
            self.is_locked = ring.is_locked(place.slab)
        elif place is not None:
            self._bytes = _shared.receive(place)

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
            leaves = _backend.views(self._bytes, message.plan)
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
