"""The benchmark harness: it refuses, it counts right, and its table is its JSON."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pyparallel import DataContainer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_harness = importlib.import_module("benchmarks._harness")
bench_collate = importlib.import_module("benchmarks.collate")
Contender, Disagreement = _harness.Contender, _harness.Disagreement


class FakeClock:
    """Stands still unless a function takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float, result: Any = 0) -> Any:
        """Return a function that takes these times in turn, the last one forever."""
        left = list(seconds)

        def call() -> Any:
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return result

        return call


def row(case: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in case["rows"] if row["name"] == name)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0, 4.0]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([[1.0, 2.0, 3.0]]),
        [1.0, 2.0, 3.0],
        None,
    ],
)
def test_functions_that_disagree_are_never_timed(other: Any) -> None:
    clock = FakeClock()
    first = Contender("a", lambda: torch.tensor([1.0, 2.0, 3.0]), "ours")
    with pytest.raises(Disagreement, match="a and b must give equal results"):
        _harness.compare("case", [first, Contender("b", lambda: other)], clock=clock)


def test_a_disagreement_deep_inside_is_named() -> None:
    one = {"x": [torch.zeros(2), "a"], "n": 1}
    two = {"x": [torch.zeros(2), "b"], "n": 1}
    assert _harness.difference(one, two) == " at ['x'][1]: 'a' and 'b'"
    assert _harness.difference(one, {"x": one["x"]}) != ""
    assert _harness.difference([one], [one, one]) != ""
    assert _harness.difference(one, {**one}) == ""


def test_equality_is_of_bits() -> None:
    nan = torch.tensor(float("nan"))
    assert _harness.difference(nan, nan.clone()) == ""
    assert _harness.difference(torch.tensor(0.0), torch.tensor(-0.0)) != ""


def test_containers_of_different_libraries_are_compared_by_what_they_hold() -> None:
    class Other:
        cpu_only = False
        data = (torch.ones(2),)

    assert _harness.difference(DataContainer((torch.ones(2),)), Other()) == ""
    assert _harness.difference(DataContainer((torch.zeros(2),)), Other()) != ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_bytes_left_unwritten_are_a_disagreement(dtype: torch.dtype) -> None:
    right = torch.zeros(4, dtype=dtype)

    def forgets_the_end() -> torch.Tensor:
        out = torch.empty(4, dtype=dtype)
        out[:3] = 0
        return out

    contenders = [
        Contender("a", right.clone, "ours"),
        Contender("b", forgets_the_end),
    ]
    with pytest.raises(Disagreement):
        _harness.compare("case", contenders)
    assert not torch.are_deterministic_algorithms_enabled()


def test_limits_are_timed_without_being_compared() -> None:
    clock = FakeClock()
    contenders = [
        Contender("ours", clock.takes(2.0), "ours"),
        Contender("less work", clock.takes(1.0, result="other"), "limit"),
    ]
    case = _harness.compare("case", contenders, rounds=3, clock=clock)
    assert row(case, "less work")["over"]["ours"]["of_medians"] == 0.5
    assert _harness.losses({"cases": [case]}) == []


def test_minimum_and_quartiles_are_those_of_the_rounds() -> None:
    clock = FakeClock()
    # One call to check, two to calibrate, then the five rounds.
    times = [9.0] * 3 + [5.0, 1.0, 2.0, 4.0, 3.0]
    contenders = [Contender("ours", clock.takes(*times), "ours")]
    case = _harness.compare("case", contenders, rounds=5, clock=clock)
    ours = row(case, "ours")
    assert ours["seconds"] == pytest.approx([5, 1, 2, 4, 3])
    figures = [ours[key] for key in ("min", "q1", "median", "q3")]
    assert figures == pytest.approx([1, 2, 3, 4])


def test_ratios_are_of_medians_with_the_spread_over_rounds() -> None:
    over = _harness.ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert over == pytest.approx({"of_medians": 2.0, "q1": 1.5, "q3": 2.5})


