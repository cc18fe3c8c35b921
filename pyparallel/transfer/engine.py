"""Queue the host-to-device copies of a batch, and keep their sources alive."""

from __future__ import annotations

import _thread
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .. import backend
from ..core.process import at_exit, on_fork
from ..core.tracing import span
from .device import TorchDevice
from .layout import TransferLayout

#: The most seconds that the exit of the interpreter waits for copies.
EXIT_SECONDS = 1.0
_POLL_SECONDS = 5e-4
#: The same between two queries of events while no batch is sent or received.
_BACKGROUND_SECONDS = 0.05

_IsDone = Callable[[], bool]
_Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # targets and sources


class KeepAlive:
    """References to the memory of queued copies, dropped when the copies are done.

    Note: [in-place sources]. torch's host allocator does not reuse its own blocks while
    a copy reads them. It does not track memory that others have pinned: dropping the
    last reference to a tensor there returns the memory at once, to a process that
    overwrites it. So a reference is kept here from before the copy is queued until its
    event is done. No call waits: the events are queried when the next batch is sent or
    received, and in every call of `release_done`.

    References are added and dropped by single operations on a dict, without a lock: a
    destructor may run at any point, and send or release batches itself. Meanwhile this
    object has the only reference, so dropping it frees the memory.

    Note: [release in the background]. After the last batch no call may follow. So a
    thread queries the events, too, and ends when none is left. A device that fails ends
    it as well; then the next call raises the error. A destructor may start the thread
    while other code holds a lock of ``threading``, which therefore does not start it.

    Args:
        in_background: use that thread. The events must not end a graph capture.
    """

    def __init__(self, in_background: bool = False) -> None:
        self._in_background = in_background
        self._reset()
        self._numbers = itertools.count()
        at_exit(self._end)
        on_fork(self._begin_in_child)

    def _reset(self) -> None:
        self._sources: dict[int, Any] = {}
        self._checks: dict[int, _IsDone] = {}
        self._thread_exists = threading.Lock()
        self._ending = threading.Event()

    def hold(self, sources: Any) -> int:
        """Keep ``sources`` alive until `release_when` is called and its event is done.

        Returns:
            A ticket for `release_when`. Without that call the sources are never freed.
        """
        ticket = next(self._numbers)
        self._sources[ticket] = sources
        return ticket

    def release_when(self, ticket: int, is_done: _IsDone) -> None:
        """Drop the sources of ``ticket`` when ``is_done`` returns True."""
        self._checks[ticket] = is_done
        if self._in_background:
            self._start_thread()

    def drop(self, ticket: int) -> None:
        """Drop the sources of ``ticket``, which no copy reads."""
        del self._sources[ticket]

    def leak(self, ticket: int) -> None:
        """Keep the sources of ``ticket`` for ever; no exit waits for them."""
        _leak(self._sources[ticket])
        del self._sources[ticket]

    def release_done(self) -> int:
        """Drop the sources of finished copies; return how many tickets remain."""
        if not self._checks:
            return len(self._sources)
        # Before Python 3.12 a destructor may run in `list(items)`, but not in `copy`.
        for ticket, is_done in self._checks.copy().items():
            if is_done():
                self._sources.pop(ticket, None)  # another thread may have been faster
                self._checks.pop(ticket, None)
        return len(self._sources)

    def _start_thread(self) -> None:
        if self._thread_exists.acquire(blocking=False):
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the interpreter exits, or the system has no thread
                self._thread_exists.release()

    def _run(self) -> None:
        is_usable = True
        try:
            while self._checks and not self._ending.wait(_BACKGROUND_SECONDS):
                self.release_done()
        except Exception:
            is_usable = False
        self._thread_exists.release()
        if self._checks and is_usable and not self._ending.is_set():
            self._start_thread()  # for a check that was added after the last look

    def drain(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for all copies; return True if none remains."""
        deadline = time.monotonic() + seconds
        while self.release_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _end(self) -> None:
        self._ending.set()
        self._thread_exists.acquire(timeout=EXIT_SECONDS)
        try:
            drained = self.drain(EXIT_SECONDS)
        except Exception:  # the device failed: it may still read the sources
            drained = False
        if not drained:
            _leak(self._sources)

    def _begin_in_child(self) -> None:
        """Forget the copies of the parent process without freeing their sources.

        A child can neither query nor destroy their events: torch's end the process.
        """
        _leak((self._sources, self._checks))
        self._reset()


def _leak(value: object) -> None:
    """Keep an object from destruction until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


keep_alive: KeepAlive = KeepAlive(in_background="cuda" in backend.transfers)


class CopyEvent(Protocol):
    """The completion of all copies of one batch."""

    def wait(self, stream: Any) -> None:
        """Make ``stream`` wait for the copies; the host does not wait."""

    def is_done(self) -> bool:
        """Return True if the copies are done; the host does not wait."""


class DeviceEvent(NamedTuple):
    """A `CopyEvent` made of an event of a device interface."""

    api: TorchDevice
    event: Any

    def wait(self, stream: Any) -> None:
        """Queue a wait."""
        check_not_capturing("waiting", stream, self.api)
        self.api.wait(stream, self.event)

    def is_done(self) -> bool:
        """Query the event."""
        return self.api.is_done(self.event)


def start(
    layout: TransferLayout,
    slab: torch.Tensor,
    direct: _Copies,
    stream: Any,
    api: TorchDevice,
) -> CopyEvent:
    """Queue the copies of one batch, and keep in-place sources alive until they end.

    Args:
        layout: the leaves that are packed into ``slab``.
        slab: memory of the device.
        direct: targets on the device, and the pinned tensors that are copied there
            in place.
        stream: of the copies; all targets belong to it.
        api: the interface of the device.
    """
    if api.has_engine(stream.device):
        return _start_native(layout, slab, direct, stream)
    # Everything that can fail on the host comes before the first copy is queued.
    copies = list(direct)
    if layout.packed and layout.plan.nbytes:
        host = api.pinned(layout.plan.nbytes)
        with span("pyparallel.pack"):
            backend.pack(host, layout.packed, layout.plan)
        copies.append((slab, host))
    return queue(copies, [source for _, source in direct], stream, api)


def _start_native(
    layout: TransferLayout, slab: torch.Tensor, direct: _Copies, stream: Any
) -> CopyEvent:
    targets = [target for target, _ in direct]
    sources = [source for _, source in direct]
    plan = layout.plan if layout.packed else None
    return start_held(
        lambda: backend.send(slab, layout.packed, plan, targets, sources, stream),
        sources,
    )


def start_held(
    run: Callable[[], backend.RecordedEvent], held: Sequence[torch.Tensor]
) -> backend.RecordedEvent:
    """Start copies of the backend, and keep tensors alive until they are done.

    Args:
        run: queues nothing if it raises; later errors are in its result.
        held: tensors that the copies read or write, and that no allocator protects.
    """
    ticket = keep_alive.hold(held) if held else None
    is_done = _always_done  # unless a copy is queued
    try:
        event = run()
        is_done = event.is_done
    finally:
        if ticket is not None:
            keep_alive.release_when(ticket, is_done)
    event.check()
    return event


def queue(
    copies: _Copies, in_place: Sequence[torch.Tensor], stream: Any, api: TorchDevice
) -> DeviceEvent:
    """Queue copies, keep memory alive until they end, and return the event after them.

    Args:
        copies: targets and sources.
        in_place: tensors that the copies read or write, and that neither torch nor the
            order of the stream protects.
        stream: of the copies.
        api: the interface of the device.
    """
    ticket = keep_alive.hold(in_place) if in_place else None
    try:
        for target, source in copies:
            api.copy(target, source, stream)
    finally:  # also for the copies that were queued before an error
        event = DeviceEvent(api, api.record(stream))
        if ticket is not None:
            keep_alive.release_when(ticket, event.is_done)
    return event


def check_not_capturing(name: str, stream: Any, api: TorchDevice) -> None:
    """Raise if a graph is captured on a stream that a copy needs.

    Raises:
        RuntimeError: with the name of the stream.
    """
    if api.is_capturing(stream):
        raise RuntimeError(
            f"send: the {name} stream must not be under graph capture, but is. Copy "
            "outside of the capture, into the static tensors of a StaticBatches."
        )


def _always_done() -> bool:
    return True
