"""How the bytes of a batch get to a device: by the backend's engine, or by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .. import backend
from ..core.tracing import span
from ._keep_alive import Keeper
from .device import DeviceApi
from .layout import Cargo

keeper = Keeper()

_Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
_Streams = tuple[Any, Any]  # of the copies; on which their targets were allocated


class Arrival(Protocol):
    """The moment at which all copies of a flight are done."""

    def wait(self, stream: Any) -> None:
        """Make ``stream`` wait for it; the host does not."""

    def is_done(self) -> bool:
        """Tell whether it has passed; the host does not wait."""


class Event(NamedTuple):
    """An event of a device interface as an arrival."""

    api: DeviceApi
    event: Any

    def wait(self, stream: Any) -> None:
        """Queue a wait."""
        _refuse_capture("waiting", stream, self.api)
        self.api.wait(stream, self.event)

    def is_done(self) -> bool:
        """Ask the event."""
        return self.api.is_done(self.event)


def start(
    cargo: Cargo,
    slab: torch.Tensor,
    direct: _Copies,
    streams: _Streams,
    api: DeviceApi,
    lands_at_once: bool = False,
) -> Arrival:
    """Queue the copies of one flight, and hold what they read in place until then.

    Args:
        cargo: what is packed into ``slab``.
        slab: on the device.
        direct: targets, and the page-locked tensors that are copied there in place.
        streams: the one of the copies, and the one on which their targets were
            allocated just now.
        api: of the device.
        lands_at_once: the second stream waits for the copies as soon as they are
            queued. They may then be queued on that stream.

    Raises:
        RuntimeError: one of the streams is under graph capture; nothing was queued.
    """
    if api.has_engine(slab.device):
        return _by_engine(cargo, slab, direct, streams, lands_at_once)
    return _by_torch(cargo, slab, direct, streams, api)


def _by_engine(
    cargo: Cargo,
    slab: torch.Tensor,
    direct: _Copies,
    streams: _Streams,
    lands_at_once: bool,
) -> Arrival:
    targets = [target for target, _ in direct]
    sources = [source for _, source in direct]
    plan = cargo.plan if cargo.packed else None
    ticket = keeper.hold(sources) if sources else None
    is_done = _at_once  # unless something is queued
    try:
        sent = backend.send(
            slab,
            cargo.packed,
            plan,
            targets,
            sources,
            *streams,
            lands_at_once=lands_at_once,
        )
        is_done = sent.is_done
    finally:
        if ticket is not None:
            keeper.release_when(ticket, is_done)
    try:
        sent.check()
    except BaseException:
        sent.wait(streams[1])  # where the memory of the targets goes back to
        raise
    return sent


def _by_torch(
    cargo: Cargo,
    slab: torch.Tensor,
    direct: _Copies,
    streams: _Streams,
    api: DeviceApi,
) -> Arrival:
    stream, home = streams
    for name, each in (("home", home), ("copy", stream)):
        _refuse_capture(name, each, api)
    allocated = api.record(home)
    # All that can fail on the host comes before the first copy is queued.
    copies = list(direct)
    if cargo.packed and cargo.plan.nbytes:
        host = api.pinned(cargo.plan.nbytes)
        with span("pyparallel.pack"):
            backend.pack(host, cargo.packed, cargo.plan)
        copies.append((slab, host))
    api.wait(stream, allocated)
    return queue(copies, [source for _, source in direct], streams, api)


def queue(
    copies: _Copies, lent: Sequence[torch.Tensor], streams: _Streams, api: DeviceApi
) -> Event:
    """Queue copies, hold what they use in place, and return the event behind them.

    Args:
        copies: targets and sources.
        lent: what is read, or written, in place and torch does not hold.
        streams: the one of the copies, and the one that the device's memory belongs to.
        api: of the device.
    """
    stream, home = streams
    ticket = keeper.hold(lent) if lent else None
    try:
        for target, source in copies:
            api.copy(target, source, stream)
    except BaseException:
        api.wait(home, api.record(stream))  # their memory goes back there
        raise
    finally:  # also for those that were queued before an error
        event = Event(api, api.record(stream))
        if ticket is not None:
            keeper.release_when(ticket, event.is_done)
    return event


def _refuse_capture(name: str, stream: Any, api: DeviceApi) -> None:
    if api.is_capturing(stream):
        raise RuntimeError(
            f"send: the {name} stream must not be under graph capture, but is. Copy "
            "outside of the capture, into static tensors that the graph reads."
        )


def _at_once() -> bool:
    return True
