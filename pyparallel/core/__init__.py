"""Facts and helpers that every other folder uses.

``errors`` has the errors and warnings, and the helpers that write their messages.
``devices`` resolves the targets of a call. ``thread_state`` carries the modes of torch
from the caller's thread to others. ``torch_private`` has every private name of torch in
use, ``versions`` the supported versions. ``tracing`` names spans for torch's profiler.
``text`` and ``cpu_time`` format and measure.
"""

__all__ = [
    "cpu_time",
    "devices",
    "errors",
    "text",
    "thread_state",
    "torch_private",
    "tracing",
    "versions",
]
