"""Loaders work while another class has the name of torch's `DataLoader`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import interpreters

pytestmark = pytest.mark.one_backend

#: Makes batches in the parent, in workers, and ahead; stops and continues; pickles.
USE = """
def use(pyparallel, *workers):
    import pickle
    data = list(range(6))
    for options in (dict(), *workers):
        loader = pyparallel.DataLoader(data, 2, **options)
        for source in (loader, pyparallel.PreDataLoader(loader)):
            assert [batch.tolist() for batch in source] == [[0, 1], [2, 3], [4, 5]]
        first = iter(loader)
        assert next(first).tolist() == [0, 1]
        again = pickle.loads(pickle.dumps(loader))
        again.load_state_dict(loader.state_dict())
        assert [batch.tolist() for batch in again] == [[2, 3], [4, 5]]
        del first
        loader = pyparallel.DataLoader(Ends(), 2, **options)
        try:
            list(pyparallel.PreDataLoader(loader))
        except RuntimeError as error:
            assert "only the sampler ends an epoch" in str(error), error
        else:
            raise AssertionError("the data set ended the epoch")

FORKED = dict(num_workers=1, multiprocessing_context="fork")

class Ends:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        raise StopIteration
"""
THEIRS = """
import multiprocessing
import torch.utils.data
from torch.utils import data
theirs = data.DataLoader

class Subclass(theirs):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a class of another library was used")

def function(*args, **kwargs):
    raise AssertionError("a function of another library was used")

def replace(names, value):
    data.DataLoader = value if names != "module" else theirs
    data.dataloader.DataLoader = value if names != "package" else theirs
"""
AFTER = """
import pyparallel
for names in ("package", "module", "both"):
    for value in (pyparallel.DataLoader, Subclass, function):
        replace(names, value)
        use(pyparallel)
replace("both", pyparallel.DataLoader)
use(pyparallel, FORKED)
"""
BEFORE = """
replace({names!r}, {value})
import pyparallel
assert pyparallel.DataLoader.__mro__[1] is theirs, pyparallel.DataLoader.__mro__
assert Subclass not in pyparallel.DataLoader.__mro__
use(pyparallel, FORKED)
"""
PLACES = {
    "after": AFTER,
    **{
        f"before {names} {value}": BEFORE.format(names=names, value=value)
        for names, value in (
            ("both", "Subclass"),
            ("both", "function"),
            ("package", "Subclass"),
            ("module", "function"),
        )
    },
}
#: Its worker imports it anew, without the other class.
SPAWNED = """
from torch.utils import data
if __name__ == "__main__":
    from pyparallel import DataLoader, PreDataLoader
    data.DataLoader = data.dataloader.DataLoader = DataLoader
    options = dict(num_workers=1, multiprocessing_context="spawn")
    loader = PreDataLoader(DataLoader(list(range(6)), 2, **options))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
"""


@pytest.mark.slow
def test_loaders_work_whatever_has_the_name() -> None:
    ended = interpreters.run(THEIRS + USE, list(PLACES.values()))
    found = dict(zip(PLACES, ended, strict=True))
    assert found == dict.fromkeys(PLACES, interpreters.Ended(0, "", ""))


@pytest.mark.slow
def test_spawned_workers_import_the_real_class(tmp_path: Path) -> None:
    script = tmp_path / "replaced.py"
    script.write_text(SPAWNED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert (done.stderr, done.returncode) == ("", 0)
