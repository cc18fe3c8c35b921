"""A dry run of the GPU benchmark: its errors, its counts and its goals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repository import ROOT
from torch.autograd import DeviceType

pytestmark = pytest.mark.peers

_harness = importlib.import_module("benchmarks._harness")
gpu = importlib.import_module("benchmarks.gpu")
gpu_case = importlib.import_module("benchmarks.gpu_case")
gpu_transfers = importlib.import_module("benchmarks.gpu_transfers")
gpu_target = importlib.import_module("benchmarks.gpu_target")
QUICK = importlib.import_module("benchmarks.case").QUICK
Contender, Goal = _harness.Contender, gpu_case.Goal
DRY = gpu_target.DryRun()


def case(peer: Callable[[Any], Any] | None, title: str = "case", **more: Any) -> Any:
    """Return a case with our clone of a tensor and another function of a peer."""

    def make(where: Any) -> Any:
        inputs = gpu_case.Rotation([torch.full((4,), float(i)) for i in range(3)])
        other = peer and (lambda: peer(inputs.now))
        contenders = [
            Contender("ours", lambda: inputs.now.clone(), "ours"),
            Contender("peer", other),
        ]
        return gpu_case.Made(contenders, inputs)

    return gpu_case.GpuCase(title, "note", make, **more)


def run(monkeypatch: pytest.MonkeyPatch, *found: Any, options: Any = ()) -> int:
    monkeypatch.setattr(gpu, "cases", lambda quick: list(found))
    return gpu.main(["--device", "cpu", *map(str, options)])


# Comparisons


@pytest.mark.parametrize("peer", [lambda x: x + 1, lambda x: x.double()])
def test_a_peer_that_differs_fails_its_case_and_no_other(
    peer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [case(peer, "wrong"), case(torch.clone, "right")]
    assert run(monkeypatch, *found) == 1
    out, err = capsys.readouterr()
    failed = "failed: Disagreement: wrong: ours and peer must give equal results, but "
    assert f"**wrong**: {failed}differ at the top: " in out
    assert "**right, a dry run** (note; 2 rounds)" in out
    assert err.startswith(f"Failed: wrong: {failed}")


@pytest.mark.parametrize(
    "other, where",
    [
        (torch.tensor([[1.0, 2.5]]), ""),
        (torch.tensor([[1.0, 2.6]]), ": by 0.6, where 0.5 is allowed"),
        (torch.tensor([[1.0, float("nan")]]), ": by nan, where 0.5 is allowed"),
        (
            torch.tensor([1.0, 2.0]),
            ": (torch.float32, (1, 2), (2, 1)) and (torch.float32, (2,), (1,))",
        ),
        (
            torch.tensor([[1.0, 2.0]]).double(),
            ": (torch.float32, (1, 2), (2, 1)) and (torch.float64, (1, 2), (2, 1))",
        ),
    ],
)
def test_values_may_be_apart_by_a_tolerance_and_nothing_else(
    other: torch.Tensor, where: str
) -> None:
    differ, one = gpu_case.close_to(0.5), torch.tensor([[1.0, 2.0]])
    assert differ(one, other) == where
    mask = torch.tensor([True, False])
    assert differ((one, mask), (other, mask)) == where
    assert differ((one, mask), (one, ~mask)) == " at the top: values"


# Timing


class FakeGpu(gpu_target.DryRun):  # type: ignore[misc]  # the module is found at run time
    """Records its calls, and has a clock for the device."""

    dry = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def sync(self) -> None:
        self.notes.append("sync")

    def device_seconds(self, call: Any, host: float) -> float | None:
        call()
        self.notes.append("device")
        return 0.25

    def counts(self, call: Any) -> dict[str, Any]:
        call()
        return {"launches": 1, "copies": 2, "waits": 0, "pin_calls": None}


def test_small_inputs_turn_in_few_blocks() -> None:
    where = SimpleNamespace(dry=False, pin=torch.Tensor.clone)
    assert gpu_transfers._turns(1 << 10, True, where).num == 512


def test_inputs_turn_before_every_call_and_results_die_after_the_clocks() -> None:
    where, inputs = FakeGpu(), gpu_case.Rotation("abc")

    class Result:
        def __del__(self) -> None:
            where.notes.append("dead")

    def call() -> Result:
        where.notes.append(inputs.now)
        return Result()

    found = gpu_case.Clocks(where, inputs.turn)(call, 2)
    once = ["sync", "dead"]
    assert where.notes == [
        "sync",
        "b",
        *once,
        "sync",
        "c",
        *once,
        "a",
        "dead",
        "device",
    ]
    assert set(found) == {"seconds", "host", "device"}
    assert found["device"] == 0.25
    assert 0 < found["host"] <= found["seconds"]


#: Calls of the host and work of the device, with their times of start.
EVENTS = """
cudaStreamSynchronize 5
cudaMemcpyAsync 12
cudaLaunchKernelExC 12
cuLaunchKernel 13
cudaLaunchHostFunc 13
cudaHostAlloc 13
cudaStreamSynchronize 14
cudaEventSynchronize 15
cudaDeviceSynchronize 21
cudaLaunchKernel 21
Memcpy HtoD (Pinned -> Device) 16
Memcpy DtoD (Device -> Device) 17
Memcpy DtoH (Device -> Pinned) 30
"""


def event(name: str, start: int, end: int, kind: DeviceType) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=kind, time_range=span)


def test_launches_copies_waits_and_pinning_of_one_call_are_counted() -> None:
    events = [
        event(gpu_target._RANGE, 10, 20, DeviceType.CPU),
        event(gpu_target._RANGE, 11, 25, DeviceType.CUDA),
    ]
    for line in EVENTS.strip().splitlines():
        name, _, start = line.rpartition(" ")
        kind = DeviceType.CUDA if name.startswith("Mem") else DeviceType.CPU
        events.append(event(name, int(start), int(start) + 1, kind))
    expected = {"launches": 2, "copies": 2, "waits": 2, "pin_calls": 1}
    assert gpu_target.count(events) == expected
    assert gpu_target.count(events, 3)["pin_calls"] == 3
    blind = [each for each in events if each.device_type is DeviceType.CPU]
    assert set(gpu_target.count(blind).values()) == {None}


# Peers that are not there


def test_peers_that_are_absent_or_fail_are_named_and_ours_may_not_fail() -> None:
    def broken(now: Any) -> Any:
        raise TypeError("not with this torch\nat all")

    absent, fails = (
        gpu_case.measure(case(peer), FakeGpu(), QUICK)["rows"][1]
        for peer in (None, broken)
    )
    absent_ = {"name": "peer", "kind": "peer", "installed": False}
    assert absent == {**absent_, "why": "not installed"}
    assert fails == {**absent_, "why": "fails: TypeError: not with this torch"}
    ours = Contender("ours", lambda: broken(0), "ours")
    made = gpu_case.Made([ours], gpu_case.Rotation([1, 2]))
    found = gpu.measure_case(gpu_case.GpuCase("c", "n", lambda _: made), DRY, QUICK)
    why = "failed: TypeError: not with this torch\nat all"
    assert found == {"title": "c", "note": "n", "error": why}


GOALS = [
    (Goal("peer", 20), False, "peer: at least 20 times ours (usable): 15 (15 - 15)"),
    (Goal("peer", 10), True, "peer: at least 10 times ours (usable): 15 (15 - 15)"),
    (
        Goal("peer", 20, 2e-3 * 0.3),
        True,
        "peer: at least 20 times ours less 600 us (usable): 15 (15 - 15)",
    ),
    (Goal("absent", 2), None, "absent: at least 2 times ours (usable): not measured"),
    (
        Goal("peer", 2, of="device"),
        None,
        "peer: at least 2 times ours (device): not measured",
    ),
    (Goal(plus=120e-6, of="host"), True, "at most 120 us (returns): 100 us"),
    (Goal(plus=1e-3), False, "at most 1000 us (usable): 2000 us"),
    (Goal(count="copies", most=1), True, "at most 1 copies: 1"),
    (Goal(count="waits"), False, "no waits: 2"),
    (Goal(count="pin_calls"), None, "no pin calls: not measured"),
]


def test_goals_are_judged_by_medians_and_counts() -> None:
    ours, theirs = [2e-3] * 3, [30e-3] * 3
    counts = {"launches": 3, "copies": 1, "waits": 2, "pin_calls": None}
    host = {**_harness.summarise([1e-4]), "over": {}}
    over = {"ours": _harness.ratio(theirs, ours)}
    rows = [
        {"name": "ours", "kind": "ours", "installed": True, "counts": counts}
        | {"host": host, "over": {}, **_harness.summarise(ours)},
        {"name": "peer", "kind": "peer", "installed": True, "over": over}
        | _harness.summarise(theirs),
        {"name": "absent", "kind": "peer", "installed": False},
    ]
    goals = [goal._asdict() for goal, _, _ in GOALS]
    expected = [(reached, text) for _, reached, text in GOALS]
    assert gpu_case.judge({"rows": rows, "goals": goals}) == expected


# The command


@pytest.mark.slow
def test_every_case_runs_dry_and_all_contenders_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = ROOT / "benchmarks" / "results"
    before = sorted(results.iterdir())
    assert gpu.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    titles = [each.title for each in gpu.cases(True)]
    assert len(set(titles)) == len(titles) == 31
    assert [t for t in titles if f"**{t}, a dry run** (" not in out] == []
    assert "reached" not in out and "missed" not in out
    assert sorted(results.iterdir()) == before


def test_a_killed_run_keeps_its_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(where: Any) -> Any:
        raise KeyboardInterrupt

    path = tmp_path / "gpu.json"
    found = [case(torch.clone, "first"), gpu_case.GpuCase("second", "n", killed)]
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, *found, options=["--json", path])
    (kept,) = json.loads(path.read_text())["runs"]
    assert [each["title"] for each in kept["cases"]] == ["first, a dry run"]
    assert [each.name for each in tmp_path.iterdir()] == ["gpu.json"]


def test_cases_for_which_there_is_no_time_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--total-seconds", "-1"]
    assert run(monkeypatch, case(torch.clone), options=options) == 1
    err = capsys.readouterr().err
    assert err == "Failed: case: not run: -1 s (--total-seconds) were over\n"
