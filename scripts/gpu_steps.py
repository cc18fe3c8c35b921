"""The steps of scripts/gpu_check.py: their commands, and the machine that runs them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

TOOLS = "hypothesis optree psutil pytest pytest_timeout xdist numpy pybind11 ninja"
TOOLS += " setuptools"
PROBE = """
import glob, json, sys, torch
print(json.dumps({
    "python": sys.version.split()[0],
    "torch": torch.__version__,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "bins": [x for p in sys.path for x in glob.glob(p + "/nvidia/*/bin")],
}))
"""
MISSING = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if not find_spec(name)])
"""
# Without the plugins of other projects. A driver may warn of something unknown.
PYTEST = "-m pytest -q -p pytest_timeout -p _hypothesis_pytestplugin".split()
PYTEST += ["--unknown-warnings", "report"]
#: The report of the step tests.
JUNIT = "tests.xml"
#: An mmengine for the benchmark may lack packages that its import needs.
TESTED = {"PYPARALLEL_MMENGINE": "off"}
# A test that hangs prints its stack first.
HANGS = "--timeout 60 -o faulthandler_timeout=45".split()
# Short tracebacks: long ones print the arguments, which are tensors on the device.
REPORT = "-o junit_family=xunit1 --maxfail=50 --durations=5 --tb=short".split()
SANITIZER = "--error-exitcode 86 --target-processes application-only --print-limit 20"
# By default the tool waits 10 s for the first CUDA call, and then checks nothing. The
# tests are collected before that call.
SANITIZER += " --launch-timeout 0"
NCU = "--target-processes application-only --clock-control none --csv"
SECTIONS = "SpeedOfLight MemoryWorkloadAnalysis Occupancy LaunchStats".split()
#: A part of the mangled names of all our kernels.
KERNEL = "run_body"
#: The message of a tool that may not read the device, and the reason.
REFUSALS = {
    "ERR_NVGPUCTRPERM": "the driver refuses the counters to this user",
    "LibraryNotLoaded": "the driver refuses the counters to this machine",
    "Device not supported": "the tool does not support this device or machine",
}
#: A checker of memory ends before its limit by this, for the last tests and its report.
SANITIZER_REST = 30.0


class Command(NamedTuple):
    """A command, the variables that it needs, and its log.

    A failure is no failure of the step where the tool was refused: see `REFUSALS`.
    """

    argv: list[str]
    env: Mapping[str, str] = {}
    log: Path | None = None
    is_tool: bool = False


