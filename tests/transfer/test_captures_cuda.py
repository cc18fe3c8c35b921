"""Graph captures, contexts and CUDA errors that the engine must not affect."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from pyparallel import (
    DataLoader,
    ImagePreprocessor,
    PreDataLoader,
    backend,
    gather,
    pad_stack,
    scatter,
    start_to_host,
    to_host,
)
from pyparallel.shm import pinning
from pyparallel.shm.ring import FREE, PARENT, Ring
from pyparallel.transfer import _cudart, to_device
from pyparallel.transfer.device import torch_return
from pyparallel.transfer.to_device import MixedCopy
from tests.support.devices import fake_cuda
from tests.support.loader.loader_sets import wait_for
from tests.support.loader.ring_workers import Worker
from tests.support.processes.gil import others_run_during
from tests.support.repository.folders import ROOT

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        "cuda" not in backend.transfers, reason="this build has no engine for CUDA"
    ),
]

CAPTURED = (
    "send: the waiting stream must not be under graph capture, but is. Copy outside of "
    "the capture, into the static tensors of a StaticBatches."
)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def keep_busy() -> None:
    torch.cuda._sleep(500_000_000)


@contextlib.contextmanager
def capturing(synchronize: bool = True) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture in the mode in which an unsafe call of any thread ends the capture."""
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(8, device=device())
    if synchronize:
        torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        try:
            static.add_(1)
            yield graph
            static.add_(1)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [2] * 8


def in_thread(body: Callable[[], Any], stream: Any = None) -> Any:
    """Return what ``body`` returns in a thread on ``stream``, or raise."""
    found: list[Any] = []
    errors: list[BaseException] = []
    stream = torch.cuda.Stream() if stream is None else stream

    def work() -> None:
        try:
            with torch.cuda.stream(stream):
                found.append(body())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def pinned_ring(num_slabs: int = 2) -> tuple[Ring, Worker]:
    lock = pinning.accelerator_pinner()
    assert lock is not None
    ring = Ring(num_slabs, 1 << 20)
    ring.pin(lock)
    return ring, Worker(ring, torch.stack)


# --------------------------------------------------------------------------- captures


def test_a_pending_copy_is_asked_beside_a_capture() -> None:
    small, results = [torch.ones(5)], [torch.ones(1000, device=device())]
    start_to_host(results).get()
    stream = torch.cuda.Stream()
    in_thread(lambda: scatter(small, [device()]), stream)  # there is memory for it now
    keep_busy()
    pending = start_to_host(results)
    with capturing(synchronize=False):
        in_thread(to_device.release_done)
        copied = in_thread(lambda: scatter(small, [device()]), stream)
    assert torch.equal(copied[0][0].cpu(), small[0])
    assert torch.equal(pending.get()[0], torch.ones(1000))


@pytest.mark.parametrize("kind", ["torch", "backend"])
def test_an_event_is_waited_for_beside_a_capture(kind: str) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        keep_busy()
        event: Any = side.record_event()
        if kind == "backend":
            event = torch_return.record(side)

    def wait() -> bool:
        torch_return.wait_on_host(event)
        with torch_return.relaxed(device()):
            return torch_return.is_done(event)

    with capturing(synchronize=False):
        assert in_thread(wait)


def test_memory_is_pinned_beside_a_capture() -> None:
    ring, worker = pinned_ring()
    with capturing():
        received = in_thread(lambda: worker.make([torch.ones(8)]))
        assert received.is_pinned
        kept = received.batch.clone()
        unpinned = weakref.ref(ring)
        received = worker = ring = None  # type: ignore[assignment]
        assert unpinned() is None
    assert kept.sum() == 8


