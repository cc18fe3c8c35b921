"""How long does a batch take with workers, threads, or ahead of a step?

Samples in memory go through workers to a consumer in the parent. pyparallel's loader is
compared with torch's loader and other collate functions.
"""

from __future__ import annotations

import argparse

from .._harness import Case, Effort
from ..command import Question
from . import fields, images, overlap, threads


def cases(args: argparse.Namespace) -> list[Case]:
    """Return all comparisons."""
    return [
        *images.cases(args.quick, args.workers),
        *fields.cases(args.quick),
        *threads.cases(args.quick),
        *overlap.cases(args.quick),
    ]


QUESTION = Question(
    "loader",
    "Loaders: pyparallel and its peers",
    cases,
    Effort(rounds=15, max_seconds=6.0, min_seconds=0.0),
    page={
        "shown": (
            images.MMCV,
            images.ONE_PASS,
            images.FILL,
            images.TORCH,
            fields.BY_TORCH,
            threads.BY_TORCH,
        )
    },
)
