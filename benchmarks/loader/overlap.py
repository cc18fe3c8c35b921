"""Overlap: the share of the time for data that passes during a step."""

from __future__ import annotations

import queue
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from pyparallel import DataLoader, PreDataLoader

from .._harness import Case, Contender, Record, summarise
from .epochs import Ways, case, loader

#: The time for data, in steps.
DATA = 0.8
_BATCH = 4
#: The share of it that must be hidden.
HIDDEN = 0.95

COMPUTE, FETCH = "the step alone", "the data alone"


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases."""
    step = (
        f"a step of matmuls by one thread, calibrated so that the data take {DATA} of "
        "it; from the first batch on"
    )
    num, nbytes = (4, 1 << 12) if quick else (24, 1 << 20)
    for kind, title, note in (
        (Inflated, "computed", "inflated by zlib, which lets go of the GIL"),
        (Awaited, "waited for", "each after 3 ms"),
    ):
        yield case(
            f"a step and data that are {title}",
            f"synthetic: 4 images, {note}; {step}",
            partial(_contenders, partial(kind, num * _BATCH, nbytes)),
            num,
            finish=add_hidden,
        )


class Inflated(Dataset[Tensor]):
    """Compressed images."""

    def __init__(self, num: int, nbytes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        # A byte has one of 8 values, so that zlib can compress.
        values = torch.randint(8, (nbytes,), dtype=torch.uint8, generator=generator)
        self._deflated, self._nbytes = [], nbytes
        for i in range(num):
            values[0] = i % 251
            self._deflated.append(zlib.compress(values.numpy().tobytes(), 1))

    def __len__(self) -> int:
        return len(self._deflated)

    def __getitem__(self, i: int) -> Tensor:
        raw = zlib.decompress(self._deflated[i], bufsize=self._nbytes)
        with warnings.catch_warnings():  # not written to: it is stacked next
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(raw, dtype=torch.uint8)


class Awaited(Dataset[Tensor]):
    """Images that arrive after a delay."""

    def __init__(self, num: int, nbytes: int) -> None:
        self._image = torch.zeros(nbytes, dtype=torch.uint8)
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, i: int) -> Tensor:
        time.sleep(0.003)
        return self._image


class Bare:
    """The minimal thread, to measure the cost of a second thread."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue(2)
        end = object()

        def fill() -> None:
            for batch in self._loader:
                batches.put(batch)
            batches.put(end)

        threading.Thread(target=fill, daemon=True).start()
        while (batch := batches.get()) is not end:
            yield batch


class Step:
    """Computes in the calling thread for about ``seconds``, without sleeping."""

    def __init__(self, seconds: float, size: int = 192) -> None:
        self._a = torch.rand(size, size)
        self._b, self._out = torch.rand(size, size), torch.empty(size, size)
        self._times = 1
        once = min(self._time(20) for _ in range(20)) / 20
        self._times = max(1, round(seconds / once))

    def _time(self, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            self()
        return time.perf_counter() - start

    def __call__(self, batch: Any = None) -> None:
        """Compute; the batch is not used."""
        for _ in range(self._times):
            torch.mm(self._a, self._b, out=self._out)


def _contenders(dataset: Callable[[], Any]) -> list[Contender]:
    items = dataset()
    plain = loader(TorchLoader, items, _BATCH, 0)
    in_worker = loader(DataLoader, items, _BATCH, 1)
    torchs = loader(TorchLoader, items, _BATCH, 1)
    step = Step(_fastest(plain()) / DATA)
    steps = Ways(partial(with_step, step), costs=False)
    alone = Ways(partial(step_alone, step), costs=False)
    fetch = Ways(fetch_alone, costs=False)
    ahead = "ours: PreDataLoader"
    return [
        steps.peer(f"{ahead}(no workers)", lambda: PreDataLoader(plain()), "ours"),
        steps.peer(
            f"{ahead}(DataLoader, 1 worker)", lambda: PreDataLoader(in_worker()), "ours"
        ),
        steps.peer("ours: DataLoader, 1 worker", in_worker, "ours"),
        steps.peer("torch's loader, no workers", plain),
        steps.peer("torch's loader, 1 worker", torchs),
        steps.peer("a bare thread and a queue", lambda: Bare(plain()), "limit"),
        alone.peer(COMPUTE, plain, "limit"),
        fetch.peer(FETCH, plain, "limit"),
    ]


def with_step(step: Callable[[Any], None], loader: Iterable[Any]) -> float:
    """Return the time after the first batch, per step."""
    batches = iter(loader)
    batch = next(batches)
    num, start = 0, time.perf_counter()
    while batch is not None:
        step(batch)
        num += 1
        batch = next(batches, None)
    return (time.perf_counter() - start) / num


def step_alone(step: Callable[[Any], None], loader: Any) -> float:
    """Return the time of a step, without loading."""
    start = time.perf_counter()
    for _ in range(len(loader)):
        step(None)
    return (time.perf_counter() - start) / len(loader)


def fetch_alone(loader: Any) -> float:
    """Return the time per step of all batches but the first."""
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    for _ in batches:
        pass
    return (time.perf_counter() - start) / len(loader)


def _fastest(loader: Any) -> float:
    """Return the shortest time of a batch."""
    times = []
    for _ in range(2):
        last = time.perf_counter()
        for _ in loader:
            now = time.perf_counter()
            times.append(now - last)
            last = now
    return min(times)


def add_hidden(case: Record) -> None:
    """Add to every row of a case the share of the data's time that was hidden.

    Ours must hide `HIDDEN` of it. It is 1 - (with - step) / data, for each round and
    for the medians.
    """
    rows = {row["name"]: row for row in case["rows"] if row["installed"]}
    compute, fetch = rows[COMPUTE], rows[FETCH]
    for row in rows.values():
        if row in (compute, fetch):
            continue
        each = zip(row["seconds"], compute["seconds"], fetch["seconds"], strict=True)
        hidden = summarise([1 - (t - step) / data for t, step, data in each])
        of_medians = 1 - (row["median"] - compute["median"]) / fetch["median"]
        row["hidden"] = {"of_medians": of_medians, **hidden}
    case["must_hide"] = HIDDEN
