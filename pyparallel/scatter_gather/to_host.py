"""to_host: the tensors of a nested batch come to the host in one copy."""

from __future__ import annotations

import threading
from typing import Any

from ..batch.container import Frame
from ..core.tracing import span
from ..transfer.device import ReturnApi, torch_return
from ..transfer.from_device import MixedHostCopy


class HostCopy:
    """A batch on its way to the host, as `start_to_host` returns it.

    It may be dropped at any time, and asked by any thread.
    """

    def __init__(self, batch: Any, api: ReturnApi, snapshot: bool) -> None:
        self._batch = batch
        self._lock = threading.Lock()
        self._pending: tuple[Frame, MixedHostCopy] | None = None
        frame = Frame(batch, lambda tensor: api.device_of(tensor) is not None)
        if frame.tensors:
            self._batch = None
            self._pending = frame, MixedHostCopy(frame.take(), api, snapshot)

    def is_done(self) -> bool:
        """Tell whether `get` would return at once; the host does not wait."""
        pending = self._pending
        return pending is None or pending[1].is_done()

    def get(self) -> Any:
        """Return the batch on the host, the same object every time.

        Stream: the host waits for this batch's own copies, not for the device.
        """
        with self._lock:
            if self._pending is not None:
                frame, copy = self._pending
                self._batch = frame.fill(copy.wait())
                self._pending = None
            return self._batch


def to_host(batch: Any) -> Any:
    """Return a nested batch with all its tensors on the host, in one copy per device.

    The tensors have no gradient history. Those of one device lie in one page-locked
    slab, which lives as long as any of them: ``clone()`` what you keep for long. Slabs
    beyond `memory.set_pinned_limit` are ordinary memory, and a `LoaderWarning` says so.

    Args:
        batch: a tensor, or any nest of containers around tensors, DataContainers too
            (what is ``cpu_only`` is not looked at). Everything else is passed through.

    Returns:
        The batch with new containers; tensors on the host, and what is no tensor, are
        the very same objects. The batch itself if no tensor is on a device.

    Raises:
        RuntimeError: the current stream of a device is recording a graph.

    Stream: on each device, one kernel packs the tensors of less than 1 MiB (one more
    for each that is not contiguous) and one copy follows it; larger contiguous ones are
    copied by themselves, to their place in the same slab. All is queued on the stream
    that is current there, and the host waits for the copies, not for the device. What
    is not plain (sparse, quantized, conjugated, subclasses of Tensor) is copied by
    ``Tensor.cpu``.

    Example:
        >>> import torch
        >>> out = {"loss": torch.tensor(0.5), "step": 7}
        >>> to_host(out) is out
        True
    """
    with span("pyparallel.to_host"):
        return HostCopy(batch, torch_return, snapshot=False).get()


def start_to_host(batch: Any) -> HostCopy:
    """Start to copy a nested batch to the host; return a handle to get it later.

    So the metrics of one step are read in the next one, without a stall. The batch has
    the values of this call: tensors may be changed and dropped as soon as it returns.

    Args:
        batch: as for `to_host`. Tensors that are on the host already are not copied:
            they are seen as they are when the batch is read.

    Returns:
        A handle: ``get()`` waits and returns what `to_host` returns, ``is_done()``
        tells whether there is anything left to wait for. Dropping it is safe.

    Raises:
        RuntimeError: the current stream of a device is recording a graph.

    Stream: on each device the tensors, large ones too, are packed on the stream that is
    current there, and the slab is copied on a stream of its own, which only the host
    waits for. What is not plain is copied, and waited for, at once.

    Example:
        >>> import torch
        >>> handle = start_to_host({"loss": torch.tensor(0.5), "step": 7})
        >>> handle.get()
        {'loss': tensor(0.5000), 'step': 7}
    """
    with span("pyparallel.to_host"):
        return HostCopy(batch, torch_return, snapshot=True)
