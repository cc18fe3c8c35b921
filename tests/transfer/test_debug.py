"""PYPARALLEL_DEBUG=1: early changes are named, freed memory is overwritten."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.transfer import debug, layout, to_device
from pyparallel.transfer import device as device_module
from tests.support.devices.fake_device import DEVICE, FakeDevice, memory
from tests.support.devices.probed_device import (
    Device,
    FakeProbe,
    ProbedRing,
    Trampling,
    held_back,
    passed,
    stale,
)

pytestmark = pytest.mark.one_backend

POISON = b"\xdb"


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYPARALLEL_DEBUG", "1")
    debug.reset()
    assert debug.enabled
    yield
    monkeypatch.undo()
    debug.reset()


# ------------------------------------------------------------------- sent sources


def test_a_leaf_that_changes_before_its_copy_is_named(monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NBYTES", 256)
    with Device() as device:
        large = device.pinned(10_240).fill_(1).view(torch.float32).view(20, 128)
        gate = held_back(device)
        queued = to_device.send([torch.ones(3), large, torch.ones(2)], DEVICE, device)
        large[16, 5] = 2
        gate.set()
        passed(device)
        with pytest.raises(RuntimeError) as caught:
            queued.wait()
        assert str(caught.value) == (
            "leaf 1 of 3 (torch.float32, shape (20, 128)) must not change before its "
            "copy to cuda:0 is done, but its bytes from 8192 on differ on the "
            "device. It is pinned, so the device reads it in place: synchronize with "
            "the device before you write to it, or send a clone."
        )
        assert [x.tolist() for x in queued.wait()[::2]] == [[1] * 3, [1] * 2]  # once


def in_a_ring(device: ProbedRing, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors in one pinned storage, 64 bytes of others between them."""
    sizes = [4 * torch.Size(shape).numel() for shape in shapes]
    whole = device.ring.take(sum(sizes) + 64 * len(sizes)).fill_(7)
    made, first = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        made.append(whole[first : first + size].view(torch.float32).view(shape))
        first += size + 64
    return made


@pytest.mark.parametrize("when", ["send", "wait", "drain"])
def test_a_leaf_of_a_span_is_named_by_the_next_call(monkeypatch, when):
    with ProbedRing() as device:
        monkeypatch.setattr(to_device, "torch_device", device)
        other = to_device.send([torch.zeros(1)], DEVICE, device)
        leaves = in_a_ring(device, (64, 64), (32, 128), (64, 64))[::-1]
        gate = held_back(device)
        queued = to_device.send(leaves, DEVICE, device)
        leaves[1][0, 0] = 2
        gate.set()
        passed(device)
        calls = {
            "send": lambda: to_device.send([torch.zeros(1)], DEVICE, device),
            "wait": other.wait,
            "drain": lambda: to_device.drain(30),
        }
        with pytest.raises(
            RuntimeError,
            match=r"^leaf 1 of 3 \(torch.float32, shape \(32, 128\)\) must not change "
            r"before its copy to cuda:0 is done, but its bytes from 0 on",
        ):
            calls[when]()
        assert len(queued.wait()) == 3


def test_bytes_between_the_leaves_of_a_span_may_change():
    with ProbedRing() as device:
        leaves = in_a_ring(device, (64, 64), (64, 64))
        gap = memory(leaves[0].data_ptr() + leaves[0].nbytes, 64)
        gate = held_back(device)
        queued = to_device.send(leaves, DEVICE, device)
        gap[:] = 0
        gate.set()
        passed(device)
        queued.wait()
        assert device.num_copies == 1 and to_device.drain(30) and not debug._unchecked


def test_a_write_to_staging_memory_is_named():
    with Trampling() as device:
        leaves = [torch.ones(3), torch.empty(0), torch.ones(9), torch.ones(40)]
        queued = to_device.send(leaves, DEVICE, device)
        passed(device)
        with pytest.raises(RuntimeError) as caught:
            queued.wait()
    assert str(caught.value) == (
        "the staging memory of leaf 3 of 4 (torch.float32, shape (40,)) must not "
        "change before its copy to cuda:0 is done, but its bytes from 64 on differ "
        "on the device. Only pyparallel may write to this memory: look for code that "
        "writes out of bounds."
    )


# ------------------------------------------------------------------- freed memory


def send(device: FakeDevice, *values: int) -> list[torch.Tensor]:
    leaves = [torch.full((100,), value, dtype=torch.uint8) for value in values]
    return to_device.send(leaves, DEVICE, device).wait()


def grad(tensor: torch.Tensor) -> Any:
    """Return a graph that holds a tensor for its backward pass."""
    return (torch.ones(100, requires_grad=True) * tensor).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: x[0],
        lambda x: x[50:].view(-1, 2),
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        lambda x: memoryview(x.numpy()),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        grad,
    ],
    ids=["itself", "element", "view", "array", "storage", "buffer", "dlpack", "graph"],
)
def test_memory_in_use_is_never_overwritten(hold):
    with Device() as device:
        tensors = send(device, 1, 2)
        passed(device)
        where = [stale(tensor) for tensor in tensors]
        held = hold(tensors[1])
        del tensors
        for _ in range(3):
            debug.check()
        passed(device)
        assert [bytes(x) for x in where] == [b"\1" * 100, b"\2" * 100]
        del held
        gc.collect()
        debug.check()
        passed(device)
        assert [bytes(x) for x in where] == [POISON * 100] * 2


