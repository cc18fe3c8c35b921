"""Errors of datasets and of ``collate_fn`` name the samples, worker and rank."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

import pyparallel
from pyparallel import DataLoader, PreDataLoader
from pyparallel.loader import tracebacks
from pyparallel.transfer import debug
from tests.support.loader.loader_sets import wait_for

PACKAGE = str(Path(pyparallel.__file__).parent)
needs_notes = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="needs notes of exceptions (Python 3.11)"
)
pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.one_backend,
    pytest.mark.timeout(120),
]


class Cause(Exception):
    """The cause of an error in a dataset."""


def fail() -> torch.Tensor:
    error = ValueError("bad")
    if sys.version_info >= (3, 11):
        error.add_note("a note of the dataset")
    raise error from Cause("of the dataset")


class Some(Dataset[torch.Tensor]):
    """Pairs of numbers, but for sample 13."""

    def __init__(self, odd: Callable[[], torch.Tensor]) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.odd() if i == 13 else torch.full((2,), i)


class AllAtOnce(Some):
    """The same, read batch by batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        return [self[i] for i in indices]


class Parts(Some):
    """The same, read by slices."""

    def __getitems__(self, part: slice) -> list[torch.Tensor]:
        return [self[i] for i in range(32)[part]]


class Samples(IterableDataset[torch.Tensor]):
    """The same as a stream, which goes on after an error. Both workers read all."""

    def __init__(self, odd: Callable[[], torch.Tensor], length: int = 32) -> None:
        self.some, self.length = Some(odd), length

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.i = -1
        return self

    def __next__(self) -> torch.Tensor:
        self.i += 1
        if self.i >= self.length:
            raise StopIteration
        return self.some[self.i]


def wide() -> torch.Tensor:
    return torch.zeros(3)


def by(*batches: Any, **options: Any) -> dict[str, Any]:
    return {"batch_sampler": list(batches), **options}


FOUR, SINGLE = {"batch_size": 4}, {"batch_size": None}
UPWARDS = by([12, 13, 14], [1, 2])
SEEDS = {"sample_seeds": True}
THREADS = {"worker_method": "thread"}
ENTRIES = "(entry 0 is index 12, entry 1 is index 13)"
OF_STREAM = "(entry 0 is sample 12, entry 1 is sample 13)"
#: A dataset, options of the loader, and the place in the message.
PLACES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "index": (Some(fail), {"batch_size": 7}, "at index 13"),
    "batch sampler": (Some(fail), UPWARDS, "at index 13"),
    "tuples": (Some(fail), by((1, 13, 2)), "at index 13"),
    "no batches": (Some(fail), SINGLE, "at index 13"),
    "subset": (Subset(Some(fail), range(31, -1, -1)), FOUR, "at index 18"),
    "seeds": (Some(fail), FOUR | SEEDS, "at index 13"),
    "seeds, no batches": (Some(fail), SINGLE | SEEDS, "at index 13"),
    "all at once": (AllAtOnce(fail), FOUR, "in the batch of indices [12, 13, 14, 15]"),
    "slices": (Parts(fail), by(slice(12, 14)), "at index slice(12, 14, None)"),
    "no list": (Some(fail), {"batch_sampler": [[1, 2], [3], 13]}, "at index 13"),
    "stream": (Samples(fail), FOUR, "at sample 13"),
    "stream, no batches": (Samples(fail), SINGLE, "at sample 13"),
    "torch's collate": (
        *(Some(wide), UPWARDS),
        f"in the batch of indices [12, 13, 14] {ENTRIES}",
    ),
    "our collate": (
        *(Some(wide), UPWARDS | {"collate_fn": pyparallel.collate}),
        "in the batch of indices [12, 13, 14] (batch[1] is index 13, batch[0] is "
        "index 12)",
    ),
    "collate of a stream": (
        *(Samples(wide), {"batch_size": 6}),
        f"in the batch of samples [12, 13, 14, 15, 16, 17] {OF_STREAM}",
    ),
    "collate of the end of a stream": (
        *(Samples(wide, 14), {"batch_size": 6}),
        f"in the batch of samples [12, 13] {OF_STREAM}",
    ),
    "many indices": (
        *(Some(wide), by([0, 13, *range(31)] * 2)),
        f"in the batch of indices [0, 13, {', '.join(map(str, range(30)))}, ...] "
        "(entry 0 is index 0, entry 1 is index 13)",
    ),
}


