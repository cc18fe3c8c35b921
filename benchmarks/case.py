"""What a comparison is, and how much time it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ._harness import Contender


class Effort(NamedTuple):
    """How long each comparison is measured; see `_harness.compare`."""

    rounds: int = 30
    max_seconds: float = 20.0
    min_seconds: float = 1e-3

    def part(self, of: float) -> Effort:
        """Return the effort for one of several comparisons that belong together."""
        return self._replace(max_seconds=self.max_seconds * of)


#: Proves that something runs; its figures mean nothing.
QUICK = Effort(rounds=2, max_seconds=1.0, min_seconds=0.0)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: for the table.
        note: what the data are, synthetic or not.
        contenders: makes the data and the functions.
        main: it is also measured with more than one thread.
        copies: it writes its output; else bytes per second mean nothing.
    """

    title: str
    note: str
    contenders: Callable[[], list[Contender]]
    main: bool = False
    copies: bool = True


@dataclass(frozen=True)
class Curves:
    """One curve for each contender.

    Attributes:
        title: of the curves.
        note: what the data are, synthetic or not.
        x: what the sizes are.
        sizes: ascending.
        contenders: makes the data and the functions for a size.
    """

    title: str
    note: str
    x: str
    sizes: list[int]
    contenders: Callable[[int], list[Contender]]
