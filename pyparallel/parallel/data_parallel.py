"""MMDataParallel: a model on one device, or several, that opens DataContainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..core.devices import HOST, Target, resolve_target, resolve_targets
from ..core.errors import warn_once
from ..core.tracing import span
from ..scatter_gather.gather import gather
from ..scatter_gather.scatter import first_arguments, scatter_kwargs
from ._replica_steps import (
    combine_outputs,
    forbid_optimizer_steps,
    refuse_updates,
    sample_counts,
)
from .parallel_apply import parallel_apply
from .replicate import replicate

_HOST = [-1]


class MMDataParallel(nn.DataParallel[nn.Module]):
    """``torch.nn.DataParallel`` for batches made by `collate`, with the step API.

    Args:
        module: the model.
        device_ids: devices to use: a list, a range or one of what `scatter` takes as a
            target. ``[-1]``, ``'cpu'`` and ``[]`` keep the model on the host, also on a
            machine with accelerators; None means all accelerators, or the host if
            there is none. A device may stand there more than once: ``['cpu', 'cpu']``
            is the host with two replicas.
        output_device: where outputs of several devices are gathered; the first device
            by default.
        dim: the dimension along which plain tensors are split.

    Raises:
        RuntimeError: a device that this machine does not have, when it has others.

    On several devices a call splits its arguments, replicates the model for every part
    and gathers what the replicas return; see `pyparallel.scatter`, `replicate`,
    `parallel_apply` and `gather`. With one part, as the last batch of an epoch may
    have, the model itself is called. Gradients are summed in the model, which lies on
    the first device; of what replicas write to buffers, that of the first one stays.

    Without an accelerator ``device_ids`` becomes ``[]`` whatever was asked for, as in
    mmcv, so that scripts written for GPUs run on the host, with a warning; unless the
    host was asked for several times.

    Subclasses may override ``scatter(inputs, kwargs, device_ids)``, which every call
    goes through, and ``replicate(module, device_ids)``, ``parallel_apply(replicas,
    inputs, kwargs)`` and ``gather(outputs, output_device)``, through which those on
    several devices go. From mmcv 1.x ``MMDataParallel``, whose steps refused several
    devices.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Target | Iterable[Target] | None = None,
        output_device: Any = None,
        dim: int = 0,
    ) -> None:
        self.module: nn.Module
        self.src_device_obj: torch.device
        devices = _devices(device_ids)
        if devices == []:
            nn.Module.__init__(self)
            self.module = module
            self.device_ids: list[Any] = []
        elif devices and devices[0] == HOST:
            nn.Module.__init__(self)
            self.module = module
            self.device_ids, self.src_device_obj = devices, HOST
            self.output_device: Any = HOST
            if output_device is not None:
                who = type(self).__name__
                given = resolve_target(output_device, who, "device for outputs")
                self.output_device = given or HOST
        else:
            super().__init__(module, devices, output_device, dim)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model with every DataContainer opened and tensors on its device.

        Returns:
            What the model returns; on several devices as `pyparallel.gather` joins it.
        """
        if len(self.device_ids) > 1:
            outputs = self._on_replicas(None, inputs, kwargs)
            return self.gather(outputs, self.output_device)
        if self.device_ids:
            return super().forward(*inputs, **kwargs)
        args, kwargs = first_arguments(self.scatter(inputs, kwargs, _HOST))
        return self.module(*args, **kwargs)

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Split arguments over devices; see `scatter_kwargs`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def replicate(self, module: Any, device_ids: Sequence[Any]) -> list[Any]:
        """Return one replica for every device; see `pyparallel.replicate`."""
        return replicate(module, device_ids, detach=not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call every replica with its arguments; see `pyparallel.parallel_apply`."""
        devices = self.device_ids[: len(replicas)]
        result: list[Any] = parallel_apply(replicas, inputs, kwargs, devices)
        return result

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of all replicas; see `pyparallel.gather`."""
        return gather(outputs, output_device, dim=self.dim)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.train_step`` of the opened arguments.

        Called by runners as ``train_step(data_batch, optimizer, **kwargs)``; the
        optimizer reaches the model untouched.

        On several devices every replica returns a dict with ``loss``, ``log_vars`` and
        ``num_samples``. A ``loss`` without dimensions and the numbers in ``log_vars``
        become means weighted by ``num_samples``, so that a loss that is a mean over
        samples has the value and the gradients of one device with the whole batch;
        ``num_samples`` are summed; all else, or an output that is no dict, is gathered
        as by `forward`. Without ``num_samples`` the parts of the arguments count.

        Raises:
            RuntimeError: parameters or buffers that are not on the (first) device.
            TypeError: on several devices, an argument by which the module would update
                its parameters: an ``OptimWrapper``. Nothing has been changed.
            ValueError: on several devices, a call of ``step`` on an optimizer among the
                arguments, before it changes a parameter; outputs that do not fit
                together, or that lack ``num_samples`` where nothing else tells.
        """
        if len(self.device_ids) > 1:
            refuse_updates((inputs, kwargs), f"{type(self).__name__}.train_step")
        return self._step("train_step", inputs, kwargs)

    def val_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.val_step`` of the opened arguments; see `train_step`."""
        return self._step("val_step", inputs, kwargs)

    def _step(self, name: str, inputs: Any, kwargs: Any) -> Any:
        with span("pyparallel.step"):
            if len(self.device_ids) > 1:
                return self._step_on_replicas(name, inputs, kwargs)
            if self.device_ids:
                self._check_module_device()
            device_ids = self.device_ids or _HOST
            args, kwargs = first_arguments(self.scatter(inputs, kwargs, device_ids))
            return getattr(self.module, name)(*args, **kwargs)

    def _step_on_replicas(self, name: str, inputs: Any, kwargs: Any) -> Any:
        where, given = f"{type(self).__name__}.{name}", (inputs, kwargs)
        with forbid_optimizer_steps(given, where):
            outputs = self._on_replicas(name, inputs, kwargs)

        def counts() -> list[int] | None:
            found = sample_counts(given, len(self.device_ids), self.dim)
            return found if found and len(found) == len(outputs) else None

        def joined(values: Sequence[Any]) -> Any:
            return self.gather(values, self.output_device)

        return combine_outputs(outputs, joined, counts, where)

    def _on_replicas(self, name: str | None, inputs: Any, kwargs: Any) -> list[Any]:
        """Return what forward, or a step, returns on every device that is used."""
        self._check_module_device()
        parts, kwargs_parts = self.scatter(inputs, kwargs, self.device_ids)
        if len(parts) <= 1:
            args, kwargs = first_arguments((parts, kwargs_parts))
            call = self.module if name is None else getattr(self.module, name)
            return [call(*args, **kwargs)]
        replicas = self.replicate(self.module, self.device_ids[: len(parts)])
        if name is not None:
            replicas = [getattr(replica, name) for replica in replicas]
        return self.parallel_apply(replicas, parts, kwargs_parts)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MMDataParallel:
        """Check the device again after the model was moved or cast."""
        self.__dict__.pop("_device_checked", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's has none
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
    """Return the devices that are meant: none for the host, None for all."""
    listed: list[Any] | None = None
    if device_ids is not None:
        one = isinstance(device_ids, int | str | torch.device)
        # A type checker does not see what follows if it is not one.
        listed = [device_ids] if one else list(device_ids)  # type: ignore[arg-type]
    if listed and len(listed) > 1 and all(map(_is_host, listed)):
        return [HOST] * len(listed)
    if not torch.accelerator.is_available():
        if listed and not all(map(_is_host, listed)):
            warn_once(
                "PP004",
                f"MMDataParallel: device_ids={listed} must be devices of this machine, "
                f"but torch {torch.__version__} sees no accelerator. The model stays "
                "on the host. Use -1 or 'cpu' to choose the host.",
                UserWarning,
            )
        return []
    if listed is None:
        return None
    targets = resolve_targets(listed) if listed else []
    return [target for target in targets if target and target.type != "cpu"]


def _is_host(target: Target) -> bool:
    if isinstance(target, int):
        return target == -1
    return str(target).partition(":")[0] == "cpu"
