"""Batches in fixed memory, for CUDA graphs and compiled code.

Note: [static slabs]. The batches of one plan are copied into the same slabs in turn. A
copy overwrites a slab, so it has to wait for all work that reads the batch before.
`record_stream` does not help, because it delays only the reuse of freed memory. So the
copy waits for events on two streams: the one that received the batch before, and the
one that is current now. They are recorded when the slab is filled, so they cover all
work that was queued there until then. The host does not wait. Memory that is read in
place or staged waits with the batch, and is copied only when the batch is received.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils import dlpack

from .. import backend
from ..backend.plain import PLAIN
from ..core.devices import HOST
from ..core.errors import BatchTypeError, BatchValueError, check_int, type_name
from ..core.text import nbytes_text
from ..core.tracing import span
from . import debug, engine
from .device import TorchDevice, torch_device
from .engine import keep_alive
from .layout import DIRECT_NBYTES, TransferLayout
from .to_device import byte_view, has_streams, warn_about_pageable_memory

#: Copies the tensors into the next slab of their plan, and returns the tensors there.
Receive = Callable[[], list[torch.Tensor]]

_ENDED = (
    "a tensor of a static batch must be used before its slab is filled again, but is "
    "used later. Clone it, or increase StaticBatches(num_slabs=...)."
)


class StaticBatches:
    """Fixed memory for batches: tensors keep their addresses from batch to batch.

    A plan is the structure of a batch with the shapes and dtypes of its tensors. The
    first batch of a plan allocates ``num_slabs`` slabs, which the batches of this plan
    fill in turn. So each tensor has ``num_slabs`` addresses. A batch lives until that
    number of later batches of its plan have been received. Use after that raises a
    RuntimeError with ``PYPARALLEL_DEBUG=1``, and reads the values of a later batch
    otherwise.

    Give it to ``scatter(out=)`` or ``PreDataLoader(static=)``.

    Args:
        num_slabs: the number of slabs of each plan.
        max_plans: the most plans of each target. A further one raises an error.
            `SizeBatchSampler` with ``size_divisor``, and `Pad` with ``buckets``, make
            few plans.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is less than 1.

    Example:
        >>> from pyparallel import scatter
        >>> static, found = StaticBatches(num_slabs=2), set()
        >>> for step in range(6):
        ...     (batch,) = scatter({"x": torch.full((3,), step)}, "cpu", out=static)
        ...     found.add(batch["x"].data_ptr())
        >>> batch, len(found)
        ({'x': tensor([5, 5, 5])}, 2)
    """

    def __init__(self, num_slabs: int = 1, max_plans: int = 16) -> None:
        self.num_slabs: int = check_int(num_slabs, 1, "StaticBatches: num_slabs")
        self.max_plans: int = check_int(max_plans, 1, "StaticBatches: max_plans")
        # Changed by single operations, without a lock.
        self._rings: dict[Any, _Ring] = {}

    @property
    def num_plans(self) -> int:
        """The number of plans that have slabs."""
        return len(self._rings)

    @property
    def nbytes(self) -> int:
        """The bytes of all slabs."""
        return sum(ring.nbytes for ring in list(self._rings.values()))

    def clear(self) -> None:
        """Forget all plans; the next batch of each plan gets new slabs.

        A slab is freed with its last tensor, so a graph that reads it must be dropped
        before.
        """
        self._rings.clear()

    def __repr__(self) -> str:
        """Return the arguments."""
        return f"StaticBatches(num_slabs={self.num_slabs}, max_plans={self.max_plans})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, without memory."""
        return StaticBatches, (self.num_slabs, self.max_plans)

    def _ring(self, key: _Key, api: TorchDevice) -> _Ring:
        ring = self._rings.get(key)
        if ring is not None:
            return ring
        same = sum(each[:2] == key[:2] for each in list(self._rings))
        if same >= self.max_plans:
            shapes = ", ".join(map(str, key.plan.shapes[:4]))
            more = ", ..." if len(key.plan.shapes) > 4 else ""
            raise BatchValueError(
                f"StaticBatches: the batches for {key.device} must have at most "
                f"{self.max_plans} plans, but this one is another, with the shapes "
                f"{shapes}{more}. The slabs have {nbytes_text(self.nbytes)}. Make "
                "fewer shapes with SizeBatchSampler(size_divisor=...) or "
                "Pad(buckets=...), or increase max_plans."
            )
        make = _Ring if key.device.type == "cpu" else _DeviceRing
        with torch.inference_mode(False):
            return self._rings.setdefault(key, make(key, self.num_slabs, api))


