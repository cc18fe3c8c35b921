"""BaseDataPreprocessor: the first step of a model, which gets the batch there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ._cast import cast
from ._upstream import BaseDataPreprocessorBase, provides

#: What ``Module.to`` and its kind give to ``Module._apply``.
Apply = Callable[[torch.Tensor], torch.Tensor]


@provides("MODELS")
class BaseDataPreprocessor(BaseDataPreprocessorBase):
    """Sends a batch to the device of the model that it is part of, in one copy.

    Args:
        non_blocking: passed to the method ``to`` of objects that are no tensors. The
            host waits for no tensor either way.

    It follows the model: whatever moves the model (``to``, ``cuda``, ``to_empty``, a
    wrapper's ``to``) moves the target of its batches. Subclasses override `forward`.

    From mmengine, where every tensor was a copy of its own, mappings became dicts and a
    range raised. As a subclass of mmengine's class, where that is installed, it can be
    part of models that are built by mmengine.
    """

    # mmengine's ``cuda`` forgets which device it was given. Typed as Any, since the
    # annotation would make them fields.
    to: Any = nn.Module.to
    cuda: Any = nn.Module.cuda
    cpu: Any = nn.Module.cpu

    def __init__(self, non_blocking: bool | None = False) -> None:
        nn.Module.__init__(self)
        self._non_blocking = bool(non_blocking)
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._device

    def cast_data(self, data: Any) -> Any:
        """Return ``data`` on the device, in new containers of the same types.

        DataContainers are opened, as `pyparallel.scatter` does for one target; what is
        ``cpu_only`` stays on the host. mmengine's data elements and other objects with
        a method ``to`` go by it. All else (strings, arrays, ranges, ``None``) is passed
        through.

        Raises:
            TypeError: a DataContainer that holds anything but tensors, without
                ``cpu_only``.
            ValueError: a DataContainer of several chunks; containers that hold
                themselves.
            RuntimeError: a device that this machine does not have.

        Stream: tensors of the host, those in data elements too, go in one packed copy
        on the copy stream; the stream that is current on the device waits for it, the
        host does not. They arrive contiguous. On the host nothing is copied.
        """
        return cast(data, self._device, self._non_blocking)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return what the model takes, on the device.

        Args:
            data: a batch as the loader gives it.
            training: whether this is a training step; for subclasses.

        Returns:
            The batch; see `cast_data`. Mappings that are no dicts become dicts, because
            they are the keyword arguments of the model.
        """
        data = self.cast_data(data)
        if isinstance(data, Mapping) and not isinstance(data, dict):
            return dict(data)
        return data

    def _apply(self, fn: Apply, recurse: bool = True) -> BaseDataPreprocessor:
        """Follow the tensors of the model to their device."""
        nn.Module._apply(self, fn, recurse)
        self._device = device_after(fn, self._device)
        return self


def device_after(fn: Apply, device: torch.device) -> torch.device:
    """Return where ``fn`` leaves tensors that were on ``device``."""
    return fn(torch.empty(0, device=device)).device
