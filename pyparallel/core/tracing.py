"""Named ranges of what the package does, for profilers: nearly free without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from .torch_private import is_profiling

Range = AbstractContextManager[object]
#: Makes a context manager of a range's name and the one that it is to be around.
Around = Callable[[str, Range], Range]

#: Every name that a range can have.
SPANS = (
    "pyparallel.collate",
    "pyparallel.pack",
    "pyparallel.send",
    "pyparallel.scatter",
    "pyparallel.step",
    "pyparallel.wait",
    "pyparallel.fetch",
    "pyparallel.transform",
    "pyparallel.gather",
    "pyparallel.to_host",
)


def span(name: str) -> Range:
    """Return a context manager that shows its block to profilers as ``name``.

    While ``torch.profiler.profile`` or ``torch.autograd.profiler.profile`` is on, the
    block is a ``torch.profiler.record_function``. With ``PYPARALLEL_NVTX=1`` in the
    environment at import, and a torch built for CUDA, it is an NVTX range as well.
    With neither, an object that does nothing is returned, always the same one, unless
    `surround` says otherwise.

    Args:
        name: one of `SPANS`.
    """
    if is_profiling():
        recorded = profiler.record_function(name)
        return recorded if _around is None else _around(name, recorded)
    return _OFF if _around is None else _around(name, _OFF)


def surround(around: Around | None) -> Around | None:
    """Put something else around every range from now on; return what was there."""
    global _around
    before, _around = _around, around
    return before


def wants_nvtx() -> bool:
    """Tell whether NVTX ranges are asked for and can be had. Initialises nothing."""
    built = torch.version.cuda or torch.version.hip
    return os.environ.get("PYPARALLEL_NVTX") == "1" and built is not None


class _Off:
    """A block that nobody watches."""

    __slots__ = ()
    # Methods in C halve what methods in Python cost that do nothing. This one takes
    # any arguments, and what it returns is false: no exception is swallowed.
    __enter__ = __exit__ = "".format


class _Nvtx:
    """An NVTX range around another context manager."""

    __slots__ = ("_inner", "_name")

    def __init__(self, name: str, inner: Range) -> None:
        self._name = name
        self._inner = inner

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        torch.cuda.nvtx.range_pop()


_OFF: Any = _Off()
_around: Around | None = _Nvtx if wants_nvtx() else None
