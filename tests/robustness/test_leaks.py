"""Batches leak no objects, bytes, descriptors, threads or processes.

``PYPARALLEL_LEAK_BATCHES=10000`` is the long run of ``make soak``. No sanitizer sees a
reference that is kept to an object of Python, so Python's own counts are compared.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from pyparallel import (
    DataContainer,
    DataLoader,
    ImagePreprocessor,
    Padding,
    PreDataLoader,
    collate,
    pad_stack,
    scatter,
)
from pyparallel.scatter_gather.to_host import HostCopy
from tests.support.devices.fake_device import FakeDevice
from tests.support.loader.loader_sets import Numbers, children, num_fds, wait_for
from tests.support.processes.process_resources import memfds, shared_names

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(600),
]

BATCHES = int(os.environ.get("PYPARALLEL_LEAK_BATCHES", "2000"))
#: What Python keeps for itself grows by some blocks, ever more slowly, and the system's
#: allocator by some pages. A leak of one block for a batch is BATCHES of them.
BLOCKS, OBJECTS, NBYTES = 600, 20, 6 << 20


class Counts(NamedTuple):
    blocks: int
    objects: int
    nbytes: int
    fds: int
    threads: int
    children: int
    shared: int


def count() -> Counts:
    gc.collect()
    objects = len(gc.get_objects())
    return Counts(
        sys.getallocatedblocks(),
        objects,
        psutil.Process().memory_info().rss,
        num_fds(),
        threading.active_count(),
        len(children()),
        shared_names() + memfds(),
    )


def sizes(i: int) -> tuple[int, int]:
    """Return one of few shapes: plans of those that were met are kept."""
    return 3 + i % 3, 5 + i % 4


def scenes(i: int) -> list[dict[str, Any]]:
    return [
        {
            "img": DataContainer(torch.ones(3, *sizes(i + j)), stack=True),
            "ids": DataContainer(
                torch.arange(2 + j), stack=True, pad_dims=1, padding=Padding(mask=True)
            ),
            "points": DataContainer(torch.ones(i % 3, 3), ragged=True),
            "boxes": DataContainer(torch.ones(j, 4)),
            "meta": DataContainer({"name": f"{i}"}, cpu_only=True),
            "label": torch.tensor(j),
        }
        for j in range(2)
    ]


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError, IndexError), match=text):
        call()


def batching(i: int) -> None:
    batch: Any = collate(scenes(i), samples_per_gpu=1 + i % 2)
    assert batch["img"].data[0].shape[0] == 1 + i % 2
    bad = [{"a": torch.ones(2)}, {"a": torch.ones(3)}]
    refused(lambda: collate(bad), "a")
    assert len(scatter(batch, [-1, -1])) == 2 - i % 2
    refused(lambda: scatter(batch, [99]), "99")
    samples = [torch.ones(sizes(i + j)) for j in range(3)]
    found: Any = pad_stack(samples, padding=Padding(mask=True, side="left"))
    assert found.mask.dtype is torch.bool
    refused(lambda: pad_stack([*samples, torch.ones(2)]), "dim")


def fetching(i: int) -> None:
    if i % 20:
        return
    with FakeDevice(copy_delay=0, compute_delay=0) as fake:  # it notes all it does
        for n in range(i, i + 20):
            there = [fake.put(torch.full(sizes(n + j), float(j))) for j in range(3)]
            nest = {"a": there, "b": ("text", {"c": n})}
            found = HostCopy(nest, fake, n % 2 == 0).get()
            assert [int(tensor[0, 0]) for tensor in found["a"]] == [0, 1, 2]
            HostCopy(nest, fake, True)  # dropped
            fake.captured = fake.main
            refused(partial(HostCopy, there, fake, False), "captur")
            fake.captured = None


preprocess = ImagePreprocessor([1.0, 2, 3], [4.0, 5, 6], size_divisor=8)


def imaging(i: int) -> None:
    images = [torch.ones(3, *sizes(i + j), dtype=torch.uint8) for j in range(2)]
    assert len(preprocess(images)) == 2
    refused(lambda: preprocess([torch.ones(3, 4)]), "must have shape")


@pytest.mark.parametrize("call", [batching, fetching, imaging])
def test_good_and_bad_calls_leave_nothing(call: Callable[[int], None]) -> None:
    def run(times: int) -> None:
        for i in range(times):
            call(i)

    check(run)


def check(run: Callable[[int], None], times: int = BATCHES) -> None:
    """Run once, which may fill caches, and then compare a second run."""
    run(times)
    before = count()
    run(times)
    wait_for(lambda: not grown(before))
    assert not grown(before)


def grown(before: Counts) -> dict[str, tuple[int, int]]:
    more = Counts(BLOCKS, OBJECTS, NBYTES, 0, 0, 0, 0)
    rows = zip(Counts._fields, before, count(), more, strict=True)
    return {name: (old, new) for name, old, new, most in rows if new > old + most}


class Failing(Numbers):
    """One sample in fifty raises."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if i % 50 == 7:
            raise KeyError(i)
        return super().__getitem__(i)


def batches_of(source: Any) -> Iterator[Any]:
    """Go through an epoch, errors and all."""
    batches = iter(source)
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except KeyError as error:
            assert "7" in str(error)
            if not isinstance(source, DataLoader):
                return


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_of_a_loader_leave_nothing(persistent: bool) -> None:
    loader = DataLoader(
        Failing(250, (4, 5)), num_workers=2, persistent_workers=persistent
    )

    def run(times: int) -> None:
        for _ in range(max(1, times // 250)):
            assert sum(1 for _ in batches_of(loader)) == 245
        loader.stats()  # keeps no figures of single batches after this

    check(run)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_passes_of_a_prefetcher_leave_nothing(num_workers: int) -> None:
    whole = DataLoader(Numbers(200), num_workers=num_workers)
    ending = DataLoader(Failing(40), num_workers=num_workers)

    def run(times: int) -> None:
        for i in range(max(1, times // 220)):
            assert sum(1 for _ in batches_of(PreDataLoader(whole))) == 200
            assert sum(1 for _ in batches_of(PreDataLoader(ending))) == 7
            for _ in PreDataLoader(whole):  # a consumer that leaves
                if i % 2 == 0:
                    break

    check(run)
