"""The functions of ``mmcv.parallel._functions``, on the host and on fakes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from pyparallel.mmcv import _functions
from pyparallel.mmcv._functions import (
    Scatter,
    get_input_device,
    scatter,
    synchronize_stream,
)

pytestmark = pytest.mark.cuda_torch


class Stream:
    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


class OnDevice(torch.Tensor):
    """A CPU tensor that records its target device and the stream of the copy."""

    number: int
    log: list

    @staticmethod
    def __new__(cls, number, log):
        tensor = torch.Tensor._make_subclass(cls, torch.tensor([float(number)]))
        tensor.number, tensor.log = number, log
        return tensor

    def contiguous(self):
        return self

    def to(self, device, non_blocking=False):
        assert non_blocking
        self.log.append((self.number, str(device)))
        return self

    def record_stream(self, stream):
        self.log.append((self.number, "recorded on", stream.name))


@pytest.fixture
def log(monkeypatch):
    """Replace the streams of every device by fakes that write into one log."""
    log: list = []
    copies = {i: Stream(f"copy{i}", log) for i in range(4)}
    current = {i: Stream(f"main{i}", log) for i in range(4)}

    @contextlib.contextmanager
    def stream(of: Stream):
        log.append(("on", of.name))
        yield

    module = SimpleNamespace(
        stream=stream, current_stream=lambda device: current[device.index]
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(_functions, "_get_stream", lambda device: copies[device.index])
    return log


@pytest.mark.parametrize(
    ("num_items", "devices", "expected"),
    [
        (5, [0, 1], [0, 0, 0, 1, 1]),
        (3, [0, 1], [0, 0, 1]),
        (1, [0, 1], [0]),
        (2, [2, 3], [2, 3]),
        (7, [0, 1, 2], [0, 0, 0, 1, 1, 1, 2]),
        (4, [1], [1, 1, 1, 1]),
    ],
)
def test_items_are_sent_and_waited_for_by_one_partition(
    log, num_items, devices, expected
):
    items = [OnDevice(i, log) for i in range(num_items)]
    outputs = Scatter.forward(devices, items)
    assert isinstance(outputs, tuple)
    assert [item.number for item in outputs] == list(range(num_items))
    sent = [
        entry
        for i, d in enumerate(expected)
        for entry in (("on", f"copy{d}"), (i, f"cuda:{d}"))
    ]
    waited = [
        entry
        for i, d in enumerate(expected)
        for entry in (
            (f"main{d}", "waits for", f"copy{d}"),
            (i, "recorded on", f"main{d}"),
        )
    ]
    assert log == sent + waited


def test_an_empty_tensor_needs_no_stream(log):
    empty = torch.empty(0)
    empty.to = lambda device, non_blocking: empty
    assert scatter(empty, [0], [Stream("copy0", log)]) is empty
    synchronize_stream(empty, [0], [Stream("copy0", log)])
    assert log == []


def test_the_host_gets_the_very_tensors():
    tensors = [torch.ones(2), torch.ones(3)]
    assert all(
        a is b for a, b in zip(Scatter.forward([-1], tensors), tensors, strict=True)
    )
    assert Scatter.forward([-1], tensors[0])[0] is tensors[0]
    assert Scatter.forward([-1], []) == ()
    assert scatter([tensors, []], [-1]) == [tensors, []]
    strided = torch.arange(6).view(2, 3).t()
    (copied,) = Scatter.forward([-1], strided)
    assert copied.is_contiguous()
    assert torch.equal(copied, strided)


def test_the_input_device_is_that_of_the_first_tensor_on_a_device():
    assert get_input_device(torch.ones(1)) == -1
    assert get_input_device([]) == -1
    assert get_input_device([[torch.ones(1)], [[]]]) == -1

    class Far(torch.Tensor):
        def get_device(self):
            return 3

    far = torch.ones(1).as_subclass(Far)
    assert get_input_device([torch.ones(1), [far], "never looked at"]) == 3


@pytest.mark.parametrize("value", [5, None, "text", {"a": 1}, (torch.ones(1),)])
def test_strangers_are_an_exception_as_before(value):
    calls = [
        lambda: get_input_device(value),
        lambda: get_input_device([torch.ones(1), value]),
        lambda: scatter(value, [-1]),
        lambda: synchronize_stream(value, [-1], [None]),
        lambda: Scatter.forward([-1], [value]),
    ]
    for call in calls:
        with pytest.raises(Exception, match=r"^Unknown type ") as caught:
            call()
        assert isinstance(caught.value, TypeError)


def test_get_stream_takes_devices_and_indices(monkeypatch):
    monkeypatch.setattr(_functions.torch_device, "copy_stream", lambda device: device)
    assert _functions._get_stream(1) == torch.device("cuda", 1)
    assert _functions._get_stream(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert _functions._get_stream(torch.device("cpu")) is None
