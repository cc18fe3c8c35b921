"""What the steps of models and wrappers share: opening, calling, updating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _tree
from .._errors import BatchTypeError, kind
from ..container import DataContainer
from ..scatter import scatter
from .preprocessor import BaseDataPreprocessor

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
        f"arguments, but returned {kind(data)}."
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
    leaves, _ = _tree.flatten(data)
    if not any(isinstance(leaf, DataContainer) for leaf in leaves):
        return data
    device = getattr(preprocessor, "device", None)
    return scatter(data, [device if isinstance(device, torch.device) else _HOST])[0]
