"""Control of the fake CUDA runtime (`tests/fakecuda`) from the process it runs in.

The runtime is a library to preload: `active` is True where it answers torch's calls.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

_library = ctypes.CDLL(None)
active = hasattr(_library, "fakecuda_fail")

#: Part of the path of our extension.
EXTENSION = "pyparallel/backend/_C"

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, LAUNCH_FAILURE = 0, 1, 2, 719


def _text(name: str) -> str:
    buffer = ctypes.create_string_buffer(1 << 20)
    getattr(_library, name)(buffer, len(buffer))
    return buffer.value.decode()


def problems() -> list[str]:
    """Return the rules of CUDA that were broken since the last call."""
    return _text("fakecuda_problems").splitlines()


def unknown_kernels() -> list[str]:
    """Return the kernels launched since the last call that the fake cannot run."""
    return _text("fakecuda_unknown").splitlines()


def contexts() -> set[int]:
    """Return the devices on which this process has opened a context."""
    bits = _library.fakecuda_contexts()
    return {device for device in range(32) if bits >> device & 1}


@contextlib.contextmanager
def failing(
    name: str, nth: int = 1, code: int = INVALID_VALUE, caller: str = ""
) -> Iterator[None]:
    """Fail the ``nth`` call of a function, counted from here.

    Args:
        name: of a function of the runtime API.
        nth: 1 for the next call.
        code: the ``cudaError_t`` that the call returns.
        caller: part of the path of a library; calls of other libraries are not
            counted and do not fail.
    """
    _library.fakecuda_only(caller.encode())
    _library.fakecuda_fail(name.encode(), nth, code)
    try:
        yield
    finally:
        _library.fakecuda_fail(name.encode(), 0, 0)
        _library.fakecuda_only(b"")


def num_failed() -> int:
    """Return the number of calls that `failing` has failed in this process."""
    _library.fakecuda_injected.restype = ctypes.c_uint64
    return int(_library.fakecuda_injected())


@contextlib.contextmanager
def calls(caller: str = "") -> Iterator[list[str]]:
    """Collect the names of the functions called inside, in order.

    Args:
        caller: part of the path of a library; calls of other libraries are left out.
    """
    found: list[str] = []
    _library.fakecuda_only(caller.encode())
    _library.fakecuda_log(1)
    try:
        yield found
    finally:
        _library.fakecuda_log(0)
        _library.fakecuda_only(b"")
        found += _text("fakecuda_calls").split()


@contextlib.contextmanager
def unlocked(caller: str) -> Iterator[None]:
    """Report each call with the GIL as a problem; the default is our extension.

    Args:
        caller: part of the path of a library; calls of other libraries may hold it.
    """
    _library.fakecuda_unlocked(caller.encode())
    try:
        yield
    finally:
        _library.fakecuda_unlocked(EXTENSION.encode())


@contextlib.contextmanager
def delayed(microseconds: int) -> Iterator[None]:
    """Delay each piece of work on a stream randomly, by at most this."""
    _library.fakecuda_delay(microseconds)
    try:
        yield
    finally:
        _library.fakecuda_delay(0)


@contextlib.contextmanager
def held(stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Stop a stream, by default the current one: work queued inside waits.

    A piece of work that runs already is finished.
    """
    stream = stream or torch.cuda.current_stream()
    handle = ctypes.c_void_p(stream.cuda_stream)
    _library.fakecuda_hold(handle, stream.device.index, 1)
    try:
        yield
    finally:
        _library.fakecuda_hold(handle, stream.device.index, 0)


def break_device(code: int = LAUNCH_FAILURE) -> None:
    """Let every later call fail, as CUDA does after an error of a kernel."""
    _library.fakecuda_break(code)


def num_interpreted() -> int:
    """Return the number of kernels run from PTX."""
    _library.fakecuda_interpreted.restype = ctypes.c_uint64
    return int(_library.fakecuda_interpreted())


def reset() -> None:
    """Release held streams, and end delays, failures and the log of calls."""
    _library.fakecuda_reset()
