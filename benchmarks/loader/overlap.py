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
import torch.utils.data
from torch import Tensor
from torch.utils.data import Dataset

import pyparallel
from pyparallel import DataLoader

from .._harness import Record, summarise
from .epochs import Counted, Epochs, peer
from .images import Comparison

#: The time for data, in steps.
DATA = 0.8
_BATCH = 4
#: The share of it that must be hidden.
HIDDEN = 0.95

COMPUTE, FETCH = "the step alone", "the data alone"
BARE = "a bare thread and a queue"

_PreDataLoader: Any = getattr(pyparallel, "PreDataLoader", None)


def cases(quick: bool) -> list[Comparison]:
    """Return the cases."""
    step = (
        f"a step of matmuls by one thread, calibrated so that the data take {DATA} of "
        "it; from the first batch on"
    )
    num, nbytes = (4, 1 << 12) if quick else (24, 1 << 20)
    return [
        Comparison(
            "a step and data that are computed",
            "overlap",
            f"synthetic: 4 images, inflated by zlib, which lets go of the GIL; {step}",
            partial(_contenders, lambda: Inflated(num * _BATCH, nbytes)),
        ),
        Comparison(
            "a step and data that are waited for",
            "overlap",
            f"synthetic: 4 images, each after 3 ms; {step}",
            partial(_contenders, lambda: Awaited(num * _BATCH, nbytes)),
        ),
    ]


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


def _contenders(dataset: Callable[[], Any], clock: Counted) -> list[Any]:
    items = dataset()
    torchs: Any = torch.utils.data.DataLoader

    def loader(kind: Any, workers: int) -> Callable[[], Any]:
        context = "fork" if workers else None
        return partial(
            kind,
            items,
            _BATCH,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context=context,
        )

    def epochs(make: Callable[[], Any], run: Callable[[Any], float]) -> Epochs:
        return Epochs(make, run, clock)

    plain = loader(torchs, 0)
    step = Step(_fastest(plain()) / DATA)
    run = partial(with_step, step)
    in_worker = loader(DataLoader, 1)
    return [
        _ahead("ours: PreDataLoader(no workers)", plain, run, clock),
        _ahead("ours: PreDataLoader(DataLoader, 1 worker)", in_worker, run, clock),
        peer("ours: DataLoader, 1 worker", epochs(in_worker, run), "ours"),
        peer("torch's loader, no workers", epochs(plain, run)),
        peer("torch's loader, 1 worker", epochs(loader(torchs, 1), run)),
        peer(BARE, epochs(lambda: Bare(plain()), run), "limit"),
        peer(COMPUTE, epochs(plain, partial(step_alone, step)), "limit"),
        peer(FETCH, epochs(plain, fetch_alone), "limit"),
    ]


def _ahead(
    name: str, make: Callable[[], Any], run: Callable[[Any], float], clock: Counted
) -> Any:
    if _PreDataLoader is None:
        return peer(name, None, "ours")
    return peer(name, Epochs(lambda: _PreDataLoader(make()), run, clock), "ours")


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

    It is 1 - (with - step) / data, for each round and for the medians.
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
