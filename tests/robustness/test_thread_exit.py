"""The interpreter ends while a daemon thread runs our native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from repository import ROOT

from pyparallel import backend

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
WORKING = """
import os, signal, sys, threading, types
import torch
from pyparallel import backend
torch.set_num_threads(1)
images = [torch.ones(3, 300 + i, 400, dtype=torch.uint8) for i in range(4)]
padded = torch.empty(4, 3, 303, 400, dtype=torch.uint8)
batch, levels = torch.empty(4, 3, 303, 400), [1.0] * 3
stream = types.SimpleNamespace(stream_id=0, device_index=-1, device_type=0)
slab, leaf = torch.ones(2, 64, dtype=torch.uint8)
plan = backend.plan_slab([leaf])
work = {
    "pad_copy": lambda: backend.pad_copy(padded, images, bytes(1)),
    "image_batch": lambda: backend.image_batch(
        batch, images, None, levels, levels, levels, False, True
    ),
    "send": lambda: backend.send(slab, [leaf], plan, [], [], stream, stream),
}[sys.argv[1]]
begun = threading.Event()
def run():
    while True:
        work()
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
    started = [
        subprocess.Popen(
            [sys.executable, "-c", f"{WORKING}{end}", work],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for end, work in cases
    ]
    for process, (end, _) in zip(started, cases, strict=True):
        _, error = process.communicate(timeout=100)
        assert process.returncode == ENDS[end], error
        assert "terminate" not in error
