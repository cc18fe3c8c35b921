"""A short soak with every kind of fault once, in a fixed or random order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import soak
import torch
from repository import ROOT, SUPPORT
from soak_faults import PADDING, is_right, size_of

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]


@pytest.mark.timeout(400)
def test_with_every_fault_no_sample_is_lost_and_nothing_is_left() -> None:
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    # Spawned workers import torch for seconds, so only the long run has them.
    options = ["--batches=24", "--seed=3", "--starts=fork:8 forkserver:3 fork:8"]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "soak.py"), *options],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert {name: found[name] for name in soak.BAD} == dict.fromkeys(soak.BAD, 0)
    assert [kind for kind, count in found["faults"].items() if not count] == []
    assert found["samples"] == 3 * 24 * found["epochs"] > 0


def batch_of(*indices: int) -> dict[str, torch.Tensor]:
    sizes = [size_of(i) for i in indices]
    data = torch.full((len(sizes), *map(max, zip(*sizes, strict=True))), PADDING)
    for row, (high, wide), i in zip(data, sizes, indices, strict=True):
        row[:high, :wide] = i
    return {"index": torch.tensor(indices), "data": data}


@pytest.mark.parametrize("place", [(0, 0, 0), (1, -1, -1)])
def test_a_soak_sees_one_wrong_number(place: tuple[int, int, int]) -> None:
    batch = batch_of(3, 4)
    assert is_right(batch)
    batch["data"][place] += 1
    assert not is_right(batch)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([[1, 2], [3, 4]], {}),
        ([[1, 2], [4]], {"lost": 1}),
        ([[1, 2], [3, 4], [3, 4]], {"duplicated": 2}),
        ([[1, 2], [4, 3]], {"wrong": 1}),
        ([[1, 2], [2, 3]], {"duplicated": 1, "lost": 1}),
    ],
)
def test_a_soak_keeps_accounts(seen: Any, found: dict[str, int]) -> None:
    run = soak.Soak(0, 2)
    run.account([1, 2, 3, 4], seen, "here")
    assert {name: run.counts[name] for name in soak.BAD if run.counts[name]} == found


def test_a_soak_detects_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = soak.Soak(0, 2)
    monkeypatch.setattr(soak, "shared_names", lambda: 0)  # of all tests that run now
    run.leaks(soak.left_over(), "here")
    assert not run.notes
    before = soak.left_over()
    later = iter(range(0, 100, 5))
    clock = SimpleNamespace(monotonic=lambda: next(later), sleep=lambda _: None)
    monkeypatch.setattr(soak, "time", clock)
    with open(os.devnull):
        run.leaks(before, "here")
    assert run.counts["leaked"] == 1 and "descriptors" in run.notes[0]
