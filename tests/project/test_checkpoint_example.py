"""``examples/_checkpoint.py``: the content of a file, also after a crash."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyparallel import DataLoader
from tests.support.errors.bad_inputs import picture
from tests.support.processes import forkserver
from tests.support.ranks import elastic_runs
from tests.support.repository.folders import ROOT

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

EXAMPLES = str(ROOT / "examples")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import _checkpoint

    return _checkpoint


@pytest.fixture
def group() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counter:
    """Something with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = torch.tensor(count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def numbers() -> DataLoader[Any]:
    return DataLoader(range(10), batch_size=2, shuffle=True)


def test_everything_saved_is_restored(
    module: ModuleType, group: None, tmp_path: Path
) -> None:
    path, loader = tmp_path / "new" / "folder" / "a.pt", numbers()
    batches = iter(loader)
    next(batches)
    module.Checkpoint(path, loader, counter=Counter(3)).save(step=1, losses=[0.5])
    drawn = torch.rand(3)
    rest = [batch.tolist() for batch in batches]

    torch.manual_seed(77)
    again, counter = numbers(), Counter()
    checkpoint = module.Checkpoint(path, again, counter=counter)
    assert checkpoint.load(step=0) == {"step": 1, "losses": [0.5]}
    assert counter.count == 3
    batches = iter(again)
    assert torch.equal(torch.rand(3), drawn)
    assert [batch.tolist() for batch in batches] == rest and len(rest) == 4
    assert os.listdir(path.parent) == ["a.pt"]


def test_a_file_of_another_number_of_ranks_is_refused(
    module: ModuleType, group: None, tmp_path: Path
) -> None:
    path, counter = tmp_path / "a.pt", Counter(1)
    state = {"parts": {"counter": Counter(2).state_dict()}, "loaders": [{}, {}]}
    module.write(state, path)
    with pytest.raises(ValueError) as caught:
        module.Checkpoint(path, numbers(), counter=counter).load()
    assert str(caught.value) == (
        f"{path} must be of a job with 1 processes, but is of one with 2. Start 2 "
        "processes, or use another file."
    )
    assert counter.count == 1


def test_ranks_leave_together_when_the_file_is_there(tmp_path: Path) -> None:
    done = elastic_runs.in_two(f"together({{rank}}, {str(tmp_path)!r})")
    seen = "[b'rank', b'rankrankrank'] b'of 0' b'' True\n"
    assert done == [(0, seen), (0, seen)]
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert state["progress"] == {"rank": 0}
    first, second = state["loaders"]
    assert picture(first) != picture(second)  # each has its own


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(Path(sys.argv[0]).with_name("evil")),)


def test_a_file_that_would_run_code_is_refused(
    module: ModuleType, group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program")])
    path = tmp_path / "a.pt"
    module.write({"loaders": [Evil()]}, path)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        module.Checkpoint(path, numbers()).load()
    assert os.listdir(tmp_path) == ["a.pt"]


def test_the_content_is_on_the_disk_before_its_name_is(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "a.pt", []
    module.write([1], path)
    fsync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        target = Path(f"/proc/self/fd/{number}").resolve()
        calls.append(("fsync", target, os.fstat(number).st_size))
        fsync(number)

    def replaced(source: Path, target: Path) -> None:
        calls.append(("replace", source, target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    module.write([2], path)
    (first, unfinished, size), second, (third, folder, _) = calls
    assert unfinished.parent == tmp_path
    assert re.fullmatch(r"a\.pt\.[0-9a-f]{16}\.unfinished", unfinished.name)
    assert first == third == "fsync" and folder == tmp_path
    assert second == ("replace", unfinished, path)
    assert size == path.stat().st_size  # all of it, none in a buffer of Python
    assert torch.load(path, weights_only=True) == [2]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import _checkpoint

def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def torn(state, file):
    file.write(b"half of it")
    file.flush()
    kill()

path = Path({path!r})
_checkpoint.write({{"state": torch.zeros(1000)}}, path)
{fault}
_checkpoint.write({{"state": torch.ones(1000)}}, path)
"""


@pytest.mark.parametrize(
    ("fault", "value", "left"),
    [
        ("torch.save = torn", 0, 2),
        ("os.fsync = kill", 0, 2),
        ("os.replace = kill", 0, 2),
        ("os.open = kill", 1, 1),  # of the folder
        ("", 1, 1),
    ],
)
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(
    fault: str, value: int, left: int, tmp_path: Path, module: ModuleType, group: None
) -> None:
    path = tmp_path / "a.pt"
    code, text = forkserver.run(KILLED.format(path=str(path), fault=fault), [EXAMPLES])
    assert (code, text) == (-9 if fault else 0, "")
    state = torch.load(path, weights_only=True)["state"]
    assert torch.equal(state, torch.full((1000,), float(value)))
    assert len(os.listdir(tmp_path)) == left
    # The next start removes the temporary file of an old one, and no other file.
    (tmp_path / "a.pt.old").touch()
    state = {"parts": {}, "loaders": [numbers().state_dict()], "progress": {}}
    module.write(state, path)
    module.Checkpoint(path, numbers()).load()
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "a.pt.old"]
