"""The interpreter ends while a daemon thread runs our native code."""

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
