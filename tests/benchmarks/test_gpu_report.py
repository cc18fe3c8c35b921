"""The GPU report: goals and losses, and the README while there are no records."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytestmark = pytest.mark.peers

_harness = importlib.import_module("benchmarks._harness")
gpu = importlib.import_module("benchmarks.gpu")
gpu_case = importlib.import_module("benchmarks.gpu_case")
gpu_report = importlib.import_module("benchmarks.gpu_report")
Goal = gpu_case.Goal


def record(goals: list[Any], host: float = 1e-4, **times: float) -> dict[str, Any]:
    """Return a record in which contenders take this long, usable; ours first."""
    rows = []
    for name, seconds in times.items():
        row = {"name": name, "installed": True, "kind": "peer"}
        over = {"ours": _harness.ratio([seconds] * 3, [times["ours"]] * 3)}
        figures = {"seconds": [seconds] * 3, **_harness.summarise([seconds] * 3)}
        rows.append({**row, **figures, "over": {} if name == "ours" else over})
    rows[0] |= {"kind": "ours", "host": {**_harness.summarise([host]), "over": {}}}
    counts = {"launches": 3, "copies": 1, "waits": 2, "pin_calls": None}
    rows[0]["counts"] = counts
    rows.append({"name": "absent", "kind": "peer", "installed": False})
    rows.append({**rows[-1], "name": "broken", "why": "fails: TypeError: no"})
    found = {"title": "case", "note": "n", "rounds": 3, "rows": rows}
    return {**found, "goals": [goal._asdict() for goal in goals]}


GOALS = [
    Goal("peer", 20),
    Goal("peer", 10),
    Goal("peer", 20, 2e-3 * 0.3),
    Goal("absent", 2),
    Goal("peer", 2, of="device"),
    Goal(plus=120e-6, of="host"),
    Goal(plus=1e-3),
    Goal(count="copies", most=1),
    Goal(count="waits"),
    Goal(count="pin_calls"),
]


def test_goals_are_judged_by_medians_and_counts() -> None:
    found = gpu_case.judge(record(GOALS, ours=2e-3, peer=30e-3))
    assert found == [
        (False, "peer: at least 20 times ours (usable): 15 (15 - 15)"),
        (True, "peer: at least 10 times ours (usable): 15 (15 - 15)"),
        (True, "peer: at least 20 times ours less 600 us (usable): 15 (15 - 15)"),
        (None, "absent: at least 2 times ours (usable): not measured"),
        (None, "peer: at least 2 times ours (device): not measured"),
        (True, "at most 120 us (returns): 100 us"),
        (False, "at most 1000 us (usable): 2000 us"),
        (True, "at most 1 copies: 1"),
        (False, "no waits: 2"),
        (None, "no pin calls: not measured"),
    ]


def test_a_case_is_one_table_with_its_goals_below() -> None:
    found = record([GOALS[0], GOALS[3]], ours=2e-3, peer=30e-3)
    assert (
        gpu_report.case_table(found)
        == """\
**case** (n; 3 rounds)

|  | returns | relative to ours | usable | relative to ours | launches | copies | \
waits | pin calls |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| **ours** | 100 us |  | 2.00 ms |  | 3 | 1 | 2 |  |
| peer | - |  | 30.0 ms | 15 (15 - 15) |  |  |  |  |
| absent | not installed |  |  |  |  |  |  |  |
| broken | fails: TypeError: no |  |  |  |  |  |  |  |

- **missed**: peer: at least 20 times ours (usable): 15 (15 - 15)
- -: absent: at least 2 times ours (usable): not measured
"""
    )


def test_the_summary_has_every_goal_and_losses_stay() -> None:
    found = record([GOALS[0], GOALS[5]], ours=2e-3, peer=1e-3)
    failed = {"title": "other", "note": "n", "error": "failed: ValueError: x"}
    runs = [{"machine": {"device": "fake", "commit": ""}, "cases": [found, failed]}]
    page = gpu_report.page({"date": "d", "runs": runs})
    assert page.startswith(
        "# pyparallel and its peers on a GPU\n\nMeasured on d. Time "
    )
    summary, found_all, tables = page.partition("## All contenders\n")
    assert (
        summary.partition(" of the work.\n\n")[2]
        == """\
| case | returns | usable | device | goal |  |  |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| case | 100 us | 2.00 ms |  | peer: at least 20 times ours (usable) | \
0.5 (0.5 - 0.5) | **missed** |
|  |  |  |  | at most 120 us (returns) | 100 us | reached |
| other |  |  |  | failed: ValueError: x |  |  |

1 of 2 measured goals are reached.

Missed:

- case: peer: at least 20 times ours (usable): 0.5 (0.5 - 0.5)

Peers with a shorter median:

- case: peer takes 0.5 of ours (0.5 - 0.5), usable

Machine:

- device: fake

"""
    )
    assert found_all and gpu_report.case_table(runs[0]["cases"][0]) in tables


def test_the_hidden_share_is_a_goal() -> None:
    found = {**record([], ours=1.0, peer=2.0), "must_hide": 0.95}
    found["rows"][0]["hidden"] = {"of_medians": 0.9}
    text = "ours hides at least 0.95 of the data: 0.900"
    assert gpu_report.goals(found) == [(False, text)]


def test_the_page_of_goals_has_those_of_all_cases(tmp_path: Path) -> None:
    assert gpu.main(["--goals", "--out", str(tmp_path)]) == 0
    path = Path("results", "gpu-goals.md")
    shown = (ROOT / "benchmarks" / path).read_text(encoding="utf-8")
    assert (tmp_path / path).read_text(encoding="utf-8") == shown


def test_a_case_has_one_row_for_each_goal() -> None:
    case = gpu_case.GpuCase("case", "note", lambda where: None, GOALS[:2] + GOALS[5:7])
    bare = gpu_case.GpuCase("other", "note", lambda where: None)
    page = gpu_report.goals_page([case, bare])
    assert (
        page[page.index("| case |") :]
        == """\
| case | goal |
| --- | --- |
| case | peer: at least 20 times ours (usable) |
|  | peer: at least 10 times ours (usable) |
|  | at most 120 us (returns) |
|  | at most 1000 us (usable) |
"""
    )


def test_the_readme_mentions_missing_records() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    found = list((ROOT / "benchmarks" / "results").glob("*-gpu.json"))
    assert ("No GPU has run these benchmarks yet." in readme) == (not found)
