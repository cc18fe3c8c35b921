"""Find the batches with which a loader draws random numbers or changes its sampler.

Note: [draws]. torch's loader draws in ``iter()``, with the first batch, and where its
sampler draws: a `RandomSampler` with a generator does so for each permutation, and once
more at its end. Other loops get another order if these draws come earlier: loops that
begin a pass early, that stop after the last batch, or that use one generator for two
loaders. So for loaders of torch's class

1. ``iter()`` of a `PreDataLoader` returns after its thread has called ``iter(loader)``.
2. The thread waits for the loop before it reads a batch with which the loader draws.
   Workers are ahead of the loop, so this batch comes earlier, as in torch.
3. The end counts as such a batch, because samplers may draw or begin another epoch
   there. Its position comes from ``len()``. A sampler of an unknown class may draw in
   its ``__len__``, so only loops call that.

A pass whose iterator is dropped at once draws nothing: Lightning calls ``iter()`` to
check that an object of another class than torch's is iterable.

Some draws still come early: those of a dataset without workers, those of a sampler of
an unknown class in mid-epoch, and those of ``RandomSampler(replacement=True)``. It
draws for each 32 samples, so waits would leave no time to read ahead. A pass that
``next_epoch=True`` starts is ahead of its loop by request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from ..core.torch_private import TorchLoader
from ._loader_state import find_generators, ordering_parts
from ._sampler_state import draws_at_start, unwrap_batch_sampler


class Length:
    """The number of batches that the loop knows.

    Attributes:
        value: the last result of ``len()``, None before its first call.
    """

    value: int | None = None


class Draws:
    """The batches with which the loader draws, in one pass.

    Args:
        loader: the loader. One of another class than torch's may draw at any time.
        length: the number of batches that the loop knows.

    Attributes:
        follows_loop: whether the thread waits for the loop at some batches.
    """

    def __init__(self, loader: Any, length: Length) -> None:
        self.follows_loop: bool = isinstance(loader, TorchLoader)
        self._loader, self._length = loader, length
        self._known_length: int | None = None
        self._before = self._after = self._states()

    def _states(self) -> list[tuple[torch.Generator, torch.Tensor]]:
        if not self.follows_loop:
            return []
        own = find_generators(ordering_parts(self._loader)).values()
        return [(each, each.get_state()) for each in [torch.default_generator, *own]]

    def begin(self) -> None:
        """Record that ``iter(loader)`` has drawn."""
        self._after = self._states()

    def undo(self) -> None:
        """Return the generators to the states before ``iter(loader)``.

        They stay as they are if other code has drawn since.
        """
        if all(torch.equal(each.get_state(), state) for each, state in self._after):
            for each, state in self._before:
                each.set_state(state)

    def waits_at(self, position: int) -> bool:
        """Return True if the loop must ask for a batch before it is read.

        Args:
            position: the number of the batch in its epoch.
        """
        if not self.follows_loop or not position:
            return self.follows_loop
        loader = self._loader
        # accelerate's loaders read one batch ahead.
        drawn = position + ("gradient_state" in vars(loader))
        if loader.num_workers:
            if isinstance(loader.dataset, IterableDataset):
                return False
            drawn += loader.num_workers * loader.prefetch_factor
        return self._draws_with(drawn)

    def _draws_with(self, number: int) -> bool:
        """Return True if the sampler may draw with this batch of its epoch."""
        loader = self._loader
        batches = loader.batch_sampler
        sampler = unwrap_batch_sampler(loader.sampler if batches is None else batches)
        shuffles = type(sampler) is RandomSampler and sampler.generator is not None
        if shuffles and not sampler.replacement:
            size = 1 if batches is None else batches.batch_size
            if _shuffles_with(sampler, number * size, size):
                return True
        is_known = draws_at_start(sampler)
        if is_known and loader.num_workers:  # the workers have the end already
            return False
        return number == self._number_of_batches(is_known=is_known)

    def _number_of_batches(self, *, is_known: bool) -> int | None:
        if self._length.value is not None or not is_known:
            return self._length.value
        if self._known_length is None:
            self._known_length = len(self._loader)
        return self._known_length


def _shuffles_with(sampler: RandomSampler, first: int, size: int) -> bool:
    """Return True if a sampler begins a permutation with a batch.

    Args:
        sampler: it begins a last one at its end.
        first: the number of the first sample of the batch.
        size: the number of its samples.
    """
    count = max(len(sampler.data_source), 1)
    begin = -(-first // count) * count
    return begin < first + size and begin <= int(sampler.num_samples)
