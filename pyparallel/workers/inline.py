"""The worker of ``num_workers=0``: the calling thread."""

from __future__ import annotations

from collections import deque
from typing import Any

from .interface import Program, Workers


class InlineWorkers(Workers):
    """Runs a task when its answer is received, so nothing is read ahead."""

    def __init__(self, program: Program) -> None:
        self.processes = []
        self._program = program
        self._tasks: deque[Any] = deque()
        program.start(0)

    def send(self, worker: int, task: Any) -> None:
        """Keep a task."""
        self._tasks.append(task)

    def receive(self, worker: int | None, timeout: float | None) -> tuple[int, Any]:
        """Run the next task and return its answer."""
        return 0, self._program.run(self._tasks.popleft())

    def close(self) -> None:
        """Drop the tasks that were kept."""
        self._tasks.clear()

    def end(self, worker: int) -> None:
        """Drop the tasks that were kept."""
        self.close()
