"""The fake CUDA runtime keeps CUDA's rules, and reports broken rules."""

from __future__ import annotations

import ast
import ctypes
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from tests.support.devices import fake_cuda
from tests.support.devices.fake_cuda_plugin import gpu_only
from tests.support.repository.folders import ROOT

NOT_READY, CAPTURE_UNSUPPORTED, CAPTURED_EVENT = 600, 900, 907
ALREADY_REGISTERED, NOT_REGISTERED, NOT_INITIALIZED = 712, 713, 3
PORTABLE = 1

on_fake = [pytest.mark.cuda, pytest.mark.fake_cuda]


def runtime() -> Any:
    return ctypes.CDLL(None)


def allocated(function: str, nbytes: int) -> int:
    pointer = ctypes.c_void_p()
    arguments = [ctypes.byref(pointer), ctypes.c_size_t(nbytes)]
    if function == "cudaHostAlloc":
        arguments.append(ctypes.c_uint(0))
    assert getattr(runtime(), function)(*arguments) == 0
    assert pointer.value is not None
    return pointer.value


def run(script: str, **environment: str) -> str:
    command = ["env", *(f"{k}={v}" for k, v in environment.items())]
    start = "import torch\nfrom tests.support.devices import fake_cuda\n"
    command += [sys.executable, "-c", start + script]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_list_of_tests_for_a_gpu_has_no_stale_entry() -> None:
    for name, reason in gpu_only().items():
        file, _, test = name.partition("::")
        body = ast.parse((ROOT / "tests" / file).read_text()).body
        names = [item.name for item in body if isinstance(item, ast.FunctionDef)]
        assert not test or test.partition("[")[0] in names, f"{name} does not exist"
        assert reason, f"{name} needs a reason"


class TestMemory:
    pytestmark = on_fake

    @pytest.mark.parametrize("function", ["cudaMalloc", "cudaHostAlloc"])
    def test_fresh_memory_is_filled_with_a_pattern(self, function: str) -> None:
        memory = allocated(function, 100)
        assert ctypes.string_at(memory, 100) == b"\xa5" * 100
        free = "cudaFree" if function == "cudaMalloc" else "cudaFreeHost"
        assert getattr(runtime(), free)(ctypes.c_void_p(memory)) == 0

    def test_a_copy_of_freed_memory_is_a_problem(self) -> None:
        memory = allocated("cudaMalloc", 64)
        assert runtime().cudaFree(ctypes.c_void_p(memory)) == 0
        target = ctypes.create_string_buffer(64)
        found = runtime().cudaMemcpy(
            target, ctypes.c_void_p(memory), ctypes.c_size_t(64), 2
        )
        assert found == fake_cuda.INVALID_VALUE
        assert fake_cuda.problems() == ["cudaMemcpy of freed memory"]

    def test_a_copy_beyond_its_allocation_is_a_problem(self) -> None:
        memory = allocated("cudaMalloc", 64)
        target = ctypes.create_string_buffer(128)
        arguments = [target, ctypes.c_void_p(memory), ctypes.c_size_t(65), 2]
        assert runtime().cudaMemcpy(*arguments) == fake_cuda.INVALID_VALUE
        message = "cudaMemcpy of 65 bytes reaches beyond the allocation"
        assert fake_cuda.problems() == [message]
        assert runtime().cudaFree(ctypes.c_void_p(memory)) == 0

    def test_memory_is_registered_once(self) -> None:
        memory = torch.empty(1 << 16, dtype=torch.uint8)
        api, address = torch.cuda.cudart(), memory.data_ptr()
        assert int(api.cudaHostRegister(address, memory.nbytes, PORTABLE)) == 0
        assert memory.is_pinned()
        again = int(api.cudaHostRegister(address + 8, 8, PORTABLE))
        assert again == ALREADY_REGISTERED
        assert int(api.cudaHostUnregister(address)) == 0
        assert int(api.cudaHostUnregister(address)) == NOT_REGISTERED
        assert not memory.is_pinned()
        assert runtime().cudaGetLastError() == NOT_REGISTERED
        assert runtime().cudaGetLastError() == fake_cuda.SUCCESS

    def test_an_index_out_of_range_breaks_the_device(self) -> None:
        indices = torch.tensor([7], device="cuda")
        torch.arange(3, device="cuda").index_select(0, indices)
        with pytest.raises(RuntimeError, match="CUDA error: device-side assert"):
            torch.cuda.synchronize()
        (problem,) = fake_cuda.problems()
        assert problem.startswith("aten::index_select failed: index out of range")
        fake_cuda.reset()


class TestStreams:
    pytestmark = on_fake

    def test_a_held_stream_runs_nothing_until_it_is_released(self) -> None:
        x, stream = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with fake_cuda.held(stream), torch.cuda.stream(stream):
            x.add_(1)
            event = stream.record_event()
            assert not event.query()
        event.synchronize()
        assert x.tolist() == [1.0] * 4

    def test_pinned_memory_is_read_when_the_stream_is_there(self) -> None:
        sources = torch.zeros(4).pin_memory(), torch.zeros(4)
        with fake_cuda.held():
            there = [source.to("cuda", non_blocking=True) for source in sources]
            for source in sources:
                source.fill_(1)
        assert [x.tolist() for x in there] == [[1.0] * 4, [0.0] * 4]

    def test_the_default_stream_waits_for_blocking_streams_alone(self) -> None:
        blocking = ctypes.c_void_p()
        assert runtime().cudaStreamCreate(ctypes.byref(blocking)) == 0
        assert blocking.value is not None
        external = torch.cuda.ExternalStream(blocking.value)
        for stream, waits in ((external, True), (torch.cuda.Stream(), False)):
            with fake_cuda.held(stream):
                with torch.cuda.stream(stream):
                    torch.zeros(1 << 10, device="cuda")
                event = torch.cuda.default_stream().record_event()
                if waits:
                    assert not event.query()
                else:
                    event.synchronize()
            event.synchronize()
        assert runtime().cudaStreamDestroy(blocking) == 0

    def test_a_wait_covers_the_work_recorded_before_it(self) -> None:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        event = torch.cuda.Event()
        event.record(first)
        second.wait_event(event)
        first.synchronize()
        with fake_cuda.held(first):
            event.record(first)
            second.synchronize()
            assert not event.query()