def test_a_batch_freed_during_capture_frees_its_slab() -> None:
    ring, worker = pinned_ring()
    batch = [worker.make([torch.ones(8)]).batch]
    assert batch[0].is_pinned()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        keep_busy()
        copied = batch[0].to(device(), non_blocking=True)
    with mock.patch.object(sys, "unraisablehook") as hook:
        with capturing(synchronize=False):
            batch.clear()
            assert ring.holders() == [PARENT, FREE]
            in_thread(to_device.release_done)
            assert wait_for(lambda: ring.holders() == [FREE, FREE])
    assert not hook.called
    assert copied.tolist() == [[1] * 8]


def test_memory_that_a_graph_copies_is_never_used_again() -> None:
    class Marked(torch.Tensor):
        pass

    ring, worker = pinned_ring()
    batch = worker.make([torch.ones(8)]).batch.as_subclass(Marked)
    target = torch.zeros(1, 8, device=device())
    with capturing() as graph:
        mixed = MixedCopy([batch], device())
        target.copy_(mixed.wait()[0])
    del batch, mixed
    gc.collect()
    for i in range(3):
        torch.cuda.synchronize()
        to_device.release_done()
        worker.make([torch.full((8,), float(i))])
    assert ring.holders() == [PARENT, FREE]
    target.zero_()
    graph.replay()
    assert target.tolist() == [[1] * 8]


@pytest.mark.parametrize("nbytes", [64, 5 << 20])
def test_a_copy_dropped_during_capture_keeps_the_graph_intact(nbytes: int) -> None:
    leaf = torch.full((nbytes,), 7, dtype=torch.uint8)
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(8, device=device())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        queued = to_device.send([leaf], device())
        graph.capture_begin(capture_error_mode="global")
        static.add_(1)
        del queued
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1] * 8
    assert to_device.release_done() == 0
    assert torch.equal(to_device.send([leaf], device()).wait()[0].cpu(), leaf)


def test_a_wait_is_refused_during_capture_and_works_later() -> None:
    leaf = torch.arange(100)
    queued = to_device.send([leaf], device())
    with capturing():
        with pytest.raises(RuntimeError) as caught:
            queued.wait()
    assert str(caught.value) == CAPTURED
    assert torch.equal(queued.wait()[0].cpu(), leaf)


def receive_from_a_loader() -> Any:
    with PreDataLoader([[torch.ones(50 << 20, dtype=torch.uint8)]], device()) as pre:
        return [batch[0] for batch in pre]


def receive_unpinned(**options: Any) -> None:
    """Receive batches that the loader pins, because no pinned slab has them."""
    dataset = [torch.ones(10 << 20)]
    (batch,) = DataLoader(dataset, pin_memory=True, **options)
    assert batch.is_pinned()


#: Calls that need more memory than any call before, on the device and pinned.
LARGER: dict[str, Callable[[torch.Tensor], Any]] = {
    "scatter": lambda _: scatter([torch.ones(60 << 20, dtype=torch.uint8)], [0]),
    "PreDataLoader": lambda _: receive_from_a_loader(),
    "gather": lambda large: gather([large, large], 0),
    "DataLoader without workers": lambda _: receive_unpinned(),
    "DataLoader without a ring": lambda _: receive_unpinned(
        num_workers=1, ring_slabs=0
    ),
    "to_host": lambda large: to_host([large[::2], large]),
    "start_to_host": lambda large: start_to_host([large]).get(),
    "pad_stack": lambda large: pad_stack([large, large[:5]]),
    "images": lambda large: ImagePreprocessor()(
        [large[: 6 << 20].view(3, 1 << 10, -1)]
    ),
}


@pytest.mark.parametrize("name", LARGER)
def test_a_larger_batch_is_received_beside_a_capture(name: str) -> None:
    large = torch.ones(70 << 20, dtype=torch.uint8, device=device())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for _ in range(2):  # cold and warm
        with capturing():
            in_thread(lambda: LARGER[name](large))