class NotRun(Exception):
    """A step has no command, for a reason that fails the run or does not."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


def stop(message: str, code: int = 1) -> NoReturn:
    """Exit with a message."""
    print(message.rstrip(), file=sys.stderr)
    sys.exit(code)


class Machine:
    """The interpreter with its torch and GPUs, and the environment of all steps."""

    def __init__(self, python: str, tree: Path) -> None:
        self.python, self.env = python, dict(os.environ)
        found = json.loads(self._ask(PROBE).splitlines()[-1])
        self.version, self.torch = found["python"], found["torch"]
        self.gpus: list[str] = found["gpus"]
        if not self.gpus:
            stop(f"gpu-check must see a GPU, but torch {self.torch} sees none.")
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        self._bins = [f"{home}/bin", *found["bins"]]
        # The packages of the interpreter itself do not change. Its ninja, without
        # which torch compiles one file at a time, need not be in PATH.
        self._site = tree / "build" / "site"
        path = [f"{self._site}/bin", os.path.dirname(python)]
        path.append(self.env.get("PATH", os.defpath))
        self.env |= {
            "PATH": ":".join(path),
            "PYTHONPATH": f"{self._site}:{self.env.get('PYTHONPATH', '')}".rstrip(":"),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYPARALLEL_BACKEND": "native",
            "PYPARALLEL_REQUIRE_CUDA": "1",
        }

    def _ask(self, code: str, *arguments: str) -> str:
        """Return the output of Python code, or exit with its error."""
        command = [self.python, "-c", code, *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        if done.returncode:
            stop(done.stderr)
        return done.stdout

    def program(self, name: str) -> str | None:
        """Find a program of CUDA in PATH, in CUDA_HOME/bin or in a wheel."""
        return shutil.which(name, path=":".join([self.env["PATH"], *self._bins]))

    def install(self, wheels: list[Path]) -> None:
        """Install the wheels, then the missing tools from an index if there is one."""
        pip = [self.python, "-m", "pip", "install", "-q", "--upgrade", "--no-compile"]
        pip += ["--disable-pip-version-check", "--target", str(self._site)]
        found = list(map(str, wheels))
        installed, listed = self._site / "installed", "\n".join([self.version, *found])
        if not installed.exists() or installed.read_text("utf-8") != listed:
            if found:
                subprocess.run([*pip, "--no-index", "--no-deps", *found], env=self.env)
            self._site.mkdir(parents=True, exist_ok=True)
            installed.write_text(listed, "utf-8")
        if missing := self._ask(MISSING, *TOOLS.split()).split():
            projects = {"xdist": "pytest-xdist"}
            names = [projects.get(name, name.replace("_", "-")) for name in missing]
            offline = ["--retries", "0", "--timeout", "5"]  # then the step is short
            subprocess.run([*pip, *offline, *names], env=self.env)
        if missing := self._ask(MISSING, *TOOLS.split()).split():
            stop(
                f"{self.python} must be able to import {TOOLS}, but lacks: "
                f"{' '.join(missing)}. Run the folder of `make gpu-bundle`, or install "
                "them elsewhere with pip install --target and put that on PYTHONPATH."
            )


class Commands:
    """The commands of each step."""

    def __init__(
        self,
        machine: Machine,
        tree: Path,
        out: Path,
        results: Path | None,
        commit: str,
    ) -> None:
        self._machine, self._tree, self._out = machine, tree, out
        self._results, self._commit = results, commit

    def of(self, step: str, seconds: float) -> list[Command]:
        """Return the commands of a step with this limit in seconds."""
        make: Callable[[float], list[Command]] = getattr(self, f"_{step}")
        return make(seconds)

    def _python(self, *arguments: str, **env: str) -> Command:
        return Command([self._machine.python, *arguments], env)

    def _build(self, _: float) -> list[Command]:
        """Build the extension, unless an earlier stage has built the same one."""
        kept = (self._results or self._out) / self._archive
        if self._results and kept.exists():
            with tarfile.open(kept) as file:
                for name in file.getnames():  # a process may have loaded the old file
                    (self._tree / name).unlink(missing_ok=True)
                file.extractall(self._tree, filter="data")
            raise NotRun(f"the extension of an earlier stage: {kept}", False)
        jobs = os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, 16))
        # A newer compiler may print more warnings, which must not stop the other steps.
        werror = os.environ.get("GPU_WERROR", "0")
        env = {"FORCE_CUDA": "1", "WERROR": werror, "MAX_JOBS": jobs}
        return [self._python("setup.py", "-q", "build_ext", "--inplace", **env)]

    def keep(self) -> None:
        """Save the extension for later stages, whose machines may be bare."""
        with tarfile.open(self._out / self._archive, "w") as file:
            for path in sorted(self._tree.glob("pyparallel/backend/_C*")):
                if path.suffix in (".so", ".json"):
                    file.add(path, path.relative_to(self._tree))

    @functools.cached_property
    def _archive(self) -> str:
        """Return a name that depends on all that the extension depends on."""
        found, machine = hashlib.sha256(), self._machine
        archs = os.environ.get("TORCH_CUDA_ARCH_LIST")
        described = (machine.version, machine.torch, machine.gpus, archs)
        found.update(repr(described).encode())
        for path in [self._tree / "setup.py", *sorted(self._tree.glob("csrc/**/*.*"))]:
            found.update(path.read_bytes())
        return f"extension-{found.hexdigest()[:16]}.tar"

    def _selftest(self, _: float) -> list[Command]:
        return [self._python("-m", "pyparallel")]

    def _tests(self, _: float) -> list[Command]:
        mark = "cuda" if len(self._machine.gpus) > 1 else "cuda and not two_gpus"
        options = [*HANGS, *REPORT, "--junitxml", f"{self._out}/{JUNIT}", "-m", mark]
        # A test that crashes ends one of these processes, and not the others.
        jobs = str(max(1, min(8, (os.cpu_count() or 1) // 2)))
        options += ["-p", "xdist", "-n", jobs, "--max-worker-restart", "50"]
        options += shlex.split(os.environ.get("GPU_TEST_ARGS", ""))
        return [self._pytest(*options)]

    def _pytest(self, *arguments: str) -> Command:
        return self._python(*PYTEST, *arguments, **TESTED, PYPARALLEL_NO_SKIP="1")

    def _retest(self, _: float) -> list[Command]:
        """Repeat each failed test in a process of its own."""
        report = (self._results or self._out) / JUNIT
        if not report.exists():
            why = f"{report} must be the report of the step tests, but does not exist."
            raise NotRun(f"{why} Copy the results of stage 1 there.", True)
        if red := red_tests(report):
            return [self._pytest(*HANGS, test) for test in red]
        raise NotRun(f"no test failed in {report}", False)

    def _rates(self, _: float) -> list[Command]:
        return [self._python("-m", "benchmarks.gpu.kernels", "--time", *kernel_args())]

    def _bench(self, seconds: float) -> list[Command]:
        options = ["--out", str(self._out), "--json", f"{self._out}/gpu.json"]
        # A case that begins before this time ends before the limit.
        options += ["--total-seconds", f"{max(seconds - 40, 1):.0f}"]
        options += ["--commit", self._commit]
        options += shlex.split(os.environ.get("GPU_BENCH_ARGS", ""))
        return [self._python("-m", "benchmarks.gpu", *options)]

    def _memcheck(self, seconds: float) -> list[Command]:
        # torch requests features that a driver may not have, and handles those errors.
        options = ["--report-api-errors", "no", "--kernel-name", f"kns={KERNEL}"]
        return self._sanitized("memcheck", seconds, *options)

    def _initcheck(self, seconds: float) -> list[Command]:
        # For all kernels: torch's kernels initialize memory that our kernels read.
        return self._sanitized("initcheck", seconds)

    def _sanitized(self, tool: str, seconds: float, *options: str) -> list[Command]:
        found = self._machine.program("compute-sanitizer")
        if found is None:
            raise NotRun(
                "compute-sanitizer must be in PATH, in CUDA_HOME/bin or in a wheel, "
                f"but is not there. Install it: {self._machine.python} -m pip install "
                "nvidia-cuda-sanitizer-api",
                True,
            )
        argv = [found, "--tool", tool, *SANITIZER.split(), *options]
        argv += [self._machine.python, *PYTEST, "--timeout", "0"]
        # The first cases of all tests launch each kernel. The other cases differ in
        # sizes, dtypes and layouts.
        left = seconds - SANITIZER_REST
        argv += ["--first-cases-after", os.environ.get("GPU_CASES", f"{left:.0f}")]
        argv += ["-m", "cuda and kernel"]
        # Without torch's cache, every tensor is an allocation with its own bounds.
        env = {**TESTED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return [Command(argv, env, is_tool=True)]

    def _ncu(self, _: float) -> list[Command]:
        found = self._machine.program("ncu")
        if found is None:
            raise NotRun("ncu is not in PATH, in CUDA_HOME/bin or in a wheel", False)
        log = self._out / "ncu.csv"
        log.unlink(missing_ok=True)
        argv = [found, *NCU.split(), "--log-file", str(log)]
        argv += ["--kernel-name", f"regex:{KERNEL}"]
        argv += [word for section in SECTIONS for word in ("--section", section)]
        argv += [self._machine.python, "-m", "benchmarks.gpu.kernels", *kernel_args()]
        return [Command(argv, log=log, is_tool=True)]


def kernel_args() -> list[str]:
    """Return the options of python -m benchmarks.gpu.kernels."""
    return shlex.split(os.environ.get("GPU_KERNEL_ARGS", ""))


def red_tests(report: Path) -> list[str]:
    """Return the ids of the failed tests in a report of pytest."""
    found = []
    for case in ET.parse(report).iter("testcase"):
        if case.find("failure") is None and case.find("error") is None:
            continue
        file, of_class = case.get("file", ""), case.get("classname", "")
        if not of_class:  # the file could not be collected
            found.append(file)
            continue
        module = file.removesuffix(".py").replace("/", ".")
        of_class = of_class.removeprefix(module).replace(".", "::")
        found.append(f"{file}{of_class}::{case.get('name')}")
    return list(dict.fromkeys(found))


def refusal(command: Command, printed: str) -> str:
    """Return the reason for which a tool was refused, or nothing."""
    if not command.is_tool:
        return ""
    if command.log is not None and command.log.exists():
        printed += command.log.read_text("utf-8", errors="replace")
    return next((why for said, why in REFUSALS.items() if said in printed), "")
