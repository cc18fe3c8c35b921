"""Let signal handlers wait while threads and processes start and end.

Note: [interrupts]. An exception of a signal handler, such as a KeyboardInterrupt, may
come between any two instructions: behind the fork of a process and before its object
knows it, or while `Thread.start` holds a lock that the new thread needs. So handlers
wait meanwhile.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from .errors import restoring

_numbers = [int(number) for number in signal.valid_signals()]
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
        for number in _numbers:
            handler = _signal.getsignal(number)  # `signal.getsignal` makes enums
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
    try:
        _call_all(
            [functools.partial(signal.signal, *pair) for pair in handlers.items()]
        )
    finally:  # not earlier: until then more signals may arrive
        _call_all([functools.partial(handlers[n], n, None) for n in arrived])


def _call_all(calls: Sequence[Callable[[], Any]]) -> None:
    """Call functions. If one raises, call the others as well."""
    if calls:
        try:
            calls[0]()
        finally:
            _call_all(calls[1:])
