"""The worker of ``num_workers=0``: the calling thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .interface import Program, Workers


class InlineWorkers(Workers):
    """Answers each task at once, so nothing is read ahead.

    Attributes:
        answer: returns the answer to a task, in place of `send` and `receive`.
    """

    def __init__(self, program: Program) -> None:
        self.processes: list[Any] = []
        self.answer: Callable[[Any], Any] = program.run
        program.start(0)

    def close(self) -> None:
        """Do nothing: nothing was kept."""
