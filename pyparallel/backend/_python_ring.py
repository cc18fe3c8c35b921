"""The header of a ring in pure Python: who holds which slot of shared memory.

Words are read and written by single stores of 8 aligned bytes (ctypes), so none is
ever seen half written. See Note [slot holders] in ``csrc/core/ring.h``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Any

from torch import Tensor

from . import _checks

_LINE = 64  # bytes
_WORDS = _LINE // 8
_MAGIC = 0x5050_5249_4E47_0001  # "PPRING", version 1
_NATIVE, _PYTHON = 1, 2  # by whom a ring is formatted
_MOST_SLOTS = 65536
_FREE = 0
_PATIENCE = 1.0  # seconds: claims take microseconds
_PAUSE = 5e-5

_mutex = threading.Lock()


def _renew_mutex() -> None:
    global _mutex
    _mutex = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may hold it when a child is made
    os.register_at_fork(after_in_child=_renew_mutex)


def ring_format(header: Tensor, num_slots: int) -> None:
    """See ``_C.pyi``."""
    _checks.require("ring_format: header", Tensor, "a torch.Tensor", header)
    num_slots = _checks.integer(num_slots, "ring_format: num_slots")
    _check_header(header, "ring_format: header")
    if not 1 <= num_slots <= _MOST_SLOTS:
        rule = f"be between 1 and {_MOST_SLOTS}"
        raise _checks.error("ring_format: num_slots", rule, f"is {num_slots}")
    nbytes = _LINE * (1 + num_slots)
    if header.numel() != nbytes:
        rule = f"have {nbytes} bytes, {_LINE} and {_LINE} for each of {num_slots} slots"
        raise _checks.error("ring_format: header", rule, f"has {header.numel()}")
    words = _words(header)
    words[:] = [_MAGIC, num_slots, _PYTHON] + [0] * (len(words) - 3)


def ring_claim(header: Tensor, holder: int, fd: int) -> int:
    """See ``_C.pyi``.

    Python has no compare-and-swap. Only claims compete, so they alone are serialised,
    by a POSIX record lock on ``fd``: the kernel takes it back from a process that dies,
    whereas a lock in shared memory would stay with the dead. Such a lock is of a
    process, hence the mutex between threads, and it is lost when the process closes any
    other descriptor of the same file. Who keeps it for a second has been stopped: then
    there is no slot.
    """
    _checks.require("ring_claim: header", Tensor, "a torch.Tensor", header)
    holder = _checks.integer(holder, "ring_claim: holder")
    fd = _checks.integer(fd, "ring_claim: fd")
    words = _open(header, "ring_claim")
    _check_holder(holder, "ring_claim")
    if words[2] != _PYTHON or sys.platform == "win32":
        return -1
    import fcntl

    with _mutex:
        if not _lock(fcntl, fd):
            return -1
        try:
            for slot in range(words[1]):
                if words[_at(slot)] == _FREE:
                    words[_at(slot)] = holder
                    return slot
            return -1
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN)


def ring_pass(header: Tensor, slot: int, holder: int, to: int) -> bool:
    """See ``_C.pyi``; nobody but the holder changes the word, so a store is enough."""
    _checks.require("ring_pass: header", Tensor, "a torch.Tensor", header)
    slot = _checks.integer(slot, "ring_pass: slot")
    holder = _checks.integer(holder, "ring_pass: holder")
    to = _checks.integer(to, "ring_pass: to")
    words = _open(header, "ring_pass")
    if not 0 <= slot < words[1]:
        rule = f"be between 0 and {words[1] - 1}"
        raise _checks.error("ring_pass: slot", rule, f"is {slot}")
    _check_holder(holder, "ring_pass")
    if to < 0:
        raise _checks.error("ring_pass: to", "be 0 or more", f"is {to}")
    if words[_at(slot)] != holder:
        return False
    words[_at(slot)] = to
    return True


def ring_reclaim(header: Tensor, holder: int) -> list[int]:
    """See ``_C.pyi``."""
    _checks.require("ring_reclaim: header", Tensor, "a torch.Tensor", header)
    holder = _checks.integer(holder, "ring_reclaim: holder")
    words = _open(header, "ring_reclaim")
    _check_holder(holder, "ring_reclaim")
    found = [slot for slot in range(words[1]) if words[_at(slot)] == holder]
    for slot in found:
        words[_at(slot)] = _FREE
    return found


def ring_holders(header: Tensor) -> list[int]:
    """See ``_C.pyi``."""
    _checks.require("ring_holders: header", Tensor, "a torch.Tensor", header)
    words = _open(header, "ring_holders")
    return [words[_at(slot)] for slot in range(words[1])]


def _at(slot: int) -> int:
    return _WORDS * (1 + slot)


def _words(header: Tensor) -> Any:
    """Return the words of a header, which must outlive them."""
    return (ctypes.c_int64 * (header.numel() // 8)).from_address(header.data_ptr())


def _check_header(header: Tensor, where: str) -> None:
    _checks.check_slab(header, where, " on the CPU")
    past = header.data_ptr() % _LINE
    if past:
        rule = f"start at a multiple of {_LINE} bytes"
        raise _checks.error(where, rule, f"starts {past} bytes behind one")


def _open(header: Tensor, op: str) -> Any:
    """Return the words of a header that somebody formatted."""
    where = f"{op}: header"
    _check_header(header, where)
    num_slots, rest = divmod(header.numel(), _LINE)
    num_slots -= 1
    if not rest and 1 <= num_slots <= _MOST_SLOTS:
        words = _words(header)
        if words[:2] == [_MAGIC, num_slots] and words[2] in (_NATIVE, _PYTHON):
            return words
    rule = f"be what ring_format makes of {header.numel()} bytes"
    raise _checks.error(where, rule, "is not", " Format it first.")


def _check_holder(holder: int, op: str) -> None:
    if holder < 1:
        raise _checks.error(f"{op}: holder", "be 1 or more", f"is {holder}")


def _lock(fcntl: Any, fd: int) -> bool:
    """Lock for this process; give up when somebody keeps it too long."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says POSIX
            if time.monotonic() > deadline:
                return False
        time.sleep(_PAUSE)
