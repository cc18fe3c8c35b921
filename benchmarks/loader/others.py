"""Loaders of other libraries that read in threads. They import their library at use."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch

_WORKERS = 2
#: The most seconds for the end of a thread of a peer.
_END_SECONDS = 10.0
Order = Sequence[Sequence[int]]


def absent(packages: Iterable[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [
        each
        for each in packages
        if not (find_spec(each.split(".")[0]) and find_spec(each))
    ]


class Peer:
    """A loader of another library, which reads and collates in two threads.

    Args:
        start: returns an iterator of an epoch, for its order and a reader of batches.
        order: the indices of each batch.
        dataset: has the samples.
        collate: makes a batch.
    """

    def __init__(
        self,
        start: Callable[[Order, Callable[[Sequence[int]], Any]], Iterator[Any]],
        order: Order,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._start, self._order = start, order
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        return self._start(self._order, self._read)

    def _read(self, batch: Sequence[int]) -> Any:
        return self._collate([self._dataset[i] for i in batch])


def by_nodes(order: Order, read: Callable[[Sequence[int]], Any]) -> Iterator[Any]:
    """Yield an epoch of torchdata's nodes.

    Their threads are daemons, which abort the process if it ends while they are in an
    operator of torch or OpenCV. So an epoch that is left waits for them.
    """
    from torchdata import nodes

    others = {*threading.enumerate()}
    batches = nodes.SamplerWrapper(order)
    mapped = nodes.ParallelMapper(batches, read, num_workers=_WORKERS, method="thread")
    loader: Any = nodes.Loader(nodes.Prefetcher(mapped, _WORKERS))
    try:
        yield from loader
    except GeneratorExit:
        del batches, mapped, loader
        gc.collect()  # they are a cycle
        for thread in {*threading.enumerate()} - others:
            thread.join(_END_SECONDS)
        raise


def by_spdl(order: Order, read: Callable[[Sequence[int]], Any]) -> Iterator[Any]:
    """Yield an epoch of a pipeline of SPDL."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(order)
    builder = builder.pipe(read, concurrency=_WORKERS, output_order="input")
    pipeline = builder.add_sink(_WORKERS).build(num_threads=_WORKERS)
    with pipeline.auto_stop():
        yield from pipeline


def by_pool(order: Order, read: Callable[[Sequence[int]], Any]) -> Iterator[Any]:
    """Yield an epoch of a pool of two threads, without anything else of a loader."""
    with ThreadPoolExecutor(_WORKERS, "", torch.set_num_threads, (1,)) as pool:
        pending = deque(pool.submit(read, batch) for batch in order[: 2 * _WORKERS])
        for batch in order[2 * _WORKERS :]:
            yield pending.popleft().result()
            pending.append(pool.submit(read, batch))
        while pending:
            yield pending.popleft().result()


#: The name of the pool.
BARE = "a bare pool of threads"
#: The other libraries by their packages: the names of contenders, and their epochs.
PEERS = {
    "torchdata": ("torchdata's nodes, threads", by_nodes),
    "spdl": ("SPDL, threads", by_spdl),
}
