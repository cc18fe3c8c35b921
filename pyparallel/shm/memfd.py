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
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, NamedTuple

import torch

from ..core import rlimits
from ..core.standard_streams import moved


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
    fd = moved(os.memfd_create("pyparallel", os.MFD_CLOEXEC))
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


class SharedMemory(NamedTuple):
    """New shared memory, which can be pickled once for another process.

    Attributes:
        descriptor: ``detach()`` returns the descriptor there, which the caller closes.
        nbytes: the size.
    """

    descriptor: Any
    nbytes: int


def write_new(nbytes: int, write: Callable[[torch.Tensor], Any]) -> SharedMemory:
    """Let a function write new memory, ``torch.uint8`` ``(nbytes,)``, and return it.

    Raises:
        OSError: no file descriptor or no memory is left.
    """
    fd = create(nbytes)
    try:
        reserve(fd, 0, nbytes)
        write(attach(fd, nbytes))
        return SharedMemory(reduction.DupFd(fd), nbytes)
    finally:
        os.close(fd)


def receive(memory: SharedMemory) -> torch.Tensor:
    """Map memory that another process sent, as ``torch.uint8`` ``(nbytes,)``."""
    fd = memory.descriptor.detach()
    try:
        return attach(fd, memory.nbytes)
    finally:
        os.close(fd)
