"""The self-tests: collate and scatter in this process, training in two processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import pyparallel

from .. import backend
from ..transfer import layout

#: One call copies this number.
_NUM_COPIES = 8
#: The two processes are killed after this time.
SECONDS = 28.0
WORLD_SIZE = 2
#: A forked process could not use CUDA, and would share the threads' locks.
_START_METHOD = "spawn"
#: The stage of a rank before it runs any code of this module.
IMPORTING = "importing pyparallel"
#: The pixels of rank ``r`` are ``r + 1``, in images of widths 1 and 2. The loss is
#: their sum times the weight: the gradients are 3 and 6, and 4.5 on average.
_GRADIENT = 4.5
_LOOPBACK = 772  # ARPHRD_LOOPBACK of Linux


def one_process() -> str | None:
    """Collate and scatter two ragged samples; return the error, or None."""
    try:
        targets = [-1] + ([0] if torch.cuda.is_available() else [])
        for target in targets:
            batch: Any = pyparallel.collate(_samples(), samples_per_gpu=2)
            error = _compare(pyparallel.scatter(batch, [target])[0])
            if error is not None:
                return f"target {target}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused_batch() -> int | None:
    """Copy large pinned tensors to a GPU; return the error of the batched copy, or 0.

    Returns:
        None if the extension copies to no GPU here.
    """
    if "cuda" not in backend.transfers or not torch.cuda.is_available():
        return None
    leaf = torch.zeros(layout.DIRECT_NBYTES, dtype=torch.uint8, device="cpu")
    pyparallel.scatter([leaf.pin_memory() for _ in range(_NUM_COPIES)], [0])
    return backend.Runtime("cuda").refused_batch()


def _samples() -> list[dict[str, Any]]:
    images = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[5.0, 6, 7]]])
    container = pyparallel.DataContainer
    left = pyparallel.Padding(side="left", mask=True)
    return [
        {
            "img": container(image, stack=True, padding_value=9),
            "boxes": container(torch.full((i, 2), i)),
            "ids": container(image[0, 0], stack=True, pad_dims=1, padding=left),
            "points": container(image[0, :, :2], ragged=True),
            "meta": container({"index": i}, cpu_only=True),
        }
        for i, image in enumerate(images)
    ]


def _compare(batch: Any) -> str | None:
    """Compare the batch of `_samples` with literal values; return the difference."""
    expected = torch.tensor([[[[1.0, 2, 9], [3, 4, 9]]], [[[5, 6, 7], [9, 9, 9]]]])
    if not torch.equal(batch["img"].cpu(), expected):
        return f"the images are {batch['img'].tolist()}"
    if [box.tolist() for box in batch["boxes"]] != [[], [[1, 1]]]:
        return f"the boxes are {batch['boxes']}"
    if batch["ids"].data.tolist() != [[0, 1, 2], [5, 6, 7]]:
        return f"the ids are {batch['ids']}"
    if batch["ids"].mask.tolist() != [[False, True, True], [True] * 3]:
        return f"the mask is {batch['ids'].mask}"
    if batch["points"].offsets.tolist() != [0, 2, 3]:
        return f"the points are {batch['points']}"
    if batch["meta"] != [{"index": 0}, {"index": 1}]:
        return f"the metadata are {batch['meta']}"
    return None


class Failure(NamedTuple):
    """A failed test in two processes.

    Attributes:
        text: the reason, in a sentence.
        output: the last lines that the failed ranks printed.
        late: the stages of the ranks that ran at the deadline; empty without one.
    """

    text: str
    output: list[str]
    late: tuple[str, ...] = ()


def two_processes(seconds: float = SECONDS) -> Failure | None:
    """Collate, scatter and train in two gloo processes; return the failure, or None.

    The processes meet in a temporary folder and connect on the loopback interface. Both
    have ended, and the folder is removed, when this function returns or raises. If this
    process is killed, they are killed too.

    Args:
        seconds: the time limit.
    """
    deadline = time.monotonic() + seconds
    try:
        with tempfile.TemporaryDirectory(prefix="pyparallel-doctor-") as folder:
            # torch exports start_processes, but not to type checkers.
            ranks = multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
                run_rank,
                (folder, seconds),
                WORLD_SIZE,
                join=False,
                daemon=True,
                start_method=_START_METHOD,
            ).processes
            try:
                return _wait(ranks, Path(folder), deadline, seconds)
            finally:
                for process in ranks:
                    process.kill()
                    process.join()
    except OSError as error:
        return Failure(f"the processes cannot be started: {error}.", [])


def _wait(
    ranks: Sequence[BaseProcess], folder: Path, deadline: float, seconds: float
) -> Failure | None:
    """Wait until all ranks have passed, one has failed, or the deadline."""
    while True:
        codes = [process.exitcode for process in ranks]
        for number, code in enumerate(codes):
            if code:
                return _ended(number, code, folder)
        running = [i for i, code in enumerate(codes) if code is None]
        if not running:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            return _late(running, folder, seconds)
        connection.wait([ranks[i].sentinel for i in running], left)


def _ended(rank: int, code: int, folder: Path) -> Failure:
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    lines = _read(folder / f"output-{rank}")
    text = f"rank {rank} {how} while {_stage(folder, rank)}: "
    return Failure(text + (lines[-1] if lines else "no output"), lines[-20:])


def _late(late: list[int], folder: Path, seconds: float) -> Failure:
    stages = tuple(_stage(folder, number) for number in late)
    states = " and ".join(
        f"rank {number} was {stage}" for number, stage in zip(late, stages, strict=True)
    )
    text = (
        f"two processes must finish within {seconds:.3g} s, but {states}. Check "
        "whether the machine is busy, and whether programs can connect on its loopback "
        "interface."
    )
    outputs = (_read(folder / f"output-{number}") for number in late)
    return Failure(text, [line for each in outputs for line in each[-10:]], stages)


def _read(path: Path) -> list[str]:
    """Return the lines that a rank has written; none without the file."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _stage(folder: Path, rank: int) -> str:
    return "".join(_read(folder / f"stage-{rank}")) or IMPORTING


