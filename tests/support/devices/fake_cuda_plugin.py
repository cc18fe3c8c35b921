"""The checks of each test that runs on the fake CUDA runtime; conftest.py registers it.

A test fails if it broke a rule of CUDA, or launched a kernel that the fake cannot run.
Tests in `gpu_only.txt` are deselected.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.devices import fake_cuda

GPU_ONLY = Path(__file__).parents[2] / "gpu_only.txt"


def gpu_only() -> dict[str, str]:
    """Return the reason for each test, or file of tests, that only a GPU can judge."""
    lines = [line for line in GPU_ONLY.read_text().splitlines() if line]
    tests = [line.partition("  ") for line in lines if not line.startswith("#")]
    return {name: reason.strip() for name, _, reason in tests}


def is_gpu_only(nodeid: str, names: Any) -> bool:
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    function = test.partition("[")[0]
    return any(
        name in names for name in (file, f"{file}::{function}", f"{file}::{test}")
    )


class FakeCuda:
    """Counts for the summary, and the hooks of pytest."""

    def __init__(self) -> None:
        self.num_run = 0
        self.num_deselected = 0

    def pytest_configure(self) -> None:
        # cuDNN needs its own kernels; torch's other convolutions run on the fake.
        torch.backends.cudnn.enabled = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        names = gpu_only()
        left = [item for item in items if not is_gpu_only(item.nodeid, names)]
        gone = [item for item in items if is_gpu_only(item.nodeid, names)]
        self.num_deselected = len(gone)
        config.hook.pytest_deselected(items=gone)
        items[:] = left

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        if item.get_closest_marker("cuda") is not None:
            self.num_run += 1
            torch.cuda.synchronize()
            found = fake_cuda.problems()
            found += [f"unknown kernel: {name}" for name in fake_cuda.unknown_kernels()]
            assert not found, "on the fake CUDA runtime:\n" + "\n".join(found)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        result = yield
        fake_cuda.reset()
        fake_cuda.problems()
        fake_cuda.unknown_kernels()
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"fake CUDA runtime: {self.num_run} tests marked cuda ran, "
            f"{self.num_deselected} that only a GPU can judge did not; "
            f"{fake_cuda.num_interpreted()} kernels from PTX"
        )
