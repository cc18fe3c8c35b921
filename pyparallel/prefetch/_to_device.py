"""Copy batches to the device in the loading thread."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple

import torch

from ..batch import pytree
from ..batch.container import (
    TensorSkeleton,
    are_only_tensors,
    check_data,
    map_tensors,
    name_of,
)
from ..core.tracing import span
from ..transfer.device import TorchDevice, keep_parts, torch_device
from ..transfer.static import StaticBatches, StaticTarget
from ..transfer.to_device import MixedCopy, has_streams

Transform = Callable[[Any], Any]
#: Returns the state of a loader between two batches, or raises its error.
LoaderState = Callable[[], Any]


class QueueItem(NamedTuple):
    """An item of the queue: a batch, an error, or (with neither) the end.

    Attributes:
        get_batch: returns the batch, after the consumer's stream waits for its copy.
        error: the error to raise.
        state: the state of the loader after the batch.
        position: the number of batches of the epoch, with this one.
        facts: those of the batch for accelerate, see `Prepared`.
    """

    get_batch: Callable[[], Any] | None = None
    error: BaseException | None = None
    state: LoaderState | None = None
    position: int = 0
    facts: tuple[bool, int] | None = None


class DeviceStage:
    """Copy batches to a device, each in one packed copy, and apply a transform.

    Args:
        device: the target; None leaves batches as they are.
        transform: called in the loading thread with each batch on the device, or None.
        api: functions of a device with streams; None selects them.
        static: the slabs for the batches, which are filled in ``next()``; or None.
    """

    def __init__(
        self,
        device: torch.device | None,
        transform: Transform | None,
        api: TorchDevice | None = None,
        static: StaticBatches | None = None,
    ) -> None:
        self.device = device
        self._static = static
        self.transform = transform
        if api is None and device is not None and device.type != "cpu":
            api = torch_device if has_streams(device) else None
        self._api = api
        self._is_cpu = device is not None and device.type == "cpu"
        #: Whether a batch of the host stays as it is.
        self.is_idle: bool = api is None and static is None and transform is None

    def prepare(self) -> None:
        """Create the copy stream and pinned memory in the consumer's thread.

        The first pinned allocation of a process registers a function for its exit. If
        another thread forks at the same time, both processes can deadlock.
        """
        if self._api is not None and self.device is not None:
            with self._api.relaxed(self.device):
                self._api.copy_stream(self.device)
                self._api.pinned(1)

    def start(self, batch: Any) -> tuple[Callable[[], Any], int]:
        """Start the copy of one batch; called in the loading thread.

        Args:
            batch: a batch of the loader.

        Returns:
            A function that the consumer calls to get the batch, and the number of
            copied bytes.
        """
        if self.is_idle and self._stays(batch):
            return repeat(batch).__next__, 0  # which C calls in less time
        if self._static is not None:
            return self._start_static(batch, self._static)
        if self._api is None or self.device is None:
            return self._on_host(batch)
        device = self.device
        skeleton = TensorSkeleton(batch, lambda tensor: tensor.device != device)
        check_data(skeleton.tensors, batch, "PreDataLoader: batch")
        nbytes = skeleton.nbytes
        if self.transform is not None:
            return self._transformed(
                skeleton, self.transform, device, self._api
            ), nbytes
        if not skeleton.tensors:
            return (lambda: batch), 0
        copy = MixedCopy(skeleton.take_tensors(), device, self._api, waits_here=False)
        return (lambda: skeleton.restore(copy.wait())), nbytes

    def _start_static(
        self, batch: Any, static: StaticBatches
    ) -> tuple[Callable[[], Any], int]:
        where = "PreDataLoader: batch"
        skeleton = TensorSkeleton(batch, lambda tensor: True)
        nbytes, tensors = skeleton.nbytes, skeleton.take_tensors()

        def name(i: int) -> str:
            return str(name_of(batch, where, lambda tensor: tensor is tensors[i]))

        target = StaticTarget(static, skeleton.key)
        receive = target.prepare(self.device, name, tensors, api=self._api)
        return (lambda: skeleton.restore(receive())), nbytes

    def _stays(self, batch: Any) -> bool:
        """Return True if it is found quickly that a batch needs no copy."""
        if not self._is_cpu:
            return self.device is None
        found = pytree.copy_compact(batch, 0, on_cpu=True)
        return found is not None and are_only_tensors(found[1])

    def _on_host(self, batch: Any) -> tuple[Callable[[], Any], int]:
        device, nbytes, is_moved = self.device, 0, False
        if device is not None and not self._stays(batch):

            def to(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal nbytes, is_moved
                if tensor.device == device:
                    return tensor
                check_data([tensor], batch, "PreDataLoader: batch")
                nbytes += tensor.numel() * tensor.element_size()
                is_moved = True  # also without bytes
                return tensor.to(device)

            with span("pyparallel.send"):
                moved = map_tensors(to, batch)
            batch = moved if is_moved else batch
        if self.transform is not None:
            with span("pyparallel.transform"):
                batch = self.transform(batch)
        return (lambda: batch), nbytes

    def _transformed(
        self,
        skeleton: TensorSkeleton,
        transform: Transform,
        device: torch.device,
        api: TorchDevice,
    ) -> Callable[[], Any]:
        """Copy and transform a batch; return a function that returns the result.

        Note: [transformed batches]. The transform may allocate memory at any time, so
        all memory is allocated on the copy stream, where the transform runs. The
        consumer's stream waits for an event after the transform. The result is recorded
        on the consumer's stream, because its memory returns to the copy stream.
        """
        copies = api.copy_stream(device)
        with api.using(copies), api.relaxed(device):
            copy = MixedCopy(skeleton.take_tensors(), device, api, copies)
            batch = skeleton.restore(copy.wait())
            with span("pyparallel.transform"):
                result = transform(batch)
            event = api.record(copies)

        def get_batch() -> Any:
            stream = api.current_stream(device)
            api.wait(stream, event)
            map_tensors(lambda tensor: keep_parts(api, device, tensor, stream), result)
            return result

        return get_batch
