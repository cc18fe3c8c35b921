"""``pyparallel.DistributedEvalSampler``: each sample on exactly one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from ._arguments import check_flags, find_ranks

_WHERE = "DistributedEvalSampler:"


class DistributedEvalSampler(DistributedSampler[Any]):
    """A sampler for evaluation, which gives each sample to exactly one rank.

    torch's ``DistributedSampler`` repeats samples so that all ranks have the same
    number, so it changes metrics. Here ranks may differ by one sample, and so by one
    batch. Rank ``r`` of ``n`` has the samples ``r``, ``r + n``, ``r + 2 * n`` and so
    on. Libraries that replace samplers of torch's loader leave this one, as it is a
    ``DistributedSampler``.

    Args:
        dataset: The map-style dataset.
        num_replicas: The number of ranks. None: the size of the default group of
            ``torch.distributed``, 1 if it is not initialised.
        rank: The rank of this process. None: its rank in that group, 0 without one.
        pad: Append one sample on ranks that have one less, for models that communicate
            in their forward pass. Leave it out of the results: see `num_valid`.

    Attributes:
        num_valid: The number of the rank's own samples. With ``pad``, an appended
            sample comes after them.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is negative, or the rank is too large.

    Example:
        >>> [list(DistributedEvalSampler(range(5), 2, rank)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]
        >>> [list(DistributedEvalSampler(range(5), 2, r, pad=True)) for r in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        pad: bool = False,
    ) -> None:
        check_flags(_WHERE, pad=pad)
        num_replicas, rank = find_ranks(_WHERE, num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle=False)
        self.pad = pad
        self.num_valid = len(range(rank, len(dataset), num_replicas))
        padded = -(-len(dataset) // num_replicas)
        self.num_samples = padded if pad else self.num_valid
        self.total_size = padded * num_replicas if pad else len(dataset)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank in the order of the dataset."""
        length = len(self.dataset)  # type: ignore[arg-type]
        first, step = self.rank, self.num_replicas
        return (
            index % length
            for index in range(first, self.num_samples * step + first, step)
        )
