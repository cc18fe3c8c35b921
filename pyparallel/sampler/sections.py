"""Divide the samples of an epoch into sections, which are planned one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: The generator of the sections is of this part, which no epoch has.
_PART = 2**31 - 1


@dataclass(frozen=True)
class Sections:
    """The sections of each epoch: each sample is in one of them.

    The numbers of samples of two sections differ by 1 at most. A section is known
    without the others, and a process needs the memory of one.

    Attributes:
        num_samples: the number of samples.
        plan_size: the largest number of samples of a section, None: there is one.
        seed: determines the sections, None: they are in the order of the data set.
    """

    num_samples: int
    plan_size: int | None
    seed: int | None

    def __len__(self) -> int:
        """Return the number of sections, at least 1."""
        return max(1, -(-self.num_samples // (self.plan_size or self.num_samples or 1)))

    def length(self, epoch: int, section: int) -> int:
        """Return the number of samples of a section."""
        runs, rest = divmod(self.num_samples, len(self))
        return runs + bool(self._order(epoch)[1][section] < rest)

    def samples(self, epoch: int, section: int) -> npt.NDArray[np.int32]:
        """Return the positions of the samples of a section, in increasing order.

        Of n sections, n consecutive samples are in different ones. So the samples of a
        section are as mixed as the data set.
        """
        number = len(self)
        runs, rest = divmod(self.num_samples, number)
        generator, order = self._order(epoch)
        place = int(order[section])
        if self.seed is None or number == 1:
            begin = place * runs + min(place, rest)
            return np.arange(begin, begin + runs + (place < rest), dtype=np.int32)
        found = np.empty(runs + (place < rest), dtype=np.int32)
        found[-1] = runs * number + place  # or overwritten, if all runs are complete
        found[:runs] = generator.integers(number, size=runs)
        found[:runs] += place
        found[:runs] %= number
        found[:runs] += np.arange(0, runs * number, number)
        return found

    def _order(self, epoch: int) -> tuple[np.random.Generator, npt.NDArray[np.int64]]:
        """Return the places of the sections in the first run, and their generator."""
        generator = np.random.Generator(np.random.PCG64([self.seed or 0, epoch, _PART]))
        if self.seed is None:
            return generator, np.arange(len(self))
        return generator, generator.permutation(len(self))