def error_of(loader: Any) -> Exception:
    batches = iter(loader)
    try:
        for _ in batches:
            pass
    except (ValueError, RuntimeError, TypeError) as error:
        return error
    finally:  # now: the collector of cycles would close the queues first
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
    raise AssertionError("no error")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_an_error_in_a_worker_names_the_samples_and_the_worker(name: str) -> None:
    dataset, options, place = PLACES[name]
    error = error_of(DataLoader(dataset, num_workers=2, **options))
    # The message of a chained error begins with its cause.
    text = re.sub(r"Original .*?(?=Traceback)", "Original ", str(error), flags=re.S)
    kind = type(error).__name__
    begin = rf"Caught {kind} in DataLoader worker process [01], {re.escape(place)}\.\n"
    assert re.match(begin + r"Original Traceback \(most recent call last\):\n", text)


@needs_notes
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_an_error_without_workers_has_a_note_with_the_samples(
    name: str, ahead: bool
) -> None:
    dataset, options, place = PLACES[name]
    loader: Any = DataLoader(dataset, **options)
    error = error_of(PreDataLoader(loader) if ahead else loader)
    *others, note = error.__notes__
    assert note == f"DataLoader: {place}."
    if isinstance(error, ValueError) and str(error) == "bad":
        assert others == ["a note of the dataset"]
        assert repr(error.__cause__) == "Cause('of the dataset')"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("ahead", [False, True])
