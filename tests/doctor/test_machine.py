"""The doctor's report on cores, memory, limits and the bandwidth of copies."""

from __future__ import annotations

import os

import pytest
import torch

from pyparallel.doctor import machine as machine_module
from pyparallel.doctor.report import Problem
from pyparallel.loader import preflight
from tests.support.loader.file_machines import machine, write

pytestmark = pytest.mark.one_backend


@pytest.fixture
def looked(monkeypatch):
    """Look at a machine of files, with 2 cores and 4 threads of torch."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 9.0, 9.0))

    def look(at):
        problems: list[Problem] = []
        return machine_module.machine(problems, at), [
            problem.text for problem in problems
        ]

    return look


def test_a_machine_with_enough_of_all_is_ok(looked, tmp_path):
    facts, problems = looked(machine(tmp_path, available=1024 * 10**6))
    assert problems == []
    judged = [part.pop("judgement") for part in facts.values() if "judgement" in part]
    assert judged == ["ok"] * 6
    del facts["start_method"], facts["load"]
    assert facts == {
        "cores": {
            "present": 2,
            "allowed": 2,
            "of_control_group": None,
            "threads_of_torch": 4,
        },
        "memory": {"left_nbytes": 1024 * 10**6, "of": "the machine's memory"},
        "shared_memory": {"left_nbytes": 8 * 10**9 // 4096 * 4096},
        "file_descriptors": {
            "open": 10,
            "limit": 1024,
            "hard_limit": 4096,
            "enough_for_workers": (1024 - 10 - 7) // 3,
        },
        "locked_memory": {
            "limit_nbytes": 8 << 20,
            "hard_limit_nbytes": 8 << 20,
            "may_lock_more": False,
        },
    }
    facts, _ = looked(machine(tmp_path, files=(-1, -1), locked=-1))
    files, locked = facts["file_descriptors"], facts["locked_memory"]
    assert (files["limit"], files["hard_limit"]) == ("unlimited", "unlimited")
    assert files["enough_for_workers"] is None
    assert locked["limit_nbytes"] == "unlimited"


def test_low_limits_are_reported_as_by_a_loader(looked, tmp_path):
    poor = machine(tmp_path, available=10**8, shm=1 << 20, files=(20, 4096))
    facts, problems = looked(poor)
    judged = {name: part.get("judgement") for name, part in facts.items()}
    assert judged == {
        "cores": "ok",
        "load": "ok",
        "start_method": None,
        "memory": "short",
        "shared_memory": "short",
        "file_descriptors": "short",
        "locked_memory": "ok",
    }
    assert facts["file_descriptors"]["enough_for_workers"] == 1
    expected = preflight.check(
        num_workers=2,
        prefetch_factor=None,
        ring_nbytes=10**9,
        pin_memory=False,
        start_method="spawn",
        machine=poor,
    )
    assert problems == [finding.text for finding in expected]
    assert len(problems) == 3


def test_more_threads_than_cores_of_the_group_are_reported(looked, tmp_path):
    at = machine(tmp_path)
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
    write(tmp_path, **files)
    facts, problems = looked(at)
    assert facts["cores"]["of_control_group"] == 1.5
    assert facts["cores"]["judgement"] == "too many threads"
    assert problems == [
        "torch should use no more threads than its control group has cores, but uses 4 "
        "threads on 1.5 cores, which slows them down. Set OMP_NUM_THREADS=2."
    ]
    write(tmp_path, **{"sys/fs/cgroup/cpu.max": "350000 100000\n"})
    assert looked(at)[1] == []


def test_more_load_than_cores_is_reported(looked, tmp_path, monkeypatch):
    at = machine(tmp_path)
    facts, problems = looked(at)
    assert facts["load"] == {"one_minute": 2.0, "judgement": "ok"} and not problems
    monkeypatch.setattr(os, "getloadavg", lambda: (18.23, 1.0, 1.0))
    facts, problems = looked(at)
    assert facts["load"] == {"one_minute": 18.23, "judgement": "busy"}
    assert problems == [
        "The machine should have free cores, but has a load of 18.2 on 2 cores: the "
        "measured bandwidths are too low, and self-tests may be late. Run the doctor "
        "again when the machine is idle."
    ]

    def unknown():
        raise OSError("not here")

    monkeypatch.setattr(os, "getloadavg", unknown)
    facts, problems = looked(at)
    assert facts["load"] == {"one_minute": None, "judgement": "ok"} and not problems


# ----------------------------------------------------------------------- bandwidth


def test_bandwidth_is_measured_on_memory_of_a_bounded_size(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    left = [16 << 20]
    monkeypatch.setattr(
        preflight.Machine, "memory_left", lambda _: (left[0], "a limit")
    )
    measure, sources = machine_module._gb_per_s, []

    def measured(code, nbytes, **variables):
        sources.append(variables["source"])
        return measure(code, nbytes, **variables)

    monkeypatch.setattr(machine_module, "_gb_per_s", measured)
    facts = machine_module.bandwidth()
    assert all(sources[0]), "zeros of bytes(n) share one page"
    assert facts["copied_nbytes"] == 1 << 20
    assert facts["memcpy_gb_per_s"] > 0.01 and facts["to_devices"] == []
    left[0] = 0
    assert machine_module.bandwidth() == {
        "copied_nbytes": 0,
        "memcpy_gb_per_s": None,
        "to_devices": [],
    }


def test_an_error_of_a_device_is_reported_and_the_rest_is_measured(monkeypatch):
    def refuse(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    facts = machine_module.to_device_bandwidth(torch.device("cpu"), 1 << 16)
    assert facts["pageable_gb_per_s"] > 0
    del facts["pageable_gb_per_s"]
    assert facts == {
        "device": "cpu",
        "error": "RuntimeError: out of memory",
        "pinned_gb_per_s": None,
    }


@pytest.mark.cuda
def test_both_kinds_of_memory_are_measured_to_every_gpu():
    facts = machine_module.bandwidth()["to_devices"]
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    assert [each["device"] for each in facts] == names
    for each in facts:
        assert each["error"] is None
        assert each["pinned_gb_per_s"] > 0 and each["pageable_gb_per_s"] > 0
