"""Limits: the least time to copy the bytes of an output.

Both copies go from one warm buffer to another, with torch's number of threads. The
non-temporal copy is compiled from ``limits.c`` at its first use.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ._harness import Contender

_SOURCE = Path(__file__).with_name("limits.c")
_BUILD = Path(__file__).parent.parent / "build" / "benchmarks"
#: The bytes of the part of one thread; handing over a part takes about 30 us.
_PART = 4 << 20

_Copy = Callable[[int, int, int], object]


def copies(out: Tensor) -> list[Contender]:
    """Return the limits for an output, each with buffers of its size."""
    warm = torch.zeros_like(out)
    nontemporal = nontemporal_memcpy()
    return [
        Contender("clone of the output", out.clone, "limit"),
        Contender(
            "memcpy into warm memory", _copier(ctypes.memmove, warm, out), "limit"
        ),
        Contender(
            "non-temporal memcpy",
            _copier(nontemporal, warm, out) if nontemporal else None,
            "limit",
        ),
    ]


def _copier(copy: _Copy, dst: Tensor, src: Tensor) -> Callable[[], None]:
    """Return a function that copies ``src`` into ``dst``, by torch's threads."""
    threads = min(torch.get_num_threads(), src.nbytes // _PART) or 1
    size = -(-src.nbytes // threads) // 64 * 64 + 64
    parts = [
        (dst.data_ptr() + start, src.data_ptr() + start, min(size, src.nbytes - start))
        for start in range(0, src.nbytes, size)
    ]

    def run() -> None:
        # The closure keeps both tensors alive during the copy.
        assert dst.nbytes == src.nbytes
        others = [_pool().submit(copy, *part) for part in parts[1:]]
        for part in parts[:1]:
            copy(*part)
        for other in others:
            other.result()

    return run


@functools.lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())


@functools.lru_cache(maxsize=1)
def nontemporal_memcpy() -> _Copy | None:
    """Return the copy of ``limits.c``, compiled at first use; None without it."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "cc"
    command = [*compiler.split(), "-O2", "-shared", "-fPIC", str(_SOURCE), "-o"]
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()
    library = _BUILD / f"limits-{key[:16]}.so"
    try:
        if not library.exists():
            _BUILD.mkdir(parents=True, exist_ok=True)
            made = library.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, str(made)], check=True)
            os.replace(made, library)
        function = ctypes.CDLL(str(library)).nontemporal_memcpy
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"The non-temporal memcpy must be compiled by {compiler}, but: {error}. "
            "Install a C compiler, or set CC. Its rows will say 'not installed'.",
            file=sys.stderr,
        )
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    copy: _Copy = function
    return copy
