"""Find parameters that a loss does not depend on: `detect_anomalous_params`."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import nn

from ..core.errors import BatchTypeError, type_name
from ..core.torch_private import will_execute
from ._upstream import upstream

_logger = logging.getLogger("pyparallel.mmengine")


def detect_anomalous_params(loss: torch.Tensor, model: nn.Module) -> list[str]:
    """Return and log the names of parameters that ``loss`` does not depend on.

    Such parameters get no gradient, so DistributedDataParallel waits for them forever
    unless ``find_unused_parameters`` is set.

    Args:
        loss: the minimized tensor, before or after its backward pass.
        model: the model. Its parameters that require grad are checked, under the names
            of ``named_parameters()``; under DDP they begin with ``module.``.

    Returns:
        The names, in the order of the parameters. Without a graph of the loss, all of
        them.

    Raises:
        TypeError: ``loss`` is not a tensor.

    Each parameter is logged as one message of level ERROR, to the current logger of
    mmengine, or without mmengine to ``pyparallel.mmengine``.

    mmengine's function returns None, and raises RecursionError for graphs 1,000 deep.
    """
    if not isinstance(loss, torch.Tensor):
        raise BatchTypeError(
            "detect_anomalous_params: loss must be a tensor, but is "
            f"{type_name(loss)}. "
            "Pass the minimized sum of the losses."
        )
    candidates = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    reached = _are_reached(loss, [parameter for _, parameter in candidates])
    missing = [
        each
        for each, is_reached in zip(candidates, reached, strict=True)
        if not is_reached
    ]
    for name, parameter in missing:
        _log(
            f"{name} with shape {parameter.shape} is not in the computational graph \n"
        )
    return [name for name, _ in missing]


class _BackwardAborted(Exception):
    """Ends the backward pass before the engine runs a node of the model."""


def _are_reached(loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[bool]:
    """Return for each parameter whether a backward pass of the loss would reach it.

    Note: [reached parameters]
    Autograd's engine determines the nodes of a backward pass before it runs the first
    one. So this function starts a pass at an additional node above the loss. The hook
    of that node queries the engine and then aborts the pass, before any node of the
    model and any other hook runs. A walk over the graph would create a Python object
    for every node instead. Since torch 2.13 such an object lives as long as its node,
    and freeing a graph about 50,000 nodes deep then overflows the stack.
    """
    if loss.grad_fn is None:
        return [False] * len(parameters)
    gradient_edge = torch.autograd.graph.get_gradient_edge
    reached: list[bool] = []

    def query_engine(_: Any) -> None:
        reached.extend(will_execute(node) for node in nodes)
        raise _BackwardAborted

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),  # would warn about _BackwardAborted
    ):
        nodes = [gradient_edge(parameter).node for parameter in parameters]
        root: Any = loss.clone()
        root.grad_fn.register_prehook(query_engine)
        with contextlib.suppress(_BackwardAborted):
            torch.autograd.backward(root, torch.empty_like(root), retain_graph=True)
    return reached


def _log(message: str) -> None:
    print_log = upstream("print_log")
    if print_log is None:
        _logger.error(message)
    else:
        print_log(message, logger="current", level=logging.ERROR)
