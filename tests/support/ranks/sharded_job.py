"""``examples/fully_sharded.py`` with a signal at a known step.

    sharded_job.py FOLDER EPOCHS SIGNAL:RANK:STEP [...]

It prints the samples that the rank uses. Each signal is sent once: a file in FOLDER
records it. After the last epoch rank 0 writes the parameters to ``FOLDER/trained.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support.repository.folders import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import fully_sharded  # needs the path of the example
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

folder, num_epochs, faults = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
read, load, step = fully_sharded.Walks.__getitem__, fully_sharded.load, 0


def read_and_print(self: fully_sharded.Walks, index: int) -> dict[str, torch.Tensor]:
    print(f"uses {index}.", flush=True)
    return read(self, index)


def load_and_count(*args: object) -> int:
    global step
    step = load(*args)  # type: ignore[arg-type]  # the arguments of the example
    register_optimizer_step_post_hook(send_signals)
    return step


def send_signals(*_: object) -> None:
    global step
    step += 1
    for fault in faults:
        name, rank, at = fault.split(":")
        sent = folder / fault
        if (int(rank), int(at)) == (dist.get_rank(), step) and not sent.exists():
            sent.touch()
            os.kill(os.getpid(), getattr(signal, name))


fully_sharded.Walks.__getitem__ = read_and_print  # type: ignore[method-assign]
fully_sharded.load = load_and_count
dist.init_process_group("gloo")
model = fully_sharded.train(folder, num_epochs)
parameters = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
if dist.get_rank() == 0:
    torch.save(parameters, folder / "trained.pt")
dist.destroy_process_group()
