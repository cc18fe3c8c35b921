"""Profiled scripts and blocks: their records and their files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import sysconfig
import types
import venv
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import pyparallel
from pyparallel import DataLoader, MMDataParallel, PreDataLoader, collate
from pyparallel.core import tracing
from pyparallel.core.cpu_time import CoreWait
from pyparallel.profiler import command, hooks, recorder, report
from pyparallel.profiler.advice import advise
from pyparallel.profiler.record import Record
from pyparallel.profiler.recorder import VARIABLE, Settings
from pyparallel.profiler.summary import Summary
from tests.support.processes import forkserver
from tests.support.processes.process_resources import SERVER
from tests.support.profiler import profile_script
from tests.support.profiler.profile_records import steady
from tests.support.profiler.profile_records import summary as summary_of
from tests.support.repository.folders import ROOT, python_path

pytestmark = pytest.mark.one_backend

SCRIPT = Path(profile_script.__file__)
CHARTS = "pyparallel.profiler.charts"


@pytest.fixture(autouse=True)
def _no_charts(monkeypatch):
    """Write reports as without matplotlib, which takes most of the time of a test."""
    monkeypatch.setitem(sys.modules, CHARTS, None)


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert VARIABLE not in os.environ
    methods = [getattr(cls, name) for cls, name in hooks.replaced_methods()]
    assert len(methods) == 8
    assert not [method for method in methods if hasattr(method, "__wrapped__")]
    assert tracing.span("pyparallel.step") is tracing.span("pyparallel.wait")


def seen(folder: Path, name: str = "profile") -> Summary:
    text = (folder / f"{name}.json").read_text(encoding="utf-8")
    return summary_of(Record.from_json(text))


def loop(loader, collated: bool = True) -> int:
    model = MMDataParallel(profile_script.Net(), [-1])
    count = 0
    for data in loader:
        model.train_step(data if collated else collate([data]), None)
        count += 1
    return count


def pairs():
    return functools.partial(collate, samples_per_gpu=2)


# Blocks.


def test_a_loader_without_workers_fetches_in_the_loop(tmp_path):
    loader = TorchLoader(profile_script.Ragged(), 2, collate_fn=pairs())
    with pyparallel.profile(tmp_path, steps=6, warmup=2) as found:
        assert loop(loader) == 32, "the block goes on unwatched"
    summary = seen(tmp_path)
    assert (len(summary.steps), summary.left_out) == (6, 2)
    # In each batch are 1 and 3 floats: 6 of 4 bytes are stacked, 2 of them padding.
    assert summary.stacked == (6 * 24, 6 * 8)
    for step in summary.steps:
        parts = step.parts
        assert all(parts[name] for name in ("fetch", "collate", "copy", "compute"))
        assert sum(parts.values()) == step.end - step.start
    assert found.verdict == summary.verdict and found.verdict in str(found)
    assert found.files[0] == tmp_path / "profile.html"
    assert summary.record.environment["device"] == "CPU"
    (of_loader,) = summary.record.loaders
    applied = ["collate_fn"]
    assert of_loader == {
        "name": "DataLoader",
        "num_workers": 0,
        "batch_size": 2,
        "applied": applied,
    }


def written_nbytes(pid: int) -> list[int]:
    """Return the sizes of the records that a process has open."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return [f.stat().st_size for f in files if ".jsonl" in os.path.realpath(f)]


def test_the_end_of_a_block_ends_the_records_of_all_processes(tmp_path):
    options = {"num_workers": 1, "persistent_workers": True}
    loader = TorchLoader(profile_script.Ragged(), 2, collate_fn=pairs(), **options)
    with pyparallel.profile(tmp_path, steps=100, warmup=0):
        loop(loader)
    assert written_nbytes(os.getpid()) == []
    worker = loader._iterator._workers[0].pid
    before = written_nbytes(worker)
    assert len(before) == 1 and loop(loader) == 32
    assert written_nbytes(worker) == before


