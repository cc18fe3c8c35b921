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

import functools
from collections.abc import Callable
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
        self._before = self._after = self._states()

    def _states(self) -> list[tuple[torch.Generator, torch.Tensor]]:
        if not self.follows_loop:
            return []
        own = find_generators(ordering_parts(self._loader)).values()
        return [(each, each.get_state()) for each in [torch.default_generator, *own]]

    def begin(self) -> None:
        """Record that ``iter(loader)`` has drawn."""
        self._after = self._states()

    def keep(self) -> None:
        """Let `undo` do nothing."""
        self._before = []

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
        ahead, shuffles, is_known = self._rules
        if ahead is None:
            return False
        number = position + ahead
        if shuffles is not None and shuffles(number):
            return True
        if is_known and self._loader.num_workers:  # the workers have the end already
            return False
        end = self._length.value
        return number == (self._own_length if end is None and is_known else end)

    @functools.cached_property
    def _own_length(self) -> int:
        return len(self._loader)

    @functools.cached_property
    def _rules(self) -> tuple[int | None, Callable[[int], bool] | None, bool]:
        """The facts of the whole pass.

        The number of batches that the sampler is ahead of the loop, None if all its
        draws come early; whether it shuffles with a batch; whether its class is known.
        """
        loader = self._loader
        # accelerate's loaders read one batch ahead.
        ahead = int("gradient_state" in vars(loader))
        if loader.num_workers:
            if isinstance(loader.dataset, IterableDataset):
                return None, None, False
            ahead += loader.num_workers * loader.prefetch_factor
        batches = loader.batch_sampler
        sampler = unwrap_batch_sampler(loader.sampler if batches is None else batches)
        shuffles = None
        if type(sampler) is RandomSampler and sampler.generator is not None:
            if not sampler.replacement:
                size = 1 if batches is None else batches.batch_size
                shuffles = _shuffles(sampler, size)
        return ahead, shuffles, draws_at_start(sampler)


def _shuffles(sampler: RandomSampler, size: int) -> Callable[[int], bool]:
    """Return a function that is True if a permutation begins with a batch.

    Args:
        sampler: it begins a last permutation at its end.
        size: the number of samples in a batch.
    """
    count, last = max(len(sampler.data_source), 1), int(sampler.num_samples)

    def shuffles(number: int) -> bool:
        first = number * size
        begin = -(-first // count) * count
        return begin < first + size and begin <= last

    return shuffles
