"""DataLoader(pin_memory=True) on a GPU: pinned rings, captures, forked workers."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import pyparallel
from pyparallel import DataLoader, PreDataLoader, scatter, start_to_host
from pyparallel.shm import pinning
from pyparallel.shm import ring as ring_module
from pyparallel.transfer import to_device
from tests.support.devices import fake_cuda
from tests.support.loader.loader_sets import Numbers, holders, wait_for

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(120),
    # Python 3.12 warns of every fork beside a thread: workers start beside CUDA's.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

NUM_BATCHES, BATCH = 10, 2
#: One more than a device uses if it is three epochs behind.
NUM_SLABS = 40
#: A batch has 256 KiB: it is copied by itself, from where a worker wrote it.
SHAPE = (32_768,)


def expected(i: int) -> torch.Tensor:
    """Return batch ``i`` of every loader here."""
    first = float(BATCH * i)
    return torch.tensor([[first], [first + 1]]).expand(BATCH, *SHAPE)


def assert_expected(batches: Iterable[torch.Tensor]) -> None:
    """Compare the batches of an epoch, from the first on."""
    for i, batch in enumerate(batches):
        assert torch.equal(batch.cpu(), expected(i)), i


OPTIONS: dict[str, Any] = {
    "num_workers": 2,
    "multiprocessing_context": "fork",
    "ring_slabs": NUM_SLABS,
}


#: Kinds of workers that write the batches.
WORKERS: dict[str, dict[str, Any]] = {
    "processes": {},
    "persistent processes": {"persistent_workers": True},
    "threads": {"worker_method": "thread", "multiprocessing_context": None},
}


def pinned_loader(dataset: Any = None, **options: Any) -> Any:
    return DataLoader(
        dataset or Numbers(BATCH * NUM_BATCHES, SHAPE),
        BATCH,
        pin_memory=True,
        **{**OPTIONS, **options},
    )


def by_scatter(loader: Any) -> Iterator[torch.Tensor]:
    for batch in loader:
        assert batch.is_pinned()
        yield scatter(batch, [0])[0]


def by_to(loader: Any) -> Iterator[torch.Tensor]:
    for batch in loader:
        assert batch.is_pinned()
        yield batch.to("cuda", non_blocking=True)


def by_prefetch(loader: Any) -> Iterator[torch.Tensor]:
    with PreDataLoader(loader, 0) as ahead:
        yield from ahead


def by_side_stream(loader: Any) -> Iterator[torch.Tensor]:
    """Copy as prefetchers of other libraries do: the batch is dropped at once."""
    side = torch.cuda.Stream()
    for batch in loader:
        assert batch.is_pinned()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            copied = batch.to("cuda", non_blocking=True)
        del batch
        torch.cuda.current_stream().wait_stream(side)
        copied.record_stream(torch.cuda.current_stream())
        yield copied


def by_side_stream_of_a_prefetcher(loader: Any) -> Iterator[torch.Tensor]:
    with PreDataLoader(loader) as on_host:
        yield from by_side_stream(on_host)


WAYS = (
    by_scatter,
    by_to,
    by_prefetch,
    by_side_stream,
    by_side_stream_of_a_prefetcher,
)


def is_free_again(loader: Any) -> bool:
    """Return True once the device has read all that was dropped."""

    def is_free() -> bool:
        to_device.release_done()
        return not any(holders(loader))

    return wait_for(is_free)


@contextlib.contextmanager
def late_device() -> Iterator[None]:
    """Keep the device behind the host: copies are under way when batches die."""
    delay = fake_cuda.delayed(2000) if fake_cuda.active else contextlib.nullcontext()
    with delay:
        torch.cuda._sleep(50_000_000)
        yield


# -------------------------------------------------------------------- values and slabs


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("way", WAYS)
def test_every_batch_of_several_epochs_is_right(way: Any, workers: str) -> None:
    loader = pinned_loader(**WORKERS[workers])
    with late_device():
        for _ in range(3):
            sent = list(way(loader))
            assert len(sent) == NUM_BATCHES
            assert all(batch.is_cuda for batch in sent)
            assert_expected(sent)
    stats = loader.stats()
    assert (stats.ring_hits, stats.ring_misses) == (3 * NUM_BATCHES, 0)
    assert is_free_again(loader)


@pytest.mark.filterwarnings("ignore:.PP201")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_slab_is_not_written_while_the_device_reads_it(
    way: Any, workers: str
) -> None:
    """Four slabs serve 60 batches, and the device is behind by three of them."""
    num = 60
    loader = pinned_loader(
        Numbers(BATCH * num, SHAPE),
        **{**WORKERS[workers], "num_workers": 1, "ring_slabs": 4},
    )
    sent = []
    with late_device():
        for batch in way(loader):
            sent.append(batch)
            if len(sent) % 4 == 0:
                torch.cuda.current_stream().synchronize()
                to_device.release_done()
                torch.cuda._sleep(5_000_000)
    assert_expected(sent)
    assert loader.stats().ring_hits > 8, "no slab was used three times"
    assert is_free_again(loader)


def by_waiting(loader: Any) -> Iterator[torch.Tensor]:
    """Copy on a stream that the host waits for."""
    side = torch.cuda.Stream()
    for batch in loader:
        with torch.cuda.stream(side):
            copied = batch.to("cuda", non_blocking=True)
        side.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        copied.record_stream(torch.cuda.current_stream())
        yield copied


@pytest.mark.fake_cuda  # holds a stream
@pytest.mark.parametrize("way", [by_scatter, by_prefetch, by_waiting])
def test_a_host_that_runs_ahead_of_the_steps_misses_no_slab(way: Any) -> None:
    """The ring has its default size. The device does no step before the last copy.

    The batches stay alive: copies into the memory of dropped ones wait for their steps.
    """
    num = 40
    loader = pinned_loader(Numbers(BATCH * num, SHAPE), ring_slabs=None)
    copies = to_device.torch_device.copy_stream(torch.device("cuda", 0))
    batches, steps = [], []
    to_device.torch_device.keep([], copies)  # memory of earlier tests is free now
    torch.cuda.synchronize()
    with fake_cuda.held():
        for batch in way(loader):
            batches.append(batch)
            steps.append(batch + 0)
            copies.synchronize()
    assert_expected(steps)
    assert (loader.stats().ring_hits, loader.stats().ring_misses) == (num, 0)


@pytest.fixture
def in_place() -> None:
    if pinning.accelerator_pinner() is None:
        pytest.skip("torch pins batches in its own memory")


@pytest.mark.fake_cuda  # lists the calls
@pytest.mark.usefixtures("in_place")
@pytest.mark.filterwarnings("ignore:.PP201")
@pytest.mark.parametrize("persistent", [False, True])
def test_slabs_are_pinned_once_and_unpinned_with_the_loader(persistent: bool) -> None:
    loader = pinned_loader(persistent_workers=persistent, ring_slabs=3)
    with fake_cuda.calls(fake_cuda.EXTENSION) as calls:
        for _ in range(3):
            for way in WAYS:
                list(way(loader))
        assert is_free_again(loader)
        del loader
        gc.collect()
    assert calls.count("cudaHostRegister") == calls.count("cudaHostUnregister") == 3


@pytest.mark.fake_cuda  # lists the calls
@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_loader_that_is_dropped_unpins_after_the_last_copy(
    way: Any, workers: str
) -> None:
    loader = pinned_loader(**WORKERS[workers])
    with fake_cuda.calls(fake_cuda.EXTENSION) as calls:
        with late_device():
            sent = list(way(loader))
            del loader
            gc.collect()
        assert wait_for(lambda: not to_device.keep_alive._sources)
    assert calls.count("cudaHostRegister") == calls.count("cudaHostUnregister")
    assert_expected(sent)


@pytest.mark.usefixtures("in_place")
def test_a_batch_is_read_in_place_without_a_pageable_copy() -> None:
    loader = pinned_loader()
    list(by_scatter(loader))  # every slab is pinned now, as far as one is used
    batches = iter(loader)
    batch = next(batches)
    ring = loader._receiver.ring
    inside = [
        ring.slab_address(slab)
        <= batch.data_ptr()
        < ring.slab_address(slab) + ring.slab_nbytes
        for slab in range(ring.num_slabs)
    ]
    assert inside.count(True) == 1
    before = pyparallel.memory.pinned_info()
    sent = scatter(batch, [0])[0]
    assert pyparallel.memory.pinned_info() == before  # no staging block was taken
    assert torch.equal(sent.cpu(), expected(0))


def test_a_batch_that_is_kept_outlives_its_epoch_and_its_loader() -> None:
    loader = pinned_loader()
    kept = list(loader)[3]
    assert [int(batch[0, 0]) for batch in loader] == [2 * i for i in range(NUM_BATCHES)]
    del loader
    assert kept.is_pinned() and torch.equal(kept, expected(3))
    assert torch.equal(scatter(kept, [0])[0].cpu(), expected(3))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", [by_scatter, by_prefetch])
def test_an_epoch_that_is_left_early_costs_no_slab(way: Any, persistent: bool) -> None:
    loader = pinned_loader(persistent_workers=persistent)
    for stop in (1, 4, 0):
        sent = way(loader)
        assert_expected(islice(sent, stop))
        sent.close()
        del sent
    sent = list(way(loader))
    assert len(sent) == NUM_BATCHES
    assert_expected(sent)
    del sent
    assert loader.stats().ring_misses == 0
    assert is_free_again(loader)


# ---------------------------------------------------------------------- forked workers


class AsksForCuda(Dataset[Any]):
    """Samples that say whether CUDA is closed to the worker that made them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        closed = torch.cuda._is_in_bad_fork() and not torch.cuda.is_initialized()
        return {"x": torch.full(SHAPE, float(i)), "closed": closed}


