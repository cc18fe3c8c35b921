"""Combine the outputs of a training step on several replicas."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from ..batch import pytree
from ..batch.container import DataContainer
from ..core.errors import BatchTypeError, BatchValueError, restoring, type_name
from ..core.torch_private import ignored_by_ddp
from ..scatter_gather.checks import check_keys
from ..scatter_gather.split import partition

_Gather = Callable[[Sequence[Any]], Any]
_Counts = Callable[[], list[int] | None]


def combine_outputs(
    outputs: Sequence[Any], gather: _Gather, counts: _Counts, where: str
) -> Any:
    """Return the output of one step on the whole batch.

    In mappings, ``loss`` (0-dim tensors) and the numbers and 0-dim tensors of
    ``log_vars`` become means weighted by ``num_samples``, which are summed. All other
    values are gathered.

    Args:
        outputs: the output of each replica.
        gather: joins the values of all replicas on the output device.
        counts: returns the number of samples of each replica, or None if unknown, for
            outputs without ``num_samples``.
        where: the step, for messages.

    Raises:
        TypeError, ValueError: invalid numbers of samples, or outputs whose structures
            differ.
    """
    first = outputs[0]
    if not all(isinstance(each, Mapping) for each in outputs):
        return gather(outputs)
    check_keys(outputs, ())
    means = [key for key in ("loss", "log_vars") if key in first]
    if not all(_is_scalar(each.get("loss")) for each in outputs):
        means = [key for key in means if key != "loss"]
    special = {*means, "num_samples"}
    rest = gather(
        [{key: each[key] for key in each if key not in special} for each in outputs]
    )
    combined = dict(rest)
    num_samples: list[int] | None = None
    if "num_samples" in first:
        num_samples = [_check_count(each["num_samples"], where) for each in outputs]
        combined["num_samples"] = sum(num_samples)
    if means:
        mean = _Mean(_check_counts(num_samples or counts(), where), gather)
        for key in means:
            combined[key] = mean([each[key] for each in outputs], (key,))
    return pytree.rebuild_mapping(first, {key: combined[key] for key in first})


def sample_counts(arguments: Any, num_targets: int, dim: int) -> list[int] | None:
    """Return the number of samples of each target in arguments that `scatter` split.

    None if the arguments contain no such numbers, or different ones.
    """
    leaves, _ = pytree.flatten(arguments)
    containers = [leaf for leaf in leaves if isinstance(leaf, DataContainer)]
    found: Iterable[Any]
    if containers:
        found = (
            tuple(map(_num_samples, leaf.data))
            for leaf in containers
            if isinstance(leaf.data, list)
        )
    else:
        found = (
            tuple(partition(leaf.shape[dim], num_targets))
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
            and -leaf.dim() <= dim < leaf.dim()
            and leaf.shape[dim]
        )
    distinct = {sizes for sizes in found if None not in sizes}
    return list(distinct.pop()) if len(distinct) == 1 else None


def refuse_updates(arguments: Any, where: str) -> None:
    """Refuse arguments by which a step updates parameters itself.

    Raises:
        TypeError: an argument is an optimizer wrapper like mmengine's.
    """
    for leaf in pytree.flatten(arguments)[0]:
        if callable(getattr(leaf, "update_params", None)):
            raise BatchTypeError(
                f"{where} must leave updates to its caller on several devices, but got "
                f"a {type_name(leaf)}, with which every replica would update the "
                "parameters. Use MMDistributedDataParallel of pyparallel.mmengine."
            )


@restoring
def forbid_optimizer_steps(arguments: Any, where: str) -> Generator[None, None, None]:
    """Make the optimizers among the arguments raise an error in ``step``."""

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        raise BatchValueError(
            f"{where} must leave updates to its caller on several devices, but calls "
            f"{type(optimizer).__name__}.step, as every replica would. Use "
            "MMDistributedDataParallel of pyparallel.mmengine."
        )

    hooks = [
        leaf.register_step_pre_hook(refuse)
        for leaf in pytree.flatten(arguments)[0]
        if isinstance(leaf, torch.optim.Optimizer)
    ]
    yield
    for hook in hooks:
        hook.remove()


@restoring
def forbid_backward(module: nn.Module, message: str) -> Generator[None, None, None]:
    """Raise an error at a backward pass into parameters of a module within a block."""

    def refuse(parameter: torch.Tensor) -> None:
        raise BatchValueError(message)

    ignored = ignored_by_ddp(module)
    hooks = [
        each.register_post_accumulate_grad_hook(refuse)
        for name, each in module.named_parameters()
        if each.requires_grad and name not in ignored
    ]
    yield
    for hook in hooks:
        hook.remove()


class _Mean:
    """Compute means over replicas, weighted by their numbers of samples."""

    def __init__(self, counts: Sequence[int], gather: _Gather) -> None:
        self._counts, self._total, self._gather = counts, sum(counts), gather

    def __call__(self, values: Sequence[Any], path: tuple[Any, ...]) -> Any:
        first = values[0]
        if all(isinstance(each, Mapping) for each in values):
            check_keys(values, path)
            return pytree.rebuild_mapping(
                first,
                {key: self([e[key] for e in values], (*path, key)) for key in first},
            )
        if all(isinstance(each, numbers.Real) for each in values):
            if all(each == first for each in values):
                return first
            return _sum([n * v for n, v in self._weighted(values)]) / self._total
        gathered = self._gathered(values, path)
        if not all(map(_is_scalar, values)):
            return gathered
        terms = (v * (n / self._total) for n, v in self._weighted(gathered.unbind()))
        return reduce(operator.add, terms)

    def _weighted(self, values: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return counts and values of replicas with samples; other means are NaN."""
        return [each for each in zip(self._counts, values, strict=True) if each[0]]

    def _gathered(self, values: Sequence[Any], path: tuple[Any, ...]) -> Any:
        """Gather values under their path, so that messages name it."""
        for key in reversed(path):
            values = [{key: each} for each in values]
        return reduce(operator.getitem, path, self._gather(values))


def _sum(values: list[Any]) -> Any:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities, also of both signs
        return sum(values)


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _num_samples(chunk: Any) -> int | None:
    """Return the number of samples in one chunk of a container; None if unknown."""
    known: int | None = getattr(chunk, "num_samples", None)
    if known is not None:
        return known
    if isinstance(chunk, torch.Tensor):
        return chunk.shape[0] if chunk.dim() else None
    return len(chunk) if isinstance(chunk, list) else None


def _check_count(value: Any, where: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise BatchTypeError(
            f"{where}: num_samples must be an integer, but is {value!r} "
            f"({type_name(value)})."
        ) from None
    if number < 0:
        raise BatchValueError(
            f"{where}: num_samples must be 0 or more, but is {number}."
        )
    return number


def _check_counts(counts: list[int] | None, where: str) -> list[int]:
    if counts is None:
        raise BatchValueError(
            f"{where} must return num_samples on several devices, to weight the loss, "
            "if its arguments do not contain the number of samples, but returned none. "
            "Return dict(loss=..., log_vars=..., num_samples=...)."
        )
    if not sum(counts):
        raise BatchValueError(
            f"{where}: num_samples must be 1 or more on one replica, but is 0 on all."
        )
    return counts
