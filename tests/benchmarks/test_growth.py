"""The fit of the cost returns the parameters of synthetic data."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.peers

backends = importlib.import_module("benchmarks.backends")
growth = importlib.import_module("benchmarks.growth")
Contender = importlib.import_module("benchmarks._harness").Contender
QUICK = importlib.import_module("benchmarks.case").QUICK

SIZES = [2**i for i in range(11)]


@pytest.fixture(autouse=True)
def backend_as_loaded() -> Iterator[None]:
    """Contenders leave the backend behind that they ran on."""
    yield
    backends.use_backend(backends.AS_LOADED)


def fit(cost: Callable[[int], float]) -> dict[str, Any]:
    return growth.fit(SIZES, [cost(n) for n in SIZES])


@pytest.mark.parametrize("fixed", [0.0, 1e-6, 1e-4])
def test_a_straight_line_is_found_whatever_its_fixed_part(fixed: float) -> None:
    found = fit(lambda n: fixed + 5e-7 * n)
    assert found["fixed"] == pytest.approx(fixed, abs=1e-12)
    assert found["each"] == pytest.approx(5e-7)
    assert found["exponent"] == pytest.approx(1)
    assert growth.is_linear(found)
    assert found["as_measured"] <= 1 + 1e-9


def test_the_fixed_part_changes_the_measured_exponent_only() -> None:
    found = fit(lambda n: 1e-5 + 5e-7 * n)
    assert found["from"] == 32  # the first size at which the fixed part is the smaller
    assert found["to"] == 1024
    assert found["as_measured"] < 0.9


@pytest.mark.parametrize(
    "cost",
    [
        lambda n: 1e-6 * n**2,
        lambda n: 1e-5 + 1e-8 * n**2,
        lambda n: 1e-6 * n**1.25,
        lambda n: 1e-6 * n * math.log(n + 1),
        lambda n: 1e-6 * n**0.8,
    ],
)
def test_nonlinear_growth_is_reported(cost: Callable[[int], float]) -> None:
    assert not growth.is_linear(fit(cost))


def test_a_cost_that_does_not_grow_is_not_linear() -> None:
    found = fit(lambda n: 1e-5 + 1e-12 * n)
    assert found["exponent"] is None
    assert not growth.is_linear(found)


def test_one_sample_is_left_out() -> None:
    costs = [1e-9, *(5e-7 * n for n in SIZES[1:])]
    assert growth.fit(SIZES, costs)["exponent"] == pytest.approx(1)


def test_curves_have_a_time_for_every_size_and_contender() -> None:
    calls: dict[tuple[str, int], int] = {}

    def contenders(size: int) -> list[Any]:
        def call(name: str) -> Callable[[], None]:
            def run() -> None:
                calls[name, size] = calls.get((name, size), 0) + 1

            return run

        return [
            Contender("ours", call("ours"), "ours"),
            Contender("peer", call("peer")),
            Contender("absent", None),
        ]

    curve = growth.Curves("title", "note", "samples", [1, 2, 4, 8], contenders)
    record = growth.measure(curve, QUICK)
    names = [(row["name"], row["installed"]) for row in record["series"]]
    assert names == [("ours", True), ("peer", True), ("absent", False)]
    assert all(len(row["seconds"]) == 4 for row in record["series"][:2])
    assert len(calls) == 8 and set(calls.values()) == {2 + QUICK.rounds}


def test_all_curves_cover_the_documented_sizes() -> None:
    ends = {(each.x, each.sizes[0], each.sizes[-1]) for each in growth.growths(False)}
    assert ends == {("samples", 1, 1024), ("leaves", 1, 10_000)}
    assert len(growth.growths(False)) == len(growth.growths(True)) == 5


def test_threads_are_put_back() -> None:
    before = growth.torch.get_num_threads()
    records = growth.measure_threads(True, QUICK)
    assert growth.torch.get_num_threads() == before
    for record in records:
        assert record["sizes"][0] == 1
        assert [len(row.get("seconds", [])) for row in record["series"][1:2]] == [
            len(record["sizes"])
        ]
