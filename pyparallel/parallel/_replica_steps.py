"""Steps on several replicas: their outputs become those of one on the whole batch."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch

from ..batch import pytree
from ..batch.container import DataContainer
from ..core.errors import BatchTypeError, BatchValueError, type_name
from ..scatter_gather.checks import check_keys
from ..scatter_gather.split import partition

_Gather = Callable[[Sequence[Any]], Any]
_Counts = Callable[[], list[int] | None]


def combine_outputs(
    outputs: Sequence[Any], gather: _Gather, counts: _Counts, where: str
) -> Any:
    """Return what one step on the whole batch would have returned.

    In mappings ``loss`` (0-dim tensors) and the numbers and 0-dim tensors of
    ``log_vars`` become their means, weighted by ``num_samples``, which are summed; all
    else is gathered.

    Args:
        outputs: one for each replica.
        gather: joins values of all replicas on the output's device.
        counts: tells how many samples each replica got, if that can be told, for
            outputs without ``num_samples``.
        where: the step, for messages.

    Raises:
        TypeError, ValueError: numbers of samples that are none; outputs that differ.
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
    made = dict(rest)
    numbers_of_samples: list[int] | None = None
    if "num_samples" in first:
        numbers_of_samples = [
            _check_count(each["num_samples"], where) for each in outputs
        ]
        made["num_samples"] = sum(numbers_of_samples)
    if means:
        mean = _Mean(_check_counts(numbers_of_samples or counts(), where), gather)
        for key in means:
            made[key] = mean([each[key] for each in outputs], (key,))
    return pytree.rebuild_mapping(first, {key: made[key] for key in first})


def sample_counts(arguments: Any, num_targets: int, dim: int) -> list[int] | None:
    """Return how many samples each target got of arguments that `scatter` split.

    None if the arguments do not tell, or not with one voice.
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
    """Raise if the step is given what updates parameters itself.

    Raises:
        TypeError: an optimizer wrapper of mmengine's kind.
    """
    for leaf in pytree.flatten(arguments)[0]:
        if callable(getattr(leaf, "update_params", None)):
            raise BatchTypeError(
                f"{where} must leave updates to its caller on several devices, but got "
                f"a {type_name(leaf)}, with which every replica would update the "
                "parameters. Use MMDistributedDataParallel."
            )


@contextmanager
def forbid_optimizer_steps(arguments: Any, where: str) -> Iterator[None]:
    """Make optimizers among the arguments raise when a step of theirs is called."""

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        raise BatchValueError(
            f"{where} must leave updates to its caller on several devices, but calls "
            f"{type(optimizer).__name__}.step, as every replica would. Use "
            "MMDistributedDataParallel."
        )

    with ExitStack() as stack:
        for leaf in pytree.flatten(arguments)[0]:
            if isinstance(leaf, torch.optim.Optimizer):
                stack.callback(leaf.register_step_pre_hook(refuse).remove)
        yield


class _Mean:
    """Means over replicas, weighted by their numbers of samples."""

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
            return math.fsum(n * v for n, v in self._weighted(values)) / self._total
        gathered = self._gathered(values, path)
        if not all(map(_is_scalar, values)):
            return gathered
        terms = (v * (n / self._total) for n, v in self._weighted(gathered.unbind()))
        return reduce(operator.add, terms)

    def _weighted(self, values: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return counts and values; a mean over no samples is none, but NaN."""
        return [each for each in zip(self._counts, values, strict=True) if each[0]]

    def _gathered(self, values: Sequence[Any], path: tuple[Any, ...]) -> Any:
        """Gather at the place where the values stand, so that messages name it."""
        for key in reversed(path):
            values = [{key: each} for each in values]
        return reduce(operator.getitem, path, self._gather(values))


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _num_samples(chunk: Any) -> int | None:
    """Return how many samples one chunk of a container holds, if it says so."""
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
            f"{where} must return num_samples on several devices, to weight the loss "
            "with, where the arguments do not tell, but returned none. Return "
            "dict(loss=..., log_vars=..., num_samples=...)."
        )
    if not sum(counts):
        raise BatchValueError(
            f"{where}: num_samples must be 1 or more on one replica, but is 0 on all."
        )
    return counts
