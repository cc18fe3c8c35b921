"""The doctor's self-test in two real processes: success and failures."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from pyparallel.doctor import self_test
from pyparallel.doctor.self_test import Failure, two_processes
from tests.support.processes import forkserver
from tests.support.repository.folders import python_path

pytestmark = pytest.mark.one_backend

FORK = multiprocessing.get_context("fork")
PACKAGE = str(Path(self_test.__file__).parents[2])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Set a folder for temporary files, which must be empty at the end."""
    # multiprocessing keeps its folder, and this path is too long for its sockets. A
    # fork server keeps the folder that torch 2.8 creates at its import.
    multiprocessing.util.get_temp_dir()
    multiprocessing.forkserver.ensure_running()
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    assert list(path.iterdir()) == []
    assert multiprocessing.active_children() == []


@pytest.fixture
def forked(monkeypatch, folder):
    """Fork the ranks: they start fast, and see the changes of a test."""
    monkeypatch.setattr(self_test, "_START_METHOD", "fork")


@pytest.fixture
def start(tmp_path):
    """Return a function that forks two ranks, which are killed at the end."""
    ranks = []

    def run(target):
        for rank in range(2):
            ranks.append(FORK.Process(target=target, args=(rank,)))
            ranks[-1].start()
        return ranks

    yield run
    for rank in ranks:
        rank.kill()
        rank.join()


@pytest.mark.slow
def test_the_installed_script_passes_in_any_folder(tmp_path, folder):
    script = tmp_path / "pyparallel"  # as pip writes it, but with longer limits
    script.write_text(
        "import sys\n"
        "from pyparallel.doctor import command, self_test\n"
        "command.SECONDS, self_test.SECONDS = 110.0, 100.0\n"
        "from pyparallel.__main__ import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    env = os.environ | {"PYTHONPATH": python_path(PACKAGE)}
    done = subprocess.run(
        [sys.executable, str(script), "doctor", "--json"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), done.stdout
    assert found["bandwidth"]["memcpy_gb_per_s"] > 0
    both = found["self_test"]["two_processes"]
    assert both.keys() == {"passed", "took_seconds", "error", "output"}
    assert (both["passed"], both["error"], both["output"]) == (True, None, [])


#: Print the failure of two processes with a wrong gradient, in a new process. A process
#: with threads of autograd, which fake tensors of CUDA start, cannot fork.
WRONG_GRADIENT = """
import json
from pyparallel.doctor import self_test

self_test._START_METHOD, self_test._GRADIENT = "fork", 3.0
failure = self_test.two_processes(200)
print(json.dumps([failure.text, failure.output]))
"""


def test_a_rank_has_its_output_without_a_stderr(tmp_path):
    code = (
        "import sys; from pyparallel.doctor import self_test\n"
        "self_test._train = lambda *_: print('trained', file=sys.stderr)\n"
        "self_test.run_rank(0, sys.argv[1], 1.0)"
    )
    shell = ("sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", code)
    env = os.environ | {"PYTHONPATH": python_path(PACKAGE)}
    subprocess.run([*shell, str(tmp_path)], env=env, check=True, timeout=120)
    assert (tmp_path / "output-0").read_text() == "trained\n"


def test_a_wrong_gradient_is_a_failure_of_the_rank_that_found_it(folder):
    code, printed = forkserver.run(WRONG_GRADIENT, [PACKAGE], 220)
    assert code == 0, printed
    text, output = json.loads(printed)
    assert text in [
        f"rank {rank} ended with exit code 1 while comparing the gradients: "
        "ValueError: the gradients of all ranks must be 3.0, but are [4.5, 4.5]."
        for rank in (0, 1)
    ]
    assert "Traceback (most recent call last):" in output


def test_a_rank_that_hangs_is_a_failure_with_its_stage(tmp_path, start):
    ready = [FORK.Event(), FORK.Event()]

    def hang(rank):
        (tmp_path / f"output-{rank}").write_text(f"up {rank}\n")
        if rank:
            (tmp_path / "stage-1").write_text("joining the group")
        ready[rank].set()
        signal.pause()

    ranks = start(hang)
    assert all(event.wait(100) for event in ready)
    assert self_test._wait(ranks, tmp_path, time.monotonic(), 1.5) == Failure(
        "two processes must finish within 1.5 s, but rank 0 was importing pyparallel "
        "and rank 1 was joining the group. Check whether the machine is busy, and "
        "whether programs can connect on its loopback interface.",
        ["up 0", "up 1"],
        ("importing pyparallel", "joining the group"),
    )


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "rank 1 was killed by signal 9 (Killed) while importing pyparallel: no "
            "output",
        ),
        (
            lambda: os._exit(3),
            "rank 1 ended with exit code 3 while importing pyparallel: no output",
        ),
    ],
    ids=["killed", "exit code"],
)
@pytest.mark.parametrize("other", ["passes", "runs"])
def test_a_rank_that_ends_early_is_a_failure(tmp_path, start, end, text, other):
    def run(rank):
        if rank:
            end()
        elif other == "runs":
            signal.pause()
        os._exit(0)

    found = self_test._wait(start(run), tmp_path, time.monotonic() + 200, 200)
    assert found == Failure(text, [])


def test_two_ranks_that_end_well_have_passed(tmp_path, start):
    ranks = start(lambda _: os._exit(0))
    assert self_test._wait(ranks, tmp_path, time.monotonic() + 200, 200) is None


def test_processes_that_cannot_be_started_are_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    failure = two_processes()
    assert failure is not None and failure.output == []
    assert failure.text.startswith(
        "the processes cannot be started: [Errno 2] No such file or directory: "
        f"'{tmp_path}/missing/pyparallel-doctor-"
    )


def test_an_interrupt_ends_the_processes(monkeypatch, forked):
    started = []

    def hang(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()

    def interrupted(ranks, *_):
        started.extend(ranks)
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "run_rank", hang)
    monkeypatch.setattr(self_test, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two_processes()
    assert [rank.exitcode for rank in started] == [-signal.SIGKILL] * 2


def _run_and_send_pids(pipe) -> None:
    def train(rank, folder, _):
        (folder / f"ready-{rank}").touch()
        while True:
            signal.pause()

    def wait(ranks, folder, *_):
        while len(list(folder.glob("ready-*"))) < 2:
            time.sleep(0.01)
        pipe.send([rank.pid for rank in ranks])
        ranks[0].join()

    self_test._START_METHOD, self_test._train, self_test._wait = "fork", train, wait
    two_processes(600)


@pytest.mark.slow
def test_ranks_end_when_their_parent_is_killed(folder):
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    parent = context.Process(target=_run_and_send_pids, args=(there,))
    parent.start()
    ranks = [psutil.Process(pid) for pid in here.recv()]
    parent.kill()
    parent.join()
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert alive == []
    for left in folder.iterdir():  # by the killed process, also in imports of torch
        shutil.rmtree(left)


def test_the_loopback_interface_is_found_by_its_type(tmp_path):
    for name, number in {"eth0": "1", "lo0": "772", "odd": "7720"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{number}\n")
    assert self_test.loopback_interface(tmp_path) == "lo0"
    assert self_test.loopback_interface(tmp_path / "eth0") is None
