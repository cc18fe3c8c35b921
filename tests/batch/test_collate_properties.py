"""collate against an oracle and torch's own operators, on generated batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, Padded, collate, pad_stack
from tests.support.batch import oracle, samples
from tests.support.fuzzing.fuzz_batches import any_case, draw_column
from tests.support.fuzzing.fuzz_operators import generator
from tests.support.fuzzing.fuzzed import search, seeded
from tests.support.processes.backends import both, using

pytestmark = pytest.mark.asan


@pytest.mark.one_backend
@pytest.mark.parametrize("first", [0, 1000])
def test_both_backends_and_the_oracle_agree(first: int) -> None:
    """tests/robustness/test_fuzz.py has the next cases."""
    failure = search(any_case, first, 1000)
    assert failure is None, str(failure)


def columns(
    dtypes: Sequence[torch.dtype], num: int
) -> Iterator[tuple[list[torch.Tensor], int | None, list[Any]]]:
    """Yield tensors to stack, their pad_dims, and their padding values."""
    for seed in range(num):
        rng = random.Random(seed)
        pad_dims = rng.choice([None, 1, 2, 3])
        fixed = [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]
        tensors = []
        for i in range(rng.randint(1, 5)):
            shape = (*fixed, *(rng.randint(1, 4) for _ in range(pad_dims or 0)))
            made = samples.random_tensor(shape, rng.choice(dtypes), i, tame=True)
            tensors.append(samples.lay_out(made, rng.choice(samples.LAYOUTS)))
        yield tensors, pad_dims, [rng.choice(samples.PADDING) for _ in tensors]


def stacked(tensors: Any, pad_dims: int | None, values: Any) -> torch.Tensor:
    batch = [
        DataContainer(sample, True, value, pad_dims=pad_dims)
        for sample, value in zip(tensors, values, strict=True)
    ]
    chunk: torch.Tensor = collate(batch, len(batch)).data[0]
    assert chunk.is_contiguous()
    return chunk


def test_mixed_dtypes_promote_as_torch_stack_promotes_them() -> None:
    num_refused = 0
    for column in columns(samples.PROMOTED, 300):
        try:
            expected = oracle.by_torch(*column)
        except RuntimeError:  # a dtype cannot hold its padding value
            num_refused += 1
            with pytest.raises(ValueError, match="must have a padding_value that"):
                stacked(*column)
        else:
            oracle.assert_same_tensor(stacked(*column), expected)
    assert 30 < num_refused < 200


@pytest.mark.one_backend
@both
def test_gradients_are_those_of_the_samples(backend: ModuleType) -> None:
    for seed in range(60):
        numbers = seeded(seed)
        column = draw_column(numbers, generator(numbers), numbers.between(1, 4))
        leaves = [torch.rand(each.shape, dtype=torch.double) for each in column.tensors]

        def pad(tensors: list[torch.Tensor], column: Any = column) -> list[Any]:
            options = {"pad_dims": column.pad_dims, **column.options}
            result = pad_stack(tensors, padding_value=2, **options)
            return [*result.fields()] if isinstance(result, Padded) else [result]

        with using(backend):
            plain = pad(leaves)
            inside = pad([torch.ones_like(each) for each in leaves])[0] == 1
            found = pad([each.requires_grad_() for each in leaves])
        for one, other in zip(found, plain, strict=True):
            assert one is other is None or torch.equal(one, other)
        upstream = torch.rand_like(found[0])
        found[0].backward(upstream)
        for leaf, row, here in zip(leaves, upstream, inside, strict=True):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.flatten(), row[here])
