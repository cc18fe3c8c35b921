"""The messages that carry batches from worker processes.

A batch of few bytes is sent in the message itself: a slab of shared memory would cost
more than the copy. The tensors of a larger batch are in a slab of the ring.
"""

from __future__ import annotations

import io
import pickle
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from .. import backend
from ..batch import allocation, stack
from ..core.cpu_time import CoreWait, cpu_seconds
from ..core.torch_private import data_collate
from ..core.tracing import span
from ..shm import memfd, serialization
from ..shm.serialization import RingMiss, move_out_of_ring, serialize
from ..workers import descriptors
from ..workers.interface import Outgoing
from .errors import pack_error
from .reader import BATCH, ERROR, Answer, Figures, Reader

#: The largest batch that is sent in a message.
INLINE_NBYTES = 16384
#: Layouts that the parent remembers for each worker.
_NUM_PLANS = 64


class Facts(NamedTuple):
    """Facts about the message of a batch.

    Attributes:
        nbytes: the bytes of its tensors.
        is_in_ring: they are in a slab.
        is_pinned: all of them are in pinned memory.
        miss: the reason why they are not in the ring, or None.
    """

    pack_seconds: float
    pack_cpu_seconds: float
    core_wait_seconds: float
    nbytes: int
    is_in_ring: bool
    is_pinned: bool
    miss: RingMiss | None


class LazySlab:
    """A slab that is claimed when the first large tensor of a batch is allocated."""

    def __init__(self, ring: Any, holder: int) -> None:
        self._ring, self._holder = ring, holder
        self.slab: Any = None

    def claim(self) -> Any:
        """Return the slab, None if none is free."""
        if self.slab is None and self._ring is not None:
            self.slab = self._ring.claim(self._holder)
        return self.slab

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a tensor if it is large; see ``allocation.Slab``."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes <= INLINE_NBYTES and self.slab is None:
            return None
        slab = self.claim()
        return None if slab is None else slab.empty(shape, dtype)


class BatchProgram:
    """The program of worker processes: a `Reader` whose batches are packed.

    Args:
        reader: reads the tasks.
        ring: the ring to write to. None: every batch takes new shared memory.
        first_holder: the number of worker 0 in the ring.
    """

    def __init__(self, reader: Reader, ring: Any, first_holder: int) -> None:
        self._reader, self._ring, self._holder = reader, ring, first_holder
        self._last_key: Any = None  # of the layout of the last small batch

    def start(self, worker: int) -> None:
        """Prepare the worker."""
        self._worker, self._holder = worker, self._holder + worker
        self._core_wait = CoreWait()
        self._core_waited = self._core_wait.seconds()
        # torch's function would allocate shared memory for every tensor.
        functions = data_collate.default_collate_fn_map
        if functions.get(torch.Tensor) is data_collate.collate_tensor_fn:
            functions[torch.Tensor] = _collate_tensors
        self._reader.start(worker)

    def answer(self, task: Any) -> Outgoing:
        """Run a task, and return its answer."""
        lazy = LazySlab(self._ring, self._holder)
        with allocation.allocate_from(lazy, packs=memfd.is_supported()):
            answer = self._reader.run(task)
        if answer.kind == BATCH:
            # No frame may refer to the batch when its slab is sent. So it is popped
            # from a list: an argument stays on the caller's stack in Python 3.10.
            held, answer = [answer.value], answer._replace(value=None)
            try:
                return self._pack_batch(held, answer, lazy)
            except Exception as error:  # it does not pickle, or has no memory
                answer = Answer(ERROR, error)
        if lazy.slab is not None:
            lazy.slab.release()
        if answer.kind == ERROR:
            return self._pack_error(answer.value, answer.location)
        kept = answer._replace(value=None)
        return Outgoing(pickle.dumps((tuple(kept), None)))

    def _pack_error(self, error: BaseException, location: str = "") -> Outgoing:
        try:
            raise error
        except BaseException:
            where = f"in DataLoader worker process {self._worker}"
            packed = pack_error(error, where, location)
        head = pickle.dumps((tuple(Answer(ERROR, packed)), None))
        return Outgoing(head, ends=not isinstance(error, Exception))

    def failed(self, error: Exception) -> Outgoing:
        """Return the answer to a task that cannot be unpickled."""
        found = RuntimeError(
            "DataLoader: the indices of the sampler must unpickle in worker "
            f"{self._worker}, but raised {type(error).__name__}: {error}. Yield "
            "indices that every process can rebuild."
        )
        found.__cause__ = error
        return self._pack_error(found)

    def _pack_batch(self, held: list[Any], answer: Answer, lazy: LazySlab) -> Outgoing:
        start, cpu = time.perf_counter(), cpu_seconds()
        with span("pyparallel.pack"):
            found = self._pack_small(held, lazy)
            if found is None:
                found = self._pack_large(held, lazy)
        before, self._core_waited = self._core_waited, self._core_wait.seconds()
        seconds = (
            time.perf_counter() - start,
            cpu_seconds() - cpu,
            self._core_waited - before,
        )
        body, layout, permuted, tail = found
        head = (tuple(answer), (seconds, body, layout, permuted))
        return Outgoing(bytes(ForkingPickler.dumps(head, 5)), tail)

    def _pack_large(self, held: list[Any], lazy: LazySlab) -> tuple[Any, ...]:
        batch, slab = held.pop(), lazy.claim()
        miss = None if slab else RingMiss("full" if self._ring else "off", 0)
        message = serialize(batch, slab, miss)
        batch = None
        if slab is not None and not slab.finish():
            if message.miss is None and message.location is not None:
                message = move_out_of_ring(message, slab)
        if slab is not None and not message.is_in_ring:
            slab.release()
        return None, tuple(message), None, b""

    def _pack_small(self, held: list[Any], lazy: LazySlab) -> tuple[Any, ...] | None:
        if lazy.slab is not None:
            return None
        leaves = serialization._LeafCollector(True, True)
        file = io.BytesIO()
        _BatchPickler(file, leaves).dump(held[0])
        nbytes = sum([leaf.nbytes for leaf in leaves.packed])
        if nbytes > INLINE_NBYTES or leaves.unsupported or leaves.buffers:
            return None
        layout, tail = self._pack_inline(leaves.packed)
        return file.getvalue(), layout, leaves.permuted, tail

    def _pack_inline(self, tensors: list[torch.Tensor]) -> tuple[bytes, bytearray]:
        """Return the layout of tensors, pickled, and their bytes."""
        if not tensors:
            return b"", bytearray()
        # Most batches have the layout of the last one.
        key = [(leaf.shape, leaf.dtype) for leaf in tensors]
        if key != self._last_key:
            plan = backend.plan_slab(tensors)
            self._last_key, self._last_plan = key, (plan, pickle.dumps(plan, 5))
        plan, layout = self._last_plan
        tail = bytearray(plan.nbytes)
        if tail:
            backend.pack(torch.frombuffer(tail, dtype=torch.uint8), tensors, plan)
        return layout, tail


