"""Copies to the host with torch: the calls and their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pyparallel import backend
from pyparallel.transfer import device as device_module
from pyparallel.transfer import to_device
from pyparallel.transfer.device import TorchReturn, torch_return
from pyparallel.transfer.from_device import PackedHostCopy
from tests.support.devices.fake_device import DEVICE

pytestmark = [pytest.mark.one_backend, pytest.mark.tsan]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Record the calls of a replacement for torch.cuda."""
    calls = mock.MagicMock()
    module = calls.module
    module.is_current_stream_capturing.return_value = False
    module.Stream.return_value = calls.back
    module.current_stream.return_value = calls.current
    calls.current.record_event.return_value = "packed"
    calls.current.device = calls.back.device = DEVICE
    for stream in (calls.back, calls.current):
        stream.record_event.return_value = stream.event
        stream.event.query.return_value = True
    calls.current.record_event.return_value = calls.current.event

    def empty(nbytes: Any, *, dtype: Any, device: Any = None, pin_memory: bool = False):
        if nbytes:
            (calls.empty_pinned if pin_memory else calls.empty)(nbytes, device)
        result = torch.zeros(nbytes, dtype=dtype)
        return result.as_subclass(Copied) if pin_memory else result

    class Copied(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
            calls.copy(non_blocking)
            return torch.Tensor.copy_(self.as_subclass(torch.Tensor), source)

    fake = SimpleNamespace(
        empty=empty, uint8=torch.uint8, get_device_module=lambda device: module
    )
    monkeypatch.setattr(device_module, "torch", fake)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    def views(slab: torch.Tensor, plan: Any) -> list[torch.Tensor]:
        return native_views(slab.as_subclass(torch.Tensor), plan)

    native_views = backend.views
    monkeypatch.setattr(backend, "views", views)
    calls.reset_mock()
    return calls


def names(calls: mock.Mock) -> list[str]:
    wanted = ("Stream", "wait_event", "record_event", "synchronize", "empty", "copy")
    wanted += ("empty_pinned", "is_current_stream_capturing", "query")
    called = [name for name, _, _ in calls.mock_calls]
    return [name for name in called if name.split(".")[-1] in wanted]


def test_a_snapshot_is_copied_on_another_stream_after_the_current_one(calls):
    queued = PackedHostCopy([torch.ones(3), torch.ones(2)], DEVICE, TorchReturn())
    assert [x.tolist() for x in queued.wait()] == [[1, 1, 1], [1, 1]]
    assert names(calls) == [
        "module.is_current_stream_capturing",
        "empty_pinned",
        "empty",
        "module.Stream",
        "current.record_event",
        "back.wait_event",
        "copy",
        "back.record_event",
        "back.event.synchronize",
        "module.is_current_stream_capturing",
        "back.event.query",
    ]
    calls.back.wait_event.assert_called_once_with(calls.current.event)
    calls.copy.assert_called_once_with(True)
    assert calls.module.stream.call_args_list[-1] == mock.call(calls.back)


def test_both_directions_have_streams_of_their_own(calls):
    calls.module.Stream.side_effect = lambda device: object()
    there = device_module.TorchDevice()
    back = TorchReturn()
    assert there.copy_stream(DEVICE) is not back.copy_stream(DEVICE)
    assert back.copy_stream(DEVICE) is back.copy_stream(torch.device("cuda:0"))
    real = (to_device.torch_device, torch_return)
    streams = [api.copy_stream(DEVICE) for api in real]
    for api in real:
        del api._streams[DEVICE]
    assert streams[0] is not streams[1]


def test_a_signal_handler_may_need_a_stream_that_is_being_created(calls):
    def create(device: torch.device) -> object:
        calls.module.Stream.side_effect = lambda device: object()
        handled.append(api.copy_stream(DEVICE))
        return object()

    api, handled = device_module.TorchDevice(), list[object]()
    calls.module.Stream.side_effect = create
    assert [api.copy_stream(DEVICE)] == handled


def test_pinned_memory_is_on_the_host_with_any_default_device():
    """Without an accelerator torch refuses it, but not for the default device."""
    with torch.device("meta"):
        if torch.accelerator.is_available():
            assert torch_return.pinned(1).device.type == "cpu"
            return
        with pytest.raises(RuntimeError, match=r"^pin_memory=True requires |^Cannot "):
            torch_return.pinned(1)


def test_the_host_waits_for_an_event_of_torch_in_the_relaxed_mode() -> None:
    """In another mode, the wait would end a capture in another thread."""
    order: list[str] = []

    class Relaxed(TorchReturn):
        @contextmanager
        def relaxed(self, device: torch.device) -> Iterator[None]:
            order.append(f"relaxed {device}")
            yield
            order.append("as before")

    event = SimpleNamespace(device=DEVICE, synchronize=lambda: order.append("waits"))
    Relaxed().wait_on_host(event)
    assert order == [f"relaxed {DEVICE}", "waits", "as before"]
