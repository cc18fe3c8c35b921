"""Count the steps of Python code, which show a loop that time does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pyparallel

_FOLDER = str(Path(pyparallel.__file__).parent)


def steps(call: Callable[[], Any]) -> int:
    """Return the number of instructions that the package's Python code executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(_FOLDER):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it in settrace
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
