"""The training, validation and test steps that models and wrappers share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..batch import pytree
from ..batch.container import DataContainer
from ..core.errors import (
    BatchTypeError,
    OptimWarning,
    SettingTypeError,
    type_name,
    warn_once,
)
from ..core.tracing import span
from ..scatter_gather.scatter import scatter
from .data_preprocessor import BaseDataPreprocessor

_HOST = -1
#: The packages whose models have the step of `TrainStep`.
_LIBRARIES = ("pyparallel", "mmengine")


def run_forward(self: Any, data: Any, mode: str) -> Any:
    """Call a model or its wrapper with a preprocessed batch as its arguments.

    It is the method ``_run_forward`` of both.
    """
    if isinstance(data, Mapping):
        return self(**data, mode=mode)
    if isinstance(data, list | tuple):
        return self(*data, mode=mode)
    raise BatchTypeError(
        f"{type(self).__name__}: data_preprocessor must return a dict, a list or a "
        f"tuple of arguments, but returned {type_name(data)}."
    )


def open_containers(data: Any, model: Any) -> Any:
    """Return the batch with its DataContainers opened, if the model needs that.

    A preprocessor of this package opens them itself, and keeps ``cpu_only`` ones on the
    host. For any other preprocessor they are opened here, as `pyparallel.scatter` does
    for the device of the preprocessor, or for the host if it has no ``device``. A batch
    without DataContainers is returned unchanged.

    Raises:
        TypeError, ValueError: as `pyparallel.scatter`.
    """
    preprocessor = getattr(model, "data_preprocessor", None)
    if isinstance(preprocessor, BaseDataPreprocessor):
        return data
    leaves, _ = pytree.flatten(data)
    if not any(isinstance(leaf, DataContainer) for leaf in leaves):
        return data
    device = getattr(preprocessor, "device", None)
    return scatter(data, [device if isinstance(device, torch.device) else _HOST])[0]


def optim_context(optim_wrapper: Any, model: Any) -> AbstractContextManager[None]:
    """Return the context of the forward pass of a training step.

    Raises:
        TypeError: ``optim_wrapper`` is not an optimizer wrapper.
    """
    context: Any = getattr(optim_wrapper, "optim_context", None)
    if context is None:
        raise SettingTypeError(
            f"{type(model).__name__}.train_step: optim_wrapper must be an "
            f"OptimWrapper, but is {type_name(optim_wrapper)}. Write "
            "OptimWrapper(optimizer)."
        )
    found: AbstractContextManager[None] = context(model)
    return found


def _warn_about_own_step(wrapper: Any, model: Any) -> None:
    """Warn if the model overrides ``train_step``, which its wrapper does not call."""
    own = getattr(type(model), "train_step", None)
    if own is not None and own.__module__.partition(".")[0] not in _LIBRARIES:
        name = type(wrapper).__name__
        warn_once(
            "PP304",
            f"{name}: train_step of {type(model).__name__} must be called to have an "
            f"effect, but {name} calls forward(mode='loss') and parse_losses instead. "
            f"Override train_step in a subclass of {name}.",
            OptimWarning,
        )


class TrainStep:
    """The training step of a wrapper whose ``forward`` must run, as under DDP."""

    module: Any

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """Preprocess, compute the losses, and update the parameters.

        Args:
            data: a batch of the loader.
            optim_wrapper: an `OptimWrapper` over the parameters of this wrapper. It
                decides whether this step reduces gradients.

        Returns:
            The values to log, from ``parse_losses`` of the model.

        Raises:
            TypeError: ``optim_wrapper`` is another object, such as a torch optimizer;
                the preprocessor returned neither a mapping nor a list or tuple.
        """
        model = self.module
        _warn_about_own_step(self, model)
        with span("pyparallel.step"):
            with optim_context(optim_wrapper, self):
                data = open_containers(data, model)
                data = model.data_preprocessor(data, training=True)
                losses = self._run_forward(data, mode="loss")
            loss, log_vars = model.parse_losses(losses)
            optim_wrapper.update_params(loss)
            self._after_update(loss)
            return log_vars

    def _after_update(self, loss: torch.Tensor) -> None:
        """Run after each update; a hook for subclasses."""

    _run_forward = run_forward


class ModelSteps:
    """Validation and test steps of a wrapper that call the model's own steps."""

    module: Any

    def val_step(self, data: Any) -> Any:
        """Return ``module.val_step`` of the batch, without a call of the wrapper."""
        with span("pyparallel.step"):
            return self.module.val_step(open_containers(data, self.module))

    def test_step(self, data: Any) -> Any:
        """Return ``module.test_step`` of the batch, without a call of the wrapper."""
        with span("pyparallel.step"):
            return self.module.test_step(open_containers(data, self.module))


class ForwardSteps(TrainStep):
    """The steps of a wrapper whose ``forward`` every step must run, as under FSDP."""

    def val_step(self, data: Any) -> Any:
        """Return the predictions for a batch. All ranks must call it together."""
        with span("pyparallel.step"):
            data = open_containers(data, self.module)
            data = self.module.data_preprocessor(data, False)
            return self._run_forward(data, mode="predict")

    def test_step(self, data: Any) -> Any:
        """Return the predictions for a batch; the same as `val_step`."""
        return self.val_step(data)
