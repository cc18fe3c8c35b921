"""What the steps of models and wrappers share: opening, calling, updating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..batch import pytree
from ..batch.container import DataContainer
from ..core.errors import BatchTypeError, type_name
from ..core.tracing import span
from ..scatter_gather.scatter import scatter
from .data_preprocessor import BaseDataPreprocessor

_HOST = -1


def run_forward(call: Callable[..., Any], data: Any, mode: str, where: str) -> Any:
    """Call a model or its wrapper with a preprocessed batch as its arguments.

    Args:
        call: what is called.
        data: keyword arguments, or a list or tuple of positional ones.
        mode: ``"loss"``, ``"predict"`` or ``"tensor"``.
        where: name of the class, for the message.

    Raises:
        TypeError: ``data`` is neither.
    """
    if isinstance(data, Mapping):
        return call(**data, mode=mode)
    if isinstance(data, list | tuple):
        return call(*data, mode=mode)
    raise BatchTypeError(
        f"{where}: data_preprocessor must return a dict, a list or a tuple of "
        f"arguments, but returned {type_name(data)}."
    )


def micro_step(
    wrapper: Any, data: Any, optim_wrapper: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Preprocess, compute the losses through a wrapper, and update the parameters.

    Args:
        wrapper: its ``module`` is the model; its ``_run_forward`` calls itself.
        data: a batch as the loader gives it.
        optim_wrapper: an `OptimWrapper`.

    Returns:
        The loss that was minimised, ``()``, and what to log.
    """
    model = wrapper.module
    with optim_wrapper.optim_context(wrapper):
        data = model.data_preprocessor(opened(data, model), training=True)
        losses = wrapper._run_forward(data, mode="loss")
    loss, log_vars = model.parse_losses(losses)
    optim_wrapper.update_params(loss)
    return loss, log_vars


def opened(data: Any, model: Any) -> Any:
    """Return a batch that the preprocessor of ``model`` understands.

    Ours opens DataContainers itself, and knows what is ``cpu_only``. For any other they
    are opened here, as `pyparallel.scatter` does for the device of the preprocessor, or
    for the host if it does not say. A batch without them is passed on as it is.

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
    """The training step of a wrapper, by a forward pass of its own."""

    module: Any

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """Preprocess, compute the losses, and update the parameters.

        Args:
            data: a batch as the loader gives it.
            optim_wrapper: an `OptimWrapper` over the parameters of this wrapper. It
                says whether gradients are reduced.

        Returns:
            What ``parse_losses`` of the model gave to log.

        Raises:
            TypeError: the preprocessor returned neither keyword arguments nor a list
                or tuple.
        """
        with span("pyparallel.step"):
            loss, log_vars = micro_step(self, data, optim_wrapper)
            self._after_update(loss)
            return log_vars

    def _after_update(self, loss: torch.Tensor) -> None:
        """Do what a wrapper wants to do with a loss that was minimised."""

    def _run_forward(self, data: Any, mode: str) -> Any:
        call: Any = self
        return run_forward(call, data, mode, type(self).__name__)


class ModelSteps:
    """The other steps of a wrapper, as the model's own."""

    module: Any

    def val_step(self, data: Any) -> Any:
        """Return ``module.val_step`` of the batch. No wrapper of it is called."""
        with span("pyparallel.step"):
            return self.module.val_step(opened(data, self.module))

    def test_step(self, data: Any) -> Any:
        """Return ``module.test_step`` of the batch. No wrapper of it is called."""
        with span("pyparallel.step"):
            return self.module.test_step(opened(data, self.module))


class ForwardSteps(TrainStep):
    """The steps of a wrapper that must run every forward pass of its model itself."""

    def val_step(self, data: Any) -> Any:
        """Return the predictions for a batch. All ranks have to call it together."""
        with span("pyparallel.step"):
            data = self.module.data_preprocessor(opened(data, self.module), False)
            return self._run_forward(data, mode="predict")

    def test_step(self, data: Any) -> Any:
        """Return the predictions for a batch; the same as `val_step`."""
        return self.val_step(data)
