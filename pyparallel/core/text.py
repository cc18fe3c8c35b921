"""Numbers, times and sizes as text."""

from __future__ import annotations


def nbytes_text(nbytes: float) -> str:
    """Format a number of bytes with a decimal unit: ``"1.5 MB"``."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def time_text(ns: float) -> str:
    """Format nanoseconds with about three digits and a unit: ``"12.3 ms"``."""
    ms = ns / 1e6
    if ms >= 1000:
        return f"{ms / 1e3:.2f} s"
    if ms >= 100:
        return f"{ms:.0f} ms"
    if ms >= 10:
        return f"{ms:.1f} ms"
    if ms >= 0.1:
        return f"{ms:.2f} ms"
    return f"{ns / 1e3:.0f} us"


def percent(fraction: float) -> str:
    """Format a fraction as a whole percentage: ``"12 %"``."""
    return f"{100 * fraction:.0f} %"


def plural(number: int, noun: str) -> str:
    """Format a number and its noun: ``"1 worker"``, ``"2 workers"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
