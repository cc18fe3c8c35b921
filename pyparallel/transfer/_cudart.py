"""Call the functions of CUDA's runtime that torch has no name for, in pure Python."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_NON_BLOCKING = 1  # cudaStreamNonBlocking


class Cudart:
    """The library that torch has loaded.

    ctypes releases the GIL in each call. Every call makes its device current first, so
    that none opens a context on another device.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def create_stream(self, device: int) -> int:
        """Return the handle of a stream that no other code has."""
        stream = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._call(
                "cudaStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, 0
            )
        return stream.value or 0

    def exchange_capture_mode(self, mode: int, device: int) -> int:
        """Set the mode of this thread during captures; return the mode before."""
        exchanged = ctypes.c_int(mode)
        with torch.cuda.device(device):
            self._call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        return exchanged.value

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise RuntimeError(f"{name} must succeed, but returned CUDA error {code}.")


@functools.cache
def load() -> Cudart | None:
    """Return the runtime that torch uses, or None if its functions are not found.

    torch loads its libraries with their names visible to the whole process, unless it
    was linked with a static runtime.
    """
    library = ctypes.CDLL(None)
    names = ("cudaStreamCreateWithPriority", "cudaThreadExchangeStreamCaptureMode")
    return Cudart(library) if all(hasattr(library, name) for name in names) else None
