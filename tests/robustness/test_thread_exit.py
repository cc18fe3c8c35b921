"""The interpreter ends beside threads in native code: daemons, workers of loaders."""

from __future__ import annotations

import signal

import pytest

from pyparallel import backend
from tests.support.processes import interpreters

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

#: An end, and the exit code of the process.
ENDS = {
    "pass": 0,
    "raise ValueError('on purpose')": 1,
    "sys.exit(5)": 5,
    "os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(30)": -signal.SIGINT,
}
# The thread wants the interpreter's lock back all the time, but seldom has it. It calls
# our operators alone: those of torch may abort the process here.
IMPORTS = """
import os, signal, sys, threading, types
import torch
from pyparallel import backend
"""
WORKING = """
torch.set_num_threads(1)
images = [torch.ones(3, 300 + i, 400, dtype=torch.uint8) for i in range(4)]
padded = torch.empty(4, 3, 303, 400, dtype=torch.uint8)
batch, levels = torch.empty(4, 3, 303, 400), [1.0] * 3
stream = types.SimpleNamespace(stream_id=0, device_index=-1, device_type=0)
slab, leaf = torch.ones(2, 64, dtype=torch.uint8)
plan = backend.plan_slab([leaf])
calls = {
    "pad_copy": lambda: backend.pad_copy(padded, images, bytes(1)),
    "image_batch": lambda: backend.image_batch(
        batch, images, None, levels, levels, levels, False, True
    ),
    "send": lambda: backend.send(slab, [leaf], plan, [], [], stream),
}
begun = threading.Event()
def run():
    while True:
        calls[work]()
        begun.set()
threading.Thread(target=run, daemon=True).start()
begun.wait()
"""


@pytest.mark.skipif(backend.name != "native", reason="pure Python is torch's operators")
def test_a_thread_in_native_code_does_not_abort_the_process() -> None:
    cases = [
        *((end, "pad_copy") for end in ENDS),
        ("pass", "image_batch"),
        ("pass", "send"),
    ]
    scripts = [f"work = {work!r}\n{WORKING}{end}" for end, work in cases]
    ended = interpreters.run(IMPORTS, scripts)
    for (end, _), (code, _, error) in zip(cases, ended, strict=True):
        assert code == ENDS[end], error
        assert "terminate" not in error


#: The places in which worker threads are at the exit, and the calls that they repeat.
PLACES = {
    "an operator of torch": ("__getitem__", "torch.rand(30_000).sort()"),
    "a library": ("__getitem__", "zlib.compress(text)"),
    "our operator": ("collate_fn", "pyparallel.pad_stack(images)"),
    "Python": ("collate_fn", "sum(range(30_000))"),
    "a wait for a task": ("", "None"),
}
FORK = """if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
#: More ends of a process whose loader has threads.
LOADER_ENDS = {
    **ENDS,
    "os._exit(4)": 4,
    "del batches": 0,
    "batches.itself = batches": 0,
    FORK: 0,
    "if os.fork() == 0: raise ValueError('on purpose')\nsys.exit(os.wait()[1] >> 8)": 1,
}
LOADER_IMPORTS = """
import os, signal, sys, threading, time, warnings, zlib
import torch
import pyparallel
warnings.simplefilter("ignore")  # forks beside threads
"""
LOADER = """
torch.set_num_threads(1)
class Last:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # a thread that returns to Python now aborts the process
last = Last()
begun, text = threading.Semaphore(0), bytes(200_000)
images = [torch.ones(3, 300 + i, 400, dtype=torch.uint8) for i in range(4)]
def run(here, result):
    while here == place:
        repeated()
        begun.release()
    return result
class Samples:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return run("__getitem__", torch.full((100, 100), index))
def collate(samples):
    return run("collate_fn", torch.stack(samples))
options = {"num_workers": 2, "worker_method": "thread", "collate_fn": collate}
loader = pyparallel.DataLoader(Samples(), 2, **options)
batches = iter(loader)
if place:
    for _ in range(6):
        begun.acquire()
else:
    kept = next(batches)
    time.sleep(0.1)
"""


def ends_at(place: str) -> list[str]:
    # Most of the seconds are spent on sleeping.
    return [*LOADER_ENDS] if place == "an operator of torch" else ["pass", FORK]


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, str], interpreters.Ended]:
    scripts = {
        (place, end): f"place, repeated = {where!r}, lambda: {call}\n{LOADER}{end}"
        for place, (where, call) in PLACES.items()
        for end in ends_at(place)
    }
    found = interpreters.run(LOADER_IMPORTS, [*scripts.values()])
    return dict(zip(scripts, found, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_worker_threads_do_not_abort_the_process(
    place: str, ended: dict[tuple[str, str], interpreters.Ended]
) -> None:
    for end in ends_at(place):
        code = LOADER_ENDS[end]
        found, _, error = ended[place, end]
        assert found == code, (end, error)
        assert "terminate" not in error and "Fatal" not in error
        assert code or not error, (end, error)