class Counted(Dataset[int]):
    """Python code that holds the GIL."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        loader = TorchLoader(range(2), 1)  # a loader of its own is a part of the fetch
        return len(list(loader)) + sum(letter == 32 for letter in bytes(400_000))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_worker_threads_have_lanes_with_times_of_their_own(tmp_path):
    threads = {"num_workers": 4, "worker_method": "thread"}
    with pyparallel.profile(tmp_path, steps=14, warmup=0):
        list(DataLoader(Counted(), 4, **threads))
    summary = seen(tmp_path)
    assert len(summary.steps) == 14 and len(summary.record.loaders) == 1
    work = summary.work("worker")
    assert work is not None
    assert work.lanes == ("worker 0", "worker 1", "worker 2", "worker 3")
    fetches = [e for e in summary.record.events if e.kind == "fetch"]
    for event in fetches:  # the CPU time of the thread, not that of the process
        assert 0 < event.cpu <= event.end - event.start
    waited = sum(event.gil_wait for event in fetches)
    if sys.platform == "linux":
        free = sum(e.end - e.start - e.core_wait for e in fetches)
        assert waited > 0.1 * free
    else:
        assert waited == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_wait_between_two_clocks_is_not_a_part_of_a_short_fetch(
    tmp_path, monkeypatch, num_workers
):
    waits = itertools.count(step=0.5)  # the thread loses its core before each reading
    monkeypatch.setattr(CoreWait, "seconds", lambda self: next(waits))
    threads = {"num_workers": num_workers}
    if num_workers:
        threads["worker_method"] = "thread"
    with pyparallel.profile(tmp_path, steps=4, warmup=0):
        list(DataLoader(Counted(), 4, **threads))
    fetches = [e for e in seen(tmp_path).record.events if e.kind == "fetch"]
    assert len(fetches) >= 4
    for event in fetches:
        assert event.cpu > 0 and event.core_wait <= event.end - event.start


def profile_alone(path: Path) -> None:
    with pyparallel.profile(path, steps=2, warmup=0):
        loop(TorchLoader(profile_script.Ragged(), 2, collate_fn=pairs()))


@pytest.mark.slow
@pytest.mark.parametrize("started", ["before", "in the first profile"])
def test_workers_of_a_fork_server_belong_to_the_present_profile(
    tmp_path, monkeypatch, started
):
    monkeypatch.setattr(SERVER, "_preload_modules", ["torch"])
    SERVER._stop()
    if started == "before":
        SERVER.ensure_running()
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    for number, cls in enumerate((DataLoader, TorchLoader, DataLoader)):
        folder = tmp_path / str(number)
        with pyparallel.profile(folder, steps=2, warmup=0):
            loop(cls(profile_script.Ragged(), 2, collate_fn=pairs(), **options))
        work = seen(folder).work("worker")
        assert work is not None and work.lanes == ("worker 0",)
        assert work.parts["fetch"] and work.parts["collate"]
        assert ("pack" in work.parts) == (cls is DataLoader)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=profile_alone, args=(tmp_path / "alone",))
    process.start()
    process.join()
    assert process.exitcode == 0 and len(seen(tmp_path / "alone").steps) == 2
    SERVER._stop()  # another one has no variable of an ended profile


def test_a_prefetcher_has_a_lane_of_its_own(tmp_path):
    with (
        pyparallel.profile(tmp_path, steps=5, warmup=0),
        PreDataLoader([torch.ones(1)] * 9) as ahead,
    ):
        assert loop(ahead, collated=False) == 9
    summary = seen(tmp_path)
    assert next(iter(summary.lanes)) == "loop"
    assert summary.record.loaders[0]["name"] == "PreDataLoader"
    fetches = [e for e in summary.record.events if e.kind == "fetch"]
    assert fetches and {event.lane for event in fetches} == {"prefetch"}
    # Batches that the loop collates itself are input, too.
    assert summary.mean["collate"] > 0 and summary.mean["copy"] > 0


def test_a_validation_between_epochs_is_another_loader(tmp_path):
    train, val = (TorchLoader(range(n)) for n in (8, 4))
    with pyparallel.profile(tmp_path, steps=12, warmup=0):
        for _ in range(2):
            sum(1 for _ in train)
            sum(1 for _ in val)
    summary = seen(tmp_path)
    assert summary.loader == 1 and len(summary.steps) == 12 and not summary.interrupted
    assert [step.is_first for step in summary.steps].count(True) == 2


def test_a_block_may_change_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])  # as in an embedded Python
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with pyparallel.profile("report", steps=2, warmup=0) as found:
        os.chdir("other")
        sum(1 for _ in TorchLoader(range(4)))
    assert found.files[0] == tmp_path / "report" / "profile.html"
    assert found.files[0].exists()


def test_reports_of_one_rank_have_different_names(tmp_path):
    records = [dataclasses.replace(steady(), rank=rank) for rank in (0, 0, 1, None)]
    pages = [each.files[0].name for each in report.write(records, tmp_path)]
    names = ["profile-0", "profile-1", "profile-rank1", "profile-3"]
    assert pages == [f"{name}.html" for name in names]
    text = (tmp_path / "profile-rank1.html").read_text()
    assert f"pyparallel profile --from {tmp_path}/profile-rank1.json</code>" in text


def test_an_error_of_the_charts_keeps_all_records(tmp_path, monkeypatch):
    def draw(_):
        raise RuntimeError("no font")

    monkeypatch.setitem(sys.modules, CHARTS, types.SimpleNamespace(draw=draw))
    records = [dataclasses.replace(steady(), rank=rank) for rank in (0, 1)]
    with pytest.raises(RuntimeError, match=r"^no font$"):
        report.write(records, tmp_path)
    for record in records:
        text = (tmp_path / f"profile-rank{record.rank}.json").read_text()
        assert Record.from_json(text) == record


def test_a_freed_dataset_is_not_the_next_one(tmp_path):
    with pyparallel.profile(tmp_path, steps=8, warmup=0):
        for number in range(2, 6):  # CPython reuses the id of the freed list
            sum(1 for _ in TorchLoader([0] * number))
    assert len(seen(tmp_path).record.loaders) == 4


KEEP_ITERATOR = "Make the iterator once: next(iter(loader)) starts the loader anew"
KEEP_LOADER = "Make the loader once, before the loop"


def restart(kind, make, steps):
    """Run steps that begin an iterator each, unless ``kind`` follows the advice."""
    loader, data = make(list(range(80))), list(range(80))
    batches = iter(make(data) if kind == "one iterator" else ())
    for _ in range(steps):
        if kind == "next(iter(loader))":
            next(iter(loader))
        elif kind == "break":
            for _batch in loader:
                break
        elif kind == "two batches":
            pair = iter(loader)
            _ = next(pair), next(pair)
        elif kind == "one batch":
            next(iter(make(data[:2])))
        elif kind == "new loader":
            next(iter(make(data)))
        elif kind == "new dataset":
            next(iter(make(list(data))))
        else:
            next(batches)


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (TorchLoader, 0),
        (DataLoader, 0),
        (functools.partial(DataLoader, num_workers=1), 1),
        (functools.partial(DataLoader, sample_seeds=True), 0),
        (lambda *options: PreDataLoader(TorchLoader(*options)), 0),
    ],
    ids=["torch", "ours", "workers", "seeds", "PreDataLoader"],
)
@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("next(iter(loader))", KEEP_ITERATOR),
        ("break", KEEP_ITERATOR),
        ("two batches", KEEP_ITERATOR),
        ("one batch", KEEP_LOADER),
        ("new loader", KEEP_LOADER),
        ("new dataset", KEEP_LOADER),
        ("one iterator", None),
    ],
)
def test_a_loop_that_starts_its_loader_anew_is_told_so(
    kind, title, make, workers, tmp_path
):
    steps = 6 if workers else 30
    with pyparallel.profile(tmp_path, steps=steps, warmup=1):
        restart(kind, lambda data: make(data, 2), steps + 10)
    found = seen(tmp_path)
    assert len(found.steps) == steps
    titles = [advice.title for advice in advise(found)]
    assert titles[0] == title if title else not {KEEP_ITERATOR, KEEP_LOADER} & {*titles}
    if title is not None:
        assert found.restarts >= steps // 3


def test_a_block_that_fails_has_its_report(tmp_path):
    with pytest.raises(KeyError, match="seven"), pyparallel.profile(tmp_path) as found:
        loop(TorchLoader(profile_script.Ragged(), 2, collate_fn=pairs()))
        raise KeyError("seven")
    assert len(seen(tmp_path).steps) == 27  # of 32, after five to warm up
    assert found.files


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Python cannot set its traceback."""

    index: int = 3


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise FrozenError
        return index


