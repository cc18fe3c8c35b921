"""Batches on their way from the thread that loads them to the one that uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.container import TensorSkeleton, map_tensors
from ..core.tracing import span
from ..transfer.device import DeviceApi, torch_device
from ..transfer.to_device import MixedCopy, has_streams

Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class State:
    """The state of a loader between two batches, or why there is none."""

    value: Any
    error: Exception | None = None

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class Item:
    """What a consumer gets: a batch that lands when called, an error, or the end."""

    land: Callable[[], Any] | None = None
    error: BaseException | None = None
    state: State | None = None


def state_of(loader: Any) -> State:
    """Take the state of a loader that has one."""
    state_dict = getattr(loader, "state_dict", None)
    try:
        return State(state_dict() if callable(state_dict) else None)
    except Exception as error:  # only who asks for a state has to know
        error.__context__ = None  # it would hold the iterator whose end this is
        return State(None, error.with_traceback(None))


class HandOver:
    """How batches get to the device: one packed copy, and a transform behind it.

    Args:
        device: None leaves batches as they are.
        transform: called in the thread with every batch on the device, or None.
        api: of a device with streams; None finds it.
    """

    def __init__(
        self,
        device: torch.device | None,
        transform: Transform | None,
        api: DeviceApi | None = None,
    ) -> None:
        self.device = device
        self._transform = transform
        if api is None and device is not None and device.type != "cpu":
            api = torch_device if has_streams(device) else None
        self._api = api

    def home(self) -> Any:
        """Return the consumer's stream: called in its thread, at every batch."""
        if self._api is None or self.device is None:
            return None
        return self._api.current_stream(self.device)

    def prepare(self) -> None:
        """Do in the consumer's thread what must not be done first in another.

        The first page-locked allocation of a process registers a function for its exit;
        beside a fork in another thread that can lock up both.
        """
        if self._api is not None and self.device is not None:
            self._api.copy_stream(self.device)
            self._api.pinned(1)

    def start(self, batch: Any, home: Any) -> tuple[Callable[[], Any], int]:
        """Start the way of one batch, in the loading thread.

        Returns:
            A function that the consumer calls to get the batch, and the bytes sent.
        """
        if self._api is None or self.device is None:
            return self._on_host(batch)
        device = self.device
        skeleton = TensorSkeleton(batch, lambda tensor: tensor.device != device)
        nbytes = sum(map(_nbytes, skeleton.tensors))
        if self._transform is not None:
            return self._transformed(
                skeleton, self._transform, device, self._api
            ), nbytes
        if not skeleton.tensors:
            return (lambda: batch), 0
        # Memory belongs to the stream that it is used on, so that the allocator may
        # reuse it there without asking: see Note [slab lifetime].
        copy = MixedCopy(skeleton.take_tensors(), device, self._api, home)
        return (lambda: skeleton.restore(copy.wait())), nbytes

    def _on_host(self, batch: Any) -> tuple[Callable[[], Any], int]:
        device, nbytes = self.device, 0
        if device is not None:

            def to(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal nbytes
                if tensor.device == device:
                    return tensor
                nbytes += _nbytes(tensor)
                return tensor.to(device)

            with span("pyparallel.send"):
                moved = map_tensors(to, batch)
            batch = moved if nbytes else batch
        if self._transform is not None:
            with span("pyparallel.transform"):
                batch = self._transform(batch)
        return (lambda: batch), nbytes

    def _transformed(
        self,
        skeleton: TensorSkeleton,
        transform: Transform,
        device: torch.device,
        api: DeviceApi,
    ) -> Callable[[], Any]:
        """Send, transform and return the landing of the result.

        Note: [transformed batches]. The transform may allocate what and when it likes,
        so here everything is allocated on the copy stream, where the transform runs.
        The consumer's stream waits for an event behind it, and the allocator is told
        of that stream, because the memory goes back to the copy stream.
        """
        copies = api.copy_stream(device)
        with api.using(copies):
            batch = skeleton.restore(
                MixedCopy(skeleton.take_tensors(), device, api).wait()
            )
            with span("pyparallel.transform"):
                result = transform(batch)
            event = api.record(copies)

        def land() -> Any:
            stream = api.current_stream(device)
            api.wait(stream, event)

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                if api.holds(device, tensor):
                    api.keep(tensor, stream)
                return tensor

            map_tensors(keep, result)
            return result

        return land


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
