"""`Runner` builds the loader of this package from configs of mmengine."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyparallel import mmengine as ours
from tests.support.repository.folders import ROOT, SUPPORT, python_path

# It may be there without the packages that it imports.
pytest.importorskip("mmengine.runner", exc_type=ImportError)

from mmengine.runner import Runner as StockRunner

from tests.support.mmengine.runner_loaders import loader, register

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with ours.installed():
        register()
        yield


def test_it_trains_as_mmengines_runner_with_the_loader_of_this_package(
    tmp_path: Path,
) -> None:
    script = SUPPORT / "mmengine" / "runner_loaders.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = torch.load(tmp_path / "results.pt")
    stock, found, skipped = (results[name] for name in ("stock", "ours", "skip"))
    assert stock["loader"] == "torch.utils.data.dataloader.DataLoader"
    assert found["loader"] == "pyparallel.loader.data_loader.DataLoader"
    assert found["seen"] == stock["seen"]
    assert len(found["seen"]) == 2 * 6
    assert all(map(torch.equal, found["weights"], stock["weights"]))
    # `on_error="skip"` of the loader's config leaves out the sample with an error.
    for epoch in (skipped["seen"][:6], skipped["seen"][6:]):
        indices = sorted(index for batch in epoch for index in batch)
        assert indices == [i for i in range(21) if i != 5]
    assert [text[:7] for text in skipped["warnings"] if "[PP2" in text] == ["[PP215]"]


@pytest.mark.parametrize(
    "changes",
    [
        {"drop_last": True},
        {"batch_size": None, "collate_fn": copy.copy},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"num_batch_per_epoch": 3},
        {"dataset": {"type": "Stream"}, "sampler": None, "num_workers": 0},
        {"disable_subprocess_warning": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_each_option_gives_the_batches_of_mmengine(changes: dict[str, Any]) -> None:
    config = loader(**changes)
    found = ours.Runner.build_dataloader(copy.deepcopy(config), seed=5)
    stock = StockRunner.build_dataloader(copy.deepcopy(config), seed=5)
    for name in ("batch_size", "drop_last", "num_workers", "prefetch_factor"):
        assert getattr(found, name) == getattr(stock, name)
    assert found.persistent_workers == stock.persistent_workers
    assert type(found.sampler) is type(stock.sampler)
    assert list(map(repr, found)) == list(map(repr, stock))


def test_a_batch_sampler_of_a_config_is_kept() -> None:
    sizes = [(1 + index % 7, 2) for index in range(21)]
    chosen = {"type": "pyparallel.SizeBatchSampler", "sizes": sizes}
    found = ours.Runner.build_dataloader(loader(batch_sampler=chosen), seed=5)
    assert type(found.batch_sampler) is ours.SizeBatchSampler
    assert found.batch_size is None
    seen = [index for batch in found for index in batch["data_samples"]]
    assert sorted(seen) == list(range(21))
