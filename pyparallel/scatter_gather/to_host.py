"""to_host: copy the tensors of a nested batch to the host in one copy per device."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from ..batch.container import TensorSkeleton, check_data
from ..core.tracing import span
from ..transfer.device import TorchReturn, torch_return
from ..transfer.from_device import MixedHostCopy

_T = TypeVar("_T")


class HostCopy:
    """A batch that is copied to the host, as `start_to_host` returns it.

    It may be dropped at any time, and used by any thread.
    """

    def __init__(self, batch: Any, api: TorchReturn, snapshot: bool) -> None:
        self._batch = batch
        self._lock = threading.RLock()  # a signal handler may call `get` in `get`
        self._pending: tuple[TensorSkeleton, MixedHostCopy] | None = None
        skeleton = TensorSkeleton(
            batch, lambda tensor: api.device_of(tensor) is not None
        )
        if skeleton.tensors:
            tensors = skeleton.take_tensors()
            try:
                copy = MixedHostCopy(tensors, api, snapshot)
            except NotImplementedError as error:
                check_data(tensors, batch, "to_host: batch", error)
                raise
            self._batch, self._pending = None, (skeleton, copy)

    def is_done(self) -> bool:
        """Return True if `get` returns at once; the host does not wait."""
        pending = self._pending
        return pending is None or pending[1].is_done()

    def get(self) -> Any:
        """Return the batch on the host, the same object every time.

        Stream: the host waits for this batch's own copies, not for the device.
        """
        with self._lock:
            if self._pending is not None:
                skeleton, copy = self._pending
                batch = skeleton.restore(copy.wait())
                if self._pending is not None:  # no handler was faster
                    self._batch, self._pending = batch, None
            return self._batch


def to_host(batch: _T) -> _T:
    """Return a nested batch with all its tensors on the host, in one copy per device.

    The tensors have no gradient history. Those of one device share one pinned slab,
    which lives as long as any of them: ``clone()`` tensors that you keep for long.
    Slabs beyond `memory.set_pinned_limit` are ordinary memory, with a `LoaderWarning`.

    Args:
        batch: a tensor, or any nest of containers around tensors, also DataContainers
            (those with ``cpu_only`` are not searched). Other values are passed through.

    Returns:
        The batch with new containers. Tensors that were on the host, and other values,
        are the same objects. If no tensor is on a device, the batch itself.

    Raises:
        ValueError: a tensor on the meta device; the message names it.
        RuntimeError: the current stream of a device is under graph capture.

    Stream: on each device, one kernel packs the tensors of less than 1 MiB (one more
    for each that is not contiguous), and one copy follows it. Larger contiguous tensors
    are copied one by one to their slots in the same slab. All work is queued on the
    stream that is current there. The host waits for the copies, not for the device.
    Tensors that are not plain (sparse, quantized, conjugated, subclasses of Tensor) are
    copied by ``Tensor.cpu``.

    Example:
        >>> import torch
        >>> out = {"loss": torch.tensor(0.5), "step": 7}
        >>> to_host(out) is out
        True
    """
    with span("pyparallel.to_host"):
        result: _T = HostCopy(batch, torch_return, snapshot=False).get()
    return result


def start_to_host(batch: Any) -> HostCopy:
    """Start to copy a nested batch to the host; return a handle to get it later.

    Use it to read the metrics of one step in the next one, without a stall. The result
    has the values at the time of this call: tensors may be changed and dropped as soon
    as it returns.

    Args:
        batch: as for `to_host`. Tensors that are on the host already are not copied:
            later changes to them are visible in the result.

    Returns:
        A handle: ``get()`` waits and returns the result of `to_host`, ``is_done()``
        returns True if there is nothing left to wait for. Dropping it is safe.

    Raises:
        ValueError: a tensor on the meta device; the message names it.
        RuntimeError: the current stream of a device is under graph capture.

    Stream: on each device the tensors, also large ones, are packed on the stream that
    is current there. The slab is copied on a separate stream, and only the host waits
    for it. Tensors that are not plain are copied, and waited for, at once.

    Example:
        >>> import torch
        >>> handle = start_to_host({"loss": torch.tensor(0.5), "step": 7})
        >>> handle.get()
        {'loss': tensor(0.5000), 'step': 7}
    """
    with span("pyparallel.to_host"):
        return HostCopy(batch, torch_return, snapshot=True)
