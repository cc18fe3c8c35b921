"""stack_equal of both backends: the result of torch.stack, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.processes.backends import check, each_backend, native, needs_native

pytestmark = [pytest.mark.cuda_torch, pytest.mark.one_backend, pytest.mark.asan]

Stack = Callable[[list[Any]], "torch.Tensor | None"]


@pytest.fixture(params=each_backend)
def stack_equal(request: pytest.FixtureRequest) -> Stack:
    return request.param.stack_equal


def test_the_result_shares_no_memory_with_one_sample(stack_equal: Stack) -> None:
    sample = torch.zeros(4)
    stacked = stack_equal([sample])
    assert stacked is not None
    stacked.fill_(1)
    assert sample.tolist() == [0, 0, 0, 0]


NOT_PLAIN: dict[str, list[torch.Tensor]] = {
    "nothing": [],
    "sizes": [torch.ones(2), torch.ones(3)],
    "dimensions": [torch.ones(2), torch.ones(1, 2)],
    "dtypes": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "strides": [torch.ones(2, 3).t(), torch.ones(2, 3).t()],
    "sparse": [torch.ones(2).to_sparse()],
    "conjugated": [torch.ones(2, dtype=torch.complex64).conj()],
    "gradients": [torch.ones(2, requires_grad=True), torch.ones(2)],
    "meta": [torch.ones(2, device="meta")],
}


@needs_native
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_the_native_operator_leaves_tensors_that_are_not_plain(name: str) -> None:
    assert native.stack_equal(NOT_PLAIN[name]) is None


@needs_native
def test_the_native_operator_refuses_values_that_are_no_tensors() -> None:
    message = "stack_equal: samples[1] must be a torch.Tensor, but is of type int."
    check(native.stack_equal, [[torch.ones(2), 3]], TypeError, message)


def test_gradients_are_left_to_others(stack_equal: Stack) -> None:
    assert stack_equal(NOT_PLAIN["gradients"]) is None
    with torch.no_grad():
        assert stack_equal(NOT_PLAIN["gradients"]) is not None


@pytest.mark.parametrize("left", [0, 8])
def test_memory_that_was_freed_is_not_read(stack_equal: Stack, left: int) -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(left)
    assert stack_equal([freed, torch.ones(1000)]) is None
    assert stack_equal([torch.ones(1000), freed]) is None
