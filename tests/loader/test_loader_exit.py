"""An interrupt of a loader, and loaders that lack a resource."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
STATEFUL = """
class Stream(torch.utils.data.IterableDataset):
    at = 0

    def __iter__(self):
        while self.at < 8:
            self.at += 1
            yield torch.full((1 << 20,), self.at)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

loader = DataLoader(Stream(), num_workers=2)
batches = iter(loader)
states = [loader.state_dict() for batch in batches]
loader.load_state_dict(states[7])
assert len(list(loader)) == 8
print("done")
"""
LIMITED = """
import warnings
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert len(list(DataLoader(Numbers(8), num_workers=2))) == 8
    try:
        list(DataLoader(Numbers(8, (1 << 20,)), num_workers=2))
    except RuntimeError as error:
        print(caught[0].message, error)
"""
SMALL_SHM = "mount -t tmpfs -o size=64M tmpfs /dev/shm || exit 99"
FULL_SHM = f"{SMALL_SHM}; cat /dev/zero >/dev/shm/full 2>/dev/null"


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


@pytest.mark.usefixtures("may_mount")
def test_a_full_dev_shm_is_enough() -> None:
    full = ["unshare", "-m", "bash", "-c", f'{FULL_SHM}; exec "$@"', "bash"]
    for ended in interpreters.run(START, [BIG, STATEFUL], "-W", "error", within=full):
        assert (ended.code, ended.out) == (0, "done\n"), ended.err


def test_a_limit_of_the_size_of_files_is_an_error_and_not_a_signal() -> None:
    (ended,) = interpreters.run(START, [LIMITED], "-W", "error")
    assert ended.code == 0, ended.err
    assert "[PP207] DataLoader: the ring could not be allocated" in ended.out
    assert "a batch must get 4194304 bytes of shared memory, but " in ended.out
    assert ended.out.count("the size of a file is limited to 1048576 bytes") == 2


#: A program without stdin, stdout and stderr. Objects with a descriptor are sent both
#: ways. An iterator whose answers have arrived is kept, with all of its descriptors.
CLOSED = """
import fcntl, multiprocessing
from tests.support.loader.loader_sets import standard_stream
out = os.fdopen(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 9), "w")
sys.stdin = sys.stdout = sys.stderr = None
os.closerange(0, 3)
find_all = lambda: {standard_stream(i) for i in range(3)}
options = {"batch_size": None, "num_workers": 1, **OPTIONS}
names = {*DataLoader(Making(standard_stream, 3), **options)}
kept = iter(DataLoader(Making(standard_stream, 9), **options))
next(kept)
print(names, find_all(), file=out, flush=True)
"""
PIPES = """
pipe = lambda i: multiprocessing.Pipe()[0]
pipes = [iter(DataLoader(Making(pipe, 9), **options)) for _ in range(3)]
ends = [next(each) for each in pipes]
time.sleep(0.2)
print({end.fileno() > 2 for end in ends}, find_all(), file=out, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_descriptor_gets_the_number_of_a_closed_stream() -> None:
    forks = CLOSED.replace("OPTIONS", "{}") + PIPES
    spawns = CLOSED.replace("OPTIONS", "{'multiprocessing_context': 'spawn'}")
    threads = CLOSED.replace("OPTIONS", "{'worker_method': 'thread'}")
    opened, none = str({"/dev/null"}), str({""})
    found = interpreters.run(START, [forks, spawns, threads])
    assert [(ended.out, ended.err) for ended in found] == [
        (f"{opened} {none}\n{ {True} } {none}\n", ""),
        (f"{opened} {none}\n", ""),
        (f"{none} {none}\n", ""),
    ]
