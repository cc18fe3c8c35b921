"""No batch shows a byte of an earlier one: not in padding, in gaps or in slack.

Before every batch, memory of its size is filled with a secret and freed. Then whole
storages are searched, not only the parts that the tensors of the batch show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel import DataContainer, Padding, Ragged, backend
from pyparallel.scatter_gather.to_host import HostCopy
from pyparallel.transfer import to_device
from tests.support.devices.fake_device import DEVICE, FakeDevice
from tests.support.loader.loader_sets import Making

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECRET, BATCHES = 0xA5, 400


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small batches do not wait for threads that a busy machine runs later."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors of whatever a batch consists of."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    names = ("data", "mask", "sizes", "values", "offsets")
    return [leaf for name in names for leaf in leaves(getattr(value, name, ()))]


def secrets(value: Any) -> int:
    """Count bytes of the secret in the whole memory behind a value."""
    return sum(int((backend.memory_of(leaf) == SECRET).sum()) for leaf in leaves(value))


def forget(*nbytes: int) -> None:
    """Fill memory of these sizes with the secret, and free it."""
    for size in nbytes:
        block = pyparallel.pad_stack([torch.full((size,), SECRET, dtype=torch.uint8)])
        torch.full((size,), SECRET, dtype=torch.uint8)
        del block


def ragged(i: int, rows: int = 40) -> list[torch.Tensor]:
    shapes = [(rows + i * j % 7, 30 + (i + j) % 9) for j in range(3)]
    return [torch.ones(shape, dtype=torch.uint8) for shape in shapes]


def test_the_look_finds_a_secret() -> None:
    whole = torch.zeros(100, dtype=torch.uint8)
    whole[99] = SECRET
    assert secrets({"a": [DataContainer(whole[:3])]}) == 1
    assert secrets(Ragged.from_tensors([whole[:3]])) == 0


@pytest.mark.parametrize("rows", [40, 12_000], ids=["small", "recycled"])
def test_padded_batches_show_nothing(rows: int) -> None:
    for i in range(BATCHES if rows == 40 else 40):
        samples = ragged(i, rows)
        nbytes = 3 * max(s.shape[0] for s in samples) * max(s.shape[1] for s in samples)
        forget(nbytes, nbytes)
        assert not secrets(pyparallel.pad_stack(samples))
        options = Padding(size_divisor=16, side="left", mask=True, sizes=True)
        forget(nbytes, nbytes)
        assert not secrets(pyparallel.pad_stack(samples, padding=options))


def batch(i: int) -> Any:
    columns = [
        {
            "img": DataContainer(sample[None], stack=True),
            "rest": DataContainer(sample[: j + 1, 0], ragged=True),
            "box": DataContainer(sample[:5, :4]),
            "n": torch.tensor(j),
        }
        for j, sample in enumerate(ragged(i))
    ]
    return pyparallel.collate(columns, samples_per_gpu=3)


def test_collated_and_scattered_batches_show_nothing() -> None:
    for i in range(BATCHES):
        forget(3 * 46 * 38, 64, 128, 256, 8192)
        made = batch(i)
        assert not secrets(made["img"].data) and not secrets(made["rest"].data)
        forget(3 * 46 * 38 + 64 * i % 9, 64, 128, 256)
        assert not secrets(pyparallel.scatter(made, [-1]))


def test_slabs_show_nothing_on_the_device_or_on_the_way_back() -> None:
    for i in range(BATCHES // 8):
        with FakeDevice(copy_delay=0, compute_delay=0) as fake:
            for n in range(8):
                for pool in (fake.host, fake.pools[fake.copies], fake.pools[fake.main]):
                    block = pool.take(1 << 13)
                    block.fill_(SECRET)
                    del block
                sent = [s[:n, : n + 3] for s in ragged(i)]
                queued = to_device.send(sent, DEVICE, fake)
                there = queued.wait()
                found = HostCopy(there, fake, n % 2 == 0).get()
                assert not secrets(found)
                assert all(map(torch.equal, found, sent))


def make(i: int) -> Any:
    """Return a large batch of secrets, or a small one."""
    if i % 2:
        return [torch.full((3000 + i,), SECRET, dtype=torch.uint8), "secret"]
    sizes = (i % 900, 7, 65)
    return [*(torch.ones(n, dtype=torch.uint8) for n in sizes), "plain"]


def only(samples: list[Any]) -> Any:
    return samples[0]


def test_batches_in_a_ring_show_nothing() -> None:
    # One slab for the current batch and one for the next: all batches use both in turn.
    loader = pyparallel.DataLoader(
        Making(make, BATCHES),
        num_workers=1,
        prefetch_factor=1,
        ring_slabs=2,
        collate_fn=only,
    )
    plain = 0
    for found in loader:
        if found[-1] == "plain":
            assert not secrets(found[:-1])
            plain += 1
        del found
    assert plain == BATCHES // 2
    assert loader.stats().ring_hits > BATCHES // 2


def test_images_show_nothing() -> None:
    pre = pyparallel.ImagePreprocessor(size_divisor=32, return_mask=True)
    for i in range(BATCHES // 4):
        images = [sample[None].expand(3, -1, -1) for sample in ragged(i)]
        forget(3 * 3 * 64 * 64 * 4, 3 * 64 * 64)
        assert not secrets(list(pre(images)))
