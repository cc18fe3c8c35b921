"""Comparison with mmcv 1.x: equal results, and errors where mmcv has errors.

Runs where both are installed. FIXED lists the intended differences.
"""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyparallel import DataContainer, collate, scatter, scatter_kwargs
from tests.support.batch import oracle, samples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mmcv 1.x announces 2.x
    try:
        import mmcv.parallel as theirs
    except ImportError as error:
        if os.environ.get("PYPARALLEL_REQUIRE_MMCV", "0") not in ("", "0"):
            raise
        pytest.skip(f"needs mmcv 1.x: {error}", allow_module_level=True)

from tests.support.errors.collate_errors import (
    CASES,  # after the import above, which may end the module
)

pytestmark = pytest.mark.peers

bounded = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


#: Cases of `refused` in which mmcv gives an answer, or none at all.
FIXED = {
    "2**63 into int64": "mmcv pads with -2**63",
    "2**64 into uint64": "mmcv pads with a value that depends on the processor",
    "negative samples per gpu": "mmcv returns an empty batch",
    "no samples per gpu": "tested by its own test",
    "fractional samples per gpu": "tested by its own test",
    "ragged lists": "mmcv drops items beyond the shortest list",
    "a list in itself": "RecursionError",
    "a dict in itself": "RecursionError",
    "ten thousand lists": "RecursionError",
    "another dataclass": "mmcv has no dataclasses",
    "a string as batch": "RecursionError",
    "bytes after a string": "RecursionError",
    "a string after a list": "RecursionError",
    "freed memory": "torch reads it and the process dies",
    "freed memory to stack": "torch reads it and the process dies",
    "freed memory to promote": "torch reads it and the process dies",
}


