"""The rules of a comparison: equal results before times, figures, fits of costs."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, backend

pytestmark = pytest.mark.peers

_harness = importlib.import_module("benchmarks._harness")
commands = importlib.import_module("benchmarks.__main__")
command = importlib.import_module("benchmarks.command")
growth = importlib.import_module("benchmarks.growth")
limits = importlib.import_module("benchmarks.limits")
Contender, Disagreement = _harness.Contender, _harness.Disagreement

NAN = torch.tensor(float("nan"))
TREE = {"x": [torch.zeros(2), "a"], "n": 1}


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
    ("one", "other", "where"),
    [
        (NAN, NAN.clone(), ""),
        (TREE, {**TREE}, ""),
        (DataContainer((torch.ones(2),)), DataContainer((torch.ones(2),)), ""),
        (torch.tensor(0.0), torch.tensor(-0.0), " at the top: values"),
        (TREE, {**TREE, "x": [torch.zeros(2), "b"]}, " at ['x'][1]: 'a' and 'b'"),
        (
            torch.ones(3),
            torch.ones(3).double(),
            " at the top: torch.float32 (3,) and torch.float64 (3,)",
        ),
        (
            torch.ones(3),
            torch.ones(1, 3),
            " at the top: torch.float32 (3,) and torch.float32 (1, 3)",
        ),
        ([TREE["n"]], [1, 1], " at the top: [1] and [1, 1]"),
        (torch.ones(1), None, " at the top: tensor([1.]) and None"),
    ],
)
def test_results_are_equal_in_every_bit(one: Any, other: Any, where: str) -> None:
    assert _harness.difference(one, other) == where


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_bytes_left_unwritten_are_found_before_anything_is_timed(
    dtype: torch.dtype,
) -> None:
    right = torch.zeros(4, dtype=dtype)

    def forgets_the_end() -> torch.Tensor:
        out = torch.empty(4, dtype=dtype)
        out[:3] = 0
        return out

    contenders = [Contender("a", right.clone, "ours"), Contender("b", forgets_the_end)]
    with pytest.raises(Disagreement, match="a and b must give equal results"):
        _harness.compare("case", contenders)
    assert not torch.are_deterministic_algorithms_enabled()


def test_figures_are_those_of_the_rounds() -> None:
    clock = FakeClock()
    # One call to check, two to calibrate, then the five rounds.
    times = [9.0] * 3 + [5.0, 1.0, 2.0, 4.0, 3.0]
    tree = {"a": [torch.zeros(3), "x"], "b": DataContainer([torch.zeros(2, 2)])}
    contenders = [
        Contender("ours", clock.takes(*times, result=tree), "ours"),
        Contender("less work", clock.takes(1.5, result="other"), "limit"),
    ]
    case = _harness.compare(
        "case", contenders, _harness.Effort(rounds=5), timer=_harness.by(clock)
    )
    ours = row(case, "ours")
    assert ours["seconds"] == pytest.approx([5, 1, 2, 4, 3])
    figures = [ours[key] for key in ("min", "q1", "median", "q3")]
    assert figures == pytest.approx([1, 2, 3, 4])
    assert row(case, "less work")["over"]["ours"]["of_medians"] == 0.5
    assert case["nbytes"] == 7 * 4
    over = _harness.ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    expected = {"of_medians": 2.0, "of_minima": 2.0, "q1": 1.5, "q3": 2.5}
    assert over == pytest.approx(expected)


def test_a_quantity_of_0_has_no_ratios() -> None:
    contenders = [
        Contender("ours", FakeClock().takes(1.0), "ours"),
        Contender("peer", FakeClock().takes(1.0)),
    ]

    def timer(call: Any, repeats: int) -> dict[str, float]:
        call()
        return {"seconds": 1.0, "faults": 0}

    case = _harness.compare("case", contenders, timer=timer)
    peer = row(case, "peer")
    assert peer["over"]["ours"]["of_medians"] == 1
    assert peer["faults"]["median"] == 0 and peer["faults"]["over"] == {}


@pytest.mark.parametrize(
    ("options", "rounds", "done"),
    [
        ({}, 20, _harness.MIN_ROUNDS),
        ({"min_rounds": 7}, 20, 7),
        ({"min_rounds": 7}, 3, 3),
    ],
)
def test_a_slow_case_runs_its_least_rounds(
    options: dict[str, int], rounds: int, done: int
) -> None:
    contenders = [Contender("ours", lambda: None, "ours")]
    case = _harness.Case("slow", "", lambda: contenders, **options)
    effort = _harness.Effort(rounds, max_seconds=0.0, min_seconds=0.0)
    record = _harness.measure_case(case, effort)
    assert record["rounds"] == len(record["rows"][0]["seconds"]) == done


def test_a_run_leaves_the_backend_and_the_threads_as_they_were() -> None:
    def state() -> list[Any]:
        names = "name", *backend._OPERATORS
        return [torch.get_num_threads(), *(getattr(backend, each) for each in names)]

    before = state()
    options = "collate --quick --only tiny --threads 1 --malloc default".split()
    args = commands.parser().parse_args(options)
    args.seconds = math.inf
    collate = importlib.import_module("benchmarks.collate").QUESTION
    (record,) = command.measure(collate, args)["runs"]
    assert [case["title"] for case in record["cases"]] == ["tiny"]
    assert state() == before


def test_costs_are_linear_only_if_they_grow_as_a_straight_line() -> None:
    sizes = [2**i for i in range(11)]
    for fixed in (0.0, 1e-6, 1e-4):
        found = growth.fit(sizes, [fixed + 5e-7 * n for n in sizes])
        assert growth.is_linear(found)
        assert found["fixed"] == pytest.approx(fixed, abs=1e-12)
        assert found["each"] == pytest.approx(5e-7)
    for cost in (
        lambda n: 1e-5 + 1e-8 * n**2,
        lambda n: 1e-6 * n**1.25,
        lambda n: 1e-6 * n * math.log(n + 1),
        lambda n: 1e-6 * n**0.8,
        lambda n: 1e-5 + 1e-12 * n,
    ):
        assert not growth.is_linear(growth.fit(sizes, [cost(n) for n in sizes]))


@pytest.mark.skipif(limits.nontemporal_memcpy() is None, reason="needs x86-64 and cc")
@pytest.mark.parametrize("num", [0, 1, 63, 64, 127, 128, 129, 4096, 100_003])
def test_the_limit_of_copies_writes_these_bytes_and_no_others(num: int) -> None:
    copy = limits.nontemporal_memcpy()
    src = torch.randint(0, 256, (num + 7,), dtype=torch.uint8)
    for start in (0, 1, 31, 64):
        dst = torch.full((num + 256,), 77, dtype=torch.uint8)
        expected = dst.clone()
        expected[start : start + num] = src[7:]
        copy(dst.data_ptr() + start, src.data_ptr() + 7, num)
        assert torch.equal(dst, expected)


#: The shares of other processes before and during a run, options, if results are kept.
LOADS = [
    ((0.1, 0.1), "", True),
    ((0.2, 0.0), "", False),
    ((0.0, 0.2), "", False),
    ((0.2, 0.2), "--despite-load", True),
]


@pytest.mark.parametrize(("shares", "options", "kept"), LOADS)
def test_a_run_beside_other_processes_keeps_no_results(
    shares: tuple[float, float],
    options: str,
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = iter(shares)
    fake = SimpleNamespace(share=lambda: next(loads))
    monkeypatch.setattr(command.environment, "OtherLoad", lambda: fake)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    folders = {True: tmp_path / "kept", False: tmp_path / "scratch"}
    monkeypatch.setattr(command, "folder", lambda keep: folders[keep])
    args = commands.parser().parse_args(["loader", *options.split()])
    if options:
        next(loads)  # is not measured
    records = {"runs": [{"machine": {}}]}
    path = folders[True] / "results" / "some.json"
    if kept:
        assert command.obtain(args, "some", lambda: records)[1] == path
        share = f"{shares[1] * 100:.0f} % of the cores"
        flag = ", with --despite-load" if options else ""
        found = json.loads(path.read_text())["runs"][0]["machine"]
        assert found == {"other processes": share + flag}
    else:
        with pytest.raises(SystemExit, match="at most 10 % of the cores, but use 20 %"):
            command.obtain(args, "some", lambda: records)
        assert not path.exists()


def test_the_load_of_others_is_the_busy_time_without_the_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([(10.0, 2.0, 0.0), (14.0, 3.0, 3.0)])
    monkeypatch.setattr(command.environment, "_core_seconds", lambda: next(times))
    monkeypatch.setattr(command.environment, "cores", lambda: 2)
    assert command.environment.OtherLoad().share() == 0.5
