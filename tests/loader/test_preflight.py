"""Pre-flight checks: every limit, from test files and from real, lowered limits."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import pyparallel
from pyparallel.loader import preflight
from pyparallel.loader.preflight import Finding, Machine, check
from tests.support.loader.file_machines import GB, MIB, machine, write

pytestmark = pytest.mark.one_backend


def run(at: Machine, **options: Any) -> list[Finding]:
    given = {
        "num_workers": 4,
        "prefetch_factor": None,
        "ring_nbytes": GB,
        "pin_memory": False,
        "start_method": "fork",
    }
    return check(**{**given, **options}, machine=at)


def test_nothing_is_said_where_nothing_is_short_or_needed(tmp_path):
    poor = machine(tmp_path, available=0, shm=0, files=(1, 1), device="cuda")
    assert run(poor, num_workers=0, pin_memory=True) == []
    assert len(run(poor, pin_memory=True)) == 5


def test_limits_that_cannot_be_read_are_skipped(tmp_path):
    def missing(_):
        raise FileNotFoundError

    nothing = Machine(tmp_path, missing, lambda _: (64, 64), lambda: None)
    assert run(nothing, ring_nbytes=0) == []
    assert nothing.memory_left() is nothing.shm_left() is nothing.cores_left() is None


#: Arguments of the machine, options of the loader, and the finding.
FINDINGS: list[tuple[dict[str, Any], dict[str, Any], Finding]] = [
    (
        {"available": 1024 * 10**6},
        {"ring_nbytes": 1024 * 10**6 + 1},
        Finding(
            "memory",
            "DataLoader: the ring may grow to 1.0 GB, but only 1.0 GB is left of the "
            "machine's memory. If the memory runs out, batches are allocated outside "
            "the ring, which is slower. Decrease ring_slabs or max_ring_bytes, or give "
            "the job more memory.",
            False,
        ),
    ),
    (
        {"shm": 64 * MIB},
        {"ring_nbytes": 0, "prefetch_factor": 3},
        Finding(
            "/dev/shm",
            "DataLoader: /dev/shm has only 67.1 MB free. torch sends tensors that are "
            "not dense, or that have gradients, through it, for up to 12 batches. "
            "Other tensors do not need it. If you use such tensors, start the "
            "container with --shm-size or --ipc=host, or remount /dev/shm, so that "
            "more than 67.1 MB are free.",
            False,
        ),
    ),
    (
        {"files": (28, 64)},
        {},
        Finding(
            "open files",
            "DataLoader: RLIMIT_NOFILE must leave 19 file descriptors for 4 workers, "
            "but 10 of 28 are open. Raise it above 29 (ulimit -n; the hard limit is "
            "64).",
            True,
        ),
    ),
    (
        {},
        {"pin_memory": True},
        Finding(
            "locked memory",
            "DataLoader: RLIMIT_MEMLOCK is 8.4 MB, less than the ring of 1.0 GB. This "
            "matters only if the device's driver counts pinned memory, which NVIDIA's "
            "driver does not. Increase the limit (ulimit -l) only if pinning fails.",
            False,
        ),
    ),
    (
        {"device": "cuda"},
        {},
        Finding(
            "fork",
            "DataLoader: cuda is already initialised, and the workers will be forked. "
            "They can use CPU tensors and the ring, but neither cuda nor tensors that "
            "are already pinned. If the dataset uses them, set "
            "multiprocessing_context='forkserver' or 'spawn'.",
            False,
        ),
    ),
]


#: The same, where a limit just suffices: nothing is found.
ENOUGH = [
    ({}, {}),
    ({"available": 1024 * 10**6}, {"ring_nbytes": 1024 * 10**6}),
    ({"shm": 64 * MIB + 4096}, {"ring_nbytes": 0}),
    ({"files": (32, 64)}, {}),
    ({"files": (-1, -1)}, {}),
    ({}, {"pin_memory": True, "ring_nbytes": 8 * MIB}),
    ({"locked": -1}, {"pin_memory": True}),
    ({"device": "cuda"}, {"start_method": "spawn"}),
    ({"device": "cuda"}, {"start_method": "forkserver"}),
]


CASES = [*((*each, [finding]) for *each, finding in FINDINGS)]
CASES += [(*each, []) for each in ENOUGH]


@pytest.mark.parametrize("limits, options, findings", CASES, ids=range(len(CASES)))
def test_a_limit_that_is_too_small_is_found(tmp_path, limits, options, findings):
    assert run(machine(tmp_path, **limits), **options) == findings


V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "2000000000\n",
    "sys/fs/cgroup/job/memory.max": "3000000000\n",
    "sys/fs/cgroup/job/memory.current": "2500000000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 400000000\nfile 9\n",
}
V1 = {
    "proc/self/cgroup": "9:cpu,memory:/job\n4:pids:/other\n0::/job\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "2500000000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "2500000000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 400000000\n",
}


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (V2, "job/memory.max"),
        (V1, "memory/memory.limit_in_bytes"),
        # A container that has the host's name for its group, mounted as the base.
        (
            {**V1, "proc/self/cgroup": "9:memory:/docker/0123\n"},
            "memory/memory.limit_in_bytes",
        ),
    ],
    ids=["v2", "v1", "v1 in a container"],
)
def test_memory_of_control_groups_includes_reclaimable_memory(tmp_path, files, where):
    at = machine(tmp_path)
    write(tmp_path, **files)
    limit = f"the limit of 3.0 GB in {tmp_path}/sys/fs/cgroup/{where}"
    assert at.memory_left() == (900_000_000, limit)
    (finding,) = run(at)
    assert f"grow to 1.0 GB, but only 900.0 MB is left of {limit}. If" in finding.text
    # The machine has less left than the group, and then the group nothing at all.
    write(tmp_path, **{"proc/meminfo": "MemAvailable: 100000 kB\n"})
    assert at.memory_left() == (102_400_000, "the machine's memory")
    write(tmp_path, **{f"sys/fs/cgroup/{where}": "1000000\n"})
    assert at.memory_left()[0] == 0


def test_the_privileged_may_lock_all_memory(tmp_path):
    at = machine(tmp_path)
    write(tmp_path, **{"proc/self/status": "Name: x\nCapEff:\t0000000000004000\n"})
    assert run(at, pin_memory=True) == []
    assert at.may_lock()


def test_asking_for_the_default_start_method_does_not_settle_it(tmp_path, monkeypatch):
    fork = multiprocessing.get_context("fork")
    unsettled = multiprocessing.context.DefaultContext(fork)  # type: ignore[arg-type]
    monkeypatch.setattr(multiprocessing, "get_start_method", unsettled.get_start_method)
    assert (
        preflight.default_start_method() == multiprocessing.get_all_start_methods()[0]
    )
    unsettled.set_start_method("spawn")  # an error if the method is settled
    assert preflight.default_start_method() == "spawn"
    at = machine(tmp_path, device="cuda")
    assert run(at, start_method=preflight.default_start_method()) == []
    unsettled.set_start_method("fork", force=True)
    assert len(run(at, start_method=preflight.default_start_method())) == 1


@pytest.mark.parametrize(
    ("accelerator", "module", "found"),
    [
        (None, None, None),
        ("cuda", SimpleNamespace(is_initialized=lambda: True), "cuda"),
        ("cuda", SimpleNamespace(is_initialized=lambda: False), None),
        ("mps", SimpleNamespace(), None),
    ],
)
def test_the_device_is_queried_but_not_initialized(
    monkeypatch, accelerator, module, found
):
    device = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert preflight.initialised_device() == found


CPU = "sys/fs/cgroup/job/cpu.max"
STEP_CPU = "sys/fs/cgroup/job/step/cpu.max"
CPU_V1 = {
    "proc/self/cgroup": "3:cpu,cpuacct:/job\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        (V2, None),
        ({**V2, STEP_CPU: "max 100000\n"}, None),
        ({**V2, CPU: "150000 100000\n"}, 1.5),
        ({**V2, CPU: "150000 100000\n", STEP_CPU: "50000 100000\n"}, 0.5),
        (CPU_V1, 2.0),
    ],
)
def test_cores_are_those_of_the_narrowest_control_group(tmp_path, files, cores):
    at = machine(tmp_path)
    write(tmp_path, **files)
    assert at.cores_left() == cores


# What follows runs on this machine.


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return i


@pytest.mark.slow
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_real_loader_opens_the_expected_number_of_files(method):
    num_workers = 2
    needed = preflight.FILES_PER_WORKER * num_workers + preflight.MORE_FILES
    loader: Any = DataLoader(
        Numbers(), 4, num_workers=num_workers, multiprocessing_context=method,
        collate_fn=list,
    )  # fmt: skip
    gc.collect()  # what another test has left may close its files at any time
    before = Machine().open_files()
    iterator = iter(loader)
    next(iterator)
    opened = Machine().open_files() - before
    assert needed / 2 <= opened < needed  # and one for the ring


@pytest.mark.filterwarnings("ignore:.PP20")
@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=[pytest.mark.slow])]
)
def test_a_lack_of_descriptors_is_an_error_that_names_their_number(method: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, failed = {*map(int, os.listdir("/proc/self/fd"))}, 0
    free = [fd for fd in range(len(used) + 30) if fd not in used]
    for limit in free[: 30 : 4 if method == "fork" else 9]:
        loader: Any = pyparallel.DataLoader(
            Numbers(), 4, num_workers=2, multiprocessing_context=method
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            next(iter(loader))
        except OSError as error:
            assert error.errno == errno.EMFILE
            assert "2 workers must find 13 free file descriptors" in str(error)
            assert f"limit of {limit} open files. Increase it (ulimit" in str(error)
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed >= 2
