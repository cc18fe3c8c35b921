"""Parts of error messages: tracebacks without our frames, the rank, short indices."""

from __future__ import annotations

import os
import reprlib
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..core.errors import Error
from ..transfer import debug


def hide_frames(error: BaseException) -> None:
    """Remove the frames of this package from the tracebacks of an error and its causes.

    The innermost frame of an unexpected error stays. ``PYPARALLEL_DEBUG=1`` keeps all.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and not debug.enabled:
        seen.add(id(link))
        link.__traceback__ = _without_ours(link.__traceback__, isinstance(link, Error))
        link = link.__cause__ or link.__context__


def _without_ours(
    trace: TracebackType | None, hides_innermost: bool
) -> TracebackType | None:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for number, step in enumerate(reversed(steps)):
        if _is_ours(step) and (number or hides_innermost):
            continue
        kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _is_ours(step: TracebackType) -> bool:
    name = str(step.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == "pyparallel"


_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = 32
_repr.maxstring = _repr.maxother = 200


def short(indices: Any) -> str:
    """Return an index, or the indices of a batch, as messages show it."""
    return _repr.repr(indices)


def rank_text() -> str:
    """Return ``"rank 3"`` in a process of a distributed job, else an empty string."""
    rank = os.environ.get("RANK", "")
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    return f"rank {rank}" if rank else ""
