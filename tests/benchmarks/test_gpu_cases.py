"""The cases of the GPU benchmark: their order and goals, a dry run, absent peers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import ROOT

from pyparallel import DataLoader

pytestmark = pytest.mark.peers

gpu = importlib.import_module("benchmarks.gpu")
gpu_case = importlib.import_module("benchmarks.gpu_case")
gpu_rings = importlib.import_module("benchmarks.gpu_rings")
gpu_target = importlib.import_module("benchmarks.gpu_target")
peers = importlib.import_module("benchmarks.peers")


def test_every_case_has_goals_and_the_first_of_each_module_come_first() -> None:
    found = gpu.cases(False)
    assert all(case.goals for case in found)
    first = [module.cases(False)[0].title for module in gpu.MODULES]
    assert [case.title for case in found[: len(first)]] == first
    assert first[0] == "528 small tensors"


def test_every_case_runs_dry_and_all_contenders_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    assert gpu.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    titles = [each.title for each in gpu.cases(True)]
    assert len(set(titles)) == len(titles) == 31
    for title in titles:
        assert f"**{title}, a dry run** (" in out
    assert "reached" not in out and "missed" not in out
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before


def test_a_ring_that_the_batches_miss_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_rings, "DataLoader", partial(DataLoader, max_ring_bytes=0))
    (case,) = (case for case in gpu.cases(True) if "a slab of" in case.title)
    with pytest.raises(RuntimeError) as caught:
        case.make(gpu_target.DryRun())
    assert str(caught.value) == (
        "all batches must be in pinned slabs, but are not. Raise the limit of locked "
        "memory (ulimit -l)."
    )


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return a call of `peers.multi_tensor_copier` that knows of no call before."""
    monkeypatch.delitem(peers.ABSENT, peers.COPIER, raising=False)
    monkeypatch.setattr(
        peers.cpp_extension,
        "load",
        lambda name, sources, **options: SimpleNamespace(start_copy=sources),
    )
    return peers.multi_tensor_copier.__wrapped__  # type: ignore[no-any-return]


def test_the_copier_is_compiled_from_its_source_or_imported(
    copier: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "package" / "csrc" / "copier.cpp"
    source.parent.mkdir(parents=True)
    source.touch()
    (tmp_path / "package" / "test.cpp").touch()
    for path in (source, tmp_path):
        monkeypatch.setenv(peers.COPIER_SOURCE, str(path))
        assert copier() == [str(source)]
    monkeypatch.delenv(peers.COPIER_SOURCE)
    module = SimpleNamespace(start_copy=copier)
    monkeypatch.setitem(sys.modules, "accvlab", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "accvlab.multi_tensor_copier", module)
    assert copier() is copier


def test_a_copier_that_cannot_be_had_is_named_in_the_table(
    copier: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(peers.COPIER_SOURCE, str(tmp_path))
    assert copier() is None
    assert gpu_case.absent(f"{peers.COPIER} start_copy().get()") == (
        "not installed: FileNotFoundError: ACCVLAB_MULTI_TENSOR_COPIER must be a C++ "
        f"file or a folder with csrc/*.cpp, but is {tmp_path}."
    )
    monkeypatch.delenv(peers.COPIER_SOURCE)
    monkeypatch.setitem(sys.modules, "accvlab", None)
    assert copier() is None
    assert gpu_case.absent(peers.COPIER) == (
        "not installed: ModuleNotFoundError: No module named "
        "'accvlab.multi_tensor_copier'; 'accvlab' is not a package"
    )