@pytest.mark.parametrize("collate_fn", [None, pyparallel.collate])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_workers_that_are_forked_after_the_start_of_cuda_do_without_it(
    collate_fn: Any, pin_memory: bool
) -> None:
    """torch raises for each use of CUDA in such a worker."""
    torch.ones(1).to("cuda")
    loader: Any = DataLoader(
        AsksForCuda(), 2, collate_fn=collate_fn, pin_memory=pin_memory, **OPTIONS
    )
    for _ in range(2):  # the second epoch forks beside slabs that are pinned
        for i, batch in enumerate(loader):
            assert list(batch["closed"]) == [True, True]
            sent = scatter(batch["x"], [0])[0]
            assert torch.equal(sent.cpu(), expected(i))
    assert loader.stats().ring_misses == 0


# --------------------------------------------------------------------- graph captures


class Gated(Numbers):
    """Samples that workers make when the gate is open; the first ones at once."""

    def __init__(self, num_free: int) -> None:
        super().__init__(BATCH * NUM_BATCHES, SHAPE)
        self.num_free = num_free
        self.gate = multiprocessing.get_context("fork").Event()

    def __getitem__(self, i: int) -> torch.Tensor:
        assert i < self.num_free or self.gate.wait(60)
        return super().__getitem__(i)


