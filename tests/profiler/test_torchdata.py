"""A profile of torchdata's StatefulDataLoader, which has its own workers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import pyparallel
from pyparallel.profiler.record import Record
from pyparallel.profiler.summary import summarize

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings(
        "ignore:'set_vital' is deprecated:UserWarning",
    ),
]


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """24 samples of 5 ms."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.full((3 + index % 2,), float(index))

    def __len__(self) -> int:
        return 24


@pytest.mark.parametrize("num_workers", [0, 1])
def test_its_fetching_is_seen_where_it_happens(
    tmp_path: Path, num_workers: int
) -> None:
    loader = torchdata.StatefulDataLoader(
        Slow(), 2, collate_fn=pyparallel.pad_stack, num_workers=num_workers
    )
    with pyparallel.profile(tmp_path, steps=6, warmup=2):
        assert sum(len(batch) for batch in loader) == 24
    text = (tmp_path / "profile.json").read_text(encoding="utf-8")
    summary = summarize(Record.from_json(text))
    assert summary is not None and len(summary.steps) == 6
    assert summary.record.loaders[0]["num_workers"] == num_workers
    in_loop = summary.mean["fetch"]
    work = summary.work("worker")
    if num_workers == 0:
        assert in_loop >= 10e6 and work is None
    else:
        assert work is not None and work.parts["fetch"] >= 10e6 and not in_loop