def _collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors as torch does, but in memory of `allocation.empty`."""
    first = batch[0]
    if (
        type(first) is torch.Tensor
        and first.nbytes * len(batch) <= INLINE_NBYTES
        and first.layout is torch.strided
        and not first.is_nested
    ):
        return torch.stack(batch)
    if allocation.is_packed_later() and stack.are_plain(batch):
        if all(tensor.shape == batch[0].shape for tensor in batch):
            stacked = stack.stack_equal(batch)
            if stacked is not None:
                return stacked
            return stack.stack(batch, None, [0] * len(batch), "batch[{}]".format)
    if allocation.is_packed_later() and not any(t.requires_grad for t in batch):
        if all(t.layout is torch.strided and not t.is_nested for t in batch):
            return torch.stack(tuple(batch))  # torch's function, without shared memory
    original: Any = data_collate.collate_tensor_fn
    collated: torch.Tensor = original(batch, collate_fn_map=collate_fn_map)
    return collated


class _BatchPickler(pickle.Pickler):
    """Pickles a batch as torch's queue does, with numbers for its tensors."""

    dispatch_table = descriptors.Pickler.dispatch_table

    def __init__(self, file: io.BytesIO, leaves: Any) -> None:
        super().__init__(file, 5, buffer_callback=leaves.add_array)
        self._leaves = leaves

    reducer_override = serialization._Pickler.reducer_override


class Unpacker:
    """Makes answers of the messages of one worker, in the parent."""

    def __init__(self) -> None:
        self._plans: dict[bytes, Any] = {}

    def unpack(
        self, head: bytes, tail: Any, fds: tuple[int, ...] = ()
    ) -> tuple[Answer, Facts | None]:
        """Return an answer, and facts about the message of a batch."""
        found: Any = pickle.loads(head)
        answer, packed = found
        answer = Answer(*answer)._replace(figures=Figures(*answer[4]))
        if packed is None:
            return answer, None
        seconds, body, layout, permuted = packed
        pack, pack_cpu, core_wait = seconds
        if body is None:
            received = serialization.ReceivedBatch(*layout)
            message = received.message
            nbytes = message.plan.nbytes if message.plan is not None else 0
            missed = message.miss
            if missed is None and message.unsupported is not None:
                missed = RingMiss("unsupported", 0)
            all_pinned = received.is_pinned and not (
                message.unsupported or message.buffers
            )
            facts = Facts(
                pack,
                pack_cpu,
                core_wait,
                nbytes,
                message.is_in_ring and not missed,
                all_pinned,
                missed,
            )
            return answer._replace(value=received.deserialize()), facts
        tensors: list[torch.Tensor] = []
        nbytes = 0
        if layout:
            plan = self._plans.get(layout)
            if plan is None:
                if len(self._plans) >= _NUM_PLANS:
                    self._plans.clear()
                plan = self._plans[layout] = pickle.loads(layout)
            nbytes = plan.nbytes
            memory = (
                torch.frombuffer(bytearray(tail), dtype=torch.uint8)
                if nbytes
                else (torch.empty(0, dtype=torch.uint8))
            )
            tensors = backend.views(memory, plan)
            for number, order in permuted.items():
                inverse = sorted(range(len(order)), key=order.__getitem__)
                tensors[number] = tensors[number].permute(inverse)
        names = {"tensor_placeholder": tensors.__getitem__}
        batch = serialization._Unpickler(body, names, ()).load()
        facts = Facts(pack, pack_cpu, core_wait, nbytes, nbytes > 0, False, None)
        return answer._replace(value=batch), facts
