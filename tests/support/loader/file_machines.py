"""Machines whose limits are files."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

from pyparallel.loader.preflight import Machine

GB = 10**9
MIB = 1 << 20


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def machine(
    root: Path,
    available: int = 16 * GB,
    shm: int = 8 * GB,
    files: tuple[int, int] = (1024, 4096),
    locked: int = 8 * MIB,
    device: str | None = None,
    num_open: int = 10,
) -> Machine:
    """Return a machine of plain files with sufficient limits."""
    write(
        root, **{"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {available >> 10} kB"}
    )
    write(root, **{"proc/self/status": "CapEff:\t00000000a80425fb\n"})
    write(root, **{f"proc/self/fd/{i}": "" for i in range(num_open + 1)})
    answers = {
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_MEMLOCK: (locked, locked),
    }
    return Machine(
        root,
        lambda _: SimpleNamespace(f_bavail=shm // 4096, f_frsize=4096),
        answers.__getitem__,
        lambda: device,
    )  # fmt: skip
