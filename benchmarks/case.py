"""The definition of a comparison, and the time that it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ._harness import Contender


class Effort(NamedTuple):
    """The time to measure each comparison; see `_harness.compare`."""

    rounds: int = 30
    max_seconds: float = 20.0
    min_seconds: float = 1e-3

    def part(self, of: float) -> Effort:
        """Return the effort for one of several comparisons that belong together."""
        return self._replace(max_seconds=self.max_seconds * of)


#: Enough to prove that a case runs; its figures are meaningless.
QUICK = Effort(rounds=2, max_seconds=1.0, min_seconds=0.0)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: the title of its table.
        note: a description of the data: synthetic or real.
        contenders: creates the data and the functions.
        main: the case is also measured with more than one thread.
        copies: it writes its output, so bytes per second are meaningful.
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
        title: the title of the curves.
        note: a description of the data: synthetic or real.
        x: the label of the sizes.
        sizes: the sizes, in ascending order.
        contenders: creates the data and the functions for a size.
    """

    title: str
    note: str
    x: str
    sizes: list[int]
    contenders: Callable[[int], list[Contender]]
