"""The GPUs on which the self-test has passed, and a warning on all others.

``pyparallel doctor --gpu`` writes the record: a JSON file in the user's cache folder.
It holds the date of the test for each GPU, torch and build of the extension.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import torch

from .. import backend
from ..backend import build_record
from ..core.errors import warn_once

_seen: set[int | None] = set()


def path() -> Path:
    """Return the file of the record, in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "pyparallel", "gpus.json")


def passed_on(device: torch.device) -> str | None:
    """Return the date on which this GPU passed; None if it has not."""
    found = _read().get(_key(device))
    return found if isinstance(found, str) else None


def write(device: torch.device, passed: bool) -> None:
    """Record a result of today. A failure removes an earlier entry.

    Raises:
        OSError: the file cannot be written.
    """
    entries = _read()
    entries.pop(_key(device), None)
    if passed:
        entries[_key(device)] = datetime.now(timezone.utc).date().isoformat()
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Ranks may write at the same time: a reader finds a whole file.
    file, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with open(file, "w", encoding="utf-8") as opened:
            json.dump(entries, opened, indent=2)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def warn_if_untested(device: torch.device) -> None:
    """Warn once in this process if our kernels run on a GPU that has not passed."""
    if device.type != "cuda" or device.index in _seen:
        return
    _seen.add(device.index)
    is_used = "cuda" in backend.transfers and torch.cuda.is_available()
    if is_used and passed_on(device) is None:
        warn_once(
            "PP005",
            f"pyparallel's CUDA code is experimental, and must pass its self-test on "
            f"{device}, but the test has not passed there with this build. Run it "
            "once: pyparallel doctor --gpu",
            UserWarning,
        )


def _read() -> dict[str, object]:
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(device: torch.device) -> str:
    """Name the GPU, torch and the build."""
    name = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{name} {major}.{minor}, torch {torch.__version__}, build {_build()}"


@functools.cache
def _build() -> str:
    """Return a checksum of the extension's file."""
    found = build_record.find(Path(build_record.__file__).parent)
    data = found.path.read_bytes() if found else b""
    return hashlib.sha256(data).hexdigest()[:16]
