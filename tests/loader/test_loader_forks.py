"""A forked child takes no batches from its parent, and leaves its workers alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyparallel import DataLoader
from tests.support.processes import interpreters

pytestmark = pytest.mark.one_backend

START = """
import gc, json, multiprocessing, os, sys, warnings
from pyparallel import DataLoader, PreDataLoader
"""
#: The child uses the iterator of its parent, follows the advice of the error, and ends.
PROGRAM = """
warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
class Remembering:
    reads = 0
    def __len__(self):
        return 9
    def __getitem__(self, index):
        self.reads += 1
        return index
    def state_dict(self):
        return {{"reads": self.reads}}
    def load_state_dict(self, state):
        self.reads = state["reads"]

def child():
    global batches
    found = []
    try:
        next(batches)
    except RuntimeError as error:
        found.append(str(error).replace(str(os.getpid()), "CHILD"))
    position = loader.state_dict()
    batches = None
    gc.collect()
    found.append([batch.item() for batch in loader] if {is_daemon} is False else ALL)
    loader.load_state_dict(position)
    os.write(write, json.dumps(found).encode())

ALL = list(range(9))
for persistent in (False, True):
    for wrap in (lambda plain: plain, PreDataLoader):
        read, write = os.pipe()
        plain = DataLoader(
            Remembering(), 1, num_workers=2, prefetch_factor=1,
            persistent_workers=persistent, multiprocessing_context="fork",
        )
        batches = iter(loader := wrap(plain))
        got = [next(batches).item()]
        {start}
        found = json.loads(os.read(read, 1 << 16))
        state = loader.state_dict()
        got += [batch.item() for batch in batches]
        text, again = found
        text = text.replace(str(os.getpid()), "PARENT")
        next_epoch = [batch.item() for batch in loader]
        print(json.dumps([text, again, got, next_epoch]), flush=True)
"""
FORK = """
        sys.stdout.flush()
        if not (pid := os.fork()):
            child()
            {end}
        os.waitpid(pid, 0)
"""
PROCESS = """
        made = multiprocessing.get_context("fork").Process(target=child, daemon={0})
        made.start()
        made.join()
"""
STARTS = {
    "os.fork, os._exit": FORK.format(end="os._exit(0)"),
    "os.fork, sys.exit": FORK.format(end="sys.exit(0)"),
    "Process": PROCESS.format(False),
    "Process, daemon": PROCESS.format(True),
}
TEXTS = {
    "DataLoader: an iterator with workers must be used in the process that made it, "
    "pid PARENT, but this is pid CHILD, to which its batches do not belong. Call "
    "iter() of the loader in this process.",
    "PreDataLoader: an iterator must be used in the process that made it, pid PARENT, "
    "but this is pid CHILD, where its thread does not run. Call iter() in this "
    "process.",
}


@pytest.fixture(scope="module")
def ended() -> dict[str, interpreters.Ended]:
    programs = [  # a daemon may not start workers
        PROGRAM.format(start=start.strip(), is_daemon="daemon" in name)
        for name, start in STARTS.items()
    ]
    return dict(zip(STARTS, interpreters.run(START, programs), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_a_child_gets_an_error_and_the_parent_loses_nothing(
    name: str, ended: dict[str, interpreters.Ended]
) -> None:
    done = ended[name]
    assert (done.code, done.err) == (0, "")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert {text for text, *_ in rows} == TEXTS and len(rows) == 4
    for _, again, got, next_epoch in rows:
        assert again == got == next_epoch == list(range(9))


class Holding:
    """A dataset that has an iterator of another loader."""

    def __init__(self, num_workers: int) -> None:
        self.batches = iter(DataLoader(range(4), num_workers=num_workers))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return next(self.batches)


@pytest.mark.usefixtures("forked")
def test_a_worker_gets_an_error_for_an_iterator_of_its_parent() -> None:
    dataset = Holding(1)
    with pytest.raises(RuntimeError, match="an iterator with workers must be used in"):
        next(iter(DataLoader(dataset, num_workers=1)))
    assert [batch.item() for batch in dataset.batches] == [0, 1, 2, 3]


@pytest.mark.usefixtures("forked")
def test_an_iterator_without_workers_shares_nothing_with_a_worker() -> None:
    """As in torch: each process continues its own copy."""
    dataset = Holding(0)
    for _ in range(2):
        assert next(iter(DataLoader(dataset, num_workers=1))).item() == 0
    assert [batch.item() for batch in dataset.batches] == [0, 1, 2, 3]