@pytest.mark.parametrize("cls", [TorchLoader, DataLoader])
@pytest.mark.parametrize("collates", [False, True])
def test_errors_stay_as_they_are(tmp_path, cls, collates):
    def collate_fn(samples):
        if 3 in samples:
            raise FrozenError
        return samples

    data = range(9) if collates else Failing()
    with pyparallel.profile(tmp_path, warmup=0), pytest.raises(FrozenError):
        list(cls(data, collate_fn=collate_fn))


def test_a_block_without_steps_is_reported(tmp_path):
    message = (
        "^profile: the block must contain at least two steps, but none was recorded. "
        "Iterate over a loader of torch or pyparallel in the block.$"
    )
    with pytest.raises(RuntimeError, match=message), pyparallel.profile(tmp_path / "x"):
        pass
    assert not (tmp_path / "x").exists()


def test_one_profile_at_a_time(tmp_path):
    message = (
        "^profile: profiles of a process must not overlap, but one is active: an outer "
        "block, or the command pyparallel profile. Remove one of them.$"
    )
    with pyparallel.profile(tmp_path / "outer"):
        loop(TorchLoader(profile_script.Ragged(), 2, collate_fn=pairs()))
        with pytest.raises(RuntimeError, match=message), pyparallel.profile(tmp_path):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["outer"]


