"""Four ranks for each case of `fault_cases`, forked from one process: `run`.

That process has imported all modules and has no other thread. So a rank starts in a
tenth of a second, all cases run at the same time, and their timeouts overlap. An error
ends a rank at once, like an uncaught error in a script.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imports of DDP, which take longer than all work of a rank
import torch.distributed as dist
from torch import nn

from pyparallel import MMDistributedDataParallel, mmengine
from tests.support.mmengine.training import Net, batch, sgd
from tests.support.ranks.distributed_ranks import join, set_timeout

WORLD, FAULTY = 4, 1
STEPS, STRUCK_STEP = 5, 2
#: Gloo of torch 2.8 keeps the first timeout of a group; gloo of torch 2.11 does not.
FIXED = torch.__version__ < (2, 11)
#: The timeout of waiting ranks in seconds, in the cases about timeouts.
SHORT = 40.0 if FIXED else 6.0
#: The limit of all cases on a busy machine, in seconds.
LIMIT = 100.0


class Steps(nn.Module):
    """A model of mmcv's protocol on the layers of mmengine's."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        ignored = getattr(net, "_ddp_params_and_buffers_to_ignore", [])
        self._ddp_params_and_buffers_to_ignore = [f"net.{name}" for name in ignored]

    def train_step(self, data: Any, optimizer: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": self.net(**data, mode="loss")["loss_square"]}


class Training:
    """A wrapped model of one of the two protocols, and its steps."""

    def __init__(self, protocol: str, net: Net, **options: Any) -> None:
        self.protocol, self.net, self.optimizer = protocol, net, sgd(net)
        if protocol == "mmengine":
            self.model: Any = mmengine.MMDistributedDataParallel(net, **options)
            self.wrapper = mmengine.OptimWrapper(self.optimizer)
        else:
            self.model = MMDistributedDataParallel(Steps(net), **options)

    def loss(self, data: Any) -> torch.Tensor:
        """Return the loss of a forward pass."""
        if self.protocol == "mmengine":
            loss: torch.Tensor = self.model(**data, mode="loss")["loss_square"]
            return loss
        return self.model.train_step(data, self.optimizer)["loss"]

    def step(self, data: Any) -> None:
        """Run a training step."""
        if self.protocol == "mmengine":
            self.model.train_step(data, self.wrapper)
            return
        self.optimizer.zero_grad()
        self.loss(data).backward()
        self.optimizer.step()


class Rank:
    """One rank of a case: its group, and the time of the fault."""

    def __init__(self, rank: int, folder: Path, protocol: str) -> None:
        self.rank, self.folder, self.protocol = rank, folder, protocol
        self.faulty, self.number = rank == FAULTY, -1
        join(folder, rank, WORLD, SHORT if FIXED else LIMIT)

    def training(self, net: Net | None = None, **options: Any) -> Training:
        """Return the model in its wrapper."""
        return Training(self.protocol, net or Net(), **options)

    def batches(self, steps: int = STEPS) -> Iterator[tuple[int, Any]]:
        """Yield the number and the batch of each step."""
        for self.number in range(steps):
            yield self.number, batch(self.number, WORLD, self.rank)

    def wait_at_most(self, seconds: float) -> None:
        """Set the timeout of the group when all ranks have started.

        So no case depends on the time that its ranks take to start.
        """
        dist.barrier()
        set_timeout(seconds)

    def strike(self) -> None:
        """Record the time of the fault."""
        (self.folder / "struck").write_text(str(time.monotonic()))

    def wait_for_the_others(self) -> None:
        """Wait until all others have written their outcomes."""
        others = [self.folder / f"{n}.json" for n in range(WORLD) if n != FAULTY]
        while not all(each.exists() for each in others):
            time.sleep(0.02)


def in_rank(function: Callable[[Rank], Any], this: Rank) -> None:
    """Run a case on this rank, and write its outcome."""
    found: dict[str, Any] = {}
    try:
        found["result"] = function(this)
    except Exception as error:
        found["error"], found["message"] = type(error).__name__, str(error)
    found["step"], found["time"] = this.number, time.monotonic()
    part = this.folder / f"{this.rank}.part"
    part.write_text(json.dumps(found))
    part.rename(part.with_suffix(".json"))


def run(cases: dict[str, Callable[[Rank], None]], folder: str) -> None:
    """Run cases of both protocols, and wait until all their ranks have ended.

    A rank stopped by a signal continues when all others of its case have ended.
    """
    gc.collect()
    gc.freeze()  # otherwise each rank would copy pages that it only reads
    groups = []
    for protocol in ("mmcv", "mmengine"):
        for name, function in cases.items():
            place = Path(folder) / f"{name}.{protocol}"
            place.mkdir()
            ranks = range(WORLD)
            groups.append([_forked(function, r, place, protocol) for r in ranks])
    deadline = time.monotonic() + LIMIT
    left = {pid for group in groups for pid in group}
    while left:
        for pid in [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]]:
            left.remove(pid)
        for group in groups:
            if left.intersection(group) == {group[FAULTY]}:
                os.kill(group[FAULTY], signal.SIGCONT)
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _forked(
    function: Callable[[Rank], None], rank: int, folder: Path, protocol: str
) -> int:
    """Run a case on one rank, in the process with this number."""
    pid = os.fork()
    if pid == 0:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
        for number in (1, 2):
            os.dup2(log, number)
        code = 1
        try:
            function(Rank(rank, folder, protocol))
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Does not destroy the group, which sometimes aborts.
            os._exit(code)
    return pid
