"""Small fields: the time to send tensors, and that of a loader alone."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader as TorchLoader

from pyparallel import DataLoader, PreDataLoader

from .._harness import Case, Contender, Goal
from .epochs import (
    Items,
    Make,
    Run,
    Ways,
    add_net,
    case,
    first_batch,
    loader,
    per_batch,
)

#: 28 samples of 4 tensors: a batch of 112.
SAMPLES = 28

BY_TORCH = "torch's loader"
BY_NAME = "torch's loader, file_system"
FLOOR, FLOOR_OF_OURS = "no tensors, torch's loader", "no tensors, our loader"
#: Ours with fewer workers, and without `PreDataLoader`.
FOUR, ALONE = "4 workers", "the loader alone"
#: Limits: what processes that do nothing else need, with few and with many of them.
BARE = "bare processes"

#: The least times of torch's loader with workers, by the number of fields.
_FIELDS = {1: 10, 8: 20, 112: 60}
_PERSISTENT = {"persistent_workers": True, "multiprocessing_context": "fork"}


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases: 112 fields that are sent, then samples that need no time."""
    note = f"synthetic: {SAMPLES} samples of boxes, labels, areas and ids, new in every"
    # One floor for all: so our own overhead in a message without tensors counts.
    floors = dict.fromkeys(("ours, native", "ours, Python", BY_TORCH, BY_NAME), FLOOR)
    num = 8 if quick else 16
    yield case(
        "112 small fields, to cross",
        f"{note} batch; from the end of collate_fn to the end of next(), which waits",
        partial(_sent, num, 0.002, _crossing),
        num,
        [Goal(BY_TORCH, 15, of="net"), Goal(BY_TORCH, 15)],
        partial(add_net, floors),
    )
    num = 8 if quick else 24
    yield case(
        "112 small fields, 1 worker",
        f"{note} batch; a whole epoch, in which collate_fn copies them alone",
        partial(_sent, num, 0.0, per_batch()),
        num,
        finish=partial(add_net, floors),
    )
    yield from _alone(quick)
    yield from _starts_and_ends(quick)


def _alone(quick: bool) -> Iterator[Case]:
    """Yield loaders without workers, and with two for more and more fields."""
    num = 16 if quick else 1024
    run = per_batch(clock=time.thread_time)
    for name, samples in (
        ("tensors of 4 floats", _vectors()),
        ("dicts of 3 fields", _dicts()),
    ):
        yield case(
            f"{name}, no workers",
            "synthetic: 8 samples in a batch, default_collate; CPU time of the thread",
            partial(_loaders, samples, 8, num, run, {}),
            num,
            [Goal(BY_TORCH, 1 / 0.8)],
        )
    num = 16 if quick else 128
    for count, factor in _FIELDS.items():
        options = {"num_workers": 2, **_PERSISTENT}
        yield case(
            f"fields of 4 floats, {count} in a sample, 2 workers",
            "synthetic: 4 samples in a batch, default_collate; a whole epoch",
            partial(_loaders, _many(count), 4, num, per_batch(), options),
            num,
            [Goal(BY_TORCH, factor)],
        )


def _starts_and_ends(quick: bool) -> Iterator[Case]:
    """Yield the cases about starts, many workers and prefetching."""
    vectors, num = _vectors(), 16 if quick else 512
    method, count = ("fork", 1) if quick else ("spawn", 8)
    options: dict[str, Any] = {"num_workers": count, "multiprocessing_context": method}
    yield case(
        f"first batch of {count} workers, {method}",
        "from iter() to the first batch; 4 samples of 4 floats",
        partial(_loaders, vectors, 4, 16, first_batch, options),
        16,
        [Goal(BY_TORCH, 3)],
    )
    large = 3 if quick else 32
    many, few = ({"num_workers": each, **_PERSISTENT} for each in (large, 4))
    yield case(
        f"tensors of 4 floats, {large} persistent workers",
        "synthetic: 4 samples in a batch; a whole epoch; bare processes stack, pickle "
        "and send",
        partial(_many_workers, vectors, num, many, few),
        num,
        [Goal(FOUR, 1)],
    )
    yield case(
        "tensors of 4 floats, PreDataLoader",
        "synthetic: 4 samples in a batch, 2 workers; CPU time of the parent",
        partial(_prefetched, vectors, num),
        num,
        [Goal(ALONE, 1 / 1.5)],
    )


def _loaders(
    samples: Sequence[Any],
    batch_size: int,
    num: int,
    run: Run,
    options: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Contender]:
    """Return loaders of ``num`` batches, also of ours with other options."""
    ways, items = Ways(run), Items(samples, batch_size * num)
    ours = partial(DataLoader, items, batch_size)
    return [
        *ways.ours(partial(ours, **options)),
        ways.peer(BY_TORCH, partial(TorchLoader, items, batch_size, **options)),
        *(
            ways.peer(name, partial(ours, **each), "ours")
            for name, each in (others or {}).items()
        ),
    ]


def _many_workers(
    samples: Sequence[Any],
    num: int,
    many: Mapping[str, Any],
    few: Mapping[str, Any],
) -> list[Contender]:
    """Return loaders with many workers, ours with few, and limits for both."""
    ways, items = Ways(per_batch()), Items(samples, 4 * num)
    bare = partial(BareProcesses, items, 4)
    return [
        *_loaders(samples, 4, num, per_batch(), many, {FOUR: few}),
        *(
            ways.peer(f"{BARE}, {each}", partial(bare, each), "limit")
            for each in (many["num_workers"], few["num_workers"])
        ),
    ]


