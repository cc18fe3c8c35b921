"""Batches that the device reads in place, and the lifetime of that memory."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import backend
from pyparallel.transfer import layout as layout_module
from pyparallel.transfer import to_device
from tests.support.batch.raw_bytes import bytes_of
from tests.support.devices.fake_device import DEVICE, FakeDevice, PinnedRing
from tests.support.errors.collate_errors import freed

DTYPES = [torch.uint8, torch.float32, torch.int64, torch.float16, torch.bool]

pytestmark = pytest.mark.asan


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(layout_module, "SPAN_NBYTES", 0)
    yield
    assert to_device.drain(30), "something is kept for ever"


def in_slab(memory: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves as a loader makes them: views of one slab."""
    plan = backend.plan_slab(leaves)
    slab = memory[: plan.nbytes]
    backend.pack(slab, leaves, plan)
    return backend.views(slab, plan)


def some_leaves(rng: random.Random, value: int) -> list[torch.Tensor]:
    return [
        torch.full((rng.randint(200, 300), rng.randint(1, 4)), value + i).to(dtype)
        for i, dtype in enumerate(DTYPES)
    ]


def arrived(device: FakeDevice, queued: to_device.DeviceCopy) -> list[torch.Tensor]:
    copied = queued.wait()
    assert device.record(device.main).wait(60)
    return copied


# ----------------------------------------------------------------------------- spans


