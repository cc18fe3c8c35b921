"""The training, validation and test steps that models and wrappers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..batch import pytree
from ..batch.container import DataContainer
from ..core.errors import BatchTypeError, type_name
from ..core.tracing import span
from ..scatter_gather.scatter import scatter
from .data_preprocessor import BaseDataPreprocessor

_HOST = -1


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
            TypeError: the preprocessor returned neither a mapping nor a list or tuple.
        """
        model = self.module
        with span("pyparallel.step"):
            with optim_wrapper.optim_context(self):
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
