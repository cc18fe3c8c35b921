"""Generated cases: native, pure Python and an oracle agree; the search finds bugs."""

from __future__ import annotations

import types
from typing import Any

import fuzz_batches
import fuzz_operators
import pytest
import torch
from backends import needs_native, reference
from fuzz_batches import any_case
from fuzzed import Numbers, search
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

CASES = 20_000
PART = 2_500


@needs_native
@pytest.mark.parametrize("first", range(0, CASES, PART))
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


def test_a_failing_case_is_reduced() -> None:
    def broken(numbers: Numbers) -> None:
        drawn = [numbers.between(0, 1000) for _ in range(numbers.between(0, 20))]
        assert sum(number > 600 for number in drawn) < 2

    failure = search(broken, 0, 2000)
    assert failure is not None and failure.drawn == [2, 601, 601]
    assert f"--first {failure.seed} --cases 1" in str(failure)
    assert "--numbers 2,601,601" in str(failure)
    assert "AssertionError" in failure.text
    again = search(broken, failure.seed, 1)
    assert again is not None and again[:2] == failure[:2]


def broken_backend(**operators: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**vars(reference) | operators)


def stale_pad_copy(dst: torch.Tensor, samples: Any, *rest: Any) -> None:
    """Leave the last element as it was where no sample reaches it."""
    last = dst.reshape(-1)[-1:].clone()
    reference.pad_copy(dst, samples, *rest)
    if dst.numel() and samples[-1].shape != dst.shape[1:]:
        dst.reshape(-1)[-1:] = last


def stale_pack(slab: torch.Tensor, leaves: Any, plan: Any) -> None:
    """Leave a gap as it was."""
    reference.pack(slab, leaves, plan)
    if leaves and leaves[-1].nbytes % 64:
        slab[-1] = 0xEE


def trusting_ring_pass(header: torch.Tensor, slot: int, holder: int, to: int) -> bool:
    """Take any memory for the header of a ring."""
    words = header.numpy().view("int64")
    if words[8 * (1 + slot)] != holder:
        return False
    words[8 * (1 + slot)] = to
    return True


FAULTS = [
    (fuzz_operators.headers, {"ring_pass": trusting_ring_pass}),
    pytest.param(fuzz_operators.pad_copies, {"pad_copy": stale_pad_copy}, id="padding"),
    pytest.param(fuzz_operators.slabs, {"pack": stale_pack}, id="gap"),
    pytest.param(fuzz_batches.batches, {"pad_copy": stale_pad_copy}, id="collate"),
]


@pytest.mark.parametrize(("case", "operators"), FAULTS)
def test_a_fault_is_found(
    case: Any, operators: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = [broken_backend(**operators)]
    monkeypatch.setattr(fuzz_operators, "BACKENDS", backends)
    monkeypatch.setattr(fuzz_batches, "BACKENDS", backends)
    assert search(case, 0, 1000) is not None
