"""Create shared memory without a file name, by ``memfd_create``.

The kernel frees it when the last process that uses it ends. Its size is limited by the
memory of the machine, not by the size of /dev/shm, which containers keep small.

Memory is reserved before it is written. A system without free memory then returns an
error; without the reservation, the write would end the process with SIGBUS.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
import weakref
from multiprocessing import reduction
from typing import Any, NamedTuple

import torch

from ..core import rlimits


@functools.cache
def is_supported() -> bool:
    """Return True if this system supports it, as Linux does."""
    if sys.platform != "linux" or not os.path.isdir("/proc/self/fd"):
        return False
    try:
        os.close(os.memfd_create("pyparallel", os.MFD_CLOEXEC))
    except OSError as error:  # of a sandbox, or of an old kernel
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES)
    return True


def limit_text(error: OSError) -> str:
    """Return the limit that an error of this module has met, and how to raise it."""
    if error.errno == errno.EMFILE:
        files, _ = rlimits.getrlimit(rlimits.RLIMIT_NOFILE)
        return (
            f"the process has reached its limit of {files} open files. Increase it "
            "(ulimit -n)"
        )
    if error.errno == errno.ENFILE:
        return (
            "the system has reached its limit of open files. Increase it (sysctl "
            "fs.file-max)"
        )
    if error.errno == errno.EFBIG:
        nbytes, _ = rlimits.getrlimit(rlimits.RLIMIT_FSIZE)
        return (
            f"the size of a file is limited to {nbytes} bytes. Increase the limit "
            "(ulimit -f)"
        )
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return (
            f"the system has no memory left ({error.strerror}). Increase the memory of "
            "the machine or its control group, or use smaller batches"
        )
    return f"the system reports: {error.strerror}. Allow memfd_create"


def create(nbytes: int) -> int:
    """Create memory of this size, without reserving it, and return its descriptor.

    Raises:
        OSError: no file descriptor is left.
    """
    if sys.platform != "linux":  # for the type checker: callers check is_supported()
        raise OSError("memfd_create needs Linux.")
    fd = os.memfd_create("pyparallel", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Reserve bytes, so that writing them cannot fail.

    Raises:
        OSError: the system has no memory left.
    """
    if sys.platform == "linux" and nbytes:
        os.posix_fallocate(fd, start, nbytes)


def attach(fd: int, nbytes: int) -> torch.Tensor:
    """Map shared memory as a tensor, ``torch.uint8`` ``(nbytes,)``.

    The caller may close the descriptor: torch opens its own, maps the memory and closes
    it. The mapping ends with the tensor's storage.

    Raises:
        OSError: no file descriptor or no memory is left.
    """
    try:
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, nbytes)
    except RuntimeError as error:
        found = re.search(r"\((\d+)\)$", str(error).splitlines()[0])
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error
    result: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    return result.set_(storage)  # type: ignore[no-any-return]  # not in torch's stubs


def picklable_descriptor(fd: int) -> Any:
    """Return an object that carries a descriptor in a pickle to another process.

    The receiver calls ``detach()`` on it once and closes the returned descriptor.
    """
    return reduction.DupFd(fd)


class SharedBufferHandle(NamedTuple):
    """A reference to shared memory that can be pickled for another process."""

    descriptor: Any
    nbytes: int


class SharedBuffer:
    """A tensor in new shared memory, which is sent to another process once.

    Raises:
        OSError: no file descriptor or no memory is left.
    """

    def __init__(self, nbytes: int) -> None:
        self._fd = create(nbytes)
        # Also after an error of a caller that has not sent it.
        self._close = weakref.finalize(self, os.close, self._fd)
        reserve(self._fd, 0, nbytes)
        self.bytes: torch.Tensor = attach(self._fd, nbytes)

    def send(self) -> SharedBufferHandle:
        """Release the memory in this process and return a handle for `receive`."""
        handle = SharedBufferHandle(picklable_descriptor(self._fd), self.bytes.numel())
        self._close()
        del self.bytes
        return handle


def receive(handle: SharedBufferHandle) -> torch.Tensor:
    """Map memory that another process sent, as ``torch.uint8`` ``(nbytes,)``."""
    fd = handle.descriptor.detach()
    try:
        return attach(fd, handle.nbytes)
    finally:
        os.close(fd)