def test_no_frame_of_the_package_is_in_a_traceback(
    num_workers: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bare `raise` of Python 3.10 keeps the frame that catches the error.
    own = int(sys.version_info < (3, 11))
    for collate_fn in (None, pyparallel.collate):
        odd = fail if collate_fn is None else wide
        loader: Any = DataLoader(
            Some(odd), 4, num_workers=num_workers, collate_fn=collate_fn
        )
        error = error_of(PreDataLoader(loader) if ahead else loader)
        text = "".join(traceback.format_exception(error))
        assert text.count(f'File "{PACKAGE}') == own
        assert f'File "{__file__}", line' in text
        if odd is fail:
            assert "Cause: of the dataset\n" in text
            assert text.count("in fail\n") == 1
            if sys.version_info >= (3, 11):
                assert "ValueError: bad\na note of the dataset\n" in text
    monkeypatch.setattr(debug, "enabled", True)
    frames = traceback.format_exception(error_of(loader))
    assert "".join(frames).count(f'File "{PACKAGE}') > own


class Untold(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("no text")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    path: str


class Proxy(Exception):
    """An exception that cannot be asked for an attribute, nor printed."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Refusing:
    """A batch that raises an error when it is pickled."""

    def __init__(self, make: Callable[[], Exception]) -> None:
        self.make = make

    def __reduce__(self) -> Any:
        raise self.make()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [{}, SEEDS, THREADS, THREADS | SEEDS], ids=repr)
@pytest.mark.parametrize(
    "make",
    [Untold, lambda: Frozen("a"), Proxy],
    ids=["text", "frozen", "getattr"],
)
def test_an_error_of_any_class_arrives(
    make: Callable[[], Exception], options: dict[str, Any], num_workers: int
) -> None:
    def odd() -> torch.Tensor:
        raise make()  # the traceback of an error that is kept would keep the threads

    options = {"num_workers": num_workers, "sampler": [1, 13, 2], **options}
    ahead: Any = PreDataLoader(DataLoader(Some(odd), **options))
    with pytest.raises(type(make())):
        list(ahead)
    if num_workers and "worker_method" not in options:
        refused = DataLoader(
            range(1), num_workers=1, collate_fn=lambda _: Refusing(make)
        )
        with pytest.raises(type(make())):
            list(refused)
    batches = iter(DataLoader(Some(odd), **options))
    next(batches)
    with pytest.raises(type(make())):
        next(batches)
    assert next(batches).tolist() == [[2, 2]]


class Unloadable(Dataset[int]):
    """A dataset whose state cannot be loaded."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return i

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise Frozen("a")


@pytest.mark.parametrize("options", [{"num_workers": 0}, {}, THREADS], ids=repr)
def test_a_frozen_error_of_a_state_arrives(options: dict[str, Any]) -> None:
    options = {"num_workers": 1, "snapshot_every_n_steps": 1, **options}
    batches = iter(loader := DataLoader(Unloadable(), 1, **options))
    assert [int(next(batches)) for _ in range(2)] == [0, 1]
    state = loader.state_dict()
    resumed: Any = DataLoader(Unloadable(), 1, **options)
    resumed.load_state_dict(state)
    with pytest.raises(Frozen):
        list(resumed)


def test_frames_of_an_exception_of_the_caller_stay() -> None:
    def use() -> None:
        kept = 7
        raise Cause(kept)

    batches = iter(DataLoader(Some(fail), num_workers=1, sampler=[13]))
    try:
        use()
    except Cause as handled:
        with pytest.raises(ValueError) as raised:
            next(batches)
        assert raised.value.__context__ is handled
        trace = handled.__traceback__
        assert trace is not None and trace.tb_next is not None
        assert trace.tb_next.tb_frame.f_locals == {"kept": 7}


def test_an_error_in_a_cycle_of_causes_is_raised() -> None:
    error, other = Cause("first"), Cause("second")
    error.__cause__, other.__cause__ = other, error
    tracebacks.clear_frames(error)  # ends
    assert (error.__cause__, other.__cause__) == (other, error)


def test_an_error_names_the_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "5")  # the group counts, if there is one
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        text = str(error_of(DataLoader(Some(fail), 4, num_workers=1)))
    finally:
        dist.destroy_process_group()
    begin = "Caught ValueError in DataLoader worker process 0 (rank 0), at index 13.\n"
    assert text.startswith(begin)


def end(by: int) -> Callable[[], torch.Tensor]:
    """Return what ends its process: by a signal, or by an exit code below 0."""

    def ending() -> torch.Tensor:
        if by < 0:
            os._exit(-by)
        if by != signal.SIGKILL:
            signal.signal(by, signal.SIG_DFL)  # torch's handler writes to stderr
        os.kill(os.getpid(), by)
        raise AssertionError

    return ending


OTHER = "Look for its traceback above, or for code in the dataset that exits."
CRASH = (
    "Native code crashed. To see the line, run the loader with num_workers=0 under "
    "python -X faulthandler."
)
MAPPED = (
    "A page of a mapped file was missing: /dev/shm or another file system is full, or "
    "the file became shorter while it was mapped. Free space there (docker run "
    "--shm-size), and do not write to files of np.memmap or torch.load(mmap=True) "
    "during the epoch."
)
KILLED = (
    "Look for an out-of-memory kill in the system's log (dmesg). Use fewer workers, "
    "smaller batches or a smaller prefetch_factor."
)


@pytest.mark.parametrize(
    "by, code, advice, in_order, ahead",
    [
        (signal.SIGKILL, "-9, SIGKILL", KILLED, True, False),
        (signal.SIGSEGV, "-11, SIGSEGV", CRASH, False, False),
        (signal.SIGBUS, "-7, SIGBUS", MAPPED, True, False),
        (-3, "3", OTHER, False, True),
        (signal.SIGKILL, "-9, SIGKILL", KILLED, True, True),
    ],
)
def test_the_error_for_a_dead_worker_names_all_of_it(
    by: int, code: str, advice: str, in_order: bool, ahead: bool, monkeypatch: Any
) -> None:
    monkeypatch.setenv("RANK", "2")
    loader: Any = DataLoader(
        Some(end(by)),
        num_workers=2,
        batch_sampler=[[0, 1], [13, 5], [2, 3], [6, 7]],
        prefetch_factor=1,
        in_order=in_order,
    )
    error = error_of(PreDataLoader(loader) if ahead else loader)
    pid = re.search(r"pid (\d+)", str(error))
    assert str(error) == (
        "DataLoader: a worker must live to the end of its epoch, but worker 1 (pid "
        f"{pid and pid[1]}, rank 2) died (exit code {code}). Indices of its pending "
        f"batches: [13, 5]. {advice}"
    )
    assert error.__cause__ is None


class Unequal(IterableDataset[int]):
    """Worker 0 ends after a sample. Worker 1 exits when worker 0 has ended."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.pid, self.arrived = fork.Value("i", 0), fork.Event()

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        yield info.id
        if info.id == 0:
            self.pid.value = os.getpid()
            return
        self.arrived.wait(60)
        assert wait_for(lambda: self.pid.value and not is_running(self.pid.value))
        os._exit(0)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_that_has_finished_is_not_dead() -> None:
    batches = iter(DataLoader(dataset := Unequal(), num_workers=2))
    assert [next(batches).tolist() for _ in range(2)] == [[0], [1]]
    dataset.arrived.set()
    pid = batches._workers[1].pid
    with pytest.raises(RuntimeError) as raised:
        next(batches)
    assert str(raised.value) == (
        "DataLoader: a worker must live to the end of its epoch, but worker 1 (pid "
        f"{pid}) died (exit code 0). {OTHER}"
    )


def test_a_worker_that_dies_between_two_batches_is_the_error_of_the_next() -> None:
    """torch's loader raises in the main thread then, between any two lines."""
    loader = DataLoader(Some(wide), batch_sampler=[[0], [1], [2], [3]], num_workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers
    os.kill(worker.pid, signal.SIGKILL)
    assert wait_for(lambda: psutil.Process(worker.pid).status() == "zombie")
    with pytest.raises(RuntimeError, match=rf"worker 0 \(pid {worker.pid}\) died"):
        list(batches)
