"""The doctor's test in two real processes: that it passes, and how it fails."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from pyparallel.doctor import _two_processes
from pyparallel.doctor._two_processes import Failure, two_processes

pytestmark = pytest.mark.one_backend

#: Two lines that a rank may begin with, instead of all that a real one does.
START = "import os, sys; rank = int(sys.argv[2])\n"
STAGE = "print('stage: joining the group', flush=True)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for temporary files, in which nothing may be left."""
    where = tmp_path / "temporary"
    where.mkdir()
    multiprocessing.util.get_temp_dir()  # it is kept, and this path is too long for it
    monkeypatch.setenv("TMPDIR", str(where))
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    yield where
    left = [path.name for path in where.iterdir()]
    # A fork server, if a test has started one, makes its own.
    assert [name for name in left if not name.startswith("pymp-")] == []
    assert ranks_of(where) == []


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that were given a folder in this one."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(
            f"{folder}/pyparallel-doctor-" in a for a in process.info["cmdline"] or ()
        ):
            found.append(process)
    return found


@pytest.fixture
def ranks_run(monkeypatch, folder):
    """Let ranks run another program; the time begins when each has printed so much."""
    watch = _two_processes._watch

    def run(
        code: str, seconds: float = 200, printed: tuple[int, int] = (0, 0)
    ) -> Failure | None:
        def watch_later(ranks, deadline, limit):
            for rank, least in zip(ranks, printed, strict=True):
                while rank._printed.count(b"\n") < least:
                    assert rank.read()
            return watch(ranks, max(deadline, time.monotonic() + limit), limit)

        monkeypatch.setattr(_two_processes, "_CODE", START + code)
        monkeypatch.setattr(_two_processes, "_watch", watch_later)
        return two_processes(seconds)

    return run


def test_the_installed_script_passes_from_any_folder(tmp_path, folder):
    script = tmp_path / "pyparallel"  # as pip writes it, but for its patience
    script.write_text(
        "import sys\n"
        "from pyparallel.doctor import _two_processes, command\n"
        "command.SECONDS, _two_processes.SECONDS = 110.0, 100.0\n"
        "from pyparallel.__main__ import main\nsys.exit(main())\n"
    )
    package = Path(_two_processes.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, str(script), "doctor", "--json"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"]) == (0, True), done.stdout
    assert told["bandwidth"]["memcpy_gb_per_s"] > 0
    both = told["self_test"]["two_processes"]
    assert both.keys() == {"passed", "took_seconds", "error", "output"}
    assert (both["passed"], both["error"], both["output"]) == (True, None, [])


def test_a_wrong_gradient_is_told_by_the_rank_that_found_it(ranks_run):
    failure = ranks_run(
        "import json; sys.path[:] = json.loads(sys.argv[1])\n"
        "from pyparallel.doctor import _rank; _rank._GRADIENT = 3.0\n"
        "_rank.run(rank, sys.argv[3], float(sys.argv[4]))"
    )
    assert failure.text in [
        f"rank {rank} ended with exit code 1 while comparing the gradients: "
        "ValueError: the gradients of all ranks must be 3.0, but are [4.5, 4.5]."
        for rank in (0, 1)
    ]
    assert "Traceback (most recent call last):" in failure.output


def test_a_rank_that_hangs_is_killed_and_its_stage_is_told(ranks_run):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    hang = f"{ignore}print('up', rank, flush=True)\nif rank:\n    {STAGE}signal.pause()"
    assert ranks_run(hang, 1.5, printed=(1, 2)) == Failure(
        "two processes must be done in 1.5 s, but rank 0 was importing pyparallel and "
        "rank 1 was joining the group. Look whether the machine is busy, and whether "
        "programs may connect on its loopback interface.",
        ["up 0", "up 1"],
        ("importing pyparallel", "joining the group"),
    )


def test_a_rank_that_never_stops_printing_is_killed_too(ranks_run):
    code = "while True: print('again' * 99, flush=True)"
    failure = ranks_run(code, 0.5, printed=(10, 10))
    assert failure.text.startswith(
        "two processes must be done in 0.5 s, but rank 0 was"
    )
    assert len(failure.output) == 20 and failure.late == ("importing pyparallel",) * 2


def test_a_rank_that_is_killed_is_told_with_the_signal(ranks_run):
    code = "if rank:\n    os.kill(os.getpid(), 9)\nsys.stdin.read()"
    assert ranks_run(code) == Failure(
        "rank 1 was ended by signal 9 (Killed) while importing pyparallel: nothing "
        "printed",
        [],
    )


def test_a_rank_that_raises_is_told_with_its_last_line(ranks_run):
    failure = ranks_run(f"if rank: sys.stdin.read()\n{STAGE}raise OSError('no route')")
    assert failure.text == (
        "rank 0 ended with exit code 1 while joining the group: OSError: no route"
    )
    assert failure.output[0] == "Traceback (most recent call last):"


def test_a_rank_that_passes_while_the_other_fails_is_no_pass(ranks_run):
    code = (
        "import time; path = os.path.join(sys.argv[3], 'rank 0 has passed')\n"
        "while rank and not os.path.exists(path): time.sleep(0.01)\n"
        "print('passed', flush=True)\nif rank: sys.exit(3)\n"
        "open(path, 'w').close(); sys.stdin.read()"
    )
    # Both have said so: what comes after is no news, and nothing is left of it.
    assert ranks_run(code) is None
    code = "if rank: sys.exit(3)\nprint('passed', flush=True)\nsys.stdin.read()"
    assert ranks_run(code).text == (
        "rank 1 ended with exit code 3 while importing pyparallel: nothing printed"
    )


def test_a_process_that_cannot_be_started_is_told(monkeypatch, folder):
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert two_processes() == Failure(
        "the processes cannot be started: [Errno 2] No such file or directory: "
        f"'{folder}/python'.",
        [],
    )


def test_an_interrupt_ends_the_processes(monkeypatch, folder):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_two_processes, "_CODE", START + "sys.stdin.read()")
    monkeypatch.setattr(_two_processes, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two_processes()


def _run_and_tell(pipe) -> None:
    watch = _two_processes._watch

    def told(ranks, *rest):
        pipe.send([rank.process.pid for rank in ranks])
        return watch(ranks, *rest)

    _two_processes._watch = told
    two_processes(600)


def test_ranks_end_by_themselves_when_their_parent_is_killed(folder):
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    parent = context.Process(target=_run_and_tell, args=(there,))
    parent.start()
    ranks = [psutil.Process(pid) for pid in here.recv()]
    parent.kill()
    parent.join()
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert alive == []


def test_the_loopback_interface_is_found_by_its_kind(tmp_path):
    for name, kind in {"eth0": "1", "lo0": "772", "odd": "7720"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    assert _two_processes.loopback_interface(tmp_path) == "lo0"
    assert _two_processes.loopback_interface(tmp_path / "eth0") is None
