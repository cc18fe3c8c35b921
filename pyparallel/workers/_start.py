"""Start processes, and leave nothing open or half started if that fails."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from ._channel import kept
from .deaths import Stacks, inherited

#: More descriptors than `multiprocessing` opens to start a process.
_NUM_SPARE = 8
#: The pipe ends in the frame of `multiprocessing` that forks.
_PIPE_ENDS = ("parent_r", "child_w", "child_r", "parent_w")


def start(process: Any, method: str, ends: Sequence[Any], stacks: Stacks) -> None:
    """Start a process of `multiprocessing` that needs these ends of sockets and pipes.

    Raises:
        OSError: no descriptor, process or memory is left.
    """
    # A lack of descriptors is an error here, where none of them stays open.
    spare = [Connection(os.dup(ends[0].fileno())) for _ in range(_NUM_SPARE)]
    del spare
    if method == "fork":
        with kept(*ends), inherited(stacks):
            try:
                process.start()
            except OSError as error:
                _close_pipes(error)
                raise
        return
    # The new process inherits this mask, so no Ctrl-C ends it before it has a handler.
    mask = [signal.SIGINT] if method == "spawn" else []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, mask)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close_pipes(error: OSError) -> None:
    """Close the pipes of a fork that failed, which `multiprocessing` leaves open."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_launch":
            for name in _PIPE_ENDS:
                with contextlib.suppress(OSError, KeyError):
                    os.close(frame.f_locals[name])
