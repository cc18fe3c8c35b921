"""MMDataParallel: run a model on one or several devices, with DataContainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..core.devices import HOST, Target, resolve_target, resolve_targets
from ..core.errors import plain_number, warn_once
from ..core.tracing import span
from ..scatter_gather.gather import gather
from ..scatter_gather.scatter import first_arguments, scatter_kwargs
from ._replica_steps import (
    combine_outputs,
    forbid_backward,
    forbid_optimizer_steps,
    refuse_updates,
    sample_counts,
)
from .parallel_apply import parallel_apply
from .replicate import replicate

_HOST_TARGETS = [-1]


class MMDataParallel(nn.DataParallel[nn.Module]):
    """``torch.nn.DataParallel`` for batches made by `collate`, with the step API.

    Args:
        module: the model.
        device_ids: the devices: one target of `scatter`, or a list or range of them.
            ``[-1]``, ``'cpu'`` and ``[]`` keep the model on the host, also on a machine
            with accelerators. None means all accelerators, or the host without one. A
            device may be named several times: ``['cpu', 'cpu']`` is the host with two
            replicas.
        output_device: the device on which outputs of several devices are gathered; by
            default the first device.
        dim: the dimension along which plain tensors are split.

    Raises:
        RuntimeError: this machine has accelerators, but not one of the devices.

    On several devices a call splits its arguments, replicates the model for each part
    and gathers the outputs of the replicas; see `pyparallel.scatter`, `replicate`,
    `parallel_apply` and `gather`. If there is only one part, as perhaps for the last
    batch of an epoch, the model itself is called. Gradients are summed in the model,
    which is on the first device. Only the first replica updates the model's buffers.

    Without an accelerator ``device_ids`` becomes ``[]``, as in mmcv, so that scripts
    for GPUs run on the host, with a warning. Several entries for the host are kept.

    Subclasses may override ``scatter(inputs, kwargs, device_ids)``, which all calls
    use, and ``replicate(module, device_ids)``, ``parallel_apply(replicas, inputs,
    kwargs)`` and ``gather(outputs, output_device)``, which calls on several devices
    use. From mmcv 1.x ``MMDataParallel``, whose steps refuse several devices.
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
                target = resolve_target(output_device, who, "device for outputs")
                self.output_device = target or HOST
        else:
            super().__init__(module, devices, output_device, dim)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model with opened DataContainers and tensors on its device.

        Returns:
            The output of the model; on several devices, the outputs joined by
            `pyparallel.gather`.
        """
        if len(self.device_ids) > 1:
            outputs = self._on_replicas(None, inputs, kwargs)
            return self.gather(outputs, self.output_device)
        if self.device_ids:
            return super().forward(*inputs, **kwargs)
        args, kwargs = first_arguments(self.scatter(inputs, kwargs, _HOST_TARGETS))
        return self.module(*args, **kwargs)

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Split arguments over devices; see `scatter_kwargs`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def replicate(self, module: Any, device_ids: Sequence[Any]) -> list[Any]:
        """Return one replica for each device; see `pyparallel.replicate`."""
        return replicate(module, device_ids, detach=not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call each replica with its arguments; see `pyparallel.parallel_apply`."""
        devices = self.device_ids[: len(replicas)]
        result: list[Any] = parallel_apply(replicas, inputs, kwargs, devices)
        return result

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of all replicas; see `pyparallel.gather`."""
        return gather(outputs, output_device, dim=self.dim)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.train_step`` of the opened arguments.

        Runners call it as ``train_step(data_batch, optimizer, **kwargs)``. The model
        gets the optimizer unchanged.

        On several devices each replica returns a dict with ``loss``, ``log_vars`` and
        ``num_samples``. A ``loss`` without dimensions and the numbers in ``log_vars``
        become means weighted by ``num_samples``. So a loss that is a mean over samples
        has the value and the gradients of one device with the whole batch. The values
        of ``num_samples`` are summed. All other values, and outputs that are not dicts,
        are gathered as by `forward`. Without ``num_samples`` in the outputs, the
        samples in the arguments are counted.

        Raises:
            RuntimeError: parameters or buffers are not on the (first) device.
            TypeError: on several devices, an argument is an ``OptimWrapper``, by which
                the module would update its parameters. Nothing has changed.
            ValueError: on several devices, the step runs a backward pass, or calls
                ``step`` of an optimizer among the arguments (no parameter has changed);
                or the outputs differ in structure; or they lack ``num_samples``, and
                the arguments do not contain the number of samples.
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
            device_ids = self.device_ids or _HOST_TARGETS
            args, kwargs = first_arguments(self.scatter(inputs, kwargs, device_ids))
            return getattr(self.module, name)(*args, **kwargs)

    def _step_on_replicas(self, name: str, inputs: Any, kwargs: Any) -> Any:
        where, arguments = f"{type(self).__name__}.{name}", (inputs, kwargs)
        refusal = (
            f"{where} must leave the backward pass to its caller on several devices, "
            "but runs one itself, whose gradients are not weighted by the numbers of "
            "samples. Return the loss."
        )
        steps = forbid_optimizer_steps(arguments, where)
        with forbid_backward(self.module, refusal), steps:
            outputs = self._on_replicas(name, inputs, kwargs)

        def counts() -> list[int] | None:
            found = sample_counts(arguments, len(self.device_ids), self.dim)
            return found if found and len(found) == len(outputs) else None

        def gather_values(values: Sequence[Any]) -> Any:
            return self.gather(values, self.output_device)

        return combine_outputs(outputs, gather_values, counts, where)

    def _on_replicas(self, name: str | None, inputs: Any, kwargs: Any) -> list[Any]:
        """Return the outputs of forward, or of a step, on all devices in use."""
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
        """Check the device of all tensors once, and of the first one in later steps."""
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
    """Return the devices of ``device_ids``: [] for the host, None for all."""
    listed: list[Any] | None = None
    if device_ids is not None:
        device_ids = plain_number(device_ids)
        is_one = isinstance(device_ids, int | str | torch.device)
        # A type checker does not infer that it is iterable otherwise.
        listed = [device_ids] if is_one else list(device_ids)  # type: ignore[arg-type]
    if listed and len(listed) > 1 and all(map(_is_host, listed)):
        return [HOST] * len(listed)
    if not torch.accelerator.is_available():
        if listed and not all(map(_is_host, listed)):
            warn_once(
                "PP004",
                f"MMDataParallel: device_ids={listed} must be devices of this machine, "
                f"but torch {torch.__version__} finds no accelerator. The model stays "
                "on the host. Use -1 or 'cpu' to select the host.",
                UserWarning,
            )
        return []
    if listed is None:
        return None
    targets = resolve_targets(listed) if listed else []
    return [target for target in targets if target and target.type != "cpu"]


def _is_host(target: Target) -> bool:
    target = plain_number(target)
    if isinstance(target, int):
        return target == -1
    return str(target).partition(":")[0] == "cpu"