class BareProcesses:
    """Processes with a pipe each, which have two tasks each, as those of loaders.

    Args:
        items: the dataset.
        batch_size: the number of samples in a batch.
        count: the number of processes.
    """

    def __init__(self, items: Items, batch_size: int, count: int) -> None:
        self._tasks = [
            [*range(first, first + batch_size)]
            for first in range(0, len(items), batch_size)
        ]
        context = torch.multiprocessing.get_context("fork")
        self._pipes = [context.Pipe() for _ in range(count)]
        ours = [end for end, _ in self._pipes]
        self._workers = [
            context.Process(target=_answer, args=(end, ours, items), daemon=True)
            for _, end in self._pipes
        ]
        for worker, (_, end) in zip(self._workers, self._pipes, strict=True):
            worker.start()
            end.close()
        self._iterator = self  # with `_workers`, as of a loader

    def __del__(self) -> None:
        """End the processes."""
        for worker in self._workers:  # processes that started later hold their pipes
            worker.terminate()
        for worker in self._workers:
            worker.join()

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return the batches of an epoch."""
        ends = itertools.cycle([end for end, _ in self._pipes])
        ahead, behind = itertools.tee(ends)
        tasks = iter(self._tasks)
        for task in itertools.islice(tasks, 2 * len(self._pipes)):
            next(ahead).send(task)
        for _ in self._tasks:
            yield torch.from_numpy(next(behind).recv())
            for task in itertools.islice(tasks, 1):
                next(ahead).send(task)


def _answer(end: Any, inherited: Sequence[Any], items: Items) -> None:
    """Answer tasks, until this process or its parent ends."""
    for each in inherited:
        each.close()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            end.send(torch.stack([items[i] for i in end.recv()]).numpy())


def _prefetched(samples: Sequence[Any], num: int) -> list[Contender]:
    """Return `PreDataLoader` and the loader that it reads."""
    items = Items(samples, 4 * num)
    make: Any = partial(DataLoader, items, 4, num_workers=2, **_PERSISTENT)
    ways = Ways(per_batch(clock=time.process_time))
    ahead = ways.ours(lambda: PreDataLoader(make(), "cpu"))
    return [*ahead, ways.peer(ALONE, make)]


# -------------------------------------------------------------------- 112 small fields
def _sent(num: int, pause: float, run: Run) -> list[Contender]:
    """Return loaders of ``num`` batches with a pause of the worker before each."""

    def made(kind: Any, sends: bool, **options: Any) -> Make:
        options["prefetch_factor"] = 1 if pause else 2
        options["collate_fn"] = Remaking(sends, pause)
        return loader(kind, Items([targets()], num), None, 1, **options)

    ways = Ways(run, lambda batch: batch["fields"])
    by_name = made(TorchLoader, True, worker_init_fn=share_by_name)
    return [
        *ways.ours(made(DataLoader, True)),
        ways.peer(BY_TORCH, made(TorchLoader, True)),
        ways.peer(BY_NAME, by_name),
        ways.peer(FLOOR, made(TorchLoader, False), "limit"),
        ways.peer(FLOOR_OF_OURS, made(DataLoader, False), "limit"),
    ]


class Remaking:
    """A collate function that copies a batch, and records the time when it is ready.

    Args:
        sends: send the batch to the parent, not only the time.
        pause: seconds to sleep first, so that the parent already waits when the batch
            is ready, and the measurement covers the whole transfer.
    """

    def __init__(self, sends: bool, pause: float) -> None:
        self.sends, self.pause = sends, pause

    def __call__(self, batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Return the batch."""
        time.sleep(self.pause)
        new = [{name: each.clone() for name, each in one.items()} for one in batch]
        return {"fields": new if self.sends else None, "ready": time.perf_counter()}


def share_by_name(worker_id: int) -> None:
    """Let a worker send the names of files instead of descriptors."""
    torch.multiprocessing.set_sharing_strategy("file_system")


def _crossing(loader: Any) -> float:
    """Return the mean time to send a batch of an epoch.

    All processes on Linux share one monotonic clock. The first batch is left out,
    because the worker makes it while the epoch starts.
    """
    seconds = [time.perf_counter() - batch["ready"] for batch in loader]
    return sum(seconds[1:]) / (len(seconds) - 1)


# --------------------------------------------------------------------------------- data
def targets() -> list[dict[str, torch.Tensor]]:
    """Return the targets of a batch for detection."""
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    found = []
    for i in range(SAMPLES):
        num = rng.randint(1, 20)
        boxes = torch.rand(num, 4, generator=generator)
        labels = torch.randint(80, (num,), generator=generator)
        areas = torch.rand(num, generator=generator)
        ids = torch.tensor([i])
        found.append({"boxes": boxes, "labels": labels, "areas": areas, "ids": ids})
    return found


def _many(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.rand(64, count, 4, generator=torch.Generator().manual_seed(0))
    return [{f"field{i}": each for i, each in enumerate(row)} for row in rows]


def _vectors() -> list[torch.Tensor]:
    return list(torch.rand(64, 4, generator=torch.Generator().manual_seed(0)))


def _dicts() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(64, 3, 16, 16, generator=generator)
    return [
        {"image": image, "label": i % 10, "path": f"{i}.jpg"}
        for i, image in enumerate(images)
    ]
