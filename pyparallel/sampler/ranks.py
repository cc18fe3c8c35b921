"""Look up the number of ranks and the rank of a sampler when it is used."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

from ..core.errors import BatchValueError, check_int
from ..core.text import plural


class Ranks:
    """The number of ranks and the rank of a sampler: given, or those of the group.

    Samplers are often made before the group, so they look it up at their first use.
    Later they raise an error if the group has other numbers: batches of both numbers
    of ranks would be mixed.

    Args:
        where: the name of the sampler in messages.
        num_replicas: the number of ranks. None: that of the group.
        rank: the rank. None: that in the group.

    Raises:
        TypeError: one is not an integer.
        ValueError: one is negative, or the rank is too large.
    """

    def __init__(self, where: str, num_replicas: int | None, rank: int | None) -> None:
        self._where = where
        if num_replicas is not None:
            num_replicas = check_int(num_replicas, 1, f"{where} num_replicas")
        if rank is not None:
            rank = check_int(rank, 0, f"{where} rank")
        self._given = num_replicas, rank
        # The numbers of the group at the first use, None before it, and the process.
        self._used: tuple[int, int] | None = None
        self._pid = 0
        if num_replicas is not None and rank is not None:
            self._check_rank(num_replicas, rank)

    def use(self) -> tuple[int, int]:
        """Return the number of ranks and the rank, and keep them.

        Raises:
            ValueError: the group has other numbers than at the first use, or the rank
                is too large.
        """
        if None not in self._given:
            return self.peek()
        now = _find_group()
        if self._used is None:
            # Before it is kept, so that a refused number can be corrected.
            self._check_rank(*self._choose(now or (1, 0)))
            self._used, self._pid = now or (1, 0), os.getpid()
        elif self._is_other(now):
            raise self._other_group(now)
        return self.peek()

    def peek(self) -> tuple[int, int]:
        """Return the numbers of `use`, but do not keep or compare them."""
        return self._choose(self._used or _find_group() or (1, 0))

    def __repr__(self) -> str:
        """Return the numbers, None for those that were not looked up yet."""
        known = self._used is not None or None not in self._given
        num_replicas, rank = self.peek() if known else self._given
        return f"num_replicas={num_replicas}, rank={rank}"

    def _choose(self, group: tuple[int, int]) -> tuple[int, int]:
        num_replicas, rank = self._given
        return (
            group[0] if num_replicas is None else num_replicas,
            group[1] if rank is None else rank,
        )

    def _is_other(self, now: tuple[int, int] | None) -> bool:
        if now is None and self._pid != os.getpid():
            return False  # a worker of a loader has no group
        return self._choose(now or (1, 0)) != self.peek()

    def _check_rank(self, num_replicas: int, rank: int) -> None:
        if rank >= num_replicas:
            raise BatchValueError(
                f"{self._where} rank must be less than num_replicas={num_replicas}, "
                f"but is {rank}. Ranks count from 0."
            )

    def _other_group(self, now: tuple[int, int] | None) -> BatchValueError:
        before = self._used or (1, 0)
        rule = "of torch.distributed must be made before the sampler is used"
        found = "the sampler was used with 1 rank, and"
        if before != (1, 0):
            rule = f"must have {before[0]} ranks, as when the sampler was first used"
            rule += f", and this must be rank {before[1]}"
            found = ""
        text = "there is no group now"
        if now:
            text = f"now it has {plural(now[0], 'rank')}, and this is rank {now[1]}"
        return BatchValueError(
            f"{self._where} the group {rule}, but {found} {text}. Make a new sampler "
            "for this group.".replace("  ", " ")
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with the numbers of this process if it has a group.

        The process that reads them may be a worker of a loader, without a group.
        """
        state = dict(self.__dict__)
        if self._used is None and (group := _find_group()) is not None:
            state["_used"], state["_pid"] = group, os.getpid()
        return state


def _find_group() -> tuple[int, int] | None:
    """Return the size of the default group and the rank in it, None without a group."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return None
    return group.get_world_size(), group.get_rank()
