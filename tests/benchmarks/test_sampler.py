"""The benchmark of samplers: it runs, agrees, and its figures are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.peers

benchmark = importlib.import_module("benchmarks.sampler")
ways = importlib.import_module("benchmarks.sampler_ways")
harness = importlib.import_module("benchmarks._harness")


def test_a_quick_run_writes_the_json_its_page_and_the_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="the training needs scikit-learn")
    benchmark.main(["--quick", "--out", str(tmp_path)])
    (path,) = (tmp_path / "results").glob("*-sampler-cpu.json")
    (run,) = json.loads(path.read_text("utf-8"))["runs"]
    page = path.with_suffix(".md")
    text = page.read_text("utf-8")
    titles = [case["title"] for case in run["cases"]]
    assert titles == ["COCO", "demo", "sentences", "audio", "audio stream"]
    assert all(f"## {title}\n" in text for title in titles)
    for case in run["cases"]:
        shares = {
            r["name"]: r["figures"]["padding"] for r in case["rows"] if r["installed"]
        }
        others = [share for name, share in shares.items() if "ours" not in name]
        assert shares.get("ours, window=50", 0) <= min(others, default=1) + 0.02
    assert [run["batches"] for run in run["training"]] == ["random", "similar"]
    assert "times as long. F1 is " in text
    assert (tmp_path / "charts" / "padding_by_window.svg").exists()
    page.unlink()
    benchmark.main(["--from", str(path), "--out", str(tmp_path)])
    assert page.read_text("utf-8") == text


def test_batches_without_a_sample_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ways, "length_grouped", lambda lengths: [[0]])
    with pytest.raises(harness.Disagreement, match="must give equal results"):
        benchmark.measure(benchmark.QUICK, ["cases"], quick=True)


def test_padding_and_balance_are_those_of_the_batches() -> None:
    sizes = np.array([[2, 3], [4, 1], [1, 1], [5, 5]] * 4)
    batches = [[i] for i in range(8)] + [[8, 9], [10], [11], [12], [13], [14], [15]]
    found = ways.figures(sizes, batches)
    costs = [6, 4, 1, 25] * 2 + [24, 1, 25, 6, 4, 1, 25]
    assert found["padding"] == pytest.approx(1 - 4 * 36 / sum(costs))
    assert found["balance_mean"] == pytest.approx(25 / 9)
    assert found["balance_p99"] == pytest.approx(25 / 9)
    assert (found["num_batches"], found["largest"]) == (15, 25)


def test_windows_are_sorted_and_the_longest_sample_is_first() -> None:
    lengths = list(range(1000))
    batches = ways.length_grouped(lengths)
    assert batches[0][0] == 999
    assert sorted(i for batch in batches for i in batch) == lengths
    assert batches[50] == sorted(batches[50], reverse=True)


def test_batches_of_groups_have_one_group() -> None:
    batches = ways.grouped([i % 3 for i in range(100)])
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert all(len({i % 3 for i in batch}) == 1 for batch in batches)
    assert sum(len(batch) < ways.BATCH_SIZE for batch in batches) <= 3


def test_the_ratio_of_epochs_has_random_batches_above() -> None:
    runs = [
        {"batches": name, "seed": seed, "epoch_seconds": [9.0, seconds, 0.1]}
        for seed, pair in enumerate([(2.0, 1.0), (3.0, 2.0)])
        for name, seconds in zip(("random", "similar"), pair, strict=True)
    ]
    assert benchmark.training_ratios(runs) == [2.0, 1.5]
