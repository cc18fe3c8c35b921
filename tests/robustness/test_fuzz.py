"""Generated cases: native, pure Python and an oracle agree; the search finds bugs."""

from __future__ import annotations

import collections
import types
from typing import Any

import fuzz_batches
import fuzz_operators
import pytest
import torch
from backends import needs_native, reference
from fuzz_kinds import KINDS, any_case
from fuzzed import Failure, Numbers, played, search, seeded
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


def test_every_kind_is_drawn() -> None:
    drawn = collections.Counter(seeded(seed).choose(KINDS) for seed in range(1000))
    assert set(drawn) == set(KINDS)


def test_a_seed_and_its_numbers_are_one_case() -> None:
    def draw(numbers: Numbers) -> list[Any]:
        return [numbers.between(3, 9), numbers.choose("abc"), numbers.maybe(4)]

    numbers = seeded(7)
    first = draw(numbers)
    assert draw(seeded(7)) == draw(played(numbers.drawn)) == first
    assert draw(played([])) == [3, "a", False]
    assert draw(played([7, 3])) == [3, "a", False]  # too large


def small_failure(first: int = 0, count: int = 2000) -> Failure:
    def broken(numbers: Numbers) -> None:
        drawn = [numbers.between(0, 1000) for _ in range(numbers.between(0, 20))]
        assert sum(number > 600 for number in drawn) < 2

    failure = search(broken, first, count)
    assert failure is not None
    return failure


def test_a_failing_case_is_reduced() -> None:
    failure = small_failure()
    assert failure.drawn == [2, 601, 601]
    assert f"--first {failure.seed} --cases 1" in str(failure)
    assert "--numbers 2,601,601" in str(failure)
    assert "AssertionError" in failure.text
    assert small_failure(failure.seed, 1)[:2] == failure[:2]


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


def trusting_pad_copy(
    dst: torch.Tensor, samples: Any, fills: Any, starts: Any, mask: Any
) -> None:
    """Write before the starts are checked."""
    dst.view(-1)[:1] = 0
    reference.pad_copy(dst, samples, fills, starts, mask)


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
    pytest.param(
        fuzz_operators.pad_copies, {"pad_copy": trusting_pad_copy}, id="order"
    ),
    pytest.param(fuzz_operators.slabs, {"pack": stale_pack}, id="gap"),
    pytest.param(fuzz_batches.batches, {"pad_copy": stale_pad_copy}, id="collate"),
    pytest.param(fuzz_batches.pad_stacks, {"pad_copy": stale_pad_copy}, id="pad_stack"),
]


@pytest.mark.parametrize(("case", "operators"), FAULTS)
def test_a_fault_is_found(
    case: Any, operators: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = [broken_backend(**operators)]
    monkeypatch.setattr(fuzz_operators, "BACKENDS", backends)
    monkeypatch.setattr(fuzz_batches, "BACKENDS", backends)
    assert search(case, 0, 1000) is not None


def test_a_wrong_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trusting:
        def __init__(self, offsets: Any, shapes: Any, dtypes: Any, nbytes: int) -> None:
            self.offsets, self.nbytes = tuple(offsets), nbytes

    monkeypatch.setattr(fuzz_operators, "BACKENDS", [broken_backend(SlabPlan=Trusting)])
    failure = search(fuzz_operators.plans, 0, 1000)
    assert failure is not None and "AssertionError" in failure.text
