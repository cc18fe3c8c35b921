"""Slabs and copies on a fake device, whose delays make every missing wait visible."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from pyparallel.transfer import debug, layout, to_device
from pyparallel.transfer import device as device_module
from pyparallel.transfer.to_device import MixedCopy
from tests.support.batch.raw_bytes import bytes_of
from tests.support.devices.fake_device import DEVICE, FakeDevice, memory
from tests.support.devices.probed_device import Device

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan, pytest.mark.tsan]

DTYPES = [torch.uint8, torch.float32, torch.int64, torch.float16, torch.bool]


def test_every_value_arrives_while_memory_is_reused():
    rng = random.Random(5)
    expected, found = [], []
    with FakeDevice() as device:
        for step in range(300):
            batch = [
                torch.full((rng.randint(0, 9), rng.randint(1, 7)), step % 100 + i)
                for i in range(len(DTYPES))
            ]
            batch = [leaf.to(dtype) for leaf, dtype in zip(batch, DTYPES, strict=True)]
            expected += [bytes_of(leaf) for leaf in batch]
            # The next batch reuses the memory of the one before last.
            for tensor in to_device.send(batch, DEVICE, device).wait():
                device.read(tensor, found)
            if step % 4 == 3:  # else the host would run far ahead
                assert device.record(device.main).wait(60)
        wrong = [a != b for a, b in zip(found, expected, strict=True)]
        assert not any(wrong)
        assert device.num_copies <= 300
        assert device.pools[device.copies].num_reused > 150
        assert device.host.num_reused > 0


def test_a_consumer_on_another_stream_may_drop_the_batch_at_once():
    found: list[bytes] = []
    with FakeDevice(copy_delay=0, compute_delay=2e-3) as device:
        for step in range(60):
            leaves = [torch.full((100,), step, dtype=torch.uint8)]
            queued = to_device.send(leaves, DEVICE, device)
            with device.using(device.side):
                (tensor,) = queued.wait()
                device.read(tensor, found)
            del queued, tensor
        assert device.record(device.side).wait(60)
    assert found == [bytes([step]) * 100 for step in range(60)]


def test_memory_of_a_copy_without_a_wait_goes_to_a_later_copy():
    with FakeDevice(copy_delay=5e-3, compute_delay=0) as device:
        for step in range(20):
            leaves = [torch.full((100,), step, dtype=torch.uint8)]
            to_device.send(leaves, DEVICE, device)
            queued = to_device.send([leaf + 1 for leaf in leaves], DEVICE, device)
            (tensor,) = queued.wait()
            assert device.record(device.main).wait(30)
            assert tensor.eq(step + 1).all()
        assert device.pools[device.copies].num_reused >= 19


@pytest.mark.parametrize("options", [{}, {"waits_here": False}, {"stream": "side"}])
@pytest.mark.parametrize("checks", [False, True])
def test_a_copy_waits_for_no_step(options, checks, monkeypatch):
    """The stream of the consumer never ends, but the copies do."""
    monkeypatch.setattr(debug, "enabled", checks)
    with Device(copy_delay=0, compute_delay=0) as device:
        step = threading.Event()
        if "stream" in options:
            options = {"stream": device.side}
        copies = options.get("stream", device.copies)
        for _ in range(3):  # the second copy could use memory of the first
            device.main.queue(step.wait, 30)
            leaves = [torch.full((100,), 7, dtype=torch.uint8)]
            queued = MixedCopy(leaves, DEVICE, device, **options)
            assert device.record(copies).wait(5), "the copy waits for the step"
            (tensor,) = queued.wait()
            assert bytes(memory(tensor.data_ptr(), 100)) == b"\7" * 100
            del queued, tensor
        step.set()
        assert device.record(device.main).wait(30)
    debug.reset()


def test_large_leaves_of_ordinary_memory_are_packed(monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NBYTES", 512)
    found: list[bytes] = []
    with FakeDevice(copy_delay=0, compute_delay=0) as device:
        pinned = device.pinned(512)
        leaves = [torch.full((512,), 1, dtype=torch.uint8), pinned.fill_(2)]
        for tensor in to_device.send(leaves, DEVICE, device).wait():
            device.read(tensor, found)
        assert device.record(device.main).wait(30)
        assert device.num_copies == 2 and len(device.host.blocks) == 2
    assert found == [b"\1" * 512, b"\2" * 512]


def test_memory_that_is_read_in_place_is_cast_on_the_device(monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NBYTES", 512)
    monkeypatch.setattr(to_device, "DIRECT_NBYTES", 512)
    with FakeDevice(copy_delay=0, compute_delay=0) as device:
        pinned = device.pinned(512).view(torch.float32).fill_(2)
        leaves = [torch.ones(3), pinned, torch.ones(3, dtype=torch.int32)]
        copy = MixedCopy(leaves, DEVICE, device, dtype=torch.float16)
        dtypes = [tensor.dtype for tensor in copy.wait()]
        assert device.record(device.main).wait(30)
        assert dtypes == [torch.float16, torch.float16, torch.int32]
        assert device.num_copies == 2, "the host casts and packs pinned memory"


def test_nothing_is_queued_when_packing_fails():
    with FakeDevice() as device:
        conjugated = torch.ones(2, dtype=torch.complex64).conj()
        with pytest.raises(TypeError):
            to_device.DeviceCopy([torch.ones(2), conjugated], DEVICE, device)
        assert device.num_copies == 0


@pytest.mark.parametrize("name", ["home", "copy"])
def test_a_stream_under_capture_is_refused_before_anything_is_queued(name):
    with FakeDevice() as device:
        device.captured = {"home": device.main, "copy": device.copies}[name]
        device.record = device.wait = mock.Mock(side_effect=AssertionError)
        with pytest.raises(RuntimeError) as caught:
            to_device.send([torch.ones(3)], DEVICE, device)
        assert str(caught.value) == (
            f"send: the {name} stream must not be under graph capture, but is. Copy "
            "outside of the capture, into the static tensors of a StaticBatches."
        )
        assert device.num_copies == 0 and not device.host.blocks


def test_capture_is_checked_on_the_stream_and_only_on_devices_with_graphs():
    calls, module = module_of_mocks()
    module.is_current_stream_capturing.return_value = True
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        assert to_device.torch_device.is_capturing(calls.side)
        assert calls.module.stream.call_args == mock.call(calls.side)
        del module.is_current_stream_capturing
        assert not to_device.torch_device.is_capturing(calls.side)


def test_nothing_but_empty_leaves_needs_no_copy():
    with FakeDevice() as device:
        empty = [torch.empty(0, 4), torch.empty(2, 0, dtype=torch.int64)]
        received = to_device.send(empty, DEVICE, device).wait()
        assert [(x.shape, x.dtype) for x in received] == [
            (x.shape, x.dtype) for x in empty
        ]
        assert to_device.send([], DEVICE, device).wait() == []
        assert device.num_copies == 0


def module_of_mocks() -> tuple[mock.Mock, mock.Mock]:
    """Return a stand-in for torch.cuda and the recorder of all its calls."""
    calls = mock.Mock()
    calls.module.stream, calls.module.device = mock.MagicMock(), mock.MagicMock()
    module = calls.module
    module.Stream.return_value = calls.copies
    module.current_stream.return_value = calls.current
    module.is_current_stream_capturing.return_value = False
    calls.copies.record_event.return_value = "copied"
    return calls, module


def test_torch_device_calls_torch_in_the_right_order(monkeypatch):
    calls, module = module_of_mocks()

    def empty(nbytes, *, dtype, device=None, pin_memory=False):
        (calls.empty_pinned if pin_memory else calls.empty)(nbytes, device)
        result = torch.zeros(nbytes, dtype=dtype)
        result.__dict__["copy_"] = calls.copy_
        result.__dict__["record_stream"] = calls.empty.record_stream
        return result

    fake = SimpleNamespace(
        empty=empty, uint8=torch.uint8, get_device_module=lambda device: module
    )
    monkeypatch.setattr(device_module, "torch", fake)
    monkeypatch.setattr(device_module._cudart, "load", lambda: None)
    api = device_module.TorchDevice()
    queued = to_device.DeviceCopy([torch.ones(3), torch.ones(2)], DEVICE, api)
    queued.wait()
    names = [name for name, _, _ in calls.mock_calls]

    def on_its_device(*inside):
        return [
            "module.device",
            "module.device().__enter__",
            *inside,
            "module.device().__exit__",
        ]

    def on_its_stream(name):
        return on_its_device(
            "module.stream",
            "module.stream().__enter__",
            name,
            "module.stream().__exit__",
        )

    assert names == [
        *on_its_device("module.current_stream"),
        *on_its_stream("module.is_current_stream_capturing"),
        "module.Stream",
        *on_its_stream("module.is_current_stream_capturing"),
        *on_its_stream("empty"),
        "empty_pinned",
        *on_its_stream("copy_"),
        "copies.record_event",
        *on_its_device("module.current_stream"),
        *on_its_stream("module.is_current_stream_capturing"),
        "current.wait_event",
        "empty.record_stream",
    ]
    calls.current.wait_event.assert_called_once_with("copied")
    calls.module.Stream.assert_called_once_with(device=DEVICE)
    assert calls.copy_.call_args.kwargs == {"non_blocking": True}
    assert api.copy_stream(DEVICE) is calls.copies


def test_there_is_one_copy_stream_for_each_device(monkeypatch):
    module = mock.Mock()
    module.Stream.side_effect = lambda device: object()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(device_module._cudart, "load", lambda: None)
    api = device_module.TorchDevice()
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert api.copy_stream(first) is api.copy_stream(torch.device("cuda:0"))
    assert api.copy_stream(first) is not api.copy_stream(second)
    assert module.Stream.call_count == 2
