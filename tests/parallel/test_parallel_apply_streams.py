"""Streams of jobs on a fake device: all waits exist, and all are necessary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pyparallel
from pyparallel.parallel import _device_threads
from pyparallel.parallel._device_threads import DeviceThreads
from tests.support.devices.fake_device import DEVICE, FakeDevice, Stream, memory

pytestmark = pytest.mark.one_backend

ROUNDS = 40
SIZE = 4096


@pytest.fixture
def on_device() -> Iterator[tuple[FakeDevice, DeviceThreads]]:
    with FakeDevice(num_devices=2) as fake:
        threads = DeviceThreads(fake, lambda device: device.type == "cuda")
        yield fake, threads
        threads.pool.close()


def add(fake: FakeDevice, x: torch.Tensor, number: int) -> torch.Tensor:
    """Queue a kernel on the current stream; return its result, in new memory."""
    device = fake.device_of(x)
    assert device is not None
    y = fake.empty(x.nbytes, device)
    src, dst = memory(x.data_ptr(), x.nbytes), memory(y.data_ptr(), y.nbytes)
    fake.current_stream(device).queue(lambda: np.copyto(dst, src + np.uint8(number)))
    return y


def job(fake: FakeDevice, x: torch.Tensor) -> Callable[[], Any]:
    return lambda: {"y": [add(fake, add(fake, x, 1), 2)]}


ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    "devices", [[ZERO, ZERO], [ZERO, ONE], [ZERO, ONE, ZERO]], ids=str
)
def test_results_are_right_however_slow_the_streams_are(
    devices: Any, on_device: Any
) -> None:
    fake, threads = on_device
    read: list[tuple[int, list[bytes]]] = []
    for i in range(ROUNDS):
        source = torch.full((SIZE,), i, dtype=torch.uint8)
        xs = [fake.put(source, device) for device in devices]
        jobs = [job(fake, x) for x in xs]
        found = threads.run(devices, jobs, lambda: None)
        del xs, jobs
        for device, result in zip(devices, found, strict=True):
            read.append((i + 3, []))
            fake.read(result["y"][0], read[-1][1], device)
        del found, result
    for stream in fake.main_streams.values():
        assert fake.record(stream).wait(60)
    assert all(into == [bytes([value]) * SIZE] for value, into in read)
    assert len(fake.new_streams) == len(devices)


def test_memory_of_arguments_is_kept_for_a_backward_pass_on_the_stream_of_the_job(
    on_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, threads = on_device
    monkeypatch.setattr(_device_threads, "threads", threads)
    into: list[bytes] = []
    late = threading.Event()

    def own_stream(x: Any, y: Any = None) -> Stream:
        return fake.current_stream(ZERO)

    x = fake.put(torch.full((SIZE,), 5, dtype=torch.uint8))
    first = _device_threads.Call(0, own_stream, ({"x": [x]},), {})
    second = _device_threads.Call(1, own_stream, (1,), {"y": 2})
    streams = _device_threads.run_calls([ZERO, ZERO], [[first], [second]], 2)
    streams[0].queue(late.wait, 60)  # the backward pass
    with fake.using(streams[0]):
        fake.read(x, into)
    del x, first
    with fake.using(fake.main):  # the next batch takes free memory
        fake.put(torch.full((SIZE,), 9, dtype=torch.uint8))
    assert fake.record(fake.main).wait(30)
    late.set()
    assert fake.record(streams[0]).wait(60)
    assert into == [bytes([5]) * SIZE]


def test_memory_of_results_is_kept_for_the_stream_that_reads_them(
    on_device: Any,
) -> None:
    fake, threads = on_device
    into: list[bytes] = []
    late = threading.Event()
    x = fake.put(torch.zeros(SIZE, dtype=torch.uint8))
    found = threads.run([ZERO, ZERO], [job(fake, x)] * 2, lambda: None)
    fake.main.queue(late.wait, 60)  # the reader
    fake.read(found[0]["y"][0], into)
    del found
    with fake.using(fake.side):  # another caller's stream, and free at once
        z = fake.put(torch.full((SIZE,), 9, dtype=torch.uint8))
        for _ in range(3):
            threads.run([ZERO, ZERO], [job(fake, z)] * 2, lambda: None)
    for stream in fake.new_streams:
        assert fake.record(stream).wait(30)
    late.set()
    assert fake.record(fake.main).wait(60)
    assert into == [bytes([3]) * SIZE]


def test_the_caller_waits_for_jobs_that_fail_too(on_device: Any) -> None:
    fake, threads = on_device

    def fail() -> None:
        fake.current_stream(DEVICE).queue(time.sleep, 0.05)
        fake.current_stream(DEVICE).queue(ended.append, 1)
        raise ValueError("no")

    ended: list[int] = []
    with pytest.raises(ValueError, match="no"):
        threads.run([ZERO, ZERO], [fail, fail], lambda: None)
    seen: list[int] = []
    fake.main.queue(lambda: seen.append(len(ended)))
    assert fake.record(fake.main).wait(60)
    assert seen == [2]


def test_the_host_does_not_wait(on_device: Any) -> None:
    fake, threads = on_device
    hold = threading.Event()
    fake.main.queue(hold.wait, 60)
    x = fake.put(torch.zeros(SIZE, dtype=torch.uint8))
    found = threads.run([ZERO, ZERO], [job(fake, x)] * 2, lambda: None)
    assert not fake.record(fake.main).is_set()  # all of it is still to be done
    into: list[bytes] = []
    fake.read(found[1]["y"][0], into)
    hold.set()
    assert fake.record(fake.main).wait(60)
    assert into == [bytes([3]) * SIZE]


def test_one_job_runs_on_the_callers_stream_and_several_on_those_of_threads(
    on_device: Any,
) -> None:
    fake, threads = on_device
    look = [lambda: fake.current_stream(DEVICE)] * 2
    with fake.using(fake.side):
        seen = threads.run([ZERO], look[:1], lambda: None)
    assert seen == [fake.side] and not fake.new_streams
    for _ in range(5):  # each thread has its stream for good
        found = {*threads.run([ZERO, ZERO], look, lambda: None)}
        assert found == set(fake.new_streams) and len(found) == 2


def test_a_stream_under_capture_is_refused_before_anything_runs(on_device: Any) -> None:
    fake, threads = on_device
    fake.captured = fake.main
    ran: list[int] = []
    with pytest.raises(RuntimeError, match="must not be under graph capture, but is"):
        threads.run([ZERO, ZERO], [lambda: ran.append(1)] * 2, lambda: None)
    assert not ran
    assert threads.run([ZERO], [lambda: 4], lambda: None) == [4]


def test_casts_are_cached_unless_two_streams_of_one_device_would_share_them(
    on_device: Any,
) -> None:
    _, threads = on_device
    look = [torch.is_autocast_cache_enabled] * 2
    assert torch.is_autocast_cache_enabled()
    assert threads.run([ZERO, ONE], look, lambda: None) == [True, True]
    assert threads.run([ZERO, ZERO], look, lambda: None) == [False, False]
    assert torch.is_autocast_cache_enabled()


def test_tensors_of_modules_are_kept_alive() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    own = {id(each) for each in (*net.parameters(), *net.buffers())}
    assert {id(each) for each in _device_threads.module_tensors(net)} == own
    assert {id(each) for each in _device_threads.module_tensors(net.forward)} == own
    _, replica = pyparallel.replicate(net, ["cpu", "cpu"])
    addresses = [each.data_ptr() for each in _device_threads.module_tensors(replica)]
    shared = {each.data_ptr() for each in net.parameters()}  # one memory on one device
    copied = {each.data_ptr() for each in replica.buffers()}
    assert len(copied) == 3 and {*addresses} == shared | copied
    assert (
        _device_threads.module_tensors(len)
        == _device_threads.module_tensors("x".join)
        == []
    )
