"""Check if other threads run during a call."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def others_run_during(call: Callable[[], Any], attempts: int = 20) -> bool:
    """Return True if a call of some milliseconds releases the GIL.

    The switch interval, otherwise 5 ms, is set so high that another thread runs only if
    the call releases the GIL.
    """
    turns: list[None] = []
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            turns.append(None)
            time.sleep(0.0005)  # without the GIL

    before = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(attempts):  # a busy machine may not run the other thread in time
            so_far = len(turns)
            call()
            if len(turns) > so_far:
                return True
        return False
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
