"""The backend in use, the target of its build, the GPUs, and the build tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import pyparallel

from .. import backend as backend_module
from ..backend import build_record
from ..transfer import debug, gpu_record
from .report import Problem

#: The time limit for a program that prints its version.
ANSWER_SECONDS = 3.0
_SETTINGS = (
    *("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CXX"),
    *("CUDA_VISIBLE_DEVICES", "PYPARALLEL_BACKEND", "PYPARALLEL_MMENGINE"),
    *("PYPARALLEL_DEBUG", "PYPARALLEL_NVTX", "PYPARALLEL_BUILD"),
    *("PYPARALLEL_SANITIZE", "FORCE_CUDA", "FORCE_ONLY_CPU", "NVCC_FLAGS", "DEBUG"),
    "WERROR",
)


def backend(problems: list[Problem]) -> dict[str, Any]:
    """Return the backend in use, its reason, and the target of its build."""
    record, error = backend_module.built_for, backend_module.load_error
    package = Path(pyparallel.__file__).parent
    module = build_record.find(package / "backend")
    requested = os.environ.get("PYPARALLEL_BACKEND") or "auto"
    if module is not None and backend_module.name == "python" and requested == "auto":
        problems.append(Problem(backend_module.reason, fails=True))
    others = build_record.list_other_pythons(package / "backend")
    if module is None and others and requested == "auto":
        problems.append(Problem(backend_module.reason, fails=False))
    newer = newer_source(module and module.path, package.parent)
    if newer is not None:
        text = (
            f"The extension must not be older than its sources, but {newer} is newer. "
            f"Rebuild it in the source folder: {build_record.REBUILD}"
        )
        problems.append(Problem(text, fails=False))
    kept = ("torch", "cuda", "archs", "compiler", "kind", "reason", "sanitize")
    return {
        "name": backend_module.name,
        "requested": requested,
        "reason": backend_module.reason,
        "load_error": f"{type(error).__name__}: {error}" if error else None,
        "device_types": list(backend_module.devices),
        "debug": debug.enabled,
        "built_for": {key: record[key] for key in kept if record.get(key)},
        "present": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "archs": torch.cuda.get_arch_list(),
        },
        "newer_source": newer,
    }


def newer_source(module: Path | None, root: Path) -> str | None:
    """Return the newest file of ``root/csrc`` if it is newer than the module.

    Elsewhere than in a source folder, csrc may belong to another package.
    """
    suffixes = (".h", ".cuh", ".cpp", ".cu")
    files = [
        path
        for path in (root / "csrc").rglob("*")
        if path.suffix in suffixes and path.exists()  # False for a dangling link
    ]
    if module is None or not files or not (root / "setup.py").exists():
        return None
    newest = max(files, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime <= module.stat().st_mtime:
        return None
    return str(newest.relative_to(root))


def gpus(problems: list[Problem]) -> list[dict[str, Any]]:
    """Return every visible GPU: its kernels, and the date of its self-test."""
    record, found = backend_module.built_for, []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        kernels = tested = None
        if backend_module.name == "native" and record.get("archs"):
            kernels = covered(record["archs"], (major, minor))
        if "cuda" in backend_module.transfers:
            tested = gpu_record.passed_on(torch.device("cuda", i))
        found.append(
            {
                "device": f"cuda:{i}",
                "name": torch.cuda.get_device_name(i),
                "capability": f"{major}.{minor}",
                "kernels": kernels,
                "tested": tested,
            }
        )
    missing = [gpu for gpu in found if gpu["kernels"] is False]
    if missing:
        listed = ", ".join(f"{gpu['device']} ({gpu['capability']})" for gpu in missing)
        wanted = ";".join(sorted({str(gpu["capability"]) for gpu in found}, key=float))
        text = (
            "The extension must have kernels for every visible GPU, but has none for "
            f"{listed}: it was built for {record['archs']}. Rebuild it in the source "
            f"folder: TORCH_CUDA_ARCH_LIST='{wanted}' {build_record.REBUILD}"
        )
        problems.append(Problem(text, fails=True))
    untested = [
        str(gpu["device"])
        for gpu in found
        if gpu["tested"] is None and "cuda" in backend_module.transfers
    ]
    if untested:
        text = (
            "The self-test should pass on each GPU, but has not with this build on "
            f"{', '.join(untested)}. Run it: pyparallel doctor --gpu"
        )
        problems.append(Problem(text, fails=False))
    if (
        found
        and backend_module.name == "native"
        and "cuda" not in backend_module.devices
    ):
        text = (
            "The extension should be built for CUDA where a GPU is visible, but was "
            f"built for the CPU only ({record.get('reason')}): torch operators replace "
            "its kernels, which is slower. Rebuild it in the source folder, with nvcc: "
            f"FORCE_CUDA=1 {build_record.REBUILD}"
        )
        problems.append(Problem(text, fails=False))
    return found


def covered(archs: str, capability: tuple[int, int]) -> bool | None:
    """Return True if kernels built for ``archs`` run on a GPU of ``capability``.

    None: a name such as Hopper does not tell.

    Machine code runs on its own minor version and on later ones of the same major
    version. PTX runs on all later versions.
    """
    is_known = True
    for arch in re.split(r"[; ]+", archs):
        found = re.match(r"(\d+)\.(\d+)([a-z]?)(\+PTX)?$", arch)
        if not found:
            is_known = is_known and not arch
            continue
        built = (int(found[1]), int(found[2]))
        if built == capability or (found[4] and built <= capability):
            return True
        if built[0] == capability[0] and built <= capability and not found[3]:
            return True
    return False if is_known else None


def toolchain(problems: list[Problem]) -> dict[str, Any]:
    """Return the paths and the versions of the programs of a build."""
    compiler = _program((os.environ.get("CXX") or "c++").split(), r"(.+)")
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    paths = [*(f"{home}/bin/nvcc" for home in homes if home), "nvcc"]
    wheels = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/bin/nvcc"))
    paths += ["/usr/local/cuda/bin/nvcc", *map(str, wheels)]
    tries = (_program([path], r"release (\d+\.\d+)") for path in paths)
    nvcc = next(filter(None, tries), None)
    if (
        compiler is None
        and backend_module.name == "python"
        and not backend_module.built_for
    ):
        text = (
            "A C++ compiler should be available to build the extension, but c++ is not "
            "on PATH, so the slower Python backend is used. Install one (Debian: "
            "apt-get install g++), or set CXX."
        )
        problems.append(Problem(text, fails=False))
    cuda = torch.version.cuda
    major = re.match(r"\d+", nvcc["version"]) if nvcc else None
    if nvcc and cuda and major and major[0] != cuda.split(".")[0]:
        text = (
            f"nvcc should have the major version of torch's CUDA {cuda} to build for "
            f"GPUs, but {nvcc['path']} has version {nvcc['version']}. Set CUDA_HOME to "
            "another toolkit."
        )
        problems.append(Problem(text, fails=False))
    return {
        "cxx": compiler,
        "nvcc": nvcc,
        "ninja": _program(["ninja"], r"(.+)"),
        "environment": {k: os.environ[k] for k in _SETTINGS if k in os.environ},
    }


def _program(command: list[str], version: str) -> dict[str, str] | None:
    """Return the path of a program, and the version that it prints; None without it.

    Args:
        command: the program and its arguments, such as ``["ccache", "g++"]``.
        version: the pattern of the version.
    """
    path = shutil.which(command[0]) if command else None
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *command[1:], "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ANSWER_SECONDS,
            check=True,
        )
        found = re.search(version, done.stdout.decode(errors="replace"))
    except subprocess.TimeoutExpired:  # the program exists, but the machine is busy
        return {"version": f"no answer in {ANSWER_SECONDS:g} s", "path": path}
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"version": found[1], "path": path} if found else None
