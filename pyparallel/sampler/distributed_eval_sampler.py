"""``pyparallel.DistributedEvalSampler``: each sample on exactly one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from ..core.text import plural
from ._arguments import check_flags
from ._loaders import check_dataset, check_loader_of_pass
from .ranks import Ranks

_WHERE = "DistributedEvalSampler:"


class DistributedEvalSampler(DistributedSampler[Any]):
    """A sampler for evaluation, which gives each sample to exactly one rank.

    torch's ``DistributedSampler`` repeats samples so that all ranks have the same
    number, so it changes metrics. Here ranks may differ by one sample, and so by one
    batch. Rank ``r`` of ``n`` has the samples ``r``, ``r + n``, ``r + 2 * n`` and so
    on. Libraries that replace samplers of torch's loader leave this one, as it is a
    ``DistributedSampler``.

    Args:
        dataset: the map-style dataset.
        num_replicas: the number of ranks. None: the size of the default group of
            ``torch.distributed`` at the first ``iter()`` or ``len()``, 1 if it is not
            initialised.
        rank: the rank of this process. None: its rank in that group, 0 without one.
        pad: append one sample on ranks that have one less, for models that communicate
            in their forward pass. Leave it out of the results: see ``num_valid``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is negative, or the rank is too large.

    Example:
        >>> [list(DistributedEvalSampler(range(5), 2, rank)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]
        >>> [list(DistributedEvalSampler(range(5), 2, r, pad=True)) for r in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """

    #: The loader need not save the global random states with each batch.
    _draws_at_start = True

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        pad: bool = False,
    ) -> None:
        check_flags(_WHERE, pad=pad)
        self._ranks = Ranks(_WHERE, num_replicas, rank)
        # torch's __init__ would look up the ranks, so its attributes are set here.
        self.dataset: Any = dataset
        self.pad: bool = pad
        self.epoch = self.seed = 0
        self.shuffle = self.drop_last = False

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return self._ranks.use()[0]

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of this process."""
        return self._ranks.use()[1]

    @property
    def num_valid(self) -> int:
        """The number of the rank's own samples. An appended sample follows them."""
        num_replicas, rank = self._ranks.use()
        return len(range(rank, self._length(), num_replicas))

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of the rank, including an appended one."""
        if not self.pad:
            return self.num_valid
        return -(-self._length() // self.num_replicas)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of samples of all ranks, including appended ones."""
        if not self.pad:
            return self._length()
        return self.num_samples * self.num_replicas

    def _length(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank in the order of the dataset.

        Raises:
            ValueError: the loader has a dataset of another length, if it is known;
                accelerate divides the batches again; or the group of
                ``torch.distributed`` has changed.
        """
        check_loader_of_pass(self, yields_batches=False)
        (step, first), length = self._ranks.use(), self._length()
        return (
            index % length
            for index in range(first, self.num_samples * step + first, step)
        )

    def check_loader(self, loader: Any) -> None:
        """Check that a loader has this dataset. `DataLoader` calls it.

        Args:
            loader: a loader with this ``sampler``.

        Raises:
            ValueError: the loader's dataset has another length.
        """
        check_dataset(self, loader, self._length())

    def __repr__(self) -> str:
        """Return the main arguments in one line."""
        samples = plural(self._length(), "sample")
        return f"{type(self).__name__}({samples}, {self._ranks!r}, pad={self.pad})"