def test_a_fast_function_is_called_often_in_a_round() -> None:
    clock = FakeClock()
    fast, slow = clock.takes(2**-13), clock.takes(0.5)
    contenders = [Contender("ours", fast, "ours"), Contender("peer", slow)]
    options = {"rounds": 2, "clock": clock, "min_seconds": 2**-7}
    case = _harness.compare("case", contenders, **options)
    assert row(case, "ours")["median"] == 2**-13
    assert row(case, "peer")["over"]["ours"]["of_medians"] == 2**12
    # A check, two calibrations and two rounds of each; 64 calls fill a round.
    assert clock.now == 5 * 0.5 + (3 + 2 * 64) * 2**-13


def test_every_round_times_every_contender_once_and_orders_change() -> None:
    clock, calls = FakeClock(), []

    def noted(name: str) -> Any:
        def call() -> int:
            calls.append(name)
            clock.now += 1
            return 0

        return call

    contenders = [Contender(name, noted(name), "ours") for name in "abc"]
    _harness.compare("case", contenders, rounds=20, clock=clock)
    timed = calls[3 + 6 :]
    rounds = [tuple(timed[i : i + 3]) for i in range(0, 60, 3)]
    assert all(set(each) == set("abc") for each in rounds)
    assert len(set(rounds)) > 1


def test_losses_stay_in_the_table_and_are_listed() -> None:
    clock = FakeClock()
    contenders = [
        Contender("ours", clock.takes(2.0), "ours"),
        Contender("faster", clock.takes(1.0)),
        Contender("absent", None),
    ]
    case = _harness.compare("case", contenders, rounds=3, clock=clock)
    record = {"machine": {"cpu": "fake"}, "cases": [case]}
    assert _harness.losses(record) == ["case: faster takes 0.5 of ours"]
    text = _harness.table(record)
    assert "| absent | not installed |" in text
    times = "1.00 s | 1.00 s | 1.00 s - 1.00 s"
    assert f"| faster | {times} | 0.5 (0.5 - 0.5) |" in text
    assert "- case: faster takes 0.5 of ours" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (45.6e-6, "45.6 us"), (3e-7, "0.30 us")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert _harness.duration(seconds) == text


def test_a_quick_run_has_a_table_that_agrees_with_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "quick.json"
    bench_collate.main(["--quick", "--json", str(path)])
    printed = capsys.readouterr().out
    (record,) = json.loads(path.read_text())["runs"]
    assert _harness.table(record) in printed
    assert len(record["cases"]) == 10
    for case in record["cases"]:
        names = [each["name"] for each in case["rows"]]
        assert names[:3] == ["ours, native", "ours, Python", "mmcv 1.x collate"]
        for each in case["rows"]:
            assert not each["installed"] or len(each["seconds"]) == case["rounds"]
    rows = re.findall(r"^\| (?!---)(?! ).*\|$", printed, flags=re.MULTILINE)
    assert len(rows) == sum(len(case["rows"]) for case in record["cases"])
    assert record["machine"]["threads"] == "1"


SWAPPED = ("name", "pad_copy", "stack_equal")


def test_a_run_leaves_the_backend_and_the_threads_as_they_were() -> None:
    from pyparallel import _backend

    before = [getattr(_backend, each) for each in SWAPPED], torch.get_num_threads()
    bench_collate.measure(1, 1, only="tiny", quick=True)
    after = [getattr(_backend, each) for each in SWAPPED], torch.get_num_threads()
    assert after == before


def test_both_backends_are_timed_in_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = importlib.import_module("benchmarks.cases")
    from pyparallel import _backend

    for each in SWAPPED:
        monkeypatch.setattr(_backend, each, None)
        monkeypatch.setitem(cases.AS_LOADED, each, "native")
    for each in SWAPPED[1:]:
        monkeypatch.setitem(cases.IN_PYTHON, each, "python")
    for _ in range(2):  # the first case leaves its last backend behind
        native, python = cases.ours(lambda: {getattr(_backend, x) for x in SWAPPED})
        assert [python.call(), native.call(), python.call()] == [
            {"python"},
            {"native"},
            {"python"},
        ]