@pytest.mark.parametrize("api", [to_device.torch_device, torch_return])
def test_no_stream_of_the_pool_is_the_copy_stream(api: Any) -> None:
    for index in range(torch.cuda.device_count()):
        where = torch.device("cuda", index)
        copies = api.copy_stream(where)
        streams = [torch.cuda.Stream(where) for _ in range(70)]
        assert copies not in streams and copies.device == where


@pytest.mark.fake_cuda  # lists the calls
@pytest.mark.parametrize(
    "call, most",
    [
        (lambda _, leaves: scatter(leaves, [device()]), 4),
        (lambda there, _: to_host(there), 10),
        (lambda there, _: start_to_host(there).get(), 10),
    ],
    ids=["scatter", "to_host", "start_to_host"],
)
def test_a_batch_sets_the_capture_mode_only_a_few_times(call: Any, most: int) -> None:
    leaves = [torch.ones(5)] * 20
    there = [leaf.to(device()) for leaf in leaves]
    for _ in range(3):
        call(there, leaves)
        torch.cuda.synchronize()
    with fake_cuda.calls() as calls:
        call(there, leaves)
    assert calls.count("cudaThreadExchangeStreamCaptureMode") <= most


@pytest.mark.fake_cuda  # lists the calls
def test_calls_in_a_relaxed_block_keep_its_mode() -> None:
    event = backend.Runtime("cuda").record(torch.cuda.current_stream())
    with to_device.torch_device.relaxed(device()), fake_cuda.calls() as calls:
        event.is_done()
    assert "cudaThreadExchangeStreamCaptureMode" not in calls


@pytest.mark.fake_cuda  # exchanges the mode as other code does
def test_a_mode_that_other_code_has_set_ends_with_that_code() -> None:
    """Later calls of the thread must set the mode again."""
    event = backend.Runtime("cuda").record(torch.cuda.current_stream())
    other = _cudart.load()
    assert other is not None

    def work() -> None:
        before = other.exchange_capture_mode(2, 0)
        with to_device.torch_device.relaxed(device()):
            event.is_done()
        other.exchange_capture_mode(before, 0)
        with fake_cuda.calls() as calls:
            event.is_done()
        assert calls.count("cudaThreadExchangeStreamCaptureMode") == 2

    in_thread(work)


# ----------------------------------------------------------------------------- errors


