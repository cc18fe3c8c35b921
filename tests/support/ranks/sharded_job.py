"""``examples/fully_sharded.py`` with a signal at a known step.

    sharded_job.py FOLDER EPOCHS SIGNAL:TARGET:RANK:STEP [...]

It prints the samples that the rank uses. Each signal is sent once, by the rank to
itself (TARGET is ``rank``, or ``late``: after the ranks have agreed) or to its torchrun
(``agent``): a file in FOLDER records it.
At the end rank 0 writes the parameters to ``FOLDER/trained.pt``.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import pyparallel
from tests.support.repository.folders import ROOT

folder, faults = Path(sys.argv[1]), sys.argv[3:]
del sys.argv[3:]
complete = [int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata")]
step, optimizers = max(complete, default=0), []
make_loader, destroy = pyparallel.DataLoader, dist.destroy_process_group
all_reduce = dist.all_reduce


class Printed:
    """Samples whose indices are printed when they are read."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        print(f"uses {index}.", flush=True)
        return self.samples[index]


def printing_loader(samples: list[Any], **options: Any) -> Any:
    return make_loader(Printed(samples), **options)


def send_signals(optimizer: Optimizer, *_: object) -> None:
    global step
    if not optimizer.param_groups[0]["lr"]:  # of torch, before it loads a state
        return
    optimizers.append(optimizer)
    step += 1
    send_due("rank", "agent")


def agree_and_send(*arguments: Any, **options: Any) -> Any:
    result = all_reduce(*arguments, **options)
    send_due("late")
    return result


def send_due(*targets: str) -> None:
    """Send the signals of this step."""
    for fault in faults:
        name, target, rank, at = fault.split(":")
        sent = folder / fault
        is_due = (int(rank), int(at)) == (dist.get_rank(), step)
        if target in targets and is_due and not sent.exists():
            sent.touch()
            pid = os.getppid() if target == "agent" else os.getpid()
            send(pid, getattr(signal, name))


def send(pid: int, number: int) -> None:
    """Send a signal, and wait until this process has received it."""
    received = threading.Event()
    handler: Any = signal.getsignal(number)

    def receive(*arguments: Any) -> None:
        handler(*arguments)
        received.set()

    signal.signal(number, receive)
    os.kill(pid, number)
    while not received.wait(0.01):  # a signal ends no wait without a limit
        pass


def save_and_destroy() -> None:
    parameters = [p.full_tensor() for p in optimizers[0].param_groups[0]["params"]]
    if dist.get_rank() == 0:
        torch.save(parameters, folder / "trained.pt")
    destroy()


print("network", os.readlink("/proc/self/ns/net"), flush=True)
register_optimizer_step_post_hook(send_signals)
pyparallel.DataLoader = printing_loader  # type: ignore[misc]
dist.destroy_process_group = save_and_destroy
dist.all_reduce = agree_and_send
runpy.run_path(str(ROOT / "examples" / "fully_sharded.py"), run_name="__main__")
