"""The benchmark of calls on two threads: it runs, agrees, and judges its goals."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.peers

benchmark = importlib.import_module("benchmarks.parallel_apply")
cases = importlib.import_module("benchmarks.parallel_cases")
harness = importlib.import_module("benchmarks._harness")
torch_on_host = importlib.import_module("benchmarks.torch_on_host")


def test_a_quick_run_writes_the_json_and_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    benchmark.main(["--quick", "--out", str(tmp_path)])
    assert torch.get_num_threads() == threads
    (path,) = (tmp_path / "results").glob("*-parallel-cpu.json")
    (run,) = json.loads(path.read_text("utf-8"))["runs"]
    titles = [case["title"] for case in run["cases"]]
    assert titles == [case.title for case in cases.cases(quick=True)]
    page = path.with_suffix(".md")
    text = page.read_text("utf-8")
    assert all(f"| {title} |" in text for title in titles)
    assert text.count(" must take ") == len(titles), "every case has a goal"
    assert "**ours**" in text
    page.unlink()
    benchmark.main(["--from", str(path), "--out", str(tmp_path)])
    assert page.read_text("utf-8") == text


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "parallel_apply", lambda fn, items, *rest: items)
    with pytest.raises(harness.Disagreement, match="must give equal results"):
        benchmark.measure(benchmark.QUICK, "numpy: sort", quick=True)


def test_the_function_of_torch_is_run_unchanged() -> None:
    theirs = torch.nn.parallel.parallel_apply
    assert torch_on_host.parallel_apply.__code__ is theirs.__code__
    with torch.no_grad():
        found = torch_on_host.parallel_apply(
            [lambda x, y: (x + y, torch.is_grad_enabled())] * 2, [(1, 2), [3, 4]]
        )
    assert found == [(3, False), (7, False)]


def test_a_missed_goal_is_named() -> None:
    over = {"of_medians": 1.2, "of_minima": 1.2, "q1": 1.1, "q3": 1.3}
    ours = {"name": cases.OURS, "kind": "ours", "installed": True, "over": {}}
    loop = {"name": cases.LOOP, "kind": "peer", "installed": True}
    case = {
        "title": "work",
        "kind": "work",
        "goals": [cases.SPEED_UP._asdict()],
        "rows": [ours, {**loop, "over": {cases.OURS: over}}],
    }
    results = {"runs": [{"machine": {}, "cases": [case]}]}
    assert benchmark.complaints(results) == [
        "work: a loop, 1 thread must take 1.7 times as long as ours, and takes 1.2 "
        "(1.1 - 1.3)"
    ]
