"""The exit of processes with loaders, and loaders that lack a resource."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest
from loader_processes import finish, left, run, start

pytestmark = [pytest.mark.one_backend, pytest.mark.slow, pytest.mark.timeout(120)]

LIVE = """
loader = DataLoader(
    Numbers(50), num_workers=2, persistent_workers={persistent}, collate_fn=None
)
batches = iter(loader)
kept = [next(batches) for _ in range(3)]
view = kept[1].numpy()
row = kept[2][0]
{end}
"""


def test_the_interpreter_exits_with_live_iterators_and_batches() -> None:
    cases = [
        ("", False, 0),
        ("", True, 0),
        ("sys.exit(5)", True, 5),
        ("1 / 0", False, 1),
    ]
    started = [
        (start(LIVE.format(persistent=persistent, end=end)), code)
        for end, persistent, code in cases
    ]
    for process, code in started:
        rc, _, err = finish(process)
        assert rc == code
        if code == 1:
            assert err.rstrip().endswith("ZeroDivisionError: division by zero")
            assert err.count("Traceback") == 1
        else:
            assert err == ""


WAITING = """
loader = DataLoader(
    Making(time.sleep), num_workers=1, sampler=[0, 30], collate_fn=only
)
batches = iter(loader)
next(batches)
print("waiting", flush=True)
next(batches)
"""


def test_an_interrupt_ends_a_loader_that_waits() -> None:
    process = start(WAITING)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in err
    assert time.monotonic() - started < 20
    assert left(process.pid) == []


BIG = """
loader = DataLoader(Numbers(8, (4 << 20,)), num_workers=2)
kept = []
for i, batch in enumerate(loader):
    assert batch.unique().tolist() == [i]
    kept = [*kept[-4:], batch]
print("done")
"""
SMALL_SHM = "mount -t tmpfs -o size=64M tmpfs /dev/shm || exit 99"


@pytest.fixture(scope="module")
def may_mount() -> None:
    probe = ["unshare", "-m", "bash", "-c", SMALL_SHM]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("needs unshare, which this system does not have")
    if done.returncode:
        pytest.skip("needs the right to mount a small /dev/shm (unshare -m)")


@pytest.mark.usefixtures("may_mount")
def test_a_small_dev_shm_is_enough() -> None:
    small: dict[str, Any] = {"before": SMALL_SHM, "within": ("unshare", "-m")}
    theirs = start(BIG, "torch", **small)
    rc, out, err = finish(start(BIG, **small))
    assert (rc, out) == (0, "done\n"), err
    rc, out, err = finish(theirs)
    assert (rc, out) == (1, "") and "shared memory" in err


MANY = """
import warnings; warnings.simplefilter("ignore")
def make(i):
    return [torch.full((3,), i) for _ in range(112)]
rings = [{"ring_slabs": 50}, {"ring_slabs": 2}]
for options in rings:
    loader = DataLoader(Making(make, 40), num_workers=1, collate_fn=only, **options)
    batches = list(loader)
    assert [batch[111][0].item() for batch in batches] == list(range(40))
print("done")
"""


def test_few_descriptors_are_enough_for_many_tensors() -> None:
    few = "ulimit -n 256"
    rc, out, err = run(MANY, before=few)  # torch's loader raises here, or hangs
    assert (rc, out) == (0, "done\n"), err


EXHAUSTED = """
import warnings; warnings.simplefilter("ignore")
loader = DataLoader(Numbers(6), num_workers=1, ring_slabs=1)
batches = iter(loader)
kept = [next(batches)]
time.sleep(0.3)
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    kept += list(batches)
except (RuntimeError, OSError) as error:
    message = str(error)
for file in files:
    os.close(file)
print(message)
"""


def test_without_any_descriptor_the_error_names_the_limit() -> None:
    rc, out, err = run(EXHAUSTED, before="ulimit -n 64")
    assert rc == 0, err
    assert "Too many open files" in out or "ulimit -n" in out
