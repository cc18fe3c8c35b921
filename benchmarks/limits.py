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
import tempfile
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
    """Return the copy of ``limits.c``, or print the reason and return None."""
    try:
        library = ctypes.CDLL(str(compiled(_SOURCE, _BUILD)))
    except OSError as error:
        print(
            f"The non-temporal memcpy must be compiled, but: {error} "
            "Its rows will say 'not installed'.",
            file=sys.stderr,
        )
        return None
    function = library.nontemporal_memcpy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function  # type: ignore[no-any-return]  # ctypes has no types


def compiled(source: Path, folder: Path) -> Path:
    """Return the shared library of a C file, compiled at first use.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise OSError("there is no C compiler. Install one, or set CC.")
    command = [*compiler.split(), "-O2", "-shared", "-fPIC"]
    key = hashlib.sha256(source.read_bytes() + " ".join(command).encode()).hexdigest()
    library = folder / f"{source.stem}-{key[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command += ["-o", str(made), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"{compiler} refused it: {done.stderr.strip()}")
            os.replace(made, library)
    return library
