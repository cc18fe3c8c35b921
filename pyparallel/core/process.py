"""Run functions in forked children and at the exit of the interpreter.

Note: [forked children]. A child has copies of all objects, but only the thread that
forked. A lock that another thread held stays locked, and events and pinned memory
belong to the parent. So objects with such members renew them in the child, and forget
the parent's. Lower floors are imported earlier, and their functions run earlier.

Note: [exit]. The interpreter first waits for all threads except daemons, which may need
the library until they end. Then it runs these functions, the last registered one first:
higher floors end before the floors that they use. A daemon that is still in native code
after the interpreter has ended aborts the process, so each daemon is stopped there.

Note: [gloo at the exit]. With torch 2.13, a reduction that a backward pass starts
refers to a Python object, and a thread of gloo frees it. If that thread waits for the
GIL when the interpreter ends, the process aborts ("terminate called without an active
exception"), and torchrun kills the other ranks. So the exit lets these threads finish.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[[], Any])


def on_fork(
    in_child: Callable[[], Any],
    before: Callable[[], Any] | None = None,
    in_parent: Callable[[], Any] | None = None,
) -> None:
    """Call functions at every fork of this process, on systems that can fork.

    Args:
        in_child: runs in the child.
        before: runs in the parent, before the fork.
        in_parent: runs in the parent, after the fork.
    """
    if not hasattr(os, "register_at_fork"):
        return
    others = {"before": before, "after_in_parent": in_parent}
    chosen: Any = {name: each for name, each in others.items() if each is not None}
    os.register_at_fork(after_in_child=in_child, **chosen)


def at_exit(function: _Function) -> _Function:
    """Call a function at the exit of the interpreter. Return it."""
    atexit.register(function)
    return function


class Living(weakref.WeakSet[_T]):
    """The living objects of a class, without references that keep them alive.

    Args:
        in_child: runs for each of them in every forked child.
        at_exit: runs for each of them at the exit of the interpreter.
    """

    def __init__(
        self,
        in_child: Callable[[_T], Any] | None = None,
        at_exit: Callable[[_T], Any] | None = None,
    ) -> None:
        super().__init__()
        if in_child is not None:
            on_fork(lambda: self._call(in_child))
        if at_exit is not None:
            atexit.register(self._call, at_exit)

    def _call(self, function: Callable[[_T], Any]) -> None:
        for each in list(self):
            function(each)


@at_exit
def _wait_for_gloo() -> None:
    """Leave the GIL to the threads of gloo until all sleep, for at most a second."""
    if not _states_of_threads("pt_gloo_runloop"):
        return
    for _ in range(100):
        time.sleep(0.01)
        if "R" not in _states_of_threads("pt_gloo_runloop"):
            return


def _states_of_threads(name: str) -> set[str]:
    """Return the states of this process's threads of a name, where Linux tells them."""
    found = set()
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            fields = path.read_text("utf-8", "replace")
        except OSError:  # the thread has ended
            continue
        if f"({name})" in fields:
            found.add(fields.rpartition(") ")[2][:1])
    return found
