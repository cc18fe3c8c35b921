"""to_host on a fake device: values, streams, and lifetimes."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import start_to_host, to_host
from pyparallel.core import errors
from pyparallel.scatter_gather.to_host import HostCopy
from pyparallel.transfer import engine, pinned_results, to_device
from pyparallel.transfer import layout as layout_module
from tests.support.batch.raw_bytes import bytes_of
from tests.support.batch.samples import DTYPES, tensors
from tests.support.devices.fake_device import DEVICE, FakeDevice

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan, pytest.mark.tsan]

OTHER = torch.device("cuda", 1)


def start(batch: Any, fake: FakeDevice, snapshot: bool = True) -> HostCopy:
    return HostCopy(batch, fake, snapshot)


def fetch(batch: Any, fake: FakeDevice) -> Any:
    return HostCopy(batch, fake, False).get()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return bytes_of(found) == bytes_of(expected)


def on(fake: FakeDevice, *values: float) -> list[torch.Tensor]:
    return [fake.put(torch.full((3,), float(value))) for value in values]


# ---------------------------------------------------------------------------- values


@st.composite
def leaves_of(draw: Any) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    return draw(tensors(shape, draw(st.sampled_from(DTYPES))))


@settings(max_examples=120, deadline=None)
@given(leaves=st.lists(leaves_of(), max_size=7), snapshot=st.booleans())
def test_every_tensor_returns_unchanged(leaves, snapshot):
    large = mock.patch.object(layout_module, "DIRECT_NBYTES", 100)
    with large, FakeDevice(copy_delay=0, compute_delay=0) as fake:
        there = [fake.put(leaf) for leaf in leaves]
        found = start(there, fake, snapshot).get()
        assert all(map(same, found, leaves))
        assert all(leaf.is_contiguous() for leaf in found)
        alone = [x for x in leaves if x.is_contiguous() and x.nbytes >= 100]
        small = sum(x.nbytes for x in leaves if all(x is not y for y in alone))
        expected = (small > 0) + len(alone)
        if snapshot:
            expected = any(x.nbytes for x in leaves)
        assert fake.num_copies == expected
        assert fake.num_packs == (small > 0 or (snapshot and expected))


@pytest.mark.parametrize("call", [to_host, lambda batch: start_to_host(batch).get()])
def test_on_the_host_a_batch_is_the_very_same_object(call):
    for batch in ({"x": torch.ones(2, requires_grad=True)}, torch.ones(1), None, [1]):
        assert call(batch) is batch
    handle = start_to_host([1])
    assert handle.is_done() and handle.get() is handle.get()


def test_gradients_stay_on_the_device():
    with FakeDevice() as fake:
        parameter = torch.nn.Parameter(*on(fake, 2))
        (found,) = fetch([parameter], fake)
        assert type(found) is torch.Tensor
        assert not found.requires_grad and parameter.requires_grad


def test_tensors_that_are_not_plain_are_copied_by_torch():
    class Named(torch.Tensor):
        pass

    class Odd(FakeDevice):
        def device_of(self, tensor):
            return DEVICE if type(tensor) is Named else super().device_of(tensor)

    conj = torch.tensor([1 + 2j]).conj()
    with Odd() as fake:
        (plain,) = on(fake, 3)
        named = torch.ones(2).as_subclass(Named)
        found = fetch([named, plain], fake)
        assert type(found[0]) is Named and found[0].tolist() == [1, 1]
        assert found[1].tolist() == [3] * 3 and fake.num_copies == 1
        fake.device_of = lambda tensor: DEVICE
        assert fetch(conj, fake).tolist() == [1 - 2j]
        sparse = torch.eye(2).to_sparse()
        assert fetch(sparse, fake).to_dense().tolist() == [[1, 0], [0, 1]]
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        to_host([torch.ones(2, device="meta")])


def test_a_device_without_a_kernel_is_served_by_torch():
    with FakeDevice() as fake:
        there = on(fake, 3, 4)
        assert fake.record(fake.main).wait(30)
        fake.packs = lambda device: False
        assert [x.tolist() for x in fetch(there, fake)] == [[3] * 3, [4] * 3]
        assert fake.num_copies == 0


def test_nothing_but_empty_tensors_needs_no_copy():
    with FakeDevice() as fake:
        empty = [torch.empty(0, 4), torch.empty(2, 0, dtype=torch.int64)]
        handle = start([fake.put(x) for x in empty], fake)
        assert handle.is_done() and all(map(same, handle.get(), empty))
        assert fake.num_copies == fake.num_packs == 0


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_default_device_does_not_matter(limit, monkeypatch):
    errors._warned.add("PP213 ")
    monkeypatch.setattr(pinned_results.host_slabs, "limit", limit)
    with FakeDevice() as fake:
        there = [fake.put(torch.empty(0, 4)), fake.put(torch.ones(3))]
        with torch.device("meta"):
            alone = fetch(there[:1], fake)
            found = fetch(there, fake)
        assert same(alone[0], torch.empty(0, 4))
        assert same(found[0], torch.empty(0, 4)) and same(found[1], torch.ones(3))


def test_one_copy_for_each_device():
    with FakeDevice(num_devices=2) as fake:
        batch = [fake.put(torch.full((3,), i), fake.devices[i % 2]) for i in range(6)]
        found = start(batch, fake).get()
        assert [x.tolist() for x in found] == [[i] * 3 for i in range(6)]
        copies = [device for what, device in fake.calls if what == "copy"]
        assert copies == [DEVICE, OTHER] and fake.num_packs == 2


# --------------------------------------------------------------------------- streams


def train(fake: FakeDevice, snapshot: bool, late: bool) -> int:
    """Fetch the results of every step one step later; count those that are wrong."""
    rng = random.Random(3)
    wrong, waiting = 0, []

    def check(handle: HostCopy, expected: list[bytes]) -> bool:
        return [bytes_of(x) for x in handle.get()] != expected

    for step in range(80):
        leaves = [
            torch.full((rng.randint(100, 200),), step + i, dtype=torch.uint8)
            for i in range(3)
        ]
        there = [fake.put(leaf) for leaf in leaves]
        waiting.append((start(there, fake, snapshot), list(map(bytes_of, leaves))))
        for tensor in there:
            fake.fill(tensor, 0xEE)  # the next step may overwrite its results
        del there, tensor
        if len(waiting) > 3 * late:
            wrong += check(*waiting.pop(0))
    return wrong + sum(check(*each) for each in waiting)


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_results_are_those_of_the_call_while_memory_is_reused(
    snapshot, late, large, monkeypatch
):
    if large:  # read in place, or from a snapshot
        monkeypatch.setattr(layout_module, "DIRECT_NBYTES", 100)
    in_place = large and not snapshot
    with FakeDevice() as fake:
        assert train(fake, snapshot, late) == 0
        assert fake.num_copies == (240 if in_place else 80)
        assert fake.num_packs == (0 if in_place else 80)
        assert fake.pools[fake.main].num_reused > 80
        assert fake.host.num_reused > 0


def test_a_dropped_handle_frees_its_memory_after_the_copy():
    with FakeDevice() as fake:
        go = threading.Event()
        fake.copies.queue(go.wait, 30)
        handle = start(on(fake, 1), fake)
        slab = weakref.ref(
            engine.keep_alive._sources[max(engine.keep_alive._sources)][0]
        )
        del handle
        assert to_device.release_done() == 1 and slab() is not None
        go.set()
        assert fake.record(fake.copies).wait(30)
        assert to_device.release_done() == 0 and slab() is None


def test_the_host_waits_when_it_reads_and_not_before():
    with FakeDevice() as fake:
        go = threading.Event()
        fake.main.queue(go.wait, 30)
        handle = start(on(fake, 5), fake)
        assert not handle.is_done()
        read: list[Any] = []
        threads = [
            threading.Thread(target=lambda: read.append(handle.get())) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert not read and not handle.is_done()
        go.set()
        for thread in threads:
            thread.join(30)
        assert handle.is_done() and len(read) == 3
        assert all(each is handle.get() for each in read)
        assert read[0][0].tolist() == [5] * 3


def test_a_signal_handler_may_get_the_batch_that_is_awaited():
    class Interrupted(FakeDevice):
        def wait_on_host(self, event: threading.Event) -> None:
            if not handled:
                handled.append(None)
                handled[0] = handle.get()
            super().wait_on_host(event)

    handled: list[Any] = []
    with Interrupted() as fake:
        handle = start({"x": fake.put(torch.ones(3))}, fake)
        found = handle.get()
    assert found is handled[0] is handle.get() and found["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("snapshot", [True, False])
def test_nothing_is_queued_while_a_graph_is_recorded(snapshot):
    message = (
        "to_host: the current stream of cuda:0 must not be under graph capture, but "
        "it is. Call to_host after the capture, or after a replay."
    )
    with FakeDevice() as fake:
        there = on(fake, 1)
        fake.captured = fake.main
        with pytest.raises(RuntimeError) as caught:
            start(there, fake, snapshot)
        assert str(caught.value) == message
        assert fake.num_copies == fake.num_packs == 0 and not fake.host.blocks


def test_a_failure_on_the_second_device_leaks_nothing():
    with FakeDevice(num_devices=2) as fake:
        batch = [fake.put(torch.ones(3)), fake.put(torch.ones(3), OTHER)]
        allocate = fake.allocate

        def fail(sizes: list[int], stream: Any) -> list[torch.Tensor]:
            if stream.device == OTHER:
                raise torch.OutOfMemoryError("full")
            return allocate(sizes, stream)

        fake.allocate = fail
        with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
            start(batch, fake)
        assert fake.num_copies == 1 and fake.record(fake.copies).wait(30)
        gc.collect()
        assert to_device.release_done() == 0