def view(memory: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]):
    result = torch.empty(0, dtype=dtype)
    return result.set_(memory.untyped_storage(), start // dtype.itemsize, shape)


@st.composite
def layouts(draw):
    """Draw positions of leaves in a storage: mostly valid, in any order."""
    placed, end = [], 64 * draw(st.integers(0, 3))
    if draw(st.integers(0, 9)) == 0:
        end += 16
    for _ in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = (draw(st.integers(0, 30)), draw(st.integers(1, 20)))
        placed.append((end, dtype, shape))
        end += shape[0] * shape[1] * dtype.itemsize
        step = draw(st.sampled_from((0, 0, 0, 0, 0, 64, 640, 8 - 64, -128)))
        end = max(0, -(-end // 64) * 64 + step)
    return draw(st.permutations(placed)), end + 10_000


def good_span(placed: list) -> bool:
    """Return True if leaves at these positions form one span, byte by byte."""
    taken: list[int] = []
    starts = []
    for start, dtype, shape in placed:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        taken += range(start, start + nbytes)
        starts += [start] * (nbytes > 0)
    if not taken or len(set(taken)) < len(taken):
        return False
    span = max(taken) + 1 - min(taken)
    aligned = all((start - min(taken)) % 64 == 0 for start in starts)
    return aligned and span <= 1.25 * len(taken)


@settings(max_examples=150, deadline=None)
@given(layout=layouts())
def test_one_span_is_one_copy_and_everything_else_is_packed(layout):
    placed, nbytes = layout
    with PinnedRing(copy_delay=0, compute_delay=0) as device:
        memory = device.ring.take(nbytes)
        memory[:] = (torch.arange(nbytes) % 249).to(torch.uint8)
        leaves = [view(memory, *place) for place in placed]
        for leaf in leaves:
            if leaf.dtype == torch.bool:
                leaf.view(torch.uint8).clamp_(max=1)
        expected = [bytes_of(leaf) for leaf in leaves]
        copied = arrived(device, to_device.send(leaves, DEVICE, device))
        assert [bytes_of(x) for x in copied] == expected
        assert [x.dtype for x in copied] == [x.dtype for x in leaves]
        assert [x.shape for x in copied] == [x.shape for x in leaves]
        assert device.num_copies == any(map(len, expected))
        packed = len(device.host.blocks) > 0
        assert packed == (any(map(len, expected)) and not good_span(placed))


def test_empty_leaves_of_a_span_may_be_anywhere():
    with PinnedRing(copy_delay=0, compute_delay=0) as device:
        memory = device.ring.take(512).fill_(5)
        leaves = [torch.empty(0, 3), memory[:256], memory[256:]]
        copied = arrived(device, to_device.send(leaves, DEVICE, device))
        assert [bytes_of(x) for x in copied] == [bytes_of(x) for x in leaves]
        assert device.num_copies == 1 and not device.host.blocks, "it was packed"


def test_ordinary_memory_and_small_batches_are_packed(monkeypatch):
    with PinnedRing() as device:
        ordinary = torch.ones(512, dtype=torch.uint8)
        arrived(
            device, to_device.send([ordinary[:256], ordinary[256:]], DEVICE, device)
        )
        assert len(device.host.blocks) == 1
        monkeypatch.setattr(layout_module, "SPAN_NBYTES", 8 << 10)
        for nbytes, packed in ((8 << 10, False), ((8 << 10) - 64, True)):
            slab = device.ring.take(2 * nbytes)
            device.host.blocks.clear()
            leaves = [slab[:nbytes], slab[nbytes:]]
            arrived(device, to_device.send(leaves, DEVICE, device))
            assert bool(device.host.blocks) == packed


def test_a_leaf_beyond_its_storage_is_an_error_and_not_read():
    with PinnedRing() as device:
        device.is_pinned = lambda tensor: True
        with pytest.raises(ValueError, match="must lie within its storage"):
            to_device.send([freed(torch.zeros(16), 10)], DEVICE, device)
        assert device.num_copies == 0


# ------------------------------------------------------------------ memory of a ring


@pytest.mark.parametrize("direct", [False, True])
def test_a_slot_is_free_when_it_has_been_read_and_not_before(direct, monkeypatch):
    """A worker rewrites every slot as soon as it is free."""
    monkeypatch.setattr(layout_module, "DIRECT_NBYTES", 256)
    rng = random.Random(3)
    expected, found = [], []
    with PinnedRing() as device:
        for step in range(150):
            slot = device.ring.take(32768)
            batch = in_slab(slot, some_leaves(rng, step % 50))
            if direct:
                batch = [slot[:1024].fill_(step % 256), torch.tensor([step])]
            expected += [bytes_of(leaf) for leaf in batch]
            copied = to_device.send(batch, DEVICE, device).wait()
            del batch, slot
            for tensor in copied:
                device.read(tensor, found)
            del tensor, copied
        assert device.record(device.main).wait(60)
        wrong = [a != b for a, b in zip(found, expected, strict=True)]
        assert not any(wrong)  # pytest compares long lists slowly
        assert device.ring.num_reused > 0
        assert bool(device.host.blocks) == direct


@pytest.fixture
def slow():
    """Yield a device whose copies wait for ``slow.go``, and a batch in its ring."""
    device = PinnedRing(copy_delay=0, compute_delay=0)
    device.go = threading.Event()
    with device:
        device.copies.queue(device.go.wait, 30)
        yield device
        device.go.set()


def send_from_ring(device: PinnedRing) -> to_device.DeviceCopy:
    return to_device.send([device.ring.take(512)], DEVICE, device)


def is_free(device: PinnedRing) -> bool:
    return len(device.ring.free[512]) == len(device.ring.blocks)


def finish(device: PinnedRing) -> None:
    device.go.set()
    assert device.record(device.copies).wait(30)


@pytest.mark.parametrize("when", ["send", "wait", "poll", "drain"])
def test_sources_that_were_read_are_freed_at_the_next_call(slow, when):
    queued = send_from_ring(slow)
    assert to_device.release_done() == 1 and not is_free(slow)
    assert not to_device.drain(0.01)
    finish(slow)
    assert not is_free(slow), "a call waited"
    if when == "send":
        to_device.send([torch.ones(3)], DEVICE, slow)
    elif when == "wait":
        queued.wait()
    elif when == "poll":
        assert to_device.release_done() == 0
    else:
        assert to_device.drain(30)
    assert is_free(slow)


def test_a_copy_that_was_queued_before_an_error_keeps_its_source(slow, monkeypatch):
    monkeypatch.setattr(layout_module, "DIRECT_NBYTES", 512)
    copy, targets = slow.copy, []

    def fail_second(dst, src, stream):
        targets.append(dst)
        if len(targets) == 2:
            raise RuntimeError("no more")
        copy(dst, src, stream)

    slow.copy = fail_second
    with pytest.raises(RuntimeError, match="no more"):
        to_device.send([slow.ring.take(512), slow.ring.take(512)], DEVICE, slow)
    gc.collect()
    assert not is_free(slow)
    finish(slow)
    assert to_device.release_done() == 0 and is_free(slow)


def test_a_copy_by_other_means_can_be_guarded(slow):
    source = slow.ring.take(512)
    slow.main.queue(slow.go.wait, 30)
    to_device.hold_while_read([source], DEVICE, slow)
    del source
    assert to_device.release_done() == 1 and not is_free(slow)
    slow.go.set()
    assert slow.record(slow.main).wait(30)
    assert to_device.release_done() == 0 and is_free(slow)


def test_a_forked_child_does_not_free_the_sources_of_its_parent(slow):
    queued = send_from_ring(slow)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        freed = len(slow.ring.free[512])
        os._exit(0 if to_device.release_done() == 0 and freed == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert to_device.release_done() == 1
    finish(slow)
    queued.wait()
    assert is_free(slow)
