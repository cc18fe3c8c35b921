"""The report as text: a row for each value, then the problems."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core.text import nbytes_text, plural

_WIDTH = 18
_SUFFIXES = ("_nbytes", "_gb_per_s", "_seconds")


class Problem(NamedTuple):
    """A problem that the doctor found.

    Attributes:
        text: the requirement, the value that was found, and the fix.
        fails: True for an error, which makes the exit code 1; False for advice.
    """

    text: str
    fails: bool


def section(name: str, found: Any) -> str:
    """Return a section with its name and a row for every key or item."""
    if isinstance(found, Mapping):
        rows = [(_label(key), value_text(value, key)) for key, value in found.items()]
    else:
        rows = [(str(i), value_text(each)) for i, each in enumerate(found)]
    lines = [f"  {label:<{_WIDTH}} {text}" for label, text in rows]
    return "\n".join([_label(name), *(lines or ["  none"])])


def value_text(value: Any, key: str = "") -> str:
    """Return a value with the unit that the suffix of its key names."""
    if value is None or value == {} or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        parts = ((_label(name), value_text(each, name)) for name, each in value.items())
        return ", ".join(f"{label} {text}" for label, text in parts if text != "-")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(map(value_text, value))
    if isinstance(value, str):
        return value.replace("\n", f"\n{'':<{_WIDTH + 3}}")
    if key.endswith("_nbytes"):
        return nbytes_text(value)
    if key.endswith("_gb_per_s"):
        return f"{value:.1f} GB/s"
    return f"{value:.1f} s" if key.endswith("_seconds") else f"{value:g}"


def what_to_do(problems: Sequence[Problem]) -> str:
    """Return the problems, errors first, and a last line with their number."""
    errors = [problem for problem in problems if problem.fails]
    advice = [problem for problem in problems if not problem.fails]
    lines = ["what to do"]
    for name, found in (("error", errors), ("advice", advice)):
        lines += [
            textwrap.fill(
                f"{name}: {problem.text}",
                88,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            for problem in found
        ]
    if not problems:
        lines.append("  nothing")
    counts = f"{plural(len(errors), 'error')}, {plural(len(advice), 'piece')} of advice"
    return "\n".join([*lines, "", f"{'failed' if errors else 'ok'}: {counts}"])


def _label(key: str) -> str:
    for suffix in _SUFFIXES:
        key = key.removesuffix(suffix)
    return key.replace("_", " ")