class _Key(NamedTuple):
    """The plan of batches for one target."""

    place: int
    device: torch.device
    structure: Any
    plan: backend.SlabPlan


class _Slab:
    """Fixed memory, and the batch in it."""

    def __init__(self, memory: torch.Tensor, stream: Any) -> None:
        self.memory = memory
        self.tensors: list[torch.Tensor] = []
        #: The stream whose work may use the memory.
        self.stream = stream

    def renew(self, plan: backend.SlabPlan) -> list[torch.Tensor]:
        """Return the tensors of the batch that was copied, and end the one before.

        A backward pass of the batch before raises, as after any change of a tensor.
        """
        increment_version(self.tensors)
        memory = self.memory
        if debug.poison_enabled:
            backend.forbid_use(self.tensors, _ENDED)
            # Its storage is that of this batch alone.
            memory = dlpack.from_dlpack(memory.__dlpack__(stream=-1))
        self.tensors = backend.views(memory, plan)
        return list(self.tensors)


class _Ring:
    """The slabs of one plan on the host."""

    def __init__(self, key: _Key, num_slabs: int, api: TorchDevice) -> None:
        self._device, self._api, self._plan = key.device, api, key.plan
        slabs = [self._make_slab() for _ in range(num_slabs)]
        self.nbytes = num_slabs * self._plan.nbytes
        self._slabs = itertools.cycle(slabs)

    def _make_slab(self) -> _Slab:
        return _Slab(backend.empty((self._plan.nbytes,), torch.uint8), None)

    def stage(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Return the sources of `fill`; they are not copied on the host."""
        return leaves

    def fill(self, staged: Any, stream: Any) -> list[torch.Tensor]:
        """Copy sources into the next slab, and return the tensors there."""
        slab = next(self._slabs)
        with span("pyparallel.pack"):
            backend.pack(slab.memory, staged, self._plan)
        return slab.renew(self._plan)


class _Staged(NamedTuple):
    """The sources of a copy to a device.

    Attributes:
        sources: pinned bytes for each section of the slab.
        leaves: the tensors themselves in debug mode, otherwise none.
    """

    sources: list[torch.Tensor]
    leaves: Sequence[torch.Tensor]


class _DeviceRing(_Ring):
    """The slabs of one plan on a device.

    The small leaves are the first section of a slab. Each large leaf is a section of
    its own, so that its place does not depend on how it is copied.
    """

    def __init__(self, key: _Key, num_slabs: int, api: TorchDevice) -> None:
        formats = list(zip(key.plan.shapes, key.plan.dtypes, strict=True))
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in formats]
        self._large = [i for i, size in enumerate(sizes) if size >= DIRECT_NBYTES]
        self._small = [i for i, size in enumerate(sizes) if size < DIRECT_NBYTES]
        order = [*self._small, *self._large]
        self._places = sorted(range(len(order)), key=order.__getitem__)
        self._small_plan = _plan([formats[i] for i in self._small])
        plan = _plan([formats[i] for i in order])
        starts = plan.offsets[len(self._small) :]
        self._sections = [
            slice(start, start + sizes[i])
            for i, start in zip(self._large, starts, strict=True)
        ]
        if self._small_plan.nbytes:
            self._sections.insert(0, slice(0, self._small_plan.nbytes))
        with api.relaxed(key.device):
            super().__init__(key._replace(plan=plan), num_slabs, api)

    def _make_slab(self) -> _Slab:
        stream = self._api.copy_stream(self._device)
        (memory,) = self._api.allocate([self._plan.nbytes], stream)
        return _Slab(memory, stream)

    def stage(self, leaves: Sequence[torch.Tensor]) -> _Staged:
        """Return the sources of `fill`; those that are not pinned are packed."""
        sources, pageable = [], 0
        with self._api.relaxed(self._device), span("pyparallel.pack"):
            if self._small_plan.nbytes:
                small = [leaves[i] for i in self._small] if self._large else leaves
                sources.append(self._pack(small, self._small_plan))
            for i in self._large:
                leaf = leaves[i]
                if leaf.is_contiguous() and self._api.is_pinned(leaf):
                    sources.append(byte_view(leaf))
                else:
                    packed = self._pack([leaf], backend.plan_slab([leaf]))
                    sources.append(packed[: leaf.nbytes])
                    pageable += leaf.nbytes
        if pageable:
            warn_about_pageable_memory(pageable, self._device)
        return _Staged(sources, leaves if debug.enabled else ())

    def _pack(
        self, leaves: Sequence[torch.Tensor], plan: backend.SlabPlan
    ) -> torch.Tensor:
        host = self._api.pinned(plan.nbytes)
        backend.pack(host, leaves, plan)
        return host

    def fill(self, staged: _Staged, stream: Any) -> list[torch.Tensor]:
        """Queue the copies into the next slab, and return the tensors there.

        See Note: [static slabs].
        """
        api = self._api
        with span("pyparallel.send"), api.relaxed(self._device):
            if stream is None:
                stream = api.copy_stream(self._device)
            home = api.current_stream(self._device)
            engine.check_not_capturing("home", home, api)
            engine.check_not_capturing("copy", stream, api)
            slab = next(self._slabs)
            engine.check_not_capturing("waiting", slab.stream, api)
            for user in {slab.stream, home}:
                api.wait(stream, api.record(user))
            slab.stream = stream  # if the copies fail half way, it may still write
            self._send(slab, staged, stream).wait(home)
            slab.stream = home
            api.keep([slab.memory], home)
            keep_alive.release_done()
            tensors = slab.renew(self._plan)
        return [tensors[i] for i in self._places]

    def _send(self, slab: _Slab, staged: _Staged, stream: Any) -> engine.CopyEvent:
        api, (sources, leaves) = self._api, staged
        targets = [slab.memory[section] for section in self._sections]
        layout = TransferLayout(self._small_plan, ())
        copies = list(zip(targets, sources, strict=True))
        copied = engine.start(layout, slab.memory, copies, stream, api)
        if not debug.enabled:
            return copied
        debug.check()
        direct = dict(zip(self._large, targets[-len(self._large) :], strict=False))
        small = [leaves[i] for i in self._small]
        layout = layout._replace(packed=small, direct=self._large)
        memory = (slab.memory[: self._small_plan.nbytes], direct)
        route = (api, self._device, stream)
        return debug.Watch(leaves, layout, memory, route, copied, is_static=True).event


def _plan(formats: Sequence[tuple[Sequence[int], torch.dtype]]) -> backend.SlabPlan:
    """Return the smallest plan of leaves with these shapes and dtypes."""
    leaves = [
        torch.empty((), dtype=dtype, device="cpu").expand(shape)
        for shape, dtype in formats
    ]
    return backend.plan_slab(leaves)


class StaticTarget(NamedTuple):
    """The slabs for the batches of one structure and one target.

    Attributes:
        batches: the slabs.
        structure: of the batch: a hashable value.
        place: the number of the target, if a batch goes to several.
    """

    batches: StaticBatches
    structure: Any
    place: int = 0

    def prepare(
        self,
        target: torch.device | None,
        name: Callable[[int], str],
        tensors: Sequence[torch.Tensor],
        stream: Any = None,
        api: TorchDevice | None = None,
    ) -> Receive:
        """Check and stage tensors; return a function that copies them into a slab.

        No batch that was received before changes until that function is called.

        Args:
            target: None is the host.
            name: returns the name of tensor ``i`` for an error.
            tensors: of one batch.
            stream: of the copy; None: the copy stream of the target.
            api: the interface of the target; None: torch's.

        Raises:
            TypeError: a tensor cannot be in a slab. The message names it.
            ValueError: there are too many plans, or the target has no streams.

        Stream: the returned function copies on ``stream``, after the work that is
        queued on the current stream and on the stream that received the batch before.
        The current stream waits for the copy.
        """
        device = HOST if target is None else target
        if device.type != "cpu" and not has_streams(device):
            raise BatchValueError(
                "a static batch must be for the host or for a device with streams, but "
                f"is for {device}. Copy it to another device, or without StaticBatches."
            )
        for i in backend.find_unpackable(tensors)[:1]:
            raise BatchTypeError(
                f"{name(i)} must be a dense tensor on the host without gradients to be "
                f"in a static batch, but {_describe(tensors[i])}. Convert it in the "
                "dataset, or put it into DataContainer([tensor], cpu_only=True)."
            )
        if not tensors:
            return list
        key = _Key(self.place, device, self.structure, backend.plan_slab(tensors))
        route, batches = torch_device if api is None else api, self.batches
        staged = batches._ring(key, route).stage(tensors)
        return lambda: batches._ring(key, route).fill(staged, stream)


def _describe(tensor: torch.Tensor) -> str:
    if type(tensor) not in PLAIN:
        return f"is of type {type_name(tensor)}"
    if not tensor.is_cpu:
        return f"is on {tensor.device}"
    if tensor.requires_grad:
        return "requires a gradient"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    return "is quantized, conjugated, negated or of torch.func"
