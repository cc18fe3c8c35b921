"""Options of padding: promoted dtypes, gradients, and the single pass.

test_collate_properties.py compares the bytes of results with an oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import samples
import torch
from backends import both, using
from fuzz_batches import draw_column
from fuzz_operators import generator
from fuzzed import seeded

from pyparallel import Padded, pad_stack
from pyparallel import backend as backend_module
from pyparallel.batch import torch_stack

pytestmark = pytest.mark.asan


def columns(num: int) -> Iterator[tuple[list[torch.Size], dict[str, Any]]]:
    """Yield the shapes of samples, and options of padding that they fit."""
    for seed in range(num):
        numbers = seeded(seed)
        column = draw_column(numbers, generator(numbers), numbers.between(1, 4))
        options = {"pad_dims": column.pad_dims, **column.options}
        yield [each.shape for each in column.tensors], options


def fields(result: Any) -> list[torch.Tensor | None]:
    return [*result.fields()] if isinstance(result, Padded) else [result]


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(fields(found), fields(expected), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype is other.dtype and torch.equal(one.detach(), other)


@both
def test_mixed_dtypes_are_promoted_with_options_too(backend: ModuleType) -> None:
    for seed, (shapes, options) in enumerate(columns(60)):
        mixed = [
            samples.random_tensor(shape, samples.PROMOTED[(seed + i) % 8], i, tame=True)
            for i, shape in enumerate(shapes)
        ]
        dtype = functools.reduce(torch.promote_types, [each.dtype for each in mixed])
        with using(backend):
            found = pad_stack(mixed, padding_value=1, **options)
            alike = [each.to(dtype) for each in mixed]
            assert_same(found, pad_stack(alike, padding_value=1, **options))


@both
def test_gradients_are_those_of_the_samples(backend: ModuleType) -> None:
    for shapes, options in columns(60):
        leaves = [torch.rand(each, dtype=torch.double) for each in shapes]
        ones = [torch.ones_like(each) for each in leaves]
        with using(backend):
            plain = pad_stack(leaves, padding_value=2, **options)
            inside = fields(pad_stack(ones, **options))[0]
            found = pad_stack(
                [each.requires_grad_() for each in leaves], padding_value=2, **options
            )
        assert_same(found, plain)
        data = fields(found)[0]
        upstream = torch.rand_like(data)
        data.backward(upstream)
        for leaf, row, here in zip(leaves, upstream, inside.bool(), strict=True):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.flatten(), row[here])


@both
def test_plain_samples_with_options_are_written_in_one_pass(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's operators must not be needed")

    monkeypatch.setattr(torch_stack, "pad_and_stack", refuse)
    monkeypatch.setattr(torch_stack, "fill_mask", refuse)
    ragged = [torch.rand(3, 100 + i, 90 - i) for i in range(4)]
    with using(backend):
        for side in ("right", "left", "center"):
            pad_stack(ragged, pad_dims=2, size_divisor=32, side=side, mask=True)


@both
def test_equal_samples_of_the_target_size_are_stacked_unchanged(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal = [torch.rand(2, 4, 8) for _ in range(3)]
    calls: list[Any] = []
    with using(backend):
        before = backend_module.stack_equal
        monkeypatch.setattr(
            backend_module, "stack_equal", lambda s: calls.append(len(s)) or before(s)
        )
        got = pad_stack(equal, pad_dims=2, size_divisor=4, mask=True, sizes=True)
    assert calls == [len(equal)]
    assert torch.equal(got.data, torch.stack(equal))
    assert got.mask.all() and got.mask.shape == (len(equal), 4, 8)
    assert got.sizes.tolist() == [[4, 8]] * len(equal)


def test_unequal_leading_dims_pad_by_default() -> None:
    got = pad_stack([torch.ones(1, 2), torch.ones(2, 1)], padding_value=7)
    assert got.tolist() == [[[1, 1], [7, 7]], [[1, 7], [1, 7]]]
