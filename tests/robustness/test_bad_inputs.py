"""Bad inputs: each has one outcome, is fast, and leaves all other state unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel import DataContainer
from pyparallel.core import errors
from tests.support.errors.bad_inputs import Case, Refused, attempt
from tests.support.errors.bad_inputs_all import CASES, TABLES
from tests.support.loader.loader_sets import all_free, no_feeders, wait_for
from tests.support.repository.folders import ROOT

#: What collate refuses, wherever it runs.
REFUSED = [
    name
    for name, case in CASES.items()
    if name.startswith(("collate/", "shapes/", "tensors/"))
    and isinstance(case.expected, Refused)
]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    """Wait until threads and processes of earlier tests have ended."""
    assert no_feeders()


@pytest.mark.parametrize("name", CASES)
def test_a_bad_input_has_one_answer_and_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    attempt(CASES[name])


@pytest.mark.python_optimized
def test_errors_are_equal_without_asserts() -> None:
    num_cases = len(CASES) - len(TABLES["slow"])
    path = [str(ROOT), *filter(None, sys.path)]
    result = subprocess.run(
        [sys.executable, "-O", "-m", "tests.support.errors.bad_inputs_all"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, f"{num_cases}\n"), result.stderr


class Failing:
    """Makes a batch of an even number, and tries a bad input for an odd one."""

    def __call__(self, numbers: list[int]) -> Any:
        (number,) = numbers
        if number % 2:
            case = CASES[REFUSED[number // 2]]
            case.call(case.make())
        return torch.full((1000,), number)


def test_errors_of_a_worker_leave_its_ring_free() -> None:
    dataset = range(2 * len(REFUSED))
    loader = pyparallel.DataLoader(dataset, num_workers=1, collate_fn=Failing())
    batches = iter(loader)
    for number in dataset:
        if number % 2 == 0:
            assert torch.equal(next(batches), torch.full((1000,), number))
            continue
        expected = CASES[REFUSED[number // 2]].expected
        with pytest.raises(expected.classes) as caught:
            next(batches)
        assert str(caught.value).endswith(f": {expected.message}\n")
        del caught
    assert next(batches, None) is None
    wait_for(lambda: all_free(loader))
    stats = loader.stats()
    assert (stats.ring_hits, stats.ring_misses) == (len(REFUSED), 0)
    del batches
    assert no_feeders()


# What finds a change must not be blind.
KEPT: list[Any] = []


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("the caller's data", lambda x: x[0].add_(1)),
        ("the caller's data", lambda x: x[1]["a"].append(1)),
        ("the caller's data", lambda x: setattr(x[2], "_stack", True)),
        ("the surroundings, torch's random state", lambda _: torch.rand(1)),
        ("the surroundings, modes", lambda _: torch.set_grad_enabled(False)),
        ("the surroundings, descriptors", lambda _: KEPT.append(open(os.devnull))),
    ],
)
def test_a_change_is_seen(what: str, act: Any) -> None:
    data = [torch.arange(3.0), {"a": [1]}, DataContainer([2])]
    try:
        with pytest.raises(AssertionError, match=f"^{what}: "):
            attempt(Case(lambda: data, lambda x: [act(x)][:0], list))
    finally:
        torch.set_grad_enabled(True)
        while KEPT:
            KEPT.pop().close()
