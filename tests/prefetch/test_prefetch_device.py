"""Batches sent to a device with slow streams that reuses memory.

The device is that of ``fake_device``: a missing wait shows as a wrong value.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyparallel import DataContainer as DC
from pyparallel import PreDataLoader, Ragged
from pyparallel.prefetch._to_device import DeviceStage
from tests.support.devices.fake_device import DEVICE, FakeDevice
from tests.support.loader.prefetch_loaders import nothing_left, until

pytestmark = pytest.mark.one_backend

NUM_BATCHES = 40


def numbers(num_batches: int = NUM_BATCHES) -> Iterator[dict[str, Any]]:
    for i in range(num_batches):
        yield {"a": torch.full((500,), i, dtype=torch.uint8), "b": [torch.tensor(i)]}


@contextlib.contextmanager
def prefetching(
    fake: FakeDevice, loader: Any, transform: Any = None, **options: Any
) -> Iterator[PreDataLoader]:
    """Make a PreDataLoader for the fake device."""
    with nothing_left(), fake, PreDataLoader(loader, **options) as pre:
        pre._device_stage = DeviceStage(DEVICE, transform, fake)
        yield pre


def wrong_batches(fake: FakeDevice, transform: Any = None, add: int = 0) -> int:
    """Read all batches on a slow stream; return how many it read wrongly."""
    read: list[bytes] = []
    with prefetching(fake, lambda: numbers(), transform) as pre:
        for i, batch in enumerate(pre):
            fake.read(batch["a"], read)
            del batch  # its memory may be used again, but not before it is read
            until(lambda seen=i: len(read) >= seen - 2)  # a step or two behind
        until(lambda: len(read) == NUM_BATCHES)
    expected = [bytes([i + add]) * 500 for i in range(NUM_BATCHES)]
    return sum(got != want for got, want in zip(read, expected, strict=True))


@pytest.mark.parametrize("delays", [(1e-2, 1e-4), (1e-4, 1e-2)], ids=["copy", "step"])
def test_every_batch_arrives_whole_before_it_is_read(
    delays: tuple[float, float],
) -> None:
    fake = FakeDevice(*delays)
    assert wrong_batches(fake) == 0
    assert fake.num_copies == NUM_BATCHES  # one for each batch
    # Its memory comes from the copy stream alone, and is used again.
    assert set(fake.pools) == {fake.copies} and fake.pools[fake.copies].num_reused > 20


def add_one(fake: FakeDevice) -> Any:
    """Return a transform that computes on the stream that is current, in new memory."""

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        assert fake.current_stream(DEVICE) is fake.copies
        read: list[bytes] = []
        fake.read(batch["a"], read)
        result = fake.empty(500, DEVICE)
        source, into = batch["a"].numpy(), result.numpy()
        del batch

        def kernel() -> None:
            into[:] = source + 1

        fake.current_stream(DEVICE).queue(kernel)
        return {"a": result}

    return transform


@pytest.mark.slow
@pytest.mark.parametrize("delays", [(1e-2, 1e-4), (1e-4, 1e-2)], ids=["copy", "step"])
def test_a_transform_runs_after_the_copy_and_before_the_consumer(
    delays: tuple[float, float],
) -> None:
    fake = FakeDevice(*delays)
    assert wrong_batches(fake, add_one(fake), add=1) == 0
    assert set(fake.pools) == {fake.copies}
    assert fake.pools[fake.copies].num_reused > 20


def test_memory_of_a_transform_is_kept_for_the_consumer_that_reads_it() -> None:
    fake = FakeDevice()
    read: list[bytes] = []
    late = threading.Event()
    with prefetching(fake, lambda: numbers(), add_one(fake)) as pre:
        it = iter(pre)
        batch = next(it)
        fake.main.queue(late.wait, 30)
        fake.read(batch["a"], read)
        del batch
        # Later ones, whose memory is free at once, would be written there.
        assert sum(1 for _ in it) == NUM_BATCHES - 1
        assert fake.record(fake.copies).wait(20)
        late.set()
        until(lambda: read)
    assert read == [bytes([1]) * 500]


def coo(*parts: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        parts[1][None], parts[2], (3,), check_invariants=False
    )


def csr(*parts: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(*parts, (1, 3), check_invariants=False)


@pytest.mark.parametrize(("make", "num_parts"), [(coo, 2), (csr, 3)])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_the_parts_of_a_sparse_result_are_kept(make: Any, num_parts: int) -> None:
    kept: list[tuple[int, Any]] = []

    class Recording(FakeDevice):
        def keep(self, tensors: list[torch.Tensor], stream: Any) -> None:
            kept.extend((tensor.data_ptr(), stream) for tensor in tensors)

    with Recording() as fake:
        values = ([0, 2], [0, 2], [1.0, 2.0])
        parts = [fake.put(torch.tensor(value)) for value in values]
        stage = DeviceStage(DEVICE, lambda batch: {"sparse": make(*parts)}, fake)
        get_batch, _ = stage.start({"a": torch.ones(1)})
        assert get_batch()["sparse"].layout is not torch.strided
    expected = [(part.data_ptr(), fake.main) for part in parts[-num_parts:]]
    assert kept == expected


def test_all_tensors_are_one_copy_and_other_values_are_unchanged() -> None:
    ragged = Ragged.from_tensors([torch.ones(2), torch.ones(3)])
    batch = {
        "pair": (torch.tensor([1]), thing := object()),
        "container": DC([[torch.tensor([2]), torch.tensor([3])]]),
        "host": DC([{"name": "a"}, torch.tensor([6])], cpu_only=True),
        "ragged": ragged,
    }
    fake = FakeDevice()
    with prefetching(fake, [batch]) as pre:
        (got,) = pre
        assert fake.record(fake.main).wait(10)
        assert fake.num_copies == 1
        assert pre.stats().nbytes == 3 * 8 + sum(t.nbytes for t in ragged.fields())
    assert list(got) == list(batch) and got["host"] is batch["host"]
    assert got["pair"][1] is thing and type(got["ragged"]) is Ragged
    values = [got["pair"][0], *got["container"].data[0]]
    assert [int(value) for value in values] == [1, 2, 3]
    assert all(fake.holds(DEVICE, value) for value in values)


def test_tensors_on_the_device_are_returned_unchanged() -> None:
    batch = [torch.ones(2, device="meta"), {"a": torch.ones(3, device="meta")}]
    with FakeDevice() as fake:
        land, nbytes = DeviceStage(torch.device("meta"), None, fake).start(batch)
        assert land() is batch and nbytes == fake.num_copies == 0


def test_without_streams_empty_tensors_are_moved_too() -> None:
    stage = DeviceStage(None, None)
    stage.device = torch.device("meta")  # in place of one without streams
    batch = {"boxes": torch.empty(0, 4)}
    get_batch, nbytes = stage.start(batch)
    assert get_batch()["boxes"].device.type == "meta" and nbytes == 0
    get_batch, nbytes = stage.start(moved := get_batch())
    assert get_batch() is moved and nbytes == 0


def test_streams_and_pinned_memory_are_first_used_by_the_consumer() -> None:
    users: list[threading.Thread] = []

    class Noting(FakeDevice):
        def pinned(self, nbytes: int) -> torch.Tensor:
            users.append(threading.current_thread())
            return super().pinned(nbytes)

        def copy_stream(self, device: torch.device) -> Any:
            users.append(threading.current_thread())
            return super().copy_stream(device)

    fake = Noting()
    with prefetching(fake, lambda: numbers(3)) as pre:
        assert len([batch["a"].shape for batch in pre]) == 3
    here = threading.current_thread()
    assert users[:2] == [here, here] and here not in users[2:]


def test_an_error_of_the_device_arrives_in_its_place() -> None:
    class Full(FakeDevice):
        def allocate(self, sizes: list[int], stream: Any) -> list[torch.Tensor]:
            if self.num_copies == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().allocate(sizes, stream)

    with prefetching(Full(), lambda: numbers()) as pre:
        it = iter(pre)
        got = [next(it) for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError):
            next(it)
        assert next(it, "end") == "end"
        del got


def test_the_stream_that_is_current_at_next_waits_and_no_other() -> None:
    fake = FakeDevice()
    on_side: list[bytes] = []
    on_main: list[bytes] = []
    late = threading.Event()
    fake.copies.queue(late.wait, 30)
    with prefetching(fake, lambda: numbers(3)) as pre:
        it = iter(pre)
        for _ in range(3):
            with fake.using(fake.side):
                batch = next(it)
                fake.read(batch["a"], on_side)
            fake.read(batch["a"], on_main)  # a mistake of the consumer
        until(lambda: len(on_main) == 3)
        assert not on_side
        late.set()
        until(lambda: len(on_side) == 3)
    assert on_side == [bytes([i]) * 500 for i in range(3)]
    assert on_main != on_side
