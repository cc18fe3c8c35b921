"""Continue an epoch of torch's ``DistributedSampler`` with another number of ranks.

Note: [dealt order]. All ranks have one order of the dataset, and take its samples in
turn. So after the same number of batches, the used samples of all ranks are the first
ones of that order. The rest is dealt again, in turn, to the ranks of today.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from ..core.errors import type_name
from ..core.stateful import is_stateful
from ._sampler_state import unwrap_batch_sampler


class _DealtSampler:
    """The samples of one rank in an epoch, without the first ones of the order.

    Args:
        sampler: the sampler of today, for its dataset, seed, epoch and ``drop_last``.
        ranks: the rank and the number of ranks, as in `find_ranks`.
        num_used: the number of samples at the start of the order that ranks have used.
    """

    def __init__(self, sampler: Any, ranks: dict[str, Any], num_used: int) -> None:
        self._sampler, self._num_used = sampler, num_used
        self._num_replicas, self._rank = ranks["num_replicas"], ranks["rank"]

    def __iter__(self) -> Iterator[int]:
        single: Any = copy.copy(self._sampler)
        single.num_replicas, single.rank = 1, 0
        single.num_samples = single.total_size = len(single.dataset)
        rest = list(single)[self._num_used :]
        surplus = len(rest) % self._num_replicas
        if surplus and self._sampler.drop_last:
            del rest[-surplus:]
        elif surplus:  # as in torch, the first samples are repeated
            missing = self._num_replicas - surplus
            rest += (rest * missing)[:missing]
        return iter(rest[self._rank :: self._num_replicas])


def find_ranks(sampler: Any) -> dict[str, Any] | None:
    """Return the rank and the number of ranks of a loader's sampler without a state.

    Returns:
        None if the sampler does not divide its samples between ranks, or if it is
        stateful. ``history`` has the number of ranks and of the batches of each rank,
        for each earlier part of the epoch.
    """
    inner = unwrap_batch_sampler(sampler)
    inner = getattr(inner, "sampler", inner)  # inside another batch sampler
    if is_stateful(inner) or is_stateful(sampler):
        return None
    num_replicas = getattr(inner, "num_replicas", None)
    rank = getattr(inner, "rank", None)
    if type(num_replicas) is not int or type(rank) is not int:
        return None
    return {"num_replicas": num_replicas, "rank": rank, "history": []}


def check_ranks(sampler: Any, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return True if a state is of another rank, or of another number of ranks.

    The state of another rank of the same number is found by its indices if the order of
    the sampler is known. Otherwise they are compared with those of this rank.
    ``saved`` and ``now`` are results of `find_ranks`.

    Raises:
        RuntimeError: the rest of the epoch cannot be dealt again.
    """
    inner = unwrap_batch_sampler(sampler)
    is_known = type(inner) is DistributedSampler
    if saved["num_replicas"] == now["num_replicas"]:
        return is_known and saved["rank"] != now["rank"]
    if not is_known:
        raise RuntimeError(
            "DataLoader.load_state_dict: the state must be of "
            f"{now['num_replicas']} ranks like this job, but is of "
            f"{saved['num_replicas']}, and the order of a {type_name(inner)} is "
            "unknown. Use torch's DistributedSampler or pyparallel.SizeBatchSampler, "
            f"or continue with {saved['num_replicas']} ranks."
        )
    return True


def sampler_of(sampler: Any, ranks: dict[str, Any]) -> Any:
    """Return the sampler of a loader for a rank in the rest of an epoch.

    ``ranks`` is a result of `find_ranks`, with the history.
    """
    used = sum(num_ranks * batches for num_ranks, batches in ranks["history"])
    inner = unwrap_batch_sampler(sampler)
    used *= 1 if inner is sampler else sampler.batch_size
    dealt: Any = _DealtSampler(inner, ranks, used)
    if inner is sampler:
        return dealt
    return BatchSampler(dealt, sampler.batch_size, sampler.drop_last)
