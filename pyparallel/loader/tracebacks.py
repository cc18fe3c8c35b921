"""Make errors of a dataset readable: name the samples, hide frames of this package."""

from __future__ import annotations

import os
import re
import reprlib
import traceback
from collections.abc import Iterator
from operator import length_hint
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..core.errors import Error
from ..transfer import debug


def hide_frames(error: BaseException) -> None:
    """Remove the frames of this package from the tracebacks of an error and its causes.

    The innermost frame of an unexpected error stays, and on Python 3.10 the frame that
    catches the error. ``PYPARALLEL_DEBUG=1`` keeps all frames.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and not debug.enabled:
        seen.add(id(link))
        trace = _without_own_frames(link.__traceback__, isinstance(link, Error))
        # An assignment would call __setattr__, which a frozen dataclass refuses.
        BaseException.with_traceback(link, trace)
        link = link.__cause__ or link.__context__


def _without_own_frames(
    trace: TracebackType | None, hides_innermost: bool
) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for i, entry in enumerate(reversed(entries)):
        if _is_own_frame(entry) and (i or hides_innermost):
            continue
        entry.tb_next = kept
        kept = entry
    # A bare `raise` of Python 3.10 begins with the first entry again.
    if entries and entries[0] is not kept:
        entries[0].tb_next = kept
    return kept


def _is_own_frame(entry: TracebackType) -> bool:
    name = str(entry.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == "pyparallel"


def clear_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Clear the frames of an error that came from a worker.

    The frames refer to the iterator, and so keep its descriptors as long as the error
    lives. The frames of the dataset were in the worker. The message of the error
    contains them.

    Args:
        error: the error.
        handled: the exception that the caller of the iterator handles. It is a context
            of the error, and the caller may still use its frames.
    """
    seen = {id(handled)}
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = 32
_repr.maxstring = _repr.maxother = 200


def format_indices(indices: Any) -> str:
    """Return a short text for an index or for the indices of a batch."""
    return _repr.repr(indices)


def rank_text(form: str = " ({})") -> str:
    """Return `` (rank 3)`` in a distributed job, and an empty string elsewhere."""
    rank = os.environ.get("RANK", "")
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    return form.format(f"rank {rank}") if rank else ""


#: Positions in a batch, in the form of this package's messages and torch's.
_POSITION = re.compile(r"\b(batch\[(\d+)\]|entry (\d+))")
_MAX_POSITIONS = 4


class Indices(list[Any]):
    """The indices of a batch. Records how many of them were read."""

    _iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._iterator = super().__iter__()
        return self._iterator

    def take_position(self) -> int | None:
        """Return the last position that was read, None without an iterator."""
        iterator, self._iterator = self._iterator, None  # it refers to this list
        return None if iterator is None else last_position(iterator, len(self))


def last_position(iterator: Iterator[Any], count: int) -> int | None:
    """Return the last position that was read of a list, None at its end.

    Args:
        iterator: an iterator over the list.
        count: the length of the list.
    """
    state: Any = iterator.__reduce__()  # at the end, it refers to an empty list
    return count - length_hint(iterator) - 1 if state[1][0] else None


def locate_in_batch(
    one: str, many: str, error: BaseException, numbers: list[Any]
) -> str:
    """Return a text for the samples of a batch, and those that an error names."""
    text = f"in the batch of {many} {format_indices(numbers)}"
    named: dict[str, str] = {}
    for found in _POSITION.finditer(message_of(error)):
        position = int(found[2] or found[3])
        if position < len(numbers) and len(named) < _MAX_POSITIONS:
            named[found[1]] = f"{found[1]} is {one} {format_indices(numbers[position])}"
    return f"{text} ({', '.join(named.values())})" if named else text


def message_of(error: BaseException | None) -> str:
    """Return the text of an error, empty if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return ""
