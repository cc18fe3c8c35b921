"""PreDataLoader on a GPU: behaviour that the fake device cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyparallel import DataContainer as DC
from tests.support.loader.prefetch_loaders import passes

pytestmark = pytest.mark.cuda

NUM_BATCHES = 20


@pytest.fixture(autouse=True, scope="module")
def _the_device_is_in_use() -> None:
    """Open the device, with dozens of descriptors, before tests count them."""
    torch.ones(1).pin_memory().to("cuda", non_blocking=True)
    torch.cuda.Stream().synchronize()
    torch.cuda.synchronize()


def batches() -> Iterator[dict[str, Any]]:
    for i in range(NUM_BATCHES):
        yield {
            "image": torch.full((3, 256, 256), i, dtype=torch.float32),
            "boxes": DC([[torch.full((4,), i), torch.full((2,), i)]]),
            "name": DC([[f"{i}.jpg"]], cpu_only=True),
        }


def busy() -> None:
    """Keep the current stream busy for some milliseconds."""
    torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 0)])
def test_batches_arrive_on_the_device_in_order(device: Any) -> None:
    with passes(batches, device, more_fds=50) as pre:
        got = list(pre)
    assert len(got) == NUM_BATCHES
    for i, batch in enumerate(got):
        assert batch["image"].device == torch.device("cuda", 0)
        assert bool((batch["image"] == i).all())
        assert [int(boxes[0]) for boxes in batch["boxes"].data[0]] == [i, i]
        assert batch["name"].data == [[f"{i}.jpg"]]


@pytest.mark.parametrize("transformed", [False, True])
def test_values_are_right_on_changing_busy_streams(transformed: bool) -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        busy()
        return {**batch, "image": batch["image"] * 2}

    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    sums = []
    with passes(
        batches, 0, transform=transform if transformed else None, more_fds=50
    ) as pre:
        it = iter(pre)
        for i in range(NUM_BATCHES):
            with torch.cuda.stream(streams[i % 2]):
                batch = next(it)
                busy()
                sums.append(batch["image"].sum())
                del batch  # its memory may be used again, behind the sum
    torch.cuda.synchronize()
    # Whole numbers below 2 ** 24: no order of the additions rounds.
    factor = 3 * 256 * 256 * (2 if transformed else 1)
    assert [float(value) for value in sums] == [i * factor for i in range(NUM_BATCHES)]


def test_next_does_not_wait_for_the_device() -> None:
    with passes(batches, 0, more_fds=50) as pre:
        it = iter(pre)
        for _ in range(8):  # allocate pinned memory first, because pinning may wait
            next(it)
            torch.cuda.synchronize()
        event = torch.cuda.Event()
        for _ in range(20):
            busy()
        event.record()
        next(it)
        assert not event.query()


def test_reserved_memory_does_not_grow_with_epochs() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with passes(batches, 0, more_fds=50) as pre:
        for _ in range(60):
            for batch in pre:
                batch["image"].sum()
                del batch
            torch.cuda.synchronize()
        # A busy device may have the batches of a whole epoch in its queue, two in each
        # 2 MiB of the allocator. One batch kept in every epoch would be 48 MB.
        assert torch.cuda.memory_reserved() - before <= (NUM_BATCHES // 2 + 4) << 21
