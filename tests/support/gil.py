"""Whether other threads run while a call is under way."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def others_run_during(call: Callable[[], Any], attempts: int = 20) -> bool:
    """Tell whether a call of some milliseconds gives away the interpreter's lock.

    Nobody asks this thread for the lock meanwhile, as the interpreter otherwise does
    every 5 ms: another thread has its turn only if the call lets it.
    """
    turns: list[None] = []
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            turns.append(None)
            time.sleep(0.0005)  # without the lock

    before = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(attempts):  # a busy machine may not run the other one in time
            so_far = len(turns)
            call()
            if len(turns) > so_far:
                return True
        return False
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
