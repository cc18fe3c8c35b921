"""Start processes, and leave nothing open or half started if that fails.

Note: [interrupts]. An exception of a signal handler, such as a KeyboardInterrupt, may
come between any two instructions: behind the fork of a process and before its object
knows it. So handlers wait while processes start and end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ..core.errors import restoring
from ._channel import kept
from .deaths import Stacks, inherited

#: More descriptors than `multiprocessing` opens to start a process.
_NUM_SPARE = 8
#: The pipe ends in the frame of `multiprocessing` that forks.
_PIPE_ENDS = ("parent_r", "child_w", "child_r", "parent_w")

#: The handlers that wait, by signal.
_handlers: dict[int, Any] = {}


@restoring
def deferred_signals() -> Generator[None, None, None]:
    """Run Python's handlers of signals that arrive in the block after the block."""
    if _handlers or threading.current_thread() is not threading.main_thread():
        yield  # Python calls handlers in the main thread only
        return
    arrived: list[int] = []

    def note(number: int, frame: Any) -> None:
        arrived.append(number)

    try:
        for number in map(int, signal.valid_signals()):
            handler = signal.getsignal(number)
            if callable(handler):
                _handlers[number] = handler
                signal.signal(number, note)
        yield
    finally:
        restore_handlers(arrived)


def restore_handlers(arrived: Sequence[int] = ()) -> None:
    """End `deferred_signals`, in a forked child as well, for signals that arrived."""
    handlers = _handlers.copy()
    _handlers.clear()
    calls = [functools.partial(signal.signal, *pair) for pair in handlers.items()]
    _call_all([*calls, *(functools.partial(handlers[n], n, None) for n in arrived)])


def _call_all(calls: Sequence[Callable[[], Any]]) -> None:
    """Call functions. If one raises, call the others as well."""
    if calls:
        try:
            calls[0]()
        finally:
            _call_all(calls[1:])


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
