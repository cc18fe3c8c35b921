"""Static slabs on a fake device: a missing wait shows as a wrong value."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from pyparallel import StaticBatches
from pyparallel.transfer import debug, static, to_device
from pyparallel.transfer.static import StaticTarget
from tests.support.devices.fake_device import DEVICE, FakeDevice, memory
from tests.support.devices.probed_device import Device, passed

pytestmark = [pytest.mark.one_backend, pytest.mark.cuda_torch]


def prepared(
    batches: StaticBatches, leaves: list[torch.Tensor], api: Any, stream: Any = None
) -> Callable[[], list[torch.Tensor]]:
    target = StaticTarget(batches, None)
    return target.prepare(DEVICE, "leaf {}".format, leaves, stream, api)


def bytes_at(tensor: torch.Tensor) -> bytes:
    return memory(tensor.data_ptr(), tensor.nbytes).tobytes()


@pytest.mark.parametrize("num_slabs", [1, 2, 3])
@pytest.mark.parametrize(
    ("receives", "works"),
    [
        (["main"], ["main"]),
        # The work is on the stream that received the batch, but it is not current.
        (["main", "side", "side"], ["main", "side", "side"]),
        # The work is on the stream that is current at the next batch.
        (["main", "side"], ["side", "main"]),
    ],
)
def test_a_slab_is_filled_after_the_work_on_the_batch_before(
    receives: list[str], works: list[str], num_slabs: int
) -> None:
    found: list[list[bytes]] = [[] for _ in range(40)]
    batches = StaticBatches(num_slabs)
    with FakeDevice(copy_delay=1e-3, compute_delay=3e-3) as device:
        for step in range(40):
            leaves = [torch.full((100,), step, dtype=torch.uint8)]
            first = getattr(device, receives[step % len(receives)])
            second = getattr(device, works[step % len(works)])
            receive = prepared(batches, leaves, device)
            with device.using(first):
                (tensor,) = receive()
            if first is not second:
                device.wait(second, device.record(first))
            with device.using(second):
                device.read(tensor, found[step])
        for stream in (device.main, device.side):
            assert device.record(stream).wait(30)
    assert found == [[bytes([step]) * 100] for step in range(40)]
    assert batches.num_plans == 1 and batches.nbytes == 128 * num_slabs


def test_a_copy_that_failed_half_way_is_waited_for() -> None:
    batches = StaticBatches()
    with FakeDevice(copy_delay=0, compute_delay=0) as device:
        leaves = [torch.ones(100, dtype=torch.uint8), torch.zeros(9)]
        gate = mock.Mock(wait=mock.Mock(side_effect=RuntimeError("of the device")))
        with (
            mock.patch.object(static.engine, "start", return_value=gate),
            pytest.raises(RuntimeError, match="of the device"),
        ):
            prepared(batches, leaves, device, device.side)()
        waits = []
        record = device.record
        with mock.patch.object(
            device, "record", lambda stream: waits.append(stream) or record(stream)
        ):
            prepared(batches, leaves, device)()
        assert device.side in waits


def test_large_leaves_are_read_in_place_if_they_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(static, "DIRECT_NBYTES", 512)
    batches, addresses = StaticBatches(), set()
    with FakeDevice(copy_delay=0, compute_delay=0) as device:
        for step in range(4):
            large = device.pinned(512).fill_(step)
            if step % 2:  # its place does not depend on the kind of its memory
                large = large.clone()
            leaves = [large, torch.full((5,), step), large.view(2, 256) + 1]
            before = device.num_copies
            found = prepared(batches, leaves, device)()
            assert device.record(device.main).wait(30)
            for leaf, tensor in zip(leaves, found, strict=True):
                assert tensor.shape == leaf.shape and tensor.dtype == leaf.dtype
                assert bytes_at(tensor) == leaf.numpy().tobytes()
            assert device.num_copies - before == 3
            addresses.add(tuple(tensor.data_ptr() for tensor in found))
    assert len(addresses) == 1


@pytest.mark.parametrize("name", ["home", "copy", "waiting"])
def test_a_capture_is_refused_before_a_slab_changes(name: str) -> None:
    batches = StaticBatches()
    with FakeDevice(copy_delay=0, compute_delay=0) as device:
        with device.using(device.side):
            (tensor,) = prepared(batches, [torch.ones(3)], device)()
        streams = {"home": device.main, "copy": device.copies, "waiting": device.side}
        receive = prepared(batches, [torch.zeros(3)], device)
        device.captured = streams[name]
        with pytest.raises(RuntimeError, match=f"the {name} stream must not be under"):
            receive()
        device.captured = None
        assert device.record(device.copies).wait(30)
        assert device.record(device.side).wait(30)
        assert tensor.tolist() == [1, 1, 1]


def test_bytes_that_change_before_their_copy_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debug, "enabled", True)
    monkeypatch.setattr(static, "DIRECT_NBYTES", 512)
    batches = StaticBatches()
    with Device() as device:
        pinned = device.pinned(512).fill_(1)
        receive = prepared(batches, [torch.ones(3), pinned], device)
        receive()
        passed(device)
        debug.check()
        receive = prepared(batches, [torch.ones(3), pinned], device)
        with mock.patch.object(debug, "row_sums", lambda data, row: data[:1].long()):
            receive()
        passed(device)
        with pytest.raises(RuntimeError, match="leaf 1 of 2"):
            debug.check()
    debug.reset()


def test_a_freed_slab_belongs_to_the_streams_that_used_it() -> None:
    batches = StaticBatches()
    with FakeDevice(copy_delay=0, compute_delay=0) as device:
        found: list[bytes] = []
        with device.using(device.side):
            (tensor,) = prepared(
                batches, [torch.ones(100, dtype=torch.uint8)], device
            )()
            gate = threading.Event()
            device.wait(device.side, gate)  # a replay, for example
            device.read(tensor, found)
        batches.clear()
        del tensor
        gc.collect()
        leaves = [torch.zeros(100, dtype=torch.uint8)]
        (other,) = to_device.send(leaves, DEVICE, device).wait()
        assert device.record(device.main).wait(30)
        gate.set()
        assert device.record(device.side).wait(30)
        assert found == [b"\1" * 100] and other.sum() == 0


def test_debug_mode_forbids_the_batch_and_not_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debug, "poison_enabled", True)
    with mock.patch.object(static.backend, "views", shared_views):
        batches = StaticBatches()
        with FakeDevice(copy_delay=0, compute_delay=0) as device:
            kept = []
            for step in range(3):
                kept += prepared(batches, [torch.full((3,), step)], device)()
            assert device.record(device.main).wait(30)
            assert kept[2].tolist() == [2, 2, 2]
            for tensor in kept[:2]:
                with pytest.raises(RuntimeError, match="of a static batch must be"):
                    tensor.tolist()


def shared_views(slab: torch.Tensor, plan: Any) -> list[torch.Tensor]:
    """Return the tensors of one leaf on the storage of the slab, as on a device."""
    return [slab[: plan.nbytes // 64 * 24].view(torch.int64)]
