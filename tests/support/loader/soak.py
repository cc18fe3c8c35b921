"""Run loaders under load with random faults, and check that no sample is lost.

``python -m tests.support.loader.soak --minutes 30`` runs epochs over shuffled scenes,
with 8 workers and random faults. After an error, the epoch resumes from
``state_dict()``. At
its end, its batches must equal those of the sampler, in order, byte for byte. Every
error must belong to a planned fault. Between epochs, no process, thread, descriptor or
shared memory may remain. The program prints the events, and the numbers of lost,
duplicated, wrong, unexplained, leaked and hung items. The exit code is 0 if all of
these are 0.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch

import pyparallel
from tests.support.loader.prefetch_loaders import num_fds, prefetch_threads
from tests.support.loader.soak_faults import (
    IN_WORKERS,
    Collating,
    Faults,
    Planned,
    Scenes,
    is_right,
)
from tests.support.processes.process_resources import memfds, shared_names

#: Actions of the consumer after some batch.
BY_CONSUMER = (
    *("break", "step raises", "interrupt", "hold", "fork"),
    *("kill", "stop a worker"),
)
#: Options of a loader that count as a fault.
OPTIONS: dict[str, dict[str, int]] = {
    "ring too small": {"max_ring_bytes": 128 * 1024},
    "too few slabs": {"ring_slabs": 2},
    "no ring": {"ring_slabs": 0},
}
KINDS = (*IN_WORKERS, *BY_CONSUMER, *OPTIONS)
#: Words in the errors of planned faults.
EXPECTED = (
    *("DataLoader worker", "a worker must live", "on purpose", "timed out after"),
    *("Too many open files", "ulimit -n", "unable to open", "received 0 items"),
)
BAD = ("lost", "duplicated", "wrong", "unexplained", "leaked", "hung")
#: The time of a sample in seconds after which its loader gives up.
TIMEOUT = 2.0


class HungError(Exception):
    """An epoch takes much longer than its limit."""


class Step(Exception):
    """The error that the consumer raises on purpose."""


class Soak:
    """Runs epochs and counts.

    Args:
        seed: the seed of all random numbers.
        length: the number of batches in an epoch.
        limit: the time in seconds after which an epoch counts as hung.
    """

    def __init__(self, seed: int, length: int, limit: int = 120) -> None:
        self.random = random.Random(seed)
        self.length, self.limit = length, limit
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.notes: list[str] = []

    def epoch(self, kinds: list[str], start: str, prefetching: bool) -> None:
        """Run an epoch with these faults; ``start`` is a method and a number."""
        method, num_workers = start.split(":")
        folder = Path(tempfile.mkdtemp(prefix="soak"))
        size = 3
        order = self.random.sample(range(self.length * size), self.length * size)
        places = self.random.sample(range(self.length // 2), len(kinds))
        mine = {n: k for n, k in zip(places, kinds, strict=True) if k in BY_CONSUMER}
        plan = {order[n * size]: k for n, k in zip(places, kinds, strict=True)}
        faults = Faults(folder, plan)
        options: dict[str, Any] = {
            "batch_size": size,
            "num_workers": int(num_workers),
            "sampler": order,
            "timeout": TIMEOUT if "sample hangs" in kinds else 0,
            "multiprocessing_context": method,
            "persistent_workers": self.random.random() < 0.5,
            "collate_fn": Collating(faults),
        }
        for kind in kinds:
            options.update(OPTIONS.get(kind, {}))
            self.faults[kind] += kind in OPTIONS
        signal.alarm(self.limit)
        try:
            seen = self.batches(faults, mine, options, prefetching)
            self.account(order, seen, f"{kinds} {start} {options}")
        except HungError:
            self.fault("hung", f"{kinds} {start} {options}")
        finally:
            signal.alarm(0)
            self.faults.update(faults.happened())
            shutil.rmtree(folder)
        self.counts["epochs"] += 1

    def batches(
        self,
        faults: Faults,
        mine: dict[int, str],
        options: dict[str, Any],
        prefetching: bool,
    ) -> list[list[int]]:
        """Run an epoch to its end, and resume it after each error."""
        seen: list[list[int]] = []
        state: Any = None
        while True:
            loader: Any = pyparallel.DataLoader(
                Scenes(self.length * options["batch_size"], faults), **options
            )
            source = pyparallel.PreDataLoader(loader) if prefetching else loader
            if state is not None:
                source.load_state_dict(state)
            try:
                if self.consume(source, seen, mine):
                    return seen
            except (Planned, Step, KeyboardInterrupt):
                self.counts["errors"] += 1
            except (RuntimeError, OSError) as error:
                self.counts["errors"] += 1
                if not any(words in str(error) for words in EXPECTED):
                    self.fault("unexplained", f"{type(error).__name__}: {error}")
                options["timeout"] *= 2  # a busy machine starts workers slowly
            state = source.state_dict()
            if prefetching:
                source.close()
            del source, loader

    def consume(self, source: Any, seen: list[list[int]], mine: dict[int, str]) -> bool:
        """Count batches; False if the consumer leaves before the end."""
        held: list[Any] = []
        for batch in source:
            seen.append(batch["index"].tolist())
            self.counts["batches"] += 1
            self.counts["bytes"] += batch["data"].nbytes
            if not is_right(batch):
                self.fault("wrong", f"{seen[-1]}: {batch}")
            if held:
                held.append(batch)
            kind = mine.pop(len(seen) - 1, None)
            if kind is None:
                continue
            self.faults[kind] += 1
            if kind == "break":
                return False
            if kind == "hold":
                held = [batch]
            self.act(kind)
        if not all(map(is_right, held)):
            self.fault("wrong", "a batch that was held")
        return True

    def act(self, kind: str) -> None:
        """Run a planned action of the consumer or of the system."""
        if kind == "step raises":
            raise Step
        if kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if kind == "fork":
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
        if kind in ("kill", "stop a worker"):
            workers = [p for p in psutil.Process().children() if is_worker(p)]
            if workers:
                number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
                os.kill(self.random.choice(workers).pid, number)

    def account(self, order: list[int], seen: list[list[int]], where: str) -> None:
        found = [i for batch in seen for i in batch]
        more = collections.Counter(found) - collections.Counter(order)
        less = collections.Counter(order) - collections.Counter(found)
        if more:
            self.fault("duplicated", f"{dict(more)}: {where}", more.total())
        if less:
            self.fault("lost", f"{dict(less)}: {where}", less.total())
        if not more and not less and found != order:
            self.fault("wrong", f"the order: {where}")
        self.counts["samples"] += len(found)

    def leaks(self, before: tuple[int, ...], where: str) -> None:
        """Wait shortly for resources to be freed; the remaining ones have leaked."""
        end = time.monotonic() + 10
        while True:
            gc.collect()
            multiprocessing.active_children()  # also reaps ended children
            left = left_over()
            pairs = zip(LEFT, before, left, strict=True)
            grown = [f"{name}: {a} to {b}" for name, a, b in pairs if b > a]
            if not grown:
                return
            if time.monotonic() > end:
                self.fault("leaked", f"{grown}: {where}", len(grown))
                return
            time.sleep(0.02)

    def fault(self, name: str, note: str, count: int = 1) -> None:
        self.counts[name] += count
        self.notes.append(f"{name}: {note}")
        print(self.notes[-1][:600], file=sys.stderr, flush=True)


LEFT = ("workers", "prefetch threads", "threads", "descriptors", "memfds", "names")


def left_over() -> tuple[int, ...]:
    """Return the numbers of the resources in LEFT, which an epoch must not leak."""
    return (
        sum(map(is_worker, psutil.Process().children(recursive=True))),
        len(prefetch_threads()),
        threading.active_count(),
        num_fds(),
        memfds(),
        shared_names(),
    )


def is_worker(process: psutil.Process) -> bool:
    """Distinguish workers from the helpers of multiprocessing, which persist."""
    with contextlib.suppress(psutil.Error):
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = " ".join(process.cmdline())
        return not ("resource_tracker" in command or is_server(process, command))
    return False


def is_server(process: psutil.Process, command: str) -> bool:
    """Distinguish a fork server from its children, which have its command line."""
    return "forkserver" in command and process.ppid() == os.getpid()


def let_go_on() -> None:
    """Continue stopped workers; runs in a thread, until the end of the soak."""
    while True:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if child.status() == psutil.STATUS_STOPPED:
                        child.send_signal(signal.SIGCONT)
        time.sleep(0.25)


def give_up(number: int, frame: Any) -> None:
    faulthandler.dump_traceback(all_threads=True)
    raise HungError


def prepare() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    threading.Thread(target=let_go_on, daemon=True).start()
    signal.signal(signal.SIGALRM, give_up)
    torch.multiprocessing.set_forkserver_preload(["torch", "soak_faults"])
    for prefetching in (False, True):  # the first loader starts processes that persist
        Soak(0, 4).epoch([], "forkserver:1", prefetching)


def main() -> int:
    """Run for a number of minutes, or once through all kinds of faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0, help="0: each kind once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batches", type=int, default=60, help="of an epoch")
    parser.add_argument(
        "--limit", type=int, default=120, help="seconds of an epoch that is not hung"
    )
    parser.add_argument("--starts", default="fork:8 forkserver:8 spawn:8")
    options = parser.parse_args()
    prepare()
    began = time.monotonic()
    soak = Soak(options.seed, options.batches, options.limit)
    starts = options.starts.split()
    rest = soak.random.sample(KINDS, len(KINDS))
    number = 0
    while rest or time.monotonic() - began < 60 * options.minutes:
        kinds = [rest.pop() for _ in range(min(3, len(rest)))]
        kinds = kinds or soak.random.sample(KINDS, soak.random.randint(0, 3))
        start, prefetching = starts[number % len(starts)], number // len(starts) % 2
        before = left_over()
        soak.epoch(kinds, start, bool(prefetching))
        soak.leaks(before, f"{kinds} {start} prefetching: {prefetching}")
        number += 1
    found = {
        "seconds": round(time.monotonic() - began),
        **{name: soak.counts[name] for name in ("epochs", "batches", "samples")},
        **{name: soak.counts[name] for name in ("bytes", "errors")},
        "faults": {kind: soak.faults[kind] for kind in KINDS},
        **{name: soak.counts[name] for name in BAD},
    }
    print(json.dumps(found, indent=2))
    return int(any(soak.counts[name] for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