class TestErrors:
    pytestmark = on_fake

    def test_the_nth_call_fails_and_leaves_the_last_error(self) -> None:
        x = torch.zeros(3, device="cuda")
        with fake_cuda.failing("cudaMemcpyAsync", 2, fake_cuda.OUT_OF_MEMORY):
            assert x.tolist() == [0.0] * 3
            with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
                x.tolist()
            assert x.tolist() == [0.0] * 3

    def test_not_ready_is_a_last_error(self) -> None:
        event = ctypes.c_void_p()
        assert runtime().cudaEventCreateWithFlags(ctypes.byref(event), 2) == 0
        with fake_cuda.held():
            torch.zeros(1 << 10, device="cuda").add_(1)
            assert runtime().cudaEventRecord(event, None) == 0
            assert runtime().cudaEventQuery(event) == NOT_READY
            assert runtime().cudaGetLastError() == NOT_READY
            assert runtime().cudaGetLastError() == fake_cuda.SUCCESS
        assert runtime().cudaEventSynchronize(event) == fake_cuda.SUCCESS
        assert runtime().cudaEventDestroy(event) == 0

    def test_every_call_fails_after_a_failure_of_the_device(self) -> None:
        fake_cuda.break_device()
        for _ in range(2):
            assert runtime().cudaDeviceSynchronize() == fake_cuda.LAUNCH_FAILURE
            assert runtime().cudaGetLastError() == fake_cuda.LAUNCH_FAILURE
        fake_cuda.reset()
        assert runtime().cudaDeviceSynchronize() == fake_cuda.SUCCESS

    def test_a_forked_child_cannot_use_the_device(self) -> None:
        script = """
import ctypes, os
torch.zeros(1, device="cuda")
if os.fork() == 0:
    os._exit(ctypes.CDLL(None).cudaDeviceSynchronize())
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        assert run(script) == str(NOT_INITIALIZED)

    def test_a_context_is_opened_on_the_devices_that_are_used(self) -> None:
        script = """
print(torch.cuda.device_count(), fake_cuda.contexts())
torch.zeros(1, device="cuda:1")
print(fake_cuda.contexts())
"""
        assert run(script, FAKECUDA_DEVICES="2") == "2 set()\n{1}"

    @pytest.mark.parametrize(("library", "num"), [("PyDLL", 1), ("CDLL", 0)])
    def test_a_call_with_the_gil_is_a_problem(self, library: str, num: int) -> None:
        synchronize = getattr(ctypes, library)(None).cudaDeviceSynchronize
        with fake_cuda.unlocked(""):
            assert synchronize() == fake_cuda.SUCCESS
        found = fake_cuda.problems()
        assert found == ["cudaDeviceSynchronize with the GIL"] * num
        assert synchronize() == fake_cuda.SUCCESS
        assert fake_cuda.problems() == []


class TestCapture:
    pytestmark = on_fake

    def in_thread(self, body: Any) -> list[Any]:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(body()))
        thread.start()
        thread.join()
        return found

    def lose(self, graph: Any, pool: Any, match: str) -> None:
        """End a capture that has failed, also for torch's allocator.

        Torch does not do the latter, and then keeps all memory that other streams used.
        """
        with pytest.raises(RuntimeError, match=match):
            graph.capture_end()
        torch._C._cuda_endAllocateToPool(0, pool)

    def test_a_graph_runs_copies_fills_and_kernels_again(self) -> None:
        source = torch.ones(4).pin_memory()
        x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.zero_()
            x.copy_(source, non_blocking=True)
            y.add_(x, alpha=2)
        assert y.tolist() == [0.0] * 4
        for value in (3.0, 5.0):
            source.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert y.tolist() == [2 * value] * 4

    @pytest.mark.parametrize(
        ("mode", "call", "expected"),
        [
            ("global", "cudaDeviceSynchronize", CAPTURE_UNSUPPORTED),
            ("thread_local", "cudaDeviceSynchronize", fake_cuda.SUCCESS),
            ("relaxed", "cudaDeviceSynchronize", fake_cuda.SUCCESS),
        ],
    )
    def test_a_mode_decides_about_other_threads(
        self, mode: str, call: str, expected: int
    ) -> None:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool, capture_error_mode=mode)
            x.add_(1)
            assert self.in_thread(getattr(runtime(), call)) == [expected]
            if expected == fake_cuda.SUCCESS:
                graph.capture_end()
                return
            self.lose(graph, pool, "failed due to a previous")
        message = f"{call} is not allowed while a stream is captured"
        assert fake_cuda.problems() == [message]

    def test_a_captured_event_cannot_be_queried(self) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool, capture_error_mode="relaxed")
            event = stream.record_event()
            found = runtime().cudaEventQuery(ctypes.c_void_p(event.cuda_event))
            assert found == CAPTURED_EVENT
            self.lose(graph, pool, "failed due to a previous")
        assert fake_cuda.problems() == ["cudaEventQuery of a captured event"]

    def test_a_forked_stream_must_be_joined(self) -> None:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
        main, side = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(main):
            pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                x.add_(1)
            self.lose(graph, pool, "stream has unjoined work")
        message = "a captured stream was not joined before the end of the capture"
        assert fake_cuda.problems() == [message]
