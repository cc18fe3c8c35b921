"""Generate hundreds of thousands of cases from numbers, and reduce failing cases.

hypothesis draws some thousand small cases a minute, and spends most of that time on its
own work. Here a case is a function of `Numbers`. They come from a generator with a
seed, which is sufficient to repeat a case. Or they come from a list, so that smaller
numbers give a smaller failing case. Or they come from hypothesis.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Numbers:
    """The numbers of a case, recorded as they are drawn.

    Args:
        below: returns a number from 0 to its argument, exclusive.
    """

    def __init__(self, below: Callable[[int], int]) -> None:
        self._below = below
        self.drawn: list[int] = []

    def between(self, low: int, high: int) -> int:
        drawn = self._below(high - low + 1)
        self.drawn.append(drawn)
        return low + drawn

    def maybe(self, one_in: int = 2) -> bool:
        """Return True with a chance of 1 in ``one_in``; the number 0 is False."""
        return self.between(0, one_in - 1) == one_in - 1

    def choose(self, values: Sequence[T]) -> T:
        return values[self.between(0, len(values) - 1)]


def seeded(seed: int) -> Numbers:
    return Numbers(random.Random(seed).randrange)


def played(drawn: Sequence[int]) -> Numbers:
    """Return these numbers; 0 after the last, and instead of too large numbers."""
    rest = iter(drawn)

    def below(end: int) -> int:
        number = next(rest, 0)
        return number if number < end else 0

    return Numbers(below)


Case = Callable[[Numbers], Any]


class Failure(NamedTuple):
    """A case that fails.

    Attributes:
        seed: the seed of the original case.
        drawn: the numbers of the smallest case found from it.
        text: the traceback of the smallest case.
    """

    seed: int
    drawn: list[int]
    text: str

    def __str__(self) -> str:
        again = ",".join(map(str, self.drawn))
        return (
            f"{self.text}\nThe case of seed {self.seed} fails; to see it again:\n"
            f"  python -m tests.support.fuzzing.fuzz --first {self.seed} --cases 1\n"
            "Made smaller it is:\n"
            f"  python -m tests.support.fuzzing.fuzz --numbers {again}"
        )


def error_of(case: Case, numbers: Numbers) -> Exception | None:
    try:
        case(numbers)
    except Exception as error:
        return error
    return None


def search(case: Case, first: int, count: int) -> Failure | None:
    """Run the cases of these seeds; return the first failure, reduced."""
    for seed in range(first, first + count):
        numbers = seeded(seed)
        error = error_of(case, numbers)
        if error is not None:
            return shrunk(case, seed, numbers.drawn, error)
    return None


def shrunk(case: Case, seed: int, drawn: list[int], error: Exception) -> Failure:
    """Reduce and drop numbers while the case fails with the same class of error."""
    kind = type(error)
    best = list(drawn)
    progress = True
    while progress:
        progress = False
        for smaller in candidates(best):
            numbers = played(smaller)
            found = error_of(case, numbers)
            used = numbers.drawn
            if type(found) is kind and (len(used), used) < (len(best), best):
                best, progress = used, True
                break
    final = error_of(case, played(best)) or error
    return Failure(seed, best, "".join(traceback.format_exception(final)))


def candidates(drawn: list[int]) -> Any:
    """Yield simpler lists, with fewer or smaller numbers."""
    size = len(drawn) // 2
    while size:
        for start in range(0, len(drawn), size):
            yield drawn[:start] + drawn[start + size :]
        size //= 2
    for i, number in enumerate(drawn):
        for lower in sorted({0, number // 2, number - 1}):
            if 0 <= lower < number:
                yield [*drawn[:i], lower, *drawn[i + 1 :]]
