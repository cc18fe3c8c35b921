"""End the interpreter in many ways while a prefetch thread works; print each attempt.

Each attempt ends a process forked from this one, which imports torch once.
"""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

# Other workers than forked ones would import this script, and run it again.
multiprocessing.set_start_method("fork")

# Called at the exit after the package's own function, which is registered later.
late: list[Callable[[], None]] = []
atexit.register(lambda: [function() for function in late])

import torch  # noqa: E402

from pyparallel import PreDataLoader  # noqa: E402
from tests.support.loader.prefetch_loaders import LOADERS, Numbers, firsts  # noqa: E402

Loader = LOADERS[sys.argv[1]]
BUSY = ("returns", "raises", "exits", "is interrupted")
ENDS = [
    ("is idle", 0),  # the time without any pass
    *((end, num_workers) for end in BUSY for num_workers in (0, 2)),
    ("is outlived", 0),
    ("is late", 0),
]
#: An exit is repeated if it takes this many seconds more than one without a pass.
ENOUGH = 2.0


class Busy(Numbers):
    """Works in native code, nearly always without the GIL.

    Otherwise each step of an exit would wait for the GIL, which is not tested here.
    """

    def __getitem__(self, index: int) -> torch.Tensor:
        square = torch.ones(300, 300)
        for _ in range(30):
            square = square @ square / 300
        return super().__getitem__(index)


started = threading.Event()


def consume() -> None:
    running = iter(PreDataLoader(Loader(Numbers(), 2)))
    first = next(running)
    started.set()
    threading.main_thread().join()
    print(firsts([first, *running]), flush=True)
    print(can_start_thread(), flush=True)
    try_again()


def can_start_thread() -> bool:
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return False
    return True


def try_again() -> None:
    try:
        print(next(PreDataLoader([1])), flush=True)
    except RuntimeError as error:
        print(error, flush=True)


def fork(out: Any, err: Any) -> int | list[Any]:
    """Return a function that reports the start of the exit (child), or the outcome."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        return write
    os.close(write)
    with os.fdopen(read) as said:
        began = float(said.readline() or "nan")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.time() - began
    for file in (out, err):
        file.seek(0)
    return [status, seconds, out.read(), err.read()]


results: dict[str, list[Any]] = {}
for end, num_workers in ENDS:
    enough = results["is idle 0"][0][1] + ENOUGH if results else math.inf
    tries = results[f"{end} {num_workers}"] = []
    # An exit that waits is slow each time; a busy machine is slow only sometimes.
    while not tries or (len(tries) < 3 and tries[-1][1] > enough):
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            result = fork(out, err)
        if isinstance(result, int):
            break
        tries.append(result)
    else:
        continue
    break
else:
    print(json.dumps(results))
    sys.exit()

if end == "is outlived":
    threading.Thread(target=consume).start()
    started.wait()
elif end == "is late":
    late.append(try_again)
elif end != "is idle":
    # With room for all batches, the thread is never idle, not even at the end.
    pre = PreDataLoader(
        Loader(Busy(), 2, sampler=[0] * 10**6, num_workers=num_workers),
        queue_size=10**6,
    )
    running = iter(pre)
    for _ in range(5):
        next(running)
os.write(result, f"{time.time()}\n".encode())
os.close(result)
if end == "raises":
    raise ValueError("on purpose")
if end == "exits":
    sys.exit(5)
if end == "is interrupted":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