@pytest.mark.fake_cuda  # fails a call
@pytest.mark.parametrize("code", [1, 46, 801, 999])
def test_a_refused_batch_is_copied_one_by_one(code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_BATCH, str(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, f"0 {code} 1\n"), done.stderr


REFUSED_BATCH = """
import sys
from tests.support.devices import fake_cuda
import torch
from pyparallel import backend, scatter
from pyparallel.doctor import self_test

code, runtime = int(sys.argv[1]), backend.Runtime("cuda")
leaves = [torch.full((1 << 18,), float(i)).pin_memory() for i in range(10)]
before, num_batches = runtime.refused_batch(), 0
with fake_cuda.failing("cudaMemcpyBatchAsync", code=code):
    for _ in range(2):
        with fake_cuda.calls() as calls:
            (copied,) = scatter(leaves, [0])
        num_batches += calls.count("cudaMemcpyBatchAsync")
        assert calls.count("cudaMemcpyAsync") == 10
        assert all(torch.equal(a.cpu(), b) for a, b in zip(copied, leaves))
print(before, runtime.refused_batch(), num_batches)
assert self_test.refused_batch() == code
fake_cuda.break_device()
try:
    scatter(leaves, [0])
except RuntimeError:
    sys.stdout.flush()
    import os
    os._exit(0)
raise SystemExit("an error of the device must be raised")
"""


def test_a_refused_slab_leaves_no_error_to_the_next_kernel() -> None:
    ring, worker = pinned_ring()
    lock = pinning.accelerator_pinner()
    assert lock is not None
    worker.make([torch.ones(8)])
    with mock.patch.object(pinning, "warn_once") as warned:
        assert not lock.pin(ring.slab_address(0), ring.committed(0))
    assert "(error 712)" in warned.call_args.args[1]
    assert torch.zeros(3, device=device()).add_(1).tolist() == [1] * 3


def test_an_error_of_cuda_has_its_class_and_code() -> None:
    with pytest.raises(torch.AcceleratorError) as caught:
        backend.Runtime("cuda").unpin(torch.zeros(4096).data_ptr())
    assert caught.value.error_code == 713
    assert torch.zeros(3, device=device()).add_(1).tolist() == [1] * 3


# --------------------------------------------------------------------------- contexts

# A rank that uses the second device, in a thread where the first one is current.
SECOND_DEVICE = """
import threading
import torch
from pyparallel import scatter, start_to_host, to_host
from pyparallel.shm import pinning
from pyparallel.shm.ring import Ring
from pyparallel.transfer import _cudart, to_device

second = torch.device("cuda", 1)
torch.cuda.set_device(second)
torch.zeros(1, device=second)

def work():
    assert torch.cuda.current_device() == 0
    home = torch.cuda.current_stream(second)
    large = torch.ones(1 << 20)
    for leaves in ([torch.ones(5)], [torch.ones(5), large], [large.pin_memory()] * 9):
        copied = to_device.send(leaves, second).wait()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(copied, leaves))
        scatter(leaves, [second])
        to_device.send(leaves, second)
        start_to_host(copied).get()
        to_host(copied)
    lock = pinning.accelerator_pinner()
    ring = Ring(1, 1 << 20)
    assert ring.commit(0, 1 << 20)
    assert lock.pin(ring.slab_address(0), ring.committed(0))
    slab = ring.payload(ring.owner(0), 64)
    with to_device.torch_device.using(home):
        copied = slab.to(second, non_blocking=True)
    fence = lock.fence(ring.slab_address(0))
    torch.cuda.synchronize(second)
    assert fence.is_done() and torch.equal(copied.cpu(), slab)
    lock.unpin(ring.slab_address(0))
    assert not to_device.torch_device.is_capturing(home)
    to_device.release_done()
    done.append([torch._C._cuda_hasPrimaryContext(i) for i in range(2)])

done = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*done)
"""


@pytest.mark.two_gpus
def test_no_context_is_opened_on_an_unused_device() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SECOND_DEVICE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "[False, True]\n"), done.stderr


# -------------------------------------------------------------------- the home stream


@pytest.mark.fake_cuda  # lists the calls
@pytest.mark.parametrize("busy", [False, True])
def test_pinned_leaves_need_no_event_on_an_idle_stream(busy: bool) -> None:
    leaf = torch.arange(1 << 20).pin_memory()
    scatter(leaf, [device()])
    torch.cuda.synchronize()
    if busy:
        keep_busy()
    with fake_cuda.calls() as calls:
        (copied,) = scatter(leaf, [device()])
    assert calls.count("cudaMemcpyAsync") == 1
    assert calls.count("cudaStreamWaitEvent") == (1 if busy else 0)
    assert calls.count("cudaEventRecord") == 1
    assert torch.equal(copied.cpu(), leaf)


# --------------------------------------------------------------------------- the host


def test_the_host_waits_without_the_interpreters_lock() -> None:
    runtime = backend.Runtime("cuda")

    def wait() -> None:
        torch.cuda._sleep(20_000_000)
        runtime.record(torch.cuda.current_stream()).synchronize()

    assert others_run_during(wait)


def test_a_runtime_that_is_older_than_the_toolkit_will_do() -> None:
    """The extension must load without symbols of CUDA 12.8 and later."""
    extension = sys.modules[backend.Runtime.__module__].__file__
    found = subprocess.run(
        ["nm", "-D", "--undefined-only", str(extension)],
        capture_output=True,
        text=True,
        check=True,
    )
    needed = {line.split()[-1].split("@")[0] for line in found.stdout.splitlines()}
    assert "cudaMemcpyAsync" in needed
    assert "cudaMemcpyBatchAsync" not in needed
