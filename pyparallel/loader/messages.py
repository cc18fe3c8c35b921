"""The messages that carry the answers of worker processes."""

from __future__ import annotations

import marshal
import pickle
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import backend
from ..batch import allocation, stack
from ..core.torch_private import (
    data_collate,
    in_worker_thread,
    runs_in_python,
    without_torch_function,
)
from ..core.tracing import span
from ..shm import memfd
from ..shm.messages import LazySlab, RingMiss, pack, pack_small, unpack
from ..shm.ring import RingMemory
from ..workers import descriptors
from ..workers.interface import Outgoing
from .errors import pack_error, worker_text
from .reader import BATCH, ERROR, NOT_STARTED, Answer, Reader, Task
from .tracebacks import clear_frames, message_of


class BatchProgram:
    """The program of worker processes: a `Reader` whose batches are packed.

    Args:
        reader: reads the tasks.
        ring: the ring to write to. None: every batch takes new shared memory.
        first_holder: the number of worker 0 in the ring.
        inline_nbytes: the most bytes of tensors that travel in a message.
    """

    def __init__(
        self,
        reader: Reader,
        ring: RingMemory | None,
        first_holder: int,
        inline_nbytes: int,
    ) -> None:
        self._reader, self._ring, self._holder = reader, ring, first_holder
        self._limit, self._moves = inline_nbytes, False
        self._backend = backend.name

    def start(self, worker: int) -> None:
        """Prepare the worker."""
        if backend.name != self._backend:  # of the parent, as in a fork server
            backend.use(self._backend)
        self._worker, self._holder = worker, self._holder + worker
        if self._ring is not None:
            self._ring = self._ring.mapped_here()
        self._packs = memfd.is_supported()
        # torch's function would allocate shared memory for every tensor.
        functions = data_collate.default_collate_fn_map
        if functions.get(torch.Tensor) is data_collate.collate_tensor_fn:
            functions[torch.Tensor] = collate_tensors
        self._reader.start(worker)

    def answer(self, task: Task) -> Outgoing:
        """Run a task, and return its answer."""
        slab = LazySlab(self._ring, self._holder, self._limit)
        with allocation.allocate_from(slab, packs=self._packs):
            answer = self._reader.run(task)
        kind, value, failures = answer.kind, answer.value, answer.failures
        report, location = answer.report, answer.location
        del answer  # see Note [references to a batch]
        if kind == BATCH:
            held = [value]
            del value
            try:
                return self._pack_batch(held, failures, report, slab)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # it does not pickle, or has no memory
                return self._pack_error(error, self._reader.locate(error))
        slab.release()
        if kind in (ERROR, NOT_STARTED):
            return self._pack_error(value, location, kind)
        return Outgoing(_pack_head(kind, value, failures, report))

    def failed(self, error: Exception) -> Outgoing:
        """Return the answer to a task that cannot be unpickled."""
        raised = f"{type(error).__name__}: {message_of(error)}"
        found = RuntimeError(
            "DataLoader: the indices of the sampler must unpickle in worker "
            f"{self._worker}, but raised {raised}. Yield indices that every process "
            "can rebuild."
        )
        found.__cause__ = error
        return self._pack_error(found)

    def _pack_error(
        self, error: BaseException, location: str = "", kind: int = ERROR
    ) -> Outgoing:
        try:
            raise error
        except BaseException:
            where = worker_text(self._worker)
            packed = pack_error(error, where, location)
        # The slab of a batch that failed is in use as long as frames refer to tensors.
        clear_frames(error)
        head = _pack_head(kind, packed)
        return Outgoing(head, ends=not isinstance(error, Exception))

    def _pack_batch(
        self, held: list[Any], failures: Any, report: bytes | None, slab: LazySlab
    ) -> Outgoing:
        sent: list[int] = []
        with span("pyparallel.pack"):
            packed = pack_small(held, slab)
            if packed is None:
                with descriptors.Sending() as sent:
                    packed = pack(held, slab)
        if packed.was_shared and not self._moves:
            self._moves = True
            self._reader.collate_in(_IntoSlab())
        miss, nbytes = packed.miss, packed.nbytes
        is_hit = miss is None and self._ring is not None and nbytes > 0
        figures = self._reader.end_message(nbytes, is_hit, miss is not None)
        measured = tuple(figures), miss and tuple(miss)
        head = _pack_head(BATCH, None, failures, report, measured)
        return Outgoing(head, packed.body, sent)


