"""Generated cases: native, pure Python and an oracle agree; the search finds bugs."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzzing import fuzz_batches, fuzz_operators
from tests.support.fuzzing.fuzz_batches import any_case
from tests.support.fuzzing.fuzzed import Numbers, search
from tests.support.processes.backends import needs_native, reference

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

#: The first cases are those of tests/batch/test_collate_properties.py.
FIRST, CASES, PART = 2_000, 20_000, 3_000


@needs_native
@pytest.mark.parametrize("first", range(FIRST, CASES, PART))
def test_both_backends_and_the_oracle_agree(first: int) -> None:
    failure = search(any_case, first, PART)
    assert failure is None, str(failure)


@needs_native
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_the_backends_agree_on_cases_of_hypothesis(data: st.DataObject) -> None:
    any_case(Numbers(lambda end: data.draw(st.integers(0, end - 1))))


def stale_pad_copy(dst: torch.Tensor, samples: Any, *rest: Any) -> None:
    """Leave the last element as it was where no sample reaches it."""
    last = dst.reshape(-1)[-1:].clone()
    reference.pad_copy(dst, samples, *rest)
    if dst.numel() and samples[-1].shape != dst.shape[1:]:
        dst.reshape(-1)[-1:] = last


@pytest.mark.parametrize("module", [fuzz_operators, fuzz_batches])
def test_a_fault_is_found(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.SimpleNamespace(**vars(reference) | {"pad_copy": stale_pad_copy})
    monkeypatch.setattr(module, "BACKENDS", [broken])
    case = fuzz_batches.batches if module is fuzz_batches else fuzz_operators.pad_copies
    failure = search(case, 0, 1000)
    assert failure is not None
    assert f"--first {failure.seed} --cases 1" in str(failure)
    assert search(case, failure.seed, 1) is not None