def test_poison_follows_reads_on_the_streams_that_waited():
    found: list[bytes] = []
    with Device(copy_delay=0, compute_delay=2e-3) as device:
        for step in range(40):
            leaves = [torch.full((100,), step, dtype=torch.uint8)]
            queued = to_device.send(leaves, DEVICE, device)
            with device.using(device.side if step % 2 else device.main):
                (tensor,) = queued.wait()
                device.read(tensor, found)
            del queued, tensor
            debug.check()
        passed(device)
        passed(device)
    assert sorted(found) == [bytes([step]) * 100 for step in range(40)]


def test_many_copies_leak_nothing():
    with Device(copy_delay=0, compute_delay=0) as device:
        found: list[bytes] = []
        for step in range(200):
            for tensor in send(device, step % 100, 5):
                device.read(tensor, found)
            assert device.record(device.main).wait(30)
        del tensor
        passed(device)
        assert found == [bytes([v]) * 100 for s in range(200) for v in (s % 100, 5)]
        debug.check()
        assert not debug._unchecked and not debug._watched
        assert len(device.pools[device.copies].blocks) <= 4
        held = [send(device, 1) for _ in range(debug.MOST_WATCHED + 10)]
        debug.check()
        assert len(debug._watched) == debug.MOST_WATCHED and len(held) == 74
        passed(device)


def test_the_checks_run_only_on_devices_with_streams_and_when_enabled(monkeypatch):
    with FakeDevice() as device:  # without a probe
        send(device, 1)
        assert not debug._unchecked and not debug._watched
    monkeypatch.setenv("PYPARALLEL_DEBUG", "0")
    debug.reset()
    with Device() as device:
        tensors = send(device, 1)
        assert not debug._unchecked and not debug._watched
        passed(device)
        assert tensors[0].tolist() == [1] * 100


class Unable(FakeProbe):
    def sums(self, block: torch.Tensor, row: int, stream: Any) -> torch.Tensor:
        raise MemoryError


def test_a_check_that_fails_frees_no_memory_early(monkeypatch):
    monkeypatch.setattr(Device, "probe", Unable())
    with Device(copy_delay=5e-3, compute_delay=0) as device:
        with pytest.raises(MemoryError):
            send(device, 1)
        with device.using(device.copies):  # the owner of the memory
            output = device.empty(100, DEVICE)
            device.fill(output, 7)
        passed(device)
        assert device.pools[device.copies].num_reused == 1
        assert output.tolist() == [7] * 100


def test_a_copy_without_a_wait_is_overwritten_after_the_copy():
    with Device(copy_delay=5e-3, compute_delay=0) as device:
        queued = to_device.send([torch.zeros(100, dtype=torch.uint8)], DEVICE, device)
        where = stale(queued._slab)
        del queued
        debug.check()
        passed(device)
        assert bytes(where[:100]) == POISON * 100


def test_a_leaf_may_change_when_its_copy_is_done(monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NBYTES", 256)
    with Device() as device:
        large = device.pinned(1024).fill_(1)
        queued = to_device.send([large, torch.ones(3)], DEVICE, device)
        passed(device)
        large.fill_(9)  # long before anybody looks
        (copied, _) = queued.wait()
        passed(device)
        assert bytes(stale(copied)) == b"\1" * 1024 and not debug._unchecked


def test_reused_memory_contains_poison():
    with Device() as device:
        tensors = send(device, 1, 2)
        passed(device)
        found = [stale(tensor) for tensor in tensors]
        assert [bytes(x[:1]) for x in found] == [b"\1", b"\2"]
        del tensors
        debug.check()
        passed(device)
        with device.using(device.copies):
            again = device.empty(256, DEVICE)
        assert again.data_ptr() == found[0].ctypes.data
        assert [bytes(x) for x in found] == [POISON * 100] * 2
        assert bytes(stale(again)) == POISON * 256


# ------------------------------------------------------------------- checksums


def expected_sums(data: bytes, row: int) -> list[int]:
    """Sum words with the weights that the documentation gives: slowly."""
    mask, sums = 0xFFFFFFFF, []
    data += bytes(-len(data) % row)
    for start in range(0, len(data), row):
        total = 0
        for i in range(row // 4):
            word = data[start + 4 * i : start + 4 * i + 4]
            h = (i + 1) * 0x9E3779B1 & mask
            h = (h ^ h >> 15) * 0x85EBCA6B & mask
            weight = (h ^ h >> 13) & 0xFFFFF | 1
            total += int.from_bytes(word, "little", signed=True) * weight
        sums.append(total)
    return sums


@given(
    st.binary(max_size=600),
    st.integers(0, 9),
    st.sampled_from([64, 128, 4096]),
    st.sampled_from([64, 4096, 1 << 24]),
)
def test_checksums_are_those_of_the_bytes(data, offset, row, chunk):
    held = torch.frombuffer(bytearray(offset) + data + b"x", dtype=torch.uint8)
    before = device_module._CHECKSUM_CHUNK
    device_module._CHECKSUM_CHUNK = max(chunk, row)
    try:
        found = device_module.row_sums(held[offset : offset + len(data)], row)
    finally:
        device_module._CHECKSUM_CHUNK = before
    assert found.tolist() == expected_sums(data, row)
