"""The measured GPU, and the host that replaces it in a dry run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from .. import environment
from .._harness import Record

#: The CUDA functions that wait for the device.
WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cudaMemcpy"),
)
#: The CUDA functions that start kernels.
LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cudaGraphLaunch"),
    *("cuLaunchKernel", "cuLaunchCooperativeKernel", "cuGraphLaunch"),
)
#: The CUDA functions that allocate pinned memory.
PIN_CALLS = ("cudaHostAlloc", "cudaMallocHost", "cudaHostRegister", "cuMemHostAlloc")

_RANGE = "the call that is counted"
_ASKED = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,pcie.link.gen.current"
_ASKED += ",pcie.link.width.current,power.limit,temperature.gpu"


class Registered:
    """Memory that CUDA has pinned."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._do(self._runtime().cudaHostRegister, tensor.nbytes, 1)  # portable

    def __del__(self) -> None:
        self._do(self._runtime().cudaHostUnregister)

    @staticmethod
    def _runtime() -> Any:
        return torch.cuda.cudart()

    def _do(self, call: Callable[..., Any], *arguments: int) -> None:
        error = int(call(self._tensor.data_ptr(), *arguments))
        if error:
            raise RuntimeError(f"{call} failed with CUDA error {error}.")


class DryRun:
    """The host: all code runs, no copy is sent, and all figures are meaningless."""

    dry = True
    device = torch.device("cpu")
    #: The argument of `pyparallel.scatter` for this target.
    index = -1

    def sync(self) -> None:
        """Wait until the target has finished all work."""

    def sleep(self, seconds: float) -> None:
        """Keep the current stream busy."""
        time.sleep(seconds)

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy."""
        return tensor.clone()

    def raw_copy(self, dst: Tensor, src: Tensor) -> None:
        """Copy bytes, to or from the target or within it, without other work."""
        dst.copy_(src)

    def register(self, tensor: Tensor) -> Registered | None:
        """Pin existing memory for as long as the result lives."""
        return None

    def numa(self) -> tuple[int | None, list[int]]:
        """Return the NUMA node of the target, None if it is unknown, and the others."""
        return None, []

    def device_seconds(self, call: Callable[[], Any], host: float) -> float | None:
        """Return the time of the call on the target, or None if it is unknown."""
        return None

    def counts(self, call: Callable[[], Any]) -> Record:
        """Return counts of a call: launches, copies, waits and allocations."""
        return {}

    def machine(self) -> dict[str, str]:
        """Describe the source of the figures."""
        return {"device": "dry run on the CPU: no figure means anything"}


class Gpu(DryRun):
    """A GPU, with torch's current stream as the consumer's."""

    dry = False

    def __init__(self, quick: bool, index: int = 0) -> None:
        self.index, self.device = index, torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._runtime, self._quick = _runtime(), quick
        self._asleep: dict[Any, float] = {}
        self._hertz = self._clock_rate()
        self._profiles = 3  # the first profile of a process may begin too late

    def sync(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def sleep(self, seconds: float) -> None:
        """Queue a kernel that sleeps."""
        torch.cuda._sleep(max(1, int(seconds * self._hertz)))

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy."""
        return tensor.pin_memory()

    def raw_copy(self, dst: Tensor, src: Tensor) -> None:
        """Call ``cudaMemcpyAsync`` on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        if self._runtime is None:
            dst.copy_(src, non_blocking=True)
            return
        where, kind = (dst.data_ptr(), src.data_ptr()), 4  # cudaMemcpyDefault
        error = self._runtime.cudaMemcpyAsync(*where, src.nbytes, kind, stream)
        if error:
            raise RuntimeError(f"cudaMemcpyAsync failed with error {error}.")

    def register(self, tensor: Tensor) -> Registered | None:
        """Call ``cudaHostRegister``."""
        return Registered(tensor)

    def numa(self) -> tuple[int | None, list[int]]:
        """Return the node of the GPU's bus, None if Linux does not know it."""
        found: Any = torch.cuda.get_device_properties(self.device)
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}"
        file = Path(f"/sys/bus/pci/devices/{bus}:{found.pci_device_id:02x}.0/numa_node")
        near = int(file.read_text()) if file.exists() else -1
        nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
        others = sorted({int(path.name[4:]) for path in nodes} - {near})
        return (near if near >= 0 else None), others if near >= 0 else []

    def device_seconds(self, call: Callable[[], Any], host: float) -> float | None:
        """Return the time between two events around a call.

        The stream sleeps while the host queues the call, so that the result does not
        include waits of the device for the host. The result is None if the call itself
        waits for the device, or takes longer to queue than the longest sleep.

        Args:
            call: the call to time.
            host: the approximate time to queue it.
        """
        asleep = self._asleep.setdefault(call, 2 * host + 1e-4)
        while asleep < 0.2:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.sync()
            self.sleep(asleep)
            begin.record()
            result = call()
            end.record()
            all_queued = not begin.query()
            self.sync()
            del result
            if all_queued:
                return begin.elapsed_time(end) / 1e3
            # A call that blocks waits for every sleep: try a few longer sleeps.
            asleep = self._asleep[call] = 3 * asleep
        self._asleep[call] = asleep
        return None

    def counts(self, call: Callable[[], Any]) -> Record:
        """Return launches, copies to and from the device, waits and pinned allocations.

        They are unknown if the profiler sees no device. Pinned allocations include
        those of torch's host allocator, which counts all threads.
        """
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        profiles, self._profiles = self._profiles, 1
        for _ in range(profiles):
            before = _host_allocations()
            with profile(activities=activities) as seen:
                with record_function(_RANGE):
                    result = call()
                self.sync()
            del result
        return count(seen.events(), _host_allocations() - before)

    def machine(self) -> dict[str, str]:
        """Describe the GPU, its driver and its clocks, and the ceilings."""
        found = torch.cuda.get_device_properties(self.device)
        copies = {name: f"{rate:.4g} GB/s" for name, rate in self.ceilings().items()}
        return {
            "device": f"{found.name}, capability {found.major}.{found.minor}, "
            f"{found.total_memory >> 30} GiB, {found.multi_processor_count} SMs, "
            f"{getattr(found, 'L2_cache_size', 0) >> 20} MiB of L2",
            **_driver(),
            "CUDA": str(torch.version.cuda),
            "sleeping kernel": f"{self._hertz / 1e6:.0f} MHz",
            "NUMA": "node of the GPU: {}; others: {}".format(*self.numa()),
            **copies,
        }

    def ceilings(self) -> dict[str, float]:
        """Return the rates of the two copies that are the upper bounds, in GB/s."""
        found, less = {}, 8 if self._quick else 0
        for name, nbytes, home in (
            ("ceiling: pinned 64 MB to the device", 64 << 20 >> less, "cpu"),
            ("ceiling: device to device, read + write", 1 << 30 >> less, self.device),
        ):
            source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=home)
            source = source.pin_memory() if home == "cpu" else source
            target = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

            def copy(target: Tensor = target, source: Tensor = source) -> None:
                self.raw_copy(target, source)

            copy()
            seconds = [self.device_seconds(copy, 2e-5) or 1e9 for _ in range(20)]
            bytes_moved = nbytes if home == "cpu" else 2 * nbytes
            found[name] = bytes_moved / statistics.median(seconds) / 1e9
        return found

    def _clock_rate(self) -> float:
        """Return the number of sleep cycles in a second, at full clock rate."""
        torch.cuda._sleep(200_000_000)  # clock rates rise
        rates, cycles = [], 10_000_000
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            self.sync()
            rates.append(cycles / (begin.elapsed_time(end) / 1e3))
        return max(rates)


