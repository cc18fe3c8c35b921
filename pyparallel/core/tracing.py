"""Named ranges for profilers, at almost no cost without a profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from .torch_private import is_profiling

Range = AbstractContextManager[object]
#: Takes a range's name and context manager; returns the context manager to use.
SpanWrapper = Callable[[str, Range], Range]

#: The names of all ranges.
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
    """Return a context manager that reports its block to profilers as ``name``.

    While ``torch.profiler.profile`` or ``torch.autograd.profiler.profile`` is active,
    the block is a ``torch.profiler.record_function``. With ``PYPARALLEL_NVTX=1`` in the
    environment at import, and a torch built for CUDA, it is also an NVTX range. Without
    either, and without `wrap_spans`, the result is a shared object that does nothing.

    Args:
        name: one of `SPANS`.
    """
    if is_profiling():
        recorded = profiler.record_function(name)
        return recorded if _wrapper is None else _wrapper(name, recorded)
    return _NO_OP if _wrapper is None else _wrapper(name, _NO_OP)


def wrap_spans(wrapper: SpanWrapper | None) -> SpanWrapper | None:
    """Set the wrapper of all later ranges; return the previous wrapper."""
    global _wrapper
    before, _wrapper = _wrapper, wrapper
    return before


def wants_nvtx() -> bool:
    """Return True if NVTX ranges are requested and available; initialize no device."""
    built = torch.version.cuda or torch.version.hip
    return os.environ.get("PYPARALLEL_NVTX") == "1" and built is not None


class _NoOp:
    """A context manager that does nothing."""

    __slots__ = ()
    # A method in C takes half the time of an empty method in Python. This one accepts
    # any arguments and returns a false value, so it does not suppress exceptions.
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


_NO_OP: Any = _NoOp()
_wrapper: SpanWrapper | None = _Nvtx if wants_nvtx() else None
