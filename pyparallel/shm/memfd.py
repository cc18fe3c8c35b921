"""Shared memory without a name: nothing of it is left when the last process ends.

A memfd is limited by memory alone, not by the size of /dev/shm, which containers keep
small. It is reserved before it is written: a system that has none left answers with an
error where a plain mapping would end in SIGBUS.
"""

from __future__ import annotations

import functools
import os
import sys
from multiprocessing import reduction
from typing import Any, NamedTuple

import torch


@functools.cache
def is_supported() -> bool:
    """Tell whether this system has such memory; Linux has."""
    return sys.platform == "linux" and os.path.isdir("/proc/self/fd")


def create(nbytes: int) -> int:
    """Return the descriptor of new memory of this size; none of it is reserved.

    Raises:
        OSError: no descriptor is left.
    """
    if sys.platform != "linux":  # for the type checker: is_supported has been asked
        raise OSError("memfd_create needs Linux.")
    fd = os.memfd_create("pyparallel", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Reserve bytes, so that to write them cannot fail.

    Raises:
        OSError: there is no such memory left.
    """
    if sys.platform == "linux" and nbytes:
        os.posix_fallocate(fd, start, nbytes)


def attach(fd: int, nbytes: int) -> torch.Tensor:
    """Return shared memory as ``torch.uint8`` ``(nbytes,)``; no descriptor is kept.

    torch opens, maps and closes; the mapping ends with the tensor's storage.
    """
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, nbytes)
    result: Any = torch.empty(0, dtype=torch.uint8)
    return result.set_(storage)  # type: ignore[no-any-return]  # not in torch's stubs


def sendable(fd: int) -> Any:
    """Return what stands for a descriptor in a pickle to another process.

    The receiver calls ``detach()`` on it, once, and closes what it gets.
    """
    return reduction.DupFd(fd)


class Sent(NamedTuple):
    """Memory on its way to another process."""

    descriptor: Any
    nbytes: int


class Fresh:
    """A tensor in memory of its own, to be sent once to another process."""

    def __init__(self, nbytes: int) -> None:
        self._fd = create(nbytes)
        try:
            reserve(self._fd, 0, nbytes)
            self.bytes = attach(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise

    def send(self) -> Sent:
        """Return what `receive` takes; the memory is no longer held here."""
        sent = Sent(sendable(self._fd), self.bytes.numel())
        os.close(self._fd)
        del self.bytes
        return sent


def receive(sent: Sent) -> torch.Tensor:
    """Return the memory that another process sent, as ``torch.uint8`` ``(nbytes,)``."""
    fd = sent.descriptor.detach()
    try:
        return attach(fd, sent.nbytes)
    finally:
        os.close(fd)