def _pack_head(
    kind: int,
    value: Any,
    failures: tuple[Any, ...] = (),
    report: bytes | None = None,
    measured: tuple[Any, ...] = (),
) -> bytes:
    """Return everything but the batch. `marshal` is ten times as fast as `pickle`."""
    left_out = pickle.dumps(failures) if failures else None
    return marshal.dumps((kind, value, left_out, report, measured))


def unpack_answer(head: bytes, tail: Any, sent: tuple[int, ...] = ()) -> Answer:
    """Return the answer of a message."""
    kind, value, left_out, report, measured = marshal.loads(head)
    failures = () if left_out is None else pickle.loads(left_out)
    if not measured:
        return Answer(kind, value, failures, report)
    if sent:
        with descriptors.arriving(sent):
            batch, is_pinned = unpack(tail)
    else:
        batch, is_pinned = unpack(tail)
    figures, miss = measured
    found = miss and RingMiss(*miss)
    return Answer(kind, batch, failures, report, figures, "", is_pinned, found)


class _IntoSlab(TorchFunctionMode):
    """Lets torch's ``collate_tensor_fn`` write into memory of `allocation.empty`.

    MONAI calls it by its name, for tensors of a class of its own. In a worker, its
    result would be in new shared memory, whose pages the kernel has to clear.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Move the result of that function before it is written."""
        kwargs = kwargs or {}
        if func is torch.stack and sys._getframe(1).f_code is _TORCH_CODE:
            out = kwargs.get("out")
            with without_torch_function():
                if _is_dense(out) and _has_memory(out):
                    out.set_(allocation.empty(out.shape, out.dtype, out.device))
        return func(*args, **kwargs)


_TORCH_CODE: Any = data_collate.collate_tensor_fn.__code__


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors as torch does, but in memory of `allocation.empty`."""
    if not (allocation.is_packed_later() and all(map(_is_dense, batch))):
        if in_worker_thread() and any(_is_dense(it, has_graph=True) for it in batch):
            return torch.stack(tuple(batch))  # as torch does without workers
        original: Any = data_collate.collate_tensor_fn
        collated: torch.Tensor = original(batch, collate_fn_map=collate_fn_map)
        return collated
    first = batch[0]
    if first.nbytes * len(batch) <= allocation.SMALL_NBYTES:
        small = backend.stack_equal(batch) if backend.name == "native" else None
        return torch.stack(tuple(batch)) if small is None else small
    out = None
    if all(it.shape == first.shape and it.dtype == first.dtype for it in batch):
        if stack.are_plain(batch):
            return stack.stack(batch, None, [0] * len(batch), "batch[{}]".format)
        if all(map(_has_memory, batch)):
            shape = len(batch), *first.shape
            out = allocation.empty(shape, first.dtype, first.device)
    return torch.stack(tuple(batch), out=out)  # the class of the tensors may change it


def _is_dense(value: Any, *, has_graph: bool = False) -> bool:
    """Return True for a tensor that torch stacks in a worker in any memory.

    Args:
        value: any object.
        has_graph: whether the tensor must have gradients, or must have none.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.requires_grad is has_graph
        and not value.is_nested
    )


def _has_memory(value: torch.Tensor) -> bool:
    """Return True if torch stacks the memory of a tensor, not an object behind it."""
    return not (value.is_quantized or runs_in_python(value))
