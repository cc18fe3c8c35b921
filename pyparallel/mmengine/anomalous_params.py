"""detect_anomalous_params: parameters that a loss does not depend on."""

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
    """Return the names of parameters that take no part in ``loss``; log each of them.

    Such parameters get no gradient: DistributedDataParallel waits for them for ever
    unless ``find_unused_parameters`` is set.

    Args:
        loss: the tensor that is minimised. The backward pass may have been run.
        model: its parameters that require grad are looked for, by the names of
            ``named_parameters()``: under DDP they begin with ``module.``.

    Returns:
        The names, in the order of the parameters. All of them, if the loss has no
        graph.

    Raises:
        TypeError: ``loss`` is no tensor.

    One message at level ERROR is logged for each: to the current logger of mmengine
    where that is installed, otherwise to ``pyparallel.mmengine``. From mmengine, which
    returned nothing and raised RecursionError for graphs 1,000 deep.
    """
    if not isinstance(loss, torch.Tensor):
        raise BatchTypeError(
            "detect_anomalous_params: loss must be a tensor, but is "
            f"{type_name(loss)}. "
            "Give it the sum that is minimised."
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
            f"parameter {name} of shape {tuple(parameter.shape)} is not in the "
            "computational graph of the loss"
        )
    return [name for name, _ in missing]


class _Answered(Exception):
    """The engine has been asked, and must not go on."""


def _are_reached(loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[bool]:
    """Tell for each parameter whether a backward pass of the loss would reach it.

    Note: [the engine is asked]
    Autograd's engine knows, before it runs anything, which nodes a pass will come by.
    So a pass is begun at a node of our own above the loss, whose hook asks and then
    ends it: no node of the model runs, and no hook of anybody else. To walk the graph
    here instead would make a Python object for every node. Since torch 2.13 these live
    as long as their nodes, and then to free a graph that is some 50,000 deep overflows
    the stack.
    """
    if loss.grad_fn is None:
        return [False] * len(parameters)
    edge_of = torch.autograd.graph.get_gradient_edge
    answers: list[bool] = []

    def ask(_: Any) -> None:
        answers.extend(will_execute(node) for node in nodes)
        raise _Answered

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),  # it would warn of what we raise
    ):
        nodes = [edge_of(parameter).node for parameter in parameters]
        root: Any = loss.clone()
        root.grad_fn.register_prehook(ask)
        with contextlib.suppress(_Answered):
            torch.autograd.backward(root, torch.empty_like(root), retain_graph=True)
    return answers


def _log(message: str) -> None:
    print_log = upstream("print_log")
    if print_log is None:
        _logger.error(message)
    else:
        print_log(message, logger="current", level=logging.ERROR)