def captured(body: Callable[[], Any]) -> None:
    """Run ``body`` in a graph capture of this thread, and replay the graph.

    An unsafe call of any thread ends the capture. `torch.cuda.graph` would first wait
    for the device and empty the allocator's cache.
    """
    static = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        static.add_(1)
        try:
            body()
        finally:
            static.add_(1)
            graph.capture_end()
    for i in (1, 2):
        graph.replay()
        assert static.tolist() == [2.0 * i] * 8


def cache_memory(stream: Any = None) -> None:
    """Let torch's allocator have memory: its ``cudaMalloc`` would end a capture."""
    with torch.cuda.stream(stream):
        blocks = [torch.empty(BATCH, *SHAPE, device="cuda") for _ in range(16)]
    del blocks


def in_thread(body: Callable[[], Any], stream: Any = None) -> None:
    """Run ``body`` in another thread, on a stream or the default one."""

    def run() -> None:
        with torch.cuda.stream(stream):
            body()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def test_batches_arrive_and_are_pinned_beside_a_capture() -> None:
    """The first use of a slab pins it. A later one asks for done copies."""
    loader = pinned_loader(persistent_workers=True)
    batches, arrived = iter(loader), []
    with late_device():
        first = scatter(next(batches), [0])[0]  # its slab is given back late

        def arrive() -> None:
            in_thread(lambda: arrived.extend(islice(batches, 3)))
            assert holders(loader).count(ring_module.PARENT) >= 3

        captured(arrive)
        rest = [scatter(batch, [0])[0] for batch in (*arrived, *batches)]
    assert_expected([first, *rest])
    arrived.clear()
    assert loader.stats().ring_misses == 0
    assert is_free_again(loader)


