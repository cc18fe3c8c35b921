"""MMDataParallel: a model on one device, or several, that opens DataContainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ._errors import BatchValueError
from ._targets import Target, resolve_targets
from ._trace import span
from .scatter import first_arguments, scatter_kwargs

_HOST = [-1]


class MMDataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """``torch.nn.DataParallel`` for batches made by `collate`, with the step API.

    Args:
        module: the model.
        device_ids: devices to use: a list, a range or one of what `scatter` takes as a
            target. ``[-1]``, ``'cpu'`` and ``[]`` keep the model on the host, also on a
            machine with accelerators; None means all accelerators, or the host if
            there is none.
        output_device: where `forward` gathers results; the first device by default.
        dim: the dimension along which plain tensors are split.

    Raises:
        RuntimeError: a device that this machine does not have, when it has others.

    `forward` runs on several devices as torch does. `train_step` and `val_step` use
    one device. Without an accelerator ``device_ids`` becomes ``[]`` whatever was asked
    for, as in mmcv, so that scripts written for GPUs run on the host.

    Subclasses may override ``scatter(inputs, kwargs, device_ids)``, which every call
    goes through. From mmcv 1.x ``MMDataParallel``.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Target | Iterable[Target] | None = None,
        output_device: Any = None,
        dim: int = 0,
    ) -> None:
        devices = _devices(device_ids)
        if devices == []:
            nn.Module.__init__(self)
            self.module = module
            self.device_ids: list[Any] = []
        else:
            super().__init__(module, devices, output_device, dim)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model with every DataContainer opened and tensors on its device."""
        if self.device_ids:
            return super().forward(*inputs, **kwargs)
        args, kwargs = first_arguments(self.scatter(inputs, kwargs, _HOST))
        return self.module(*args, **kwargs)

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Split arguments over devices; see `scatter_kwargs`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.train_step`` of the opened arguments.

        Called by runners as ``train_step(data_batch, optimizer, **kwargs)``; the
        optimizer reaches the model untouched.

        Raises:
            ValueError: several devices (an ``AssertionError`` too).
            RuntimeError: parameters or buffers that are not on the device.
        """
        return self._step("train_step", inputs, kwargs)

    def val_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.val_step`` of the opened arguments; see `train_step`."""
        return self._step("val_step", inputs, kwargs)

    def _step(self, name: str, inputs: Any, kwargs: Any) -> Any:
        if len(self.device_ids) > 1:
            raise BatchValueError(
                f"{type(self).__name__}.{name} must run on one device, but "
                f"device_ids is {self.device_ids}. Use MMDistributedDataParallel to "
                "train on several."
            )
        if self.device_ids:
            self._check_module_device()
        device_ids = self.device_ids or _HOST
        with span("pyparallel.step"):
            args, kwargs = first_arguments(self.scatter(inputs, kwargs, device_ids))
            return getattr(self.module, name)(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MMDataParallel:
        """Check the device again after the model was moved or cast."""
        self.__dict__.pop("_device_checked", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _check_module_device(self) -> None:
        """Check every tensor once, and only the first one in later steps."""
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.src_device_obj:
                raise RuntimeError(
                    f"{type(self).__name__}: module must have its parameters and "
                    f"buffers on {self.src_device_obj} (device_ids[0]), but found one "
                    f"on {tensor.device}."
                )
            if self.__dict__.get("_device_checked"):
                return
        self.__dict__["_device_checked"] = True


def _devices(device_ids: Target | Iterable[Target] | None) -> list[Any] | None:
    """Return the accelerators that are meant: none for the host, None for all."""
    if not torch.accelerator.is_available():
        return []
    if device_ids is None:
        return None
    one = isinstance(device_ids, int | str | torch.device)
    listed: list[Any] = [device_ids] if one else list(device_ids)  # type: ignore[arg-type]
    targets = resolve_targets(listed) if listed else []
    return [target for target in targets if target and target.type != "cpu"]