@pytest.mark.parametrize("name", ["steps", "warmup"])
def test_numbers_of_steps_are_checked(name, tmp_path):
    with pytest.raises(TypeError, match=f"profile: {name} must be"):
        pyparallel.profile(tmp_path, **{name: "4"}).__enter__()
    with pytest.raises(ValueError, match=f"profile: {name} must be"):
        pyparallel.profile(tmp_path, **{name: -1}).__enter__()


def test_a_step_ends_when_a_device_in_use_has_done_its_work(tmp_path, monkeypatch):
    calls: list[None] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append(None))
    loader = TorchLoader(range(8))
    for is_in_use, wanted, count in (
        (True, True, 9),
        (False, True, 0),
        (True, False, 0),
    ):
        calls.clear()
        module = type("Device", (), {"get_device_name": lambda: "Imagined 9"})
        monkeypatch.setattr(torch, "get_device_module", lambda _, m=module: m)
        monkeypatch.setattr(
            recorder,
            "initialised_device",
            lambda on=is_in_use: "imagined" if on else None,
        )
        with pyparallel.profile(tmp_path, warmup=0, synchronize=wanted):
            assert sum(1 for _ in loader) == 8
        assert len(calls) == count  # before each batch, and before the end
    assert seen(tmp_path).record.environment["device"] == "Imagined 9"
    assert "on the host" in (tmp_path / "profile.html").read_text()


# Commands.