def target(name: str, quick: bool = False) -> DryRun:
    """Return the target of this name, ``cuda`` or ``cpu``; ``quick`` for a test run.

    Raises:
        SystemExit: there is no GPU.
    """
    if name == "cpu":
        return DryRun()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"benchmarks.gpu must see a GPU, but torch {torch.__version__} sees none. "
            "To see that everything runs, pass --device cpu: its figures mean nothing."
        )
    return Gpu(quick)


@contextlib.contextmanager
def on_node(node: int) -> Iterator[None]:
    """Run on the cores of a NUMA node, so that new memory is there."""
    before = os.sched_getaffinity(0)
    cores = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text()
    ranges = [part.partition("-") for part in cores.strip().split(",")]
    chosen = {i for a, _, b in ranges for i in range(int(a), int(b or a) + 1)}
    os.sched_setaffinity(0, chosen & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def count(events: Any, host_allocations: int = 0) -> Record:
    """Count the events of a profile that belong to the range of one call."""
    on_device = [e for e in events if e.device_type == DeviceType.CUDA]
    found = [e for e in events if e.name == _RANGE and e not in on_device]
    if not on_device or not found:
        return dict.fromkeys(("launches", "copies", "waits", "pin_calls"))
    whole = found[0].time_range
    called = [
        e.name
        for e in events
        if e.device_type == DeviceType.CPU
        and whole.start <= e.time_range.start <= whole.end
    ]
    copied = [e for e in on_device if e.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]
    pinned = sum(name.startswith(PIN_CALLS) for name in called)
    return {
        "launches": sum(name.startswith(LAUNCHES) for name in called),
        "copies": len(copied),
        "waits": sum(name in WAITS for name in called),
        "pin_calls": max(pinned, host_allocations),
    }


def _host_allocations() -> int:
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(stats.get("num_host_alloc", 0))


def _runtime() -> Any:
    """Return the CUDA runtime that torch calls, or None."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.rpartition(" ")[2] for line in maps]
    loaded = [p for p in paths if Path(p).name.startswith("libcudart.so")]
    for path in [None, *loaded[:1]]:  # a preloaded library has priority, as for torch
        found = ctypes.CDLL(path)
        if hasattr(found, "cudaMemcpyAsync"):
            pointers = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
            found.cudaMemcpyAsync.argtypes = [*pointers, ctypes.c_int, ctypes.c_void_p]
            return found
    return None


def _driver() -> dict[str, str]:
    """Return the output of nvidia-smi, or nothing if it fails or is missing."""
    command = shutil.which("nvidia-smi")
    if not command:
        return {}
    asked = [command, f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    answers = done.stdout.strip().splitlines()[:1]
    if done.returncode or not answers:
        return {}
    names = (name.replace(".", " ").replace("_", " ") for name in _ASKED.split(","))
    return dict(zip(names, map(str.strip, answers[0].split(",")), strict=False))


def describe(where: DryRun, commit: str = "") -> dict[str, str]:
    """Return the description of the machine for a record."""
    found = {"system": platform.platform(), **where.machine(), **environment.machine()}
    return {**found, "commit": commit or found["commit"]}
