"""Fixtures and hooks of all tests.

A test fails if it leaves a thread, a process or shared memory.
``PYPARALLEL_REQUIRE_CUDA=1`` fails the tests marked ``cuda`` where no GPU is visible;
``PYPARALLEL_NO_SKIP=1`` fails every test that would be skipped. Jobs that exist to run
such tests set them, so that they cannot pass by doing nothing.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.support.devices import fake_cuda, gpu_run
from tests.support.processes import process_resources
from tests.support.repository.marked_files import may_select

#: As in `make test`. A marker or a path on the command line chooses other tests.
QUICK = "not slow and not peers and not python_optimized"
NO_GPU = f"needs a visible NVIDIA GPU; torch {torch.__version__} sees none"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background processes of a shell ignore Ctrl-C, and children inherit this. Tests
    # that interrupt need the default handler, as in a terminal.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# torch.compile of torch 2.8 starts processes, which it keeps; 1 starts none.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# How long an example takes says how busy the machine is.
settings.register_profile("pyparallel", settings(), deadline=None)
settings.load_profile("pyparallel")

# Children of a fork server inherit torch, and what its optimizers and DDP import. These
# imports are slower than most tests.
multiprocessing.set_forkserver_preload(["torch", "torch._dynamo"])


#: Collected only where pytest gets their path: tests of tools of the tests.
collect_ignore = ["fakecuda"]


def pytest_addoption(parser: pytest.Parser) -> None:
    gpu_run.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    gpu_run.configure(config)
    everything = config.args_source is config.ArgsSource.TESTPATHS
    if everything and not config.option.markexpr:
        config.option.markexpr = QUICK  # plain `pytest`, as contributors type it
    if fake_cuda.active:
        from tests.support.devices.fake_cuda_plugin import FakeCuda

        config.pluginmanager.register(FakeCuda())
    if torch.cuda.is_available() and not hasattr(config, "workerinput"):
        config.add_cleanup(_record_gpus(config.rootpath))


def _record_gpus(root: Path) -> Callable[[], None]:
    """Record a passed self-test of the GPUs: the tests are more than it is.

    In another process, because CUDA must not be initialised before a test forks.
    """
    folder = tempfile.TemporaryDirectory(prefix="pyparallel-record-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    code = (
        "import torch\nfrom pyparallel.transfer import gpu_record\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    gpu_record.write(torch.device('cuda', i), passed=True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
    return folder.cleanup


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files in which no test has the markers of ``-m``."""
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if may_select(config.option.markexpr, text) else True


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect tests of the fake CUDA runtime elsewhere, and order the others.

    Slow files come first, so that no slow file runs alone at the end.
    """
    if not fake_cuda.active:
        only_fake = [item for item in items if item.get_closest_marker("fake_cuda")]
        config.hook.pytest_deselected(items=only_fake)
        items[:] = [item for item in items if item not in only_fake]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    # A failed device may read pinned memory for ever, which counts in later tests.
    items.sort(key=lambda item: item.get_closest_marker("device_failures") is not None)


#: Seconds in which threads and processes of a test may end after it.
LIMIT_SECONDS = 20.0
#: Markers of tests of drivers and packages that keep threads.
KEEP_THREADS = ("cuda", "peers", "also_peers")


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a process or shared memory.

    This fixture is the first of each test, so it ends after the others.
    """
    before = process_resources.resources()
    yield
    if any(map(request.node.get_closest_marker, KEEP_THREADS)):
        return
    request.node.funcargs.clear()  # pytest keeps the values of ended fixtures
    more = process_resources.left_behind(before, LIMIT_SECONDS)
    assert not more, f"the test must end or close: {', '.join(more)}"


@pytest.fixture
def in_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send small batches in the ring, too."""
    monkeypatch.setattr("pyparallel.loader.epoch.INLINE_NBYTES", 0)


@pytest.fixture
def forked() -> Iterator[None]:
    """Fork workers: a fork server gets no lambda and no patch, and shares tensors."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(params=["torch", "ours"])
def loader(request: pytest.FixtureRequest) -> Any:
    """Return a function that makes loaders of one class."""
    from tests.support.loader import prefetch_loaders

    return functools.partial(prefetch_loaders.loader, kind=request.param)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a prefetch thread half a minute to end without a warning; torch a minute.

    A busy machine keeps this limit; torch alone would exceed it.
    """
    from pyparallel.prefetch import iterator

    monkeypatch.setattr(iterator.stop, "__defaults__", (30.0,))
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60.0)
    of_torch: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(of_torch._try_get_data, "__defaults__", (60.0,))


def _on(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None:
        return
    if torch.cuda.is_available():
        to_device = sys.modules.get("pyparallel.transfer.to_device")
        if to_device is not None:  # the batches of other tests must cause no warning
            to_device.reset_pageable_count()
        if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
            pytest.skip("needs two NVIDIA GPUs")
        return
    if _on("PYPARALLEL_REQUIRE_CUDA"):
        pytest.fail(f"PYPARALLEL_REQUIRE_CUDA is set, but the test {NO_GPU}")
    pytest.skip(NO_GPU)


def pytest_collection_finish() -> None:
    """Exclude existing objects from all later garbage collections.

    Tests collect often, to check for leaks. Each collection would visit the objects of
    torch's modules, some hundred thousand, which live to the end.
    """
    gc.collect()
    gc.freeze()


def _fail_skipped(report: Any) -> Any:
    if _on("PYPARALLEL_NO_SKIP") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"PYPARALLEL_NO_SKIP is set, but: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _fail_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _fail_skipped((yield))


def pytest_report_teststatus(report: Any, config: Any) -> Any:
    """Print no letter for a test that passed or was skipped, with ``-q``."""
    if config.option.verbose >= 0 or hasattr(report, "wasxfail") or report.failed:
        return None
    return (report.outcome if report.skipped or report.when == "call" else ""), "", ""


def _print_skipped(terminalreporter: Any) -> None:
    reasons = [
        str(each.longrepr[2]) for each in terminalreporter.stats.get("skipped", [])
    ]
    on_gpu = sum(NO_GPU in reason for reason in reasons)
    if reasons:
        terminalreporter.line(
            f"{on_gpu} skipped tests need a GPU, {len(reasons) - on_gpu} something "
            "else: pytest -rs lists them"
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count the skipped tests. List the commands that run failed ones alone."""
    stats = terminalreporter.stats
    if terminalreporter.config.option.verbose < 0:
        _print_skipped(terminalreporter)
    failed = [each.nodeid for key in ("failed", "error") for each in stats.get(key, [])]
    names = [name for name in dict.fromkeys(failed) if "::" in name][:20]
    if not names:
        return
    fake = os.environ["LD_PRELOAD"] if fake_cuda.active else ""
    words = [
        *([".", f"{os.path.dirname(fake)}/env.sh", "&&"] if fake else []),
        *(
            f"{name}={shlex.quote(value)}"
            for name, value in sorted(os.environ.items())
            if name.startswith("PYPARALLEL_") or name == "FAKECUDA_DEVICES"
        ),
        shlex.quote(sys.executable),
        "-m pytest",
    ]
    terminalreporter.section("run a failed test alone")
    for name in names:
        terminalreporter.line(" ".join([*words, shlex.quote(name)]))
