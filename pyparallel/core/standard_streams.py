"""Give no descriptor of this package the number of stdin, stdout or stderr.

A program without these streams, such as a service, has their numbers free, and a new
file gets the lowest free number. Native code would write its messages into that file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

#: One more than the number of stderr.
_FIRST = 3


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Open /dev/null in place of missing streams, for the block and its children."""
    fds: list[int] = []
    try:
        with contextlib.suppress(OSError):  # no number is free, or there is no /dev
            while (fd := os.open(os.devnull, os.O_RDWR)) < _FIRST:
                fds.append(fd)
                os.set_inheritable(fd, True)
            os.close(fd)
        yield
    finally:
        for fd in fds:
            os.close(fd)


def moved(fd: int) -> int:
    """Return a descriptor with another number if it has the number of a stream."""
    if fd >= _FIRST or sys.platform == "win32":
        return fd
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)
