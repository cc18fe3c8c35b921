"""Ranges appear in every active profiler, and are nearly free without one."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pyparallel.core import tracing
from pyparallel.core.tracing import SPANS, span
from tests.support.processes import forkserver
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


def two_spans():
    def other():
        with span("pyparallel.send"):
            pass

    with span("pyparallel.wait"):
        pass
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()


def names(events) -> list[str]:
    return sorted(event.name for event in events if event.name.startswith("pyparallel"))


def test_the_documentation_lists_all_ranges():
    text = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^\| `(pyparallel\.\w+)`", text, re.M)} == {*SPANS}


CPU = [ProfilerActivity.CPU]
EVERY_THREAD = _ExperimentalConfig(profile_all_threads=True)
AUTOGRAD = torch.autograd.profiler.profile


@pytest.mark.parametrize(
    ("profiler", "options", "expected"),
    [
        # torch.autograd._profiler_enabled() is False here, in both threads.
        (profile, {"activities": CPU, "experimental_config": EVERY_THREAD},
         ["pyparallel.send", "pyparallel.wait"]),
        (profile, {"activities": CPU}, ["pyparallel.wait"]),
        (AUTOGRAD, {"use_kineto": True}, ["pyparallel.wait"]),
        (AUTOGRAD, {"use_kineto": False}, ["pyparallel.wait"]),
    ],
)  # fmt: skip
def test_a_profiler_sees_its_thread_or_all(profiler, options, expected):
    with profiler(**options) as watched:
        two_spans()
    events = watched.events() if profiler is profile else watched.function_events
    assert names(events) == expected


def test_a_range_from_before_the_profiler_ends_without_an_error():
    with span("pyparallel.wait"):
        watched = profile(activities=[ProfilerActivity.CPU])
        watched.start()
    with span("pyparallel.send"):
        watched.stop()
    assert span("pyparallel.wait") is span("pyparallel.send")
    # A range that has not ended is shown by torch 2.13, not by torch 2.11.
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    allowed = [["pyparallel.send"]] if version >= (2, 13) else [[], ["pyparallel.send"]]
    assert names(watched.events()) in allowed


def test_an_error_passes_a_recorded_range_and_ends_it():
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        with pytest.raises(KeyError, match="seven"), span("pyparallel.wait"):
            torch.ones(2).add(1)
            raise KeyError("seven")
        with span("pyparallel.send"):
            pass
    ranges = {e.name: e for e in watched.events() if e.name in SPANS}
    assert ranges["pyparallel.send"].cpu_parent is None
    assert ranges["pyparallel.wait"].is_user_annotation
    assert "aten::add" in [e.name for e in ranges["pyparallel.wait"].cpu_children]


@pytest.fixture
def nvtx(monkeypatch):
    """Ranges as NVTX would get them."""
    calls = []
    monkeypatch.setattr(tracing, "_wrapper", tracing._Nvtx)
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}")
    )
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


def test_nvtx_ranges_are_pushed_and_popped_in_pairs_also_on_errors(nvtx):
    with span("pyparallel.wait"):
        nvtx.append("within")
    with pytest.raises(KeyError), span("pyparallel.send"):
        raise KeyError
    wait, send = ("push pyparallel.wait", "push pyparallel.send")
    assert nvtx == [wait, "within", "pop", send, "pop"]


@pytest.mark.parametrize(
    ("flag", "cuda", "hip", "wanted"),
    [
        ("1", "13.0", None, True),
        ("1", None, "7.0", True),
        ("1", None, None, False),
        ("0", "13.0", None, False),
    ],
)
def test_nvtx_needs_the_flag_and_a_torch_that_has_it(
    monkeypatch, flag, cuda, hip, wanted
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setenv("PYPARALLEL_NVTX", flag)
    assert tracing.wants_nvtx() is wanted


def test_the_flag_neither_initialises_cuda_nor_fails_without_it(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_NVTX", "1")
    code = (
        "import torch; from pyparallel.core import tracing\n"
        "with tracing.span('pyparallel.wait'): pass\n"
        "print(torch.cuda.is_initialized())"
    )
    assert forkserver.run(code, [str(ROOT)]) == (0, "False\n")