def test_a_batch_may_die_in_the_thread_that_captures() -> None:
    loader = pinned_loader()
    batches = iter(loader)
    held = [next(batches)]
    with late_device():
        sent = [scatter(held[0], [0])[0]]
        captured(held.clear)
        sent += [scatter(batch, [0])[0] for batch in batches]
    assert_expected(sent)
    assert loader.stats().ring_misses == 0
    assert is_free_again(loader)


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_thread_sends_and_drops_batches_beside_a_capture(own_stream: bool) -> None:
    loader = pinned_loader()
    stream = torch.cuda.Stream() if own_stream else None
    batches, sent = iter(loader), []

    def use() -> None:
        for _ in range(4):
            sent.append(scatter(next(batches), [0])[0])

    with late_device():
        in_thread(use, stream)
        cache_memory(stream)
        captured(lambda: in_thread(use, stream))
        sent += [scatter(batch, [0])[0] for batch in batches]
    assert_expected(sent)
    assert is_free_again(loader)


@pytest.mark.parametrize("own_stream", [False, True])
def test_results_are_under_way_to_the_host_beside_a_capture(own_stream: bool) -> None:
    """A send asks for the end of other copies, which must not end the capture."""
    numbers = torch.arange(1 << 20, dtype=torch.float32)
    there, leaves = numbers.to("cuda"), [torch.full((5,), 7.0), torch.arange(9)]
    stream = torch.cuda.Stream() if own_stream else None
    sent: list[Any] = []

    def send() -> None:
        in_thread(lambda: sent.extend(scatter(leaves, [0])), stream)

    send()
    cache_memory(stream)
    start_to_host([there]).get()  # to allocate pinned memory may wait for the device
    with late_device():
        handle = start_to_host([there])
        assert not handle.is_done()
        captured(send)
        (got,) = handle.get()
    assert torch.equal(got, numbers)
    for first, second in sent:
        assert torch.equal(first.cpu(), leaves[0])
        assert torch.equal(second.cpu(), leaves[1])


@pytest.mark.parametrize("kind", [DataLoader, TorchLoader])
def test_a_prefetcher_continues_during_a_capture(kind: Any) -> None:
    """torch's own pinning thread may end a capture: its loader does not pin here."""
    dataset, options = Gated(num_free=2 * BATCH), {**OPTIONS, "num_workers": 1}
    if kind is TorchLoader:
        del options["ring_slabs"]
    loader = kind(dataset, BATCH, pin_memory=kind is DataLoader, **options)
    with PreDataLoader(loader, 0, queue_size=4) as ahead:
        batches = iter(ahead)
        sent = [next(batches)]
        cache_memory()

        def arrive() -> None:
            dataset.gate.set()
            assert wait_for(lambda: len(batches._thread.items) == 4)

        captured(arrive)
        sent += batches
    assert len(sent) == NUM_BATCHES
    assert_expected(sent)