def run_rank(rank: int, folder: str, seconds: float) -> None:
    """Run one of the processes, and end it.

    Args:
        rank: 0 or 1.
        folder: the folder in which the ranks meet.
        seconds: the time limit of a collective.
    """
    # torch sends SIGINT when the parent dies, and Python handles it after collectives.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    output = os.open(Path(folder, f"output-{rank}"), os.O_WRONLY | os.O_CREAT, 0o600)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        # A stream that was closed before the start is None.
        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "TMPDIR": folder}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if loopback := loopback_interface():
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    tempfile.tempdir = folder  # torch creates folders there for its compiler
    code = 1
    try:
        _train(rank, Path(folder), seconds)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # tearing down a process group aborts sometimes


def loopback_interface(folder: Path = Path("/sys/class/net")) -> str | None:
    """Return the name of the loopback interface; None without one."""
    for path in sorted(folder.glob("*/type")):
        try:
            if path.read_text(encoding="ascii").strip() == str(_LOOPBACK):
                return path.parent.name
        except OSError:
            pass
    return None


def _train(rank: int, folder: Path, seconds: float) -> None:
    def enter(stage: str) -> None:
        (folder / f"stage-{rank}").write_text(stage, encoding="utf-8")

    torch.set_num_threads(1)
    enter("joining the group")
    # torch exports FileStore, but not to type checkers.
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)  # type: ignore[attr-defined]
    limit = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit
    )
    enter("wrapping the model")
    model = pyparallel.MMDistributedDataParallel(_Scale(1, 1, bias=False))
    enter("collating")
    container = pyparallel.DataContainer
    value = float(rank + 1)
    samples = [
        {"img": container(torch.full((1, 1, width), value), stack=True)}
        for width in (1, 2)
    ]
    batch = pyparallel.collate(samples, samples_per_gpu=2)
    enter("running the step")
    loss = model.train_step(batch)
    enter("reducing the gradient")
    loss.backward()
    gradient = model.module.weight.grad
    enter("comparing the gradients")
    gradients = [torch.empty_like(gradient) for _ in range(WORLD_SIZE)]
    dist.all_gather(gradients, gradient)
    found = [each.item() for each in gradients]
    if found != [_GRADIENT] * WORLD_SIZE:
        raise ValueError(
            f"the gradients of all ranks must be {_GRADIENT}, but are {found}."
        )
    enter("waiting for the other rank")  # which may still receive from this one
    store.set(f"passed-{rank}", "")
    store.wait([f"passed-{i}" for i in range(WORLD_SIZE)], limit)


class _Scale(nn.Linear):
    """A model with one weight."""

    def train_step(self, data: Any) -> torch.Tensor:
        """Return the loss of a batch of two images that differ in width."""
        image: torch.Tensor = data["img"]
        if image.shape != (2, 1, 1, 2):
            raise ValueError(
                f"the images must have the shape (2, 1, 1, 2), but have "
                f"{tuple(image.shape)}."
            )
        return (image * self.weight).sum()
