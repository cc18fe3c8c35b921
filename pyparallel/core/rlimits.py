"""The limits of this process that POSIX defines. Windows has none of them."""

from __future__ import annotations

import sys

if sys.platform != "win32":
    from resource import (
        RLIM_INFINITY,
        RLIMIT_FSIZE,
        RLIMIT_MEMLOCK,
        RLIMIT_NOFILE,
        getrlimit,
    )
else:
    RLIMIT_FSIZE, RLIMIT_MEMLOCK, RLIMIT_NOFILE, RLIM_INFINITY = 0, 1, 2, -1

    def getrlimit(_resource: int) -> tuple[int, int]:
        """Return the soft and the hard limit."""
        return RLIM_INFINITY, RLIM_INFINITY


__all__ = [
    "RLIMIT_FSIZE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_NOFILE",
    "RLIM_INFINITY",
    "getrlimit",
]