def profiled(tmp_path: Path, *options: str, script: tuple[str, ...]) -> int:
    return command.main(["--out", str(tmp_path / "out"), *options, "--", *script])


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    package = str(Path(pyparallel.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", python_path(package))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def python(how: str) -> tuple[str, ...]:
    return sys.executable, "-W", "error", str(SCRIPT), how


@pytest.mark.slow
def test_a_script_is_ended_after_its_steps_also_with_spawned_workers(tmp_path, capfd):
    options = ("--steps", "4", "--warmup", "1")
    assert profiled(tmp_path, *options, script=python("spawn")) == 0
    out, err = capfd.readouterr()
    assert "to its end" not in out and "Traceback" not in err
    assert err.startswith("profile_script.py: 4 steps after 1 to warm up, ")
    summary = seen(tmp_path / "out")
    assert len(summary.steps) == 4 and summary.record.exit_code == 0
    names = [loader["name"] for loader in summary.record.loaders]
    assert names == ["PreDataLoader"]
    # A prefetcher's thread, and a worker that imported everything anew.
    lanes = {event.lane for event in summary.record.events}
    assert lanes == {"loop", "prefetch", "worker 0"}
    collates = [e for e in summary.record.events if e.kind == "collate"]
    assert {(e.lane, e.stacked_nbytes, e.padding_nbytes) for e in collates} == {
        ("worker 0", 24, 8)
    }


@pytest.mark.slow
def test_a_script_that_is_killed_is_reported_as_far_as_it_came(tmp_path, capfd):
    assert profiled(tmp_path, "--warmup", "0", script=python("killed")) == 128 + 9
    summary = seen(tmp_path / "out")
    # Of five batches the last one was not followed by another.
    assert len(summary.steps) == 4 and summary.record.exit_code == 137
    assert "ended with exit code 137" in (tmp_path / "out/profile.html").read_text()


@pytest.mark.slow
def test_a_script_may_run_to_its_end_and_keeps_its_exit_code(tmp_path, capfd):
    options = ("--keep-going", "--steps", "2")
    assert profiled(tmp_path, *options, script=python("fails")) == 1
    out, err = capfd.readouterr()
    assert "to its end" in out and "ValueError: nine of ten" in err
    assert len(seen(tmp_path / "out").steps) == 2


@pytest.mark.slow
def test_every_rank_is_reported(tmp_path, capfd):
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    script = (*run, "--nproc_per_node=2", str(SCRIPT), "ranks")
    code, err = (
        profiled(tmp_path, "--steps", "3", script=script),
        capfd.readouterr().err,
    )
    assert code == 0, err
    for rank in (0, 1):
        assert f"profile_script.py, rank {rank} of 2: 3 steps" in err
        summary = seen(tmp_path / "out", f"profile-rank{rank}")
        assert (summary.record.rank, summary.record.world_size) == (rank, 2)
        assert len(summary.steps) == 3


TORCH_ONLY = """
import sys, time
from torch.utils.data import DataLoader, Dataset

class Sleeping(Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        time.sleep(0.1)
        return index

if __name__ == "__main__":
    options = {"multiprocessing_context": sys.argv[1]} if sys.argv[1:] else {}
    for batch in DataLoader(Sleeping(), num_workers=len(options), **options):
        assert "pyparallel" in sys.modules
    import helper
    print("to its end", helper.__name__)
"""
BESIDE = """
import sys
assert "torch" not in sys.modules and "pyparallel" not in sys.modules
print("another sitecustomize")
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["", "fork", "forkserver", "spawn"])
def test_a_script_that_never_imports_the_package_is_profiled(tmp_path, capfd, start):
    path = tmp_path / "torch_only.py"
    path.write_text(TORCH_ONLY, encoding="utf-8")
    (tmp_path / "helper.py").write_text("", encoding="utf-8")
    options = ("--steps", "6", "--warmup", "1", "--keep-going")
    script = (sys.executable, "-W", "error", str(path), *filter(None, [start]))
    assert profiled(tmp_path, *options, script=script) == 0
    assert capfd.readouterr().out == "to its end helper\n"
    summary = seen(tmp_path / "out")
    assert summary.bottleneck == "input-bound" and len(summary.steps) == 6
    lane = "worker 0" if start else "loop"
    fetches = [e for e in summary.record.events if e.kind == "fetch"]
    assert {event.lane for event in fetches} == {lane}
    assert all(event.end - event.start >= 100e6 for event in fetches)
    assert all(0 < event.cpu < 50e6 for event in fetches[1:])
    (first, *_) = advise(summary)
    if start:
        numbers = [event.batch for event in fetches]
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
        assert summary.lateness is not None and max(summary.lateness) > 0
        assert first.title.startswith("Use more workers: num_workers=")
    else:
        assert first.title.startswith("Make batches in workers: num_workers=")


def test_another_sitecustomize_is_imported_too(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text(BESIDE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys, sitecustomize; print(sitecustomize.__file__)\n"
    code += "print(any('startup' in path for path in sys.path))"
    assert profiled(tmp_path, script=(sys.executable, "-c", code)) == 1
    out, err = capfd.readouterr()
    assert out == f"another sitecustomize\n{tmp_path}/sitecustomize.py\nFalse\n"
    assert err == NOTHING


HIDDEN = """
import os, sys
from torch.utils.data import DataLoader
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f)]
sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, "pyparallel"))]
paths = list(sys.path)
assert [int(batch) for batch in DataLoader(range(4))] == [0, 1, 2, 3]
assert sys.path == paths
print(sys.modules["pyparallel"].__file__)
"""


@pytest.mark.slow
def test_the_package_of_the_command_is_used_where_there_is_no_other(tmp_path, capfd):
    path = tmp_path / "train.py"
    path.write_text(HIDDEN, encoding="utf-8")
    script = (sys.executable, str(path))
    assert profiled(tmp_path, "--keep-going", script=script) == 0
    assert capfd.readouterr().out == f"{pyparallel.__file__}\n"
    assert len(seen(tmp_path / "out").steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_workers_use_the_package_of_the_command_too(tmp_path, monkeypatch, start):
    monkeypatch.delenv("PYTHONPATH")
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = (tmp_path / "env").glob("lib/*/site-packages")
    # Python reads no *.pth files in a folder that such a file names.
    folders = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    (packages / "others.pth").write_text("\n".join(folders), encoding="utf-8")
    path = tmp_path / "torch_only.py"
    second = (
        "    [*DataLoader(Sleeping(), num_workers=1, **options)]\n    import helper"
    )
    text = TORCH_ONLY.replace("    import helper", second)
    path.write_text(text, encoding="utf-8")
    (tmp_path / "helper.py").write_text("", encoding="utf-8")
    script = (str(tmp_path / "env/bin/python"), str(path), start)
    assert profiled(tmp_path, "--keep-going", script=script) == 0
    work = seen(tmp_path / "out").work("worker")
    assert work is not None and work.lanes == ("worker 0",)


@pytest.mark.slow
def test_a_script_whose_python_lacks_the_package_is_reported(tmp_path, capfd):
    (tmp_path / "pyparallel.py").write_text("raise ImportError('not mine')")
    path = tmp_path / "train.py"
    path.write_text("from torch.utils.data import DataLoader\n[*DataLoader([1, 2])]\n")
    assert profiled(tmp_path, script=(sys.executable, str(path))) == 1
    assert capfd.readouterr().err == (
        "pyparallel profile: pyparallel must be installed for the Python of the "
        f"script, but cannot be imported: {sys.executable}: ImportError: not mine\n"
    )


LATE = (
    "pyparallel profile: the script must begin its first step within 0.1 s, but did "
    "not. {} If it starts slowly, increase --patience. Otherwise iterate over a loader "
    "of torch, torchdata or pyparallel, or call collate, scatter or a wrapper.\n"
)


def test_a_script_without_a_loader_is_given_up(tmp_path, capfd):
    script = (sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(60)")
    assert profiled(tmp_path, "--patience", "0.1", script=script) == 1
    assert capfd.readouterr().err == LATE.format("It was stopped.")


@pytest.mark.parametrize("ignores", [False, True])
def test_an_abandoned_script_is_ended(tmp_path, monkeypatch, ignores):
    code = "import signal, sys\n"
    code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignores else ""
    code += "print('ready', flush=True)\nsys.stdin.read()"
    monkeypatch.setattr(command, "_GRACE", 0.1 if ignores else 100.0)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        settings = Settings(str(tmp_path), 1, 0, leave=True)
        assert command._wait(process, settings, 0.1) == command._STOPPED
    number = signal.SIGKILL if ignores else signal.SIGTERM
    assert process.returncode == -number


ENDLESS = (
    "pyparallel profile: the script must end after its recorded steps, but still runs. "
    "Its loop is in a thread or a process pool, or it catches SystemExit. Press Ctrl-C "
    "to get the report now.\n"
)


@pytest.mark.parametrize(
    ("files", "leave", "message"),
    [
        (["12-0.jsonl"], True, ""),
        (["12-0.jsonl", "12.stopped"], True, ENDLESS),
        (["12-0.jsonl", "12.stopped"], False, ""),
        ([], False, LATE.format("It continues.")),
    ],
)
def test_a_script_with_steps_or_keep_going_is_waited_for(
    tmp_path, capfd, files, leave, message
):
    class Process:
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if timeout is not None and self.waits < 4:
                raise subprocess.TimeoutExpired("train.py", timeout)
            return 7

    for name in files:
        (tmp_path / name).touch()
    process = Process()
    assert command._wait(process, Settings(str(tmp_path), 1, 0, leave=leave), 0.1) == 7
    assert capfd.readouterr().err == message


NOTHING = (
    "pyparallel profile: the script must run at least two steps, but none was "
    "recorded. Iterate over a loader of torch, torchdata or pyparallel, or call "
    "collate, scatter or a wrapper. Start Python without -E, -I and -S.\n"
)


def test_an_invalid_program_is_an_error(tmp_path, capfd):
    assert profiled(tmp_path, script=(str(tmp_path / "train.py"),)) == 127
    assert capfd.readouterr().err == (
        f"pyparallel profile: the command must begin with a program, but "
        f"'{tmp_path}/train.py' cannot be started: No such file or directory. Begin it "
        "with python or torchrun.\n"
    )


def test_a_record_that_is_no_text_is_an_error(tmp_path, capsys):
    (tmp_path / "profile.png").write_bytes(b"\x89PNG")
    assert command.main(["--from", str(tmp_path / "profile.png")]) == 2
    message = "pyparallel profile: 'utf-8' codec can't decode byte 0x89 in position 0"
    assert capsys.readouterr().err.startswith(message)


def test_an_impossible_folder_is_an_error_before_the_script(tmp_path, capfd):
    (tmp_path / "out").touch()
    assert profiled(tmp_path, script=(sys.executable, "-c", "print('ran')")) == 2
    message = f"pyparallel profile: [Errno 17] File exists: '{tmp_path}/out'\n"
    assert capfd.readouterr() == ("", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a command after --, for example: -- python train.py"),
        (["--steps", "0", "--", "x"], "must be an integer of at least 1, but is '0'"),
        (["--patience", "0", "--", "x"], "must be a number of seconds above 0, but is"),
        (["--patience", "x", "--", "x"], "must be a number of seconds above 0, but is"),
        (["train.py"], "unrecognized arguments: train.py"),
        (["--from", "x.json", "--", "python"], "give a command after --"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_a_record_is_drawn_once_more(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, CHARTS)
    first, again = tmp_path / "first", tmp_path / "again"
    with pyparallel.profile(first, warmup=0) as found:
        loop(TorchLoader(profile_script.Ragged(), 2, collate_fn=pairs()))
    record = str(first / "profile.json")
    assert command.main(["--from", record, "--out", str(again)]) == 0
    assert capsys.readouterr().out == found.text.replace(str(first), str(again)) + "\n"
    for name in ("profile.html", "profile.json", "profile.trace.json"):
        assert (again / name).read_bytes() == (first / name).read_bytes()
    renamed = (first / "profile.json").rename(first / "before.json")
    assert command.main(["--from", str(renamed), "--out", str(again)]) == 0
    assert (again / "before.html").exists()
    capsys.readouterr()
    assert command.main(["--from", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_that_ends_the_command_ends_the_script(tmp_path):
    code = "import time; print('ready', flush=True); time.sleep(60)"
    ours = (sys.executable, "-m", "pyparallel", "profile", "--out", str(tmp_path))
    with subprocess.Popen(
        [*ours, "--", sys.executable, "-S", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGTERM, NOTHING)


EARLY = """
import os, signal, subprocess, sys
from pyparallel.profiler import command
class Popen(subprocess.Popen):
    def __init__(self, *args, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*args, **settings)
subprocess.Popen = Popen
script = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
sys.exit(command.main(["--out", {out!r}, "--", *script]))
"""


def test_a_signal_before_the_script_begins_ends_both(tmp_path):
    path = str(Path(pyparallel.__file__).parents[1])
    done = forkserver.run(EARLY.format(out=str(tmp_path)), [path])
    assert done == (128 + signal.SIGTERM, NOTHING)


def test_the_script_of_the_documentation_can_be_profiled(tmp_path, monkeypatch):
    page = ROOT / "docs" / "profile-command.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path), "--blurs", "1", "--workers", "0"])
    settings = Settings(str(tmp_path), 2, 0, leave=True)
    with pytest.raises(SystemExit) as ended, hooks.recording(settings):
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0, "its next step ends it, as sys.exit()"
    (written,) = report.write(report.gather(tmp_path, 0), tmp_path / "out")
    assert report.text(written).startswith("train.py: 2 steps, ")
    assert written.summary.record.loaders[0]["batch_size"] == 8
