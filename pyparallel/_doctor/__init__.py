"""``pyparallel doctor``: which backend runs and why, what surrounds it, a self-test.

The exit code is 0 if the self-test passes. ``--json`` prints one JSON object instead.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pyparallel
from pyparallel import _backend, _debug, _preflight
from pyparallel._backend import _build

_SETTINGS = (
    *("CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "PYPARALLEL_BACKEND"),
    *("PYPARALLEL_MMENGINE", "PYPARALLEL_POISON", "PYPARALLEL_NVTX"),
)
_PEERS = (
    *("mmcv", "mmcv-full", "mmcv-lite", "onedl-mmcv"),
    *("mmengine", "mmengine-lite", "onedl-mmengine"),
)


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def stray_distribution() -> str | None:
    """Tell whether the index's ``pyparallel``, a parallel-port driver, is installed."""
    version = installed("pyparallel")
    return version and (
        f"the distribution pyparallel {version} is installed, which drives parallel "
        "ports; this library is pyparallel-torch. Type: pip uninstall pyparallel"
    )


def older_than_sources(module: Path | None, root: Path) -> str | None:
    """Name the newest file of ``root/csrc`` that is younger than the module."""
    files = [
        p for p in (root / "csrc").rglob("*") if p.suffix[1:] in ("h", "cpp", "cu")
    ]
    if module is None or not files:
        return None
    newest = max(files, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime <= module.stat().st_mtime:
        return None
    return f"{newest.relative_to(root)} is newer. Rebuild: {_build.REBUILD}"


def covered(archs: str, capability: tuple[int, int]) -> bool:
    """Tell whether kernels built for ``archs`` run on a GPU of ``capability``.

    Machine code runs on its own minor version and later ones of the same major; PTX
    runs on everything newer.
    """
    for arch in re.split(r"[; ]+", archs):
        found = re.match(r"(\d+)\.(\d+)([a-z]?)(\+PTX)?$", arch)
        if not found:
            continue
        built = (int(found[1]), int(found[2]))
        if built == capability or (found[4] and built <= capability):
            return True
        if built[0] == capability[0] and built <= capability and not found[3]:
            return True
    return False


def gpus(archs: str | None) -> list[str]:
    """Describe every visible GPU and whether the extension has kernels for it."""
    found = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        line = f"cuda:{i} {torch.cuda.get_device_name(i)}, capability {major}.{minor}"
        if archs:
            fits = covered(archs, (major, minor))
            line += ", kernels: " + ("yes" if fits else f"none (built for {archs})")
        found.append(line)
    return found


def nvcc() -> str | None:
    """Return where nvcc is and its version."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    paths = [f"{home}/bin/nvcc" for home in homes if home]
    paths += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    for path in filter(os.path.exists, paths):
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        release = re.search(r"release (\d+\.\d+)", done.stdout)
        return f"{release[1] if release else 'unknown version'} at {path}"
    return None


def report() -> dict[str, Any]:
    """Gather everything that the two output forms print, self-test included."""
    built, package = _backend.built_for, Path(pyparallel.__file__).parent
    module = _build.find(package / "_backend")
    shim = sys.modules.get("mmcv.parallel")
    error = _backend.load_error
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    failure = self_test()
    return {
        "pyparallel": pyparallel.__version__,
        "installed at": str(package),
        "python": f"{platform.python_version()} at {sys.executable}",
        "torch": torch.__version__,
        "optree": installed("optree"),
        "backend": _backend.name,
        "reason": _backend.reason,
        "load error": f"{type(error).__name__}: {error}" if error else None,
        "device types": list(_backend.devices),
        "built for": _versions(built.get("torch"), built.get("cuda"), built),
        "present": _versions(torch.__version__, torch.version.cuda, {"torch": 1}),
        "build kind": built.get("kind") and f"{built['kind']}: {built.get('reason')}",
        "compiler": built.get("compiler"),
        "sanitizers": built.get("sanitize") or None,
        "archs": built.get("archs") or None,
        "older than csrc": older_than_sources(module and module.path, package.parent),
        "gpus": gpus(built.get("archs")),
        "nvcc": nvcc(),
        "settings": [f"{k}={os.environ[k]}" for k in _SETTINGS if k in os.environ],
        "debug mode": "on, by PYPARALLEL_DEBUG" if _debug.enabled else "off",
        "peers": [f"{n} {v}" for n in _PEERS if (v := installed(n))],
        "mmcv.parallel": getattr(shim, "__file__", repr(shim)) if shim else None,
        "wrong package": stray_distribution(),
        "cores": f"{len(cores)} of {os.cpu_count()}, {torch.get_num_threads()} threads",
        "start method": multiprocessing.get_start_method(allow_none=True)
        or f"{_preflight.default_start_method()} (default)",
        **_preflight.limits(),
        "self-test": failure or "passed",
    }


def _versions(torch_version: Any, cuda: Any, record: dict[str, Any]) -> str | None:
    return _build.describe(torch_version, cuda) if record.get("torch") else None


def self_test() -> str | None:
    """Collate and scatter two ragged samples; return what is wrong, or None.

    The expected values are written down, not computed.
    """
    try:
        images = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[5.0, 6, 7]]])
        container = pyparallel.DataContainer
        left = pyparallel.Padding(side="left", mask=True)
        samples = [
            {
                "img": container(image, stack=True, padding_value=9),
                "boxes": container(torch.full((i, 2), i)),
                "ids": container(image[0, 0], stack=True, pad_dims=1, padding=left),
                "points": container(image[0, :, :2], ragged=True),
                "meta": container({"index": i}, cpu_only=True),
            }
            for i, image in enumerate(images)
        ]
        expected = torch.tensor([[[[1.0, 2, 9], [3, 4, 9]]], [[[5, 6, 7], [9, 9, 9]]]])
        targets = [-1] + ([0] if torch.cuda.is_available() else [])
        for target in targets:
            batch: Any = pyparallel.collate(samples, samples_per_gpu=2)
            found: Any = pyparallel.scatter(batch, [target])[0]
            if not torch.equal(found["img"].cpu(), expected):
                return f"target {target}: the images are {found['img'].tolist()}"
            if [box.tolist() for box in found["boxes"]] != [[], [[1, 1]]]:
                return f"target {target}: the boxes are {found['boxes']}"
            if found["ids"].data.tolist() != [[0, 1, 2], [5, 6, 7]]:
                return f"target {target}: the ids are {found['ids']}"
            if found["ids"].mask.tolist() != [[False, True, True], [True] * 3]:
                return f"target {target}: the mask is {found['ids'].mask}"
            if found["points"].offsets.tolist() != [0, 2, 3]:
                return f"target {target}: the points are {found['points']}"
            if found["meta"] != [{"index": 0}, {"index": 1}]:
                return f"target {target}: the metadata are {found['meta']}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def text(found: dict[str, Any]) -> str:
    """Return the report as aligned lines; the last one is the self-test's."""
    lines = []
    for name, value in found.items():
        shown = value if isinstance(value, list) else [value]
        shown = [str(each) for each in shown if each is not None] or ["-"]
        lines += [f"{name:<16} {shown[0]}", *(f"{'':<16} {more}" for more in shown[1:])]
    verdict = found["self-test"]
    lines[-1] = f"self-test {'passed' if verdict == 'passed' else f'failed: {verdict}'}"
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser("pyparallel doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(argv).json
    found = report()
    print(json.dumps(found, indent=2) if as_json else text(found))
    return 0 if found["self-test"] == "passed" else 1
