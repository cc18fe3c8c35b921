"""Interrupt a loop over a loader wherever Python calls signal handlers.

Usage: python -m tests.support.loader.interrupts KIND PART [KIND PART ...]

It prints a line for each pair: the number of interrupted loops and their leftovers.
"""

from __future__ import annotations

import dis
import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from pyparallel import DataLoader, PreDataLoader
from pyparallel.prefetch import iterator

#: The instructions after which handlers run.
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
#: Modules whose code is interrupted, with those of this package.
MODULES = ("threading", "weakref", "queue")
#: Every how many of these places is tried. Their number differs from loop to loop.
STRIDE = 11
#: Seconds for all loops of one run.
SECONDS = 120.0
_places: dict[CodeType, set[int]] = {}


class Numbers(torch.utils.data.Dataset[int]):
    """Forty slow numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        return index


def loader_of(kind: str) -> Any:
    """Return a loader, such as "thread", "thread ahead" and "thread quick ahead".

    Loops over "quick" ones read themselves, and those over "quickest" ones at once.
    """
    method: Any = kind.partition(" ")[0]
    if "quick" in kind:
        steps = 0 if "quickest" in kind else 1
        iterator.QUICK_NS, iterator.QUICK_STEPS = math.inf, steps
    loader: Any = DataLoader(Numbers(), 2, num_workers=2, worker_method=method)
    return PreDataLoader(loader) if kind.endswith("ahead") else loader


def places(code: CodeType) -> set[int]:
    """Return the offsets of the instructions before which a handler may run.

    No code can catch an error at the first one of a method of an iterator. The caller
    of the method, whose error keeps the iterator, is the loop itself.
    """
    if code not in _places:
        _places[code] = found = set()
        before = ""
        for each in dis.get_instructions(code):
            if before.startswith(CHECKS):
                found.add(each.offset)
            before = each.opname
        if code.co_name in ("__next__", "begin"):
            found.discard(min(found, default=0))
    return _places[code]


class Interrupt:
    """Sends SIGINT at one of the places."""

    def __init__(self, number: int) -> None:
        self.left, self.where, self.pid = number, "", os.getpid()

    def start(self) -> None:
        sys.settrace(self.enter)

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "pyparallel" and name not in MODULES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.left -= 1
            if not self.left and os.getpid() == self.pid:  # not in a worker
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.step


def progress_bar(loader: Any) -> Iterator[Any]:
    """Return a generator, as tqdm does."""
    yield from loader


def loop(loader: Any, interrupt: Interrupt, part: str) -> None:
    """Loop over five batches. Raise LookupError if nothing interrupts it."""
    if part == "iter":
        interrupt.start()
    for number, _ in enumerate(progress_bar(loader)):
        if number == 1:
            interrupt.start()
        if number == 4 or part == "iter":
            sys.settrace(None)
            raise LookupError


def case(kind: str, part: str, number: int) -> tuple[str, list[str]]:
    """Interrupt a loop and keep its error, as a notebook does.

    Returns:
        the place of the interrupt, and the leftovers of the loop.
    """
    gc.disable()  # an error may keep a loop no longer than a reference does
    interrupt, found = Interrupt(number), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            loop(loader_of(kind), interrupt, part)
        except BaseException as error:
            sys.settrace(None)
            sys.last_value = error
        if interrupt.where and not isinstance(sys.last_value, KeyboardInterrupt):
            found.append(f"raised {sys.last_value!r}")
    deadline = time.monotonic() + 5
    while True:
        left = [t.name for t in threading.enumerate() if "pyparallel" in t.name]
        left += [child.name for child in multiprocessing.active_children()]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return interrupt.where, [*found, *(str(each.message) for each in warned), *left]


def main(kind: str, part: str) -> None:
    """Try places, each in a process of its own, until a loop ends without one."""
    end, number, cases = time.monotonic() + SECONDS, 1, 0
    problems: dict[str, list[str]] = {}
    while time.monotonic() < end:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            found = case(kind, part, number)
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as answer:
            where, left = json.loads(answer.read() or b'["died", ["nothing"]]')
        os.waitpid(pid, 0)
        if not where:
            break
        cases, number = cases + 1, number + STRIDE
        if left:
            problems[where] = left
    print(json.dumps([cases, problems]), flush=True)


if __name__ == "__main__":
    os.register_at_fork(after_in_child=lambda: sys.settrace(None))  # in workers
    for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(*pair)
