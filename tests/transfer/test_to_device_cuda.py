"""Copies to a GPU: values, streams, the single copy, and captures."""

from __future__ import annotations

import contextlib
import gc
import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from pyparallel import backend, memory, scatter
from pyparallel.transfer import layout, to_device
from tests.support.devices import fake_cuda
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.cuda

engine = pytest.mark.skipif(
    "cuda" not in backend.transfers, reason="this build has no engine for CUDA"
)
DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16]
DTYPES += [torch.float32, torch.int32, torch.int64, torch.float64, torch.complex128]
CHUNK = 4 << 20
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}
WAITS |= {"cudaMemcpy", "cudaFree", "cudaFreeHost"}
CAPTURED = (
    "send: the {} stream must not be under graph capture, but is. Copy outside of the "
    "capture, into the static tensors of a StaticBatches."
)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def leaves(num: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [
        torch.randint(0, 2, (i % 7, i % 5 + 1)).to(DTYPES[i % len(DTYPES)])
        for i in range(num)
    ]


def keep_busy(cycles: int = 20_000_000) -> None:
    torch.cuda._sleep(cycles)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.is_cuda
    return torch.equal(found.cpu(), expected)


def all_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(itertools.starmap(same, zip(found, expected, strict=True)))


# scatter


def test_values_of_all_dtypes_and_layouts_arrive():
    strange = [
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.ones(1, 3).expand(5, 3),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(10)[::3],
        torch.ones(2, dtype=torch.complex64).conj(),
        nn.Parameter(torch.ones(3)),
        torch.ones(2).to(device()),
    ]
    batch = {"x": leaves(60), "strange": strange, "sparse": torch.eye(3).to_sparse()}
    (part,) = scatter(batch, [0])
    expected = [*batch["x"], *strange[:-1], torch.ones(2)]
    assert all_same(part["x"] + part["strange"], expected)
    assert same(part["sparse"].to_dense(), torch.eye(3))


@pytest.mark.two_gpus
def test_targets_need_not_be_the_current_device():
    first, second = scatter({"x": torch.arange(5)}, [1, 0])
    assert (first["x"].get_device(), second["x"].get_device()) == (1, 0)
    with torch.cuda.device(1):
        (part,) = scatter({"x": torch.arange(5)}, [0])
    assert part["x"].tolist() == [0, 1, 2, 3, 4]


# Streams


@pytest.mark.parametrize("home", ["default", "side"])
def test_a_consumer_on_another_stream_waits_and_may_drop_at_once(home):
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    sent_on = torch.cuda.default_stream() if home == "default" else other
    totals = []
    for step in range(100):
        with torch.cuda.stream(sent_on):
            queued = to_device.send([torch.full((50_000,), float(step))], device())
        with torch.cuda.stream(side):
            (tensor,) = queued.wait()
            keep_busy(500_000)
            totals.append(tensor.double().sum())
        del queued, tensor
    side.synchronize()
    assert [total.item() for total in totals] == [
        50_000.0 * step for step in range(100)
    ]


@pytest.fixture
def registered():
    """Pinned memory outside torch's host allocator."""
    memory = torch.empty(1 << 22, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
    yield memory
    torch.cuda.synchronize()
    assert to_device.drain(10)
    assert cudart.cudaHostUnregister(memory.data_ptr()) == 0


def test_a_batch_in_one_registered_storage_is_read_in_place_and_kept_alive(registered):
    second, first = registered[1 << 20 :].view(torch.float32), registered[: 1 << 20]
    for step in range(10):
        first.fill_(step)
        second.fill_(step)
        with torch.cuda.stream(to_device.torch_device.copy_stream(device())):
            keep_busy(200_000_000)
        queued = to_device.send([second, first], device(), waits_here=False)
        assert num_in_place(queued) == 1
        assert to_device.release_done() == 1, "given up before the copy"
        assert all_same(queued.wait(), [second, first])
        assert to_device.release_done() == 0


def num_in_place(queued: Any) -> int:
    """Return the number of copies that read memory in place."""
    if isinstance(queued, to_device.DeviceCopy):
        return len(queued._direct) + (queued._order is not None)
    return queued.num_in_place


def many(num: int = 528, value: int = 0) -> list[torch.Tensor]:
    """Return small leaves of three dtypes, about 150 KB for 528 of them."""
    dtypes = (torch.float32, torch.int64, torch.uint8)
    return [
        torch.full((i % 11 + 1, 8), (value + i) % 120, dtype=dtypes[i % 3])
        for i in range(num)
    ]


def send(leaves: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    return to_device.send(leaves, device(), **options).wait()


def watch(body: Any) -> tuple[list[str], int]:
    """Return the calls that ``body`` makes to CUDA, and its copies to the device."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with profile(activities=activities) as found:
        with record_function("body"):
            body()
        torch.cuda.synchronize()
    events = list(found.events())
    if not any(e.device_type == torch.autograd.DeviceType.CUDA for e in events):
        pytest.xfail("the profiler sees no device events on this machine")
    on_host = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    (when,) = [e.time_range for e in on_host if e.name == "body"]
    calls = [
        e.name
        for e in on_host
        if e.name.startswith("cuda")
        and when.start <= e.time_range.start
        and e.time_range.end <= when.end
    ]
    return calls, sum("Memcpy HtoD" in e.name for e in events)


# ------------------------------------------------------------------ one copy, no wait


@engine
def test_a_small_batch_is_one_copy_without_a_host_wait():
    leaves = many()
    for _ in range(3):
        send(leaves)
    copied: list[torch.Tensor] = []
    calls, num_copies = watch(lambda: copied.extend(send(leaves)))
    assert num_copies == 1
    assert calls.count("cudaMemcpyAsync") == 1
    assert not WAITS.intersection(calls)
    assert "cudaEventCreateWithFlags" not in calls
    assert all_same(copied, leaves)


@engine
def test_a_large_pageable_batch_is_sent_in_chunks():
    leaves = [torch.rand(16 << 20), torch.rand(3 << 20), torch.arange(1000)]
    nbytes = backend.plan_slab(leaves).nbytes
    assert all_same(send(leaves), leaves)
    copied: list[torch.Tensor] = []
    calls, num_copies = watch(lambda: copied.extend(send(leaves)))
    assert num_copies == -(-nbytes // CHUNK)
    assert not WAITS.intersection(calls)
    assert all_same(copied, leaves)


@engine
def test_the_steady_state_allocates_no_pinned_memory():
    leaves = [torch.rand(2 << 20), *many()]

    def step() -> None:
        for tensor in send(leaves):
            tensor.add_(1)
        torch.cuda.synchronize()

    for _ in range(5):
        step()

    def steps() -> None:
        for _ in range(20):
            step()

    calls, _ = watch(steps)
    assert not {"cudaHostAlloc", "cudaHostRegister", "cudaFreeHost"}.intersection(calls)


def test_the_host_is_done_while_the_device_still_sleeps():
    leaves = [*many(), torch.rand(3 << 20)]
    send(leaves)
    torch.cuda.synchronize()
    keep_busy(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    copied = send(leaves)
    assert not busy.query(), "the host waited for the device"
    assert all_same(copied, leaves)


# ------------------------------------------------------------------------------ values


def test_values_are_right_while_everything_is_used_again():
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    side = torch.cuda.Stream()
    for step in range(2_000 if fake_cuda.active else 10_000):
        value = step % 100
        leaves = [
            torch.full((1000 + 37 * (step % 50),), value, dtype=torch.int32),
            torch.full((3,), value, dtype=torch.uint8),
        ]
        with torch.cuda.stream(side if step % 7 == 0 else torch.cuda.default_stream()):
            if step % 100 == 0:
                keep_busy(5_000_000)
            copied = send(leaves)
            for leaf in leaves:
                leaf.fill_(101)  # as the next batch would
            bad = sum((tensor != value).sum() for tensor in copied)
        torch.cuda.current_stream().wait_stream(side)
        bad.record_stream(torch.cuda.current_stream())
        wrong += bad
    assert wrong.item() == 0


@pytest.mark.parametrize("num", [1, 7, 8, 30])
@pytest.mark.parametrize("kind", ["own", "default", "side"])
def test_pinned_leaves_are_copied_in_place(num, kind):
    nbytes = layout.DIRECT_NBYTES
    for step in range(5):
        leaves = [
            torch.full((nbytes + 64 * i,), (i + step) % 250, dtype=torch.uint8)
            for i in range(num)
        ]
        pinned = [leaf.pin_memory() for leaf in leaves]
        stream = {
            "own": None,
            "default": torch.cuda.default_stream(),
            "side": torch.cuda.Stream(),
        }[kind]
        keep_busy(1_000_000)
        queued = to_device.send([torch.tensor(step), *pinned], device(), stream=stream)
        assert num_in_place(queued) == num
        del pinned
        assert all_same(queued.wait(), [torch.tensor(step), *leaves])


@engine
def test_many_pinned_leaves_are_one_call_or_one_each():
    leaves = [torch.rand(1 << 18).pin_memory() for _ in range(10)]
    send(leaves)
    calls, num_copies = watch(lambda: send(leaves))
    if calls.count("cudaMemcpyAsync") == 10:
        assert num_copies == 10
    else:
        # No GPU has shown yet whether CUPTI reports a batch as one copy or as ten.
        assert calls.count("cudaMemcpyAsync") == 0
        assert num_copies in (1, 10)
    assert not WAITS.intersection(calls)


def test_one_span_is_one_copy():
    memory = torch.rand(1 << 20).pin_memory()
    leaves = [memory[1 << 19 :], memory[: 1 << 19].view(512, -1)]
    send(leaves)
    copied: list[torch.Tensor] = []
    _, num_copies = watch(lambda: copied.extend(send(leaves)))
    assert num_copies == 1
    assert all_same(copied, leaves)


@engine
def test_scatter_copies_on_the_stream_that_it_is_given(monkeypatch):
    side, leaves = torch.cuda.Stream(), many()
    send = mock.Mock(wraps=backend.plan_copy)
    monkeypatch.setattr(backend, "plan_copy", send)
    with torch.cuda.stream(side):
        keep_busy()
    (copied,) = scatter(leaves, [device()], stream=side)
    assert send.call_args.args[1] == side
    assert all_same(copied, leaves)


# ---------------------------------------------------------------------------- capture


def test_a_capture_refuses_the_copy_and_continues():
    leaves, static = many(20), torch.zeros(8, device=device())
    send(leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
        with pytest.raises(RuntimeError) as caught:
            scatter(leaves, [device()])
        static.add_(1)
    assert str(caught.value) == CAPTURED.format("home")
    graph.replay()
    assert static.tolist() == [2] * 8
    assert all_same(send(leaves), leaves)


def test_a_copy_stream_under_capture_is_refused():
    leaves, side = many(20), torch.cuda.Stream()
    static = torch.zeros(8, device=device())
    send(leaves)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="relaxed")
        static.add_(1)  # an empty graph would be warned of
        with torch.cuda.stream(torch.cuda.default_stream()):
            with pytest.raises(RuntimeError) as caught:
                to_device.send(leaves, device(), stream=side)
        graph.capture_end()
    assert str(caught.value) == CAPTURED.format("copy")
    assert all_same(send(leaves), leaves)


@engine
def test_at_its_limit_the_host_waits_and_every_byte_arrives():
    leaves = [torch.arange(5_000_000, dtype=torch.int32), torch.ones(7)]
    copies = torch.cuda.Stream()
    torch.cuda.synchronize()
    before = memory.pinned_info()
    memory.set_pinned_limit(before.in_use + CHUNK)
    try:
        with torch.cuda.stream(copies):
            keep_busy(500_000_000)
        sent = to_device.send(leaves, device(), stream=copies)  # five chunks, one block
        info = memory.pinned_info()
    finally:
        memory.set_pinned_limit(before.limit)
    assert info.waits > before.waits
    most = before.in_use + 2 * CHUNK  # the host's engine has one
    assert CHUNK <= info.in_use + info.cached <= most
    assert all_same(sent.wait(), leaves)


def test_threads_send_at_the_same_time():
    errors: list[Any] = []

    def work(seed: int) -> None:
        try:
            home = torch.cuda.Stream()
            with torch.cuda.stream(home):
                for step in range(200):
                    leaves = many(40, seed + step)
                    if step % 20 == 0:
                        leaves.append(torch.full((3 << 20,), float(step)))
                    copied = send(leaves)
                    keep_busy(100_000)
                    if not all_same(copied, leaves):
                        errors.append((seed, step))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_copy_waits_for_earlier_users_of_its_memory():
    """A copy must not overwrite memory that the caller's stream reads later."""
    found = []
    for step in range(50):
        held = torch.full((1 << 16,), step, dtype=torch.uint8, device=device())
        keep_busy(2_000_000)
        found.append(held.max())
        del held  # the allocator gives this block to the copy
        send([torch.full((1 << 16,), 255, dtype=torch.uint8)])
    assert [value.item() for value in found] == list(range(50))


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Let torch's allocator take this number of bytes more than it has now."""
    gc.collect()
    torch.cuda.synchronize()
    send([torch.zeros(1)])  # frees dropped memory
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device()).total_memory
    most = torch.cuda.memory_reserved() + nbytes
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_per_process_memory_fraction(1.0)


def drop_batch_in_use(source: torch.Tensor) -> torch.cuda.Event:
    """Drop a batch that a step of the current stream uses; return the end of it."""
    batch = send([source])
    keep_busy(1_000_000_000)
    batch[0].add_(1)
    busy = torch.cuda.Event()
    busy.record()
    return busy


@engine
@pytest.mark.parametrize("num", [1, 3])
def test_memory_that_waits_for_steps_is_there_for_every_allocation(num):
    source = torch.ones(40 << 20, dtype=torch.uint8)
    with room_for(num * source.nbytes + (10 << 20)):
        for _ in range(num):
            drop_batch_in_use(source)
        found = torch.full((num * source.nbytes,), 7, dtype=torch.uint8, device="cuda")
        assert bool((found.cpu() == 7).all())


@engine
def test_on_a_full_device_a_batch_reuses_memory_without_a_wait_of_the_host():
    source = torch.ones(40 << 20, dtype=torch.uint8)
    with room_for(source.nbytes + (10 << 20)):
        send([source])
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        for _ in range(3):
            busy = drop_batch_in_use(source)
            copied = send([source])
            assert not busy.query()
            assert all_same(copied, [source])
            del copied
        assert torch.cuda.memory_stats()["num_alloc_retries"] == before


@engine
def test_a_copy_waits_for_no_step_although_other_code_asks_for_memory():
    source = torch.ones(3 << 20, dtype=torch.uint8)
    with room_for(1 << 30):
        for step in range(3):
            busy = drop_batch_in_use(source)
            torch.empty((64 + 16 * step) << 20, dtype=torch.uint8, device=device())
            copy = to_device.send([source], device())
            to_device.torch_device.copy_stream(device()).synchronize()
            assert not busy.query()
            assert all_same(copy.wait(), [source])


@engine
@pytest.mark.fake_cuda
def test_other_allocators_of_torch_keep_memory_for_its_users():
    code = """
    import os, torch
    from pyparallel import scatter
    library = os.environ["LD_PRELOAD"].split()[0]
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "fakecuda_plain_malloc", "fakecuda_plain_free")
    torch.cuda.memory.change_current_allocator(allocator)
    (batch,) = scatter([torch.arange(5.0)], [0])
    assert batch[0].tolist() == [0, 1, 2, 3, 4]
    batch[0].untyped_storage().resize_(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=ROOT)


def test_gradients_flow_back_from_the_device():
    source = torch.arange(5.0, requires_grad=True)
    first, second = scatter({"x": source}, [0, 0])
    (first["x"].sum() + 2 * second["x"].sum()).backward()
    assert source.grad.tolist() == [1, 1, 1, 2, 2]
    with torch.no_grad():
        (part,) = scatter({"x": source}, [0])
    assert not part["x"].requires_grad


def test_memory_of_a_copy_without_a_wait_is_safe_to_reuse():
    for _ in range(50):
        queued = to_device.send([torch.zeros(5_000_000, dtype=torch.uint8)], device())
        del queued
        output = torch.full((5_000_000,), 7, dtype=torch.uint8, device=device())
        assert bool((output == 7).all())
        del output
