"""An interrupt of a loader, and loaders that lack a resource."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.support.loader.loader_processes import START, left, start
from tests.support.processes import interpreters

pytestmark = [pytest.mark.one_backend, pytest.mark.slow, pytest.mark.timeout(120)]

MANY = """
from tests.support.loader.loader_sets import many_tensors
import warnings; warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
rings = [{"ring_slabs": 50}, {"ring_slabs": 2}]
for options in rings:
    data = Making(many_tensors, 40)
    loader = DataLoader(data, num_workers=1, collate_fn=only, **options)
    batches = list(loader)
    assert [batch[111][0].item() for batch in batches] == list(range(40))
print("done")
"""
EXHAUSTED = """
import warnings; warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
loader = DataLoader(Numbers(6, (30_000,)), num_workers=1, ring_slabs=1)
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


def test_a_loader_needs_few_descriptors_and_names_their_limit() -> None:
    many, exhausted = interpreters.run(START, [MANY, EXHAUSTED], "-W", "error")
    # torch's loader raises with many tensors, or hangs.
    assert (many.code, many.out) == (0, "done\n"), many.err
    assert exhausted.code == 0, exhausted.err
    assert "Too many open files" in exhausted.out or "ulimit -n" in exhausted.out


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
    small = ["unshare", "-m", "bash", "-c", f'{SMALL_SHM}; exec "$@"', "bash"]
    scripts = [BIG, f"from torch.utils.data import DataLoader\n{BIG}"]
    ours, theirs = interpreters.run(START, scripts, "-W", "error", within=small)
    assert (ours.code, ours.out) == (0, "done\n"), ours.err
    assert (theirs.code, theirs.out) == (1, "") and "shared memory" in theirs.err