def convert(tree: Any) -> Any:
    """Return the tree with mmcv's containers around the very same values."""
    if isinstance(tree, DataContainer):
        flags = (tree.stack, tree.padding_value, tree.cpu_only, tree.pad_dims)
        return theirs.DataContainer(convert(tree.data), *flags)
    if isinstance(tree, dict):
        return type(tree)((key, convert(value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(convert(value) for value in tree)
    return tree


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result, or the exception instead of raising it."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


def assert_alike_errors(ours: Any, other: Exception) -> None:
    """Assert an error that a handler of mmcv's error catches too."""
    assert isinstance(ours, Exception), f"mmcv raises {other!r}, we give {ours!r}"
    for cls in (AssertionError, KeyError, IndexError, RuntimeError):
        assert not isinstance(other, cls) or isinstance(ours, cls), repr(ours)


def assert_alike(ours: Any, other: Any) -> None:
    """Assert the same answer: types, flags, bits, and objects where they are kept."""
    if isinstance(other, Exception):
        assert_alike_errors(ours, other)
    elif isinstance(ours, Exception):
        raise ours
    elif isinstance(other, theirs.DataContainer):
        assert type(ours) is DataContainer
        assert state(ours) == state(other)
        assert_alike(ours.data, other.data)
    elif isinstance(other, torch.Tensor):
        if ours is not other:
            oracle.assert_same_tensor(ours, other)
            assert ours.requires_grad == other.requires_grad
    elif isinstance(other, dict):
        assert (type(ours), list(ours)) == (type(other), list(other))
        for key in other:
            assert_alike(ours[key], other[key])
    elif isinstance(other, list | tuple):
        assert (type(ours), len(ours)) == (type(other), len(other))
        for one, two in zip(ours, other, strict=True):
            assert_alike(one, two)
    else:
        assert ours is other or ours == other


def state(container: Any) -> tuple[str, ...]:
    names = ("stack", "padding_value", "cpu_only", "pad_dims")
    return tuple(repr(getattr(container, name)) for name in names)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, DataContainer | theirs.DataContainer):
        yield from tensors_in(tree.data)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)


def kept(before: Any, after: Any) -> list[bool]:
    """Tell for every tensor of ``after`` whether it is one of ``before``."""
    known = {id(tensor) for tensor in tensors_in(before)}
    return [id(tensor) in known for tensor in tensors_in(after)]


def as_torch_rounds(value: Any, dtype: torch.dtype) -> Any:
    """Return an integer as torch rounds it to a double; ours does not round.

    The largest integer of a dtype stays, because torch limits the double to it.
    """
    has_limit = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not has_limit or not isinstance(value, int) or abs(value) <= 2**53:
        return value
    rounded = int(float(value))
    return value if rounded == torch.iinfo(dtype).max + 1 else rounded


@pytest.mark.parametrize("mixed", [False, True])
@bounded
@given(data=st.data(), chunk=st.integers(1, 6))
def test_collate_stacks_a_column_alike(
    mixed: bool, data: st.DataObject, chunk: int
) -> None:
    column = data.draw(samples.columns(mixed=mixed))
    values = [
        as_torch_rounds(value, sample.dtype)
        for sample, value in zip(column.samples, column.values, strict=True)
    ]
    batch = [
        DataContainer(sample, True, value, pad_dims=column.pad_dims)
        for sample, value in zip(column.samples, values, strict=True)
    ]
    ours = attempt(collate, batch, chunk)
    other = attempt(theirs.collate, convert(batch), chunk)
    ends = range(0, len(batch), chunk)
    targets = [
        oracle.target_shape(
            [tuple(s.shape) for s in column.samples[i : i + chunk]], column.pad_dims
        )
        for i in ends
    ]
    # torch checks a padding value by other rules if it fills one element, or none. It
    # rounds the value of a sample without elements like a float.
    rounded = any(
        not sample.numel() and abs(value) > 2**53
        for sample, value in zip(column.samples, values, strict=True)
    )
    # Its cast of a double above the limit depends on the code that it takes.
    rounded |= mixed and any(type(v) is int and v != float(v) for v in values)
    if all(torch.Size(target).numel() > 1 for target in targets) and not rounded:
        assert_alike(ours, other)


@bounded
@given(batch=samples.batches(DataContainer), chunk=st.integers(1, 6))
def test_collate_batches_a_nest_alike(batch: list[Any], chunk: int) -> None:
    ours, other = collate(batch, chunk), theirs.collate(convert(batch), chunk)
    assert_alike(ours, other)
    assert kept(batch, ours) == kept(batch, other)


@bounded
@given(batch=samples.batches(DataContainer))
def test_scatter_to_the_host_alike(batch: list[Any]) -> None:
    ours = collate(batch, len(batch))
    other = convert(ours)
    parts, their_parts = scatter(ours, [-1]), theirs.scatter(other, [-1])
    assert_alike(parts, their_parts)
    assert kept(ours, parts) == kept(other, their_parts)


@bounded
@given(
    inputs=samples.batches(DataContainer),
    kwargs=samples.batches(DataContainer),
    empty=st.sampled_from(["", "inputs", "kwargs", "both"]),
)
def test_scatter_kwargs_to_the_host_alike(
    inputs: list[Any], kwargs: list[Any], empty: str
) -> None:
    args: Any = (collate(inputs, len(inputs)),) if empty in ("", "kwargs") else ()
    named: Any = {"x": collate(kwargs, len(kwargs))}
    named = named if empty in ("", "inputs") else None
    ours = scatter_kwargs(args, named, [-1])
    other = theirs.scatter_kwargs(convert(args), convert(named), [-1])
    assert_alike(ours, other)


THINGS: list[Any] = [None, "text", b"", 5, 1.5, {1, 2}, np.ones(2), range(3), [], {}]
THINGS += [(), [None, ["a"]], {"a": [1, ()]}, OrderedDict(b=1, a=[2]), (1, "x")]


@pytest.mark.parametrize("thing", THINGS, ids=repr)
def test_scatter_passes_other_values_by_reference(thing: Any) -> None:
    assert_alike(scatter(thing, [-1]), theirs.scatter(thing, [-1]))
    assert_alike(scatter([thing], [-1]), theirs.scatter([thing], [-1]))
    named = {"x": thing, "t": torch.ones(2, 3).t()}
    ours, other = scatter(named, [-1]), theirs.scatter(named, [-1])
    assert_alike(ours, other)
    assert ours[0]["t"].stride() == other[0]["t"].stride() == (2, 1)


DATA: list[Any] = [torch.ones(2, 3), [1, 2], "text", 5, None, np.ones(2), {"a": 1}]


@pytest.mark.parametrize("data", DATA, ids=lambda data: type(data).__name__)
def test_containers_answer_alike(data: Any) -> None:
    options = itertools.product(
        [False, True], [0, -1.5, "x"], [False, True], [None, 0, 1, True, 2, 3, 4, "2"]
    )
    for flags in options:
        ours = attempt(DataContainer, data, *flags)
        other = attempt(theirs.DataContainer, data, *flags)
        assert_alike(ours, other)
        if isinstance(other, Exception):
            continue
        assert vars(ours) == vars(other) or isinstance(data, torch.Tensor | np.ndarray)
        assert list(vars(ours)) == list(vars(other))
        assert ours.datatype == other.datatype
        assert repr(ours) == repr(other)
        for call in (
            lambda dc: dc.size(), lambda dc: dc.size(1), lambda dc: dc.size(dim=0),
            lambda dc: dc.dim(), len, lambda dc: setattr(dc, "data", 1),
        ):  # fmt: skip
            got, expected = attempt(call, ours), attempt(call, other)
            assert type(got) is type(expected)
            assert got == expected or isinstance(expected, Exception)
            if call is not len and isinstance(data, str | list):
                assert str(got).replace("DataContainer'", "") == str(expected).replace(
                    "DataContainer'", ""
                )


def test_pickled_states_load_in_both_directions() -> None:
    flags = ([torch.ones(2)], True, 7, True, 1)
    ours, other = DataContainer(*flags), theirs.DataContainer(*flags)
    for source, target in ((ours, other), (other, ours)):
        written = pickle.loads(pickle.dumps(source)).__reduce_ex__(2)[2]
        again = object.__new__(type(target))
        again.__setstate__(written) if target is ours else vars(again).update(written)
        assert state(again) == state(target)
        assert torch.equal(again.data[0], flags[0][0])  # type: ignore[index]


@pytest.mark.parametrize("case", sorted(CASES.keys() - FIXED.keys()))
def test_errors_of_mmcv_are_errors_with_a_class_that_old_code_catches(
    case: str,
) -> None:
    batch = CASES[case][0]
    other = attempt(theirs.collate, convert(batch), 8)
    assert isinstance(other, Exception)
    assert_alike(attempt(collate, batch, 8), other)


@pytest.mark.parametrize("samples_per_gpu", [0, 1.5, "2"])
def test_odd_chunk_sizes_are_refused_by_both(samples_per_gpu: Any) -> None:
    for function, cls in (
        (collate, DataContainer),
        (theirs.collate, theirs.DataContainer),
    ):
        with pytest.raises((TypeError, ValueError)):
            function([cls(1)], samples_per_gpu)
