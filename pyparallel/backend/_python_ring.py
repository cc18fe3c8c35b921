"""The header of a ring in pure Python: the holder of each slot of shared memory.

ctypes reads and writes each word as 8 aligned bytes at once, so no process reads a
partially written word. See Note [slot holders] in ``csrc/core/ring.h``.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

from torch import Tensor

from ..core.process import on_fork
from . import _checks

_LINE = 64  # bytes
_WORDS = _LINE // 8
_MAGIC = 0x5050_5249_4E47_0001  # "PPRING", version 1
_NATIVE, _PYTHON = 1, 2  # the backend that formatted a ring
_MOST_SLOTS = 65536
_FREE = 0
_LOCK_SECONDS = 1.0  # a claim takes microseconds
_RETRY_SECONDS = 5e-5

_mutex = threading.Lock()


def _renew_mutex() -> None:
    global _mutex
    _mutex = threading.Lock()


on_fork(_renew_mutex)  # another thread may hold it during a fork


def ring_format(header: Tensor, num_slots: int) -> None:
    """See ``_C.pyi``."""
    _checks.check_type("ring_format: header", Tensor, "a torch.Tensor", header)
    num_slots = _checks.as_int(num_slots, "ring_format: num_slots")
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

    Python has no compare-and-swap. Only claims compete, so only claims are serialized,
    by a POSIX record lock on ``fd``. The kernel releases this lock when its process
    dies, unlike a lock in shared memory. The lock belongs to a process, so a mutex
    serializes the threads. It is lost if the process closes another descriptor of the
    same file. A process that holds it for a second has been stopped; the claim then
    returns no slot.
    """
    _checks.check_type("ring_claim: header", Tensor, "a torch.Tensor", header)
    holder = _checks.as_int(holder, "ring_claim: holder")
    fd = _checks.as_int(fd, "ring_claim: fd")
    words = _formatted_words(header, "ring_claim")
    _check_holder(holder, "ring_claim")
    if words[2] != _PYTHON or sys.platform == "win32":
        return -1
    import fcntl

    with _mutex:
        if not _lock(fcntl, fd):
            return -1
        try:
            for slot in range(words[1]):
                if words[_word_of(slot)] == _FREE:
                    words[_word_of(slot)] = holder
                    return slot
            return -1
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN)


def ring_pass(header: Tensor, slot: int, holder: int, to: int) -> bool:
    """See ``_C.pyi``; only the holder changes the word, so a store is enough."""
    _checks.check_type("ring_pass: header", Tensor, "a torch.Tensor", header)
    slot = _checks.as_int(slot, "ring_pass: slot")
    holder = _checks.as_int(holder, "ring_pass: holder")
    to = _checks.as_int(to, "ring_pass: to")
    words = _formatted_words(header, "ring_pass")
    if not 0 <= slot < words[1]:
        rule = f"be between 0 and {words[1] - 1}"
        raise _checks.error("ring_pass: slot", rule, f"is {slot}")
    _check_holder(holder, "ring_pass")
    if to < 0:
        raise _checks.error("ring_pass: to", "be 0 or more", f"is {to}")
    if words[_word_of(slot)] != holder:
        return False
    words[_word_of(slot)] = to
    return True


def ring_reclaim(header: Tensor, holder: int) -> list[int]:
    """See ``_C.pyi``."""
    _checks.check_type("ring_reclaim: header", Tensor, "a torch.Tensor", header)
    holder = _checks.as_int(holder, "ring_reclaim: holder")
    words = _formatted_words(header, "ring_reclaim")
    _check_holder(holder, "ring_reclaim")
    found = [slot for slot in range(words[1]) if words[_word_of(slot)] == holder]
    for slot in found:
        words[_word_of(slot)] = _FREE
    return found


def ring_holders(header: Tensor) -> list[int]:
    """See ``_C.pyi``."""
    _checks.check_type("ring_holders: header", Tensor, "a torch.Tensor", header)
    words = _formatted_words(header, "ring_holders")
    return [words[_word_of(slot)] for slot in range(words[1])]


def _word_of(slot: int) -> int:
    return _WORDS * (1 + slot)


def _words(header: Tensor) -> Any:
    """Return the words of a header; the header must outlive them."""
    return (ctypes.c_int64 * (header.numel() // 8)).from_address(header.data_ptr())


def _check_header(header: Tensor, where: str) -> None:
    _checks.check_slab(header, where, " on the CPU")
    past = header.data_ptr() % _LINE
    if past:
        rule = f"start at a multiple of {_LINE} bytes"
        raise _checks.error(where, rule, f"starts {past} bytes behind one")


def _formatted_words(header: Tensor, op: str) -> Any:
    """Return the words of a formatted header."""
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
    """Lock for this process; return False after `_LOCK_SECONDS`."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES in POSIX
            if time.monotonic() > deadline:
                return False
        time.sleep(_RETRY_SECONDS)
