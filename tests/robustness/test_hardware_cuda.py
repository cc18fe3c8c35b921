"""Properties that only hardware can judge; the fake runtime runs the code of each.

A GPU gets 10,000 batches, the fake runtime a few. The checksums are computed on the
device, so no copy to the host waits for a batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pyparallel import (
    DataContainer,
    DataLoader,
    Padding,
    PreDataLoader,
    collate,
    scatter,
)
from tests.support.devices import fake_cuda
from tests.support.repository.folders import ROOT, python_path

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(120),
    # Python 3.12 warns of every fork beside a thread: workers start beside CUDA's.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    # A device that is late has all slabs.
    pytest.mark.filterwarnings("ignore:.PP201"),
]

BATCH, WIDEST = 2, 30_000
NUM_BATCHES = 40 if fake_cuda.active else 10_000
#: Large primes, so that a byte in another place gives another checksum.
FACTOR, MODULUS = 7_919, 1_000_003


class Ragged(Dataset[Any]):
    """Bytes that depend on the sample and the place, in different numbers."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._bytes = torch.arange(2 * WIDEST, dtype=torch.int64) * FACTOR % 251 + 1
        self._bytes = self._bytes.to(torch.uint8)

    def __len__(self) -> int:
        return self._num

    def sample(self, i: int) -> Tensor:
        """Return the bytes of a sample."""
        begin = i * 13 % WIDEST
        return self._bytes[begin : begin + WIDEST - i * 31 % 20_000]

    def __getitem__(self, i: int) -> Any:
        return DataContainer(self.sample(i), stack=True, pad_dims=1, padding=Padding())


class Checksums:
    """The sums of batches, each byte times a number of its place."""

    def __init__(self, device: str) -> None:
        places = torch.arange(WIDEST, device=device)
        self._weights = places * FACTOR % MODULUS
        self.found: list[Tensor] = []

    def add(self, batch: Tensor) -> None:
        """Queue the sum of a batch, and wait for nothing."""
        weighted = batch.to(torch.int64) * self._weights[: batch.shape[1]]
        self.found.append(weighted.sum(1))


def expected(num_batches: int) -> Tensor:
    """Return the sums of all samples, computed from the samples alone."""
    samples, sums = Ragged(BATCH * num_batches), Checksums("cpu")
    for i in range(BATCH * num_batches):
        sums.add(samples.sample(i)[None])
    return torch.cat(sums.found)


def loader(num_batches: int, **options: Any) -> Any:
    return DataLoader(
        Ragged(BATCH * num_batches),
        BATCH,
        collate_fn=collate,
        num_workers=2,
        multiprocessing_context="fork",
        pin_memory=True,
        **options,
    )


def whole(batch: Any) -> Tensor:
    """Return the tensor of a batch of one chunk."""
    (tensor,) = batch.data if isinstance(batch, DataContainer) else [batch]
    return tensor


def by_scatter(batches: Iterable[Any]) -> Iterator[Tensor]:
    for batch in batches:
        yield whole(scatter(batch, [0])[0])


def by_to_on_a_side_stream(batches: Iterable[Any]) -> Iterator[Tensor]:
    """Copy as a prefetcher of a user does, and drop the batch outside the stream."""
    side = torch.cuda.Stream()
    for batch in batches:
        with torch.cuda.stream(side):
            sent = whole(batch).to("cuda", non_blocking=True)
        del batch
        torch.cuda.current_stream().wait_stream(side)
        sent.record_stream(torch.cuda.current_stream())
        yield sent


def by_prefetch(batches: Any) -> Iterator[Tensor]:
    with PreDataLoader(batches, 0) as ahead:
        yield from map(whole, ahead)


WAYS = [by_scatter, by_to_on_a_side_stream, by_prefetch]


@pytest.mark.parametrize("way", WAYS)
def test_thousands_of_batches_have_their_checksums(way: Any) -> None:
    sums = Checksums("cuda")
    for batch in way(loader(NUM_BATCHES)):
        sums.add(batch)
    assert torch.equal(torch.cat(sums.found).cpu(), expected(NUM_BATCHES))


@pytest.mark.parametrize("way", WAYS)
def test_a_host_that_runs_ahead_overwrites_nothing(way: Any) -> None:
    """The device sleeps in each step, so the host is many steps ahead."""
    num, sums = (20 if fake_cuda.active else 300), Checksums("cuda")
    for batch in way(loader(num, ring_slabs=6)):
        torch.cuda._sleep(1_000_000)
        sums.add(batch)
    assert torch.equal(torch.cat(sums.found).cpu(), expected(num))


def test_one_call_copies_from_both_kinds_of_pinned_memory() -> None:
    """Memory that torch has allocated, and memory of a ring, which is registered."""
    shape = (1 << 20,) if fake_cuda.active else (8 << 20,)
    numbers = torch.arange(shape[0], dtype=torch.int32)
    ring = next(iter(DataLoader(Rows(numbers), 3, **PINNED)))
    torchs = [(numbers * i).pin_memory() for i in range(2, 5)]
    for leaves in ([*torchs, *ring], [*ring.unbind(), torchs[0]]):
        assert all(leaf.is_pinned() for leaf in leaves)
        for got, leaf in zip(scatter(leaves, [0])[0], leaves, strict=True):
            assert torch.equal(got.cpu(), leaf)


PINNED: dict[str, Any] = {
    "num_workers": 1,
    "multiprocessing_context": "fork",
    "pin_memory": True,
}


class Rows(Dataset[Tensor]):
    """A tensor, shifted by the number of the sample."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        return self._numbers + i


ALLOCATORS = [
    "expandable_segments:True",
    "backend:cudaMallocAsync",
    "pinned_use_background_threads:True",
]
#: One thread captures in the mode in which any thread can end it, another one receives.
CAPTURE = """
import threading, warnings
import torch
from tests.support.loader.loader_sets import Numbers
from pyparallel import DataLoader, PreDataLoader
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
warnings.filterwarnings("ignore", ".PP201")
shape, received, stream = (300_000,), [], torch.cuda.Stream()
options = dict(num_workers=1, pin_memory=True, ring_slabs=40)
loaders = [DataLoader(Numbers(32, shape), 2, **options) for _ in range(2)]

def receive():
    with torch.cuda.stream(stream), PreDataLoader(loaders[1], 0) as ahead:
        received.extend(ahead)

static, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
batches = iter(PreDataLoader(loaders[0], 0))
print(next(batches).sum().item())
thread = threading.Thread(target=receive)
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    graph.capture_begin(capture_error_mode="global")
    static.add_(1)
    thread.start()
    thread.join(60)
    static.add_(1)
    graph.capture_end()
graph.replay()
print(static.tolist())
numbers = torch.arange(32.0) * shape[0]
for found, first in ((received, 0), (batches, 2)):
    sums = [batch.sum(1) for batch in found]
    assert torch.equal(torch.cat(sums).cpu(), numbers[first:])
"""


@pytest.mark.parametrize("setting", ALLOCATORS)
def test_batches_arrive_beside_a_capture_with_each_allocator(setting: str) -> None:
    lines = run(CAPTURE, PYTORCH_ALLOC_CONF=setting)
    assert lines == ["300000.0", str([2.0] * 8)]


def run(code: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": python_path(ROOT), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
