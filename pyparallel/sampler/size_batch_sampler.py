"""``pyparallel.SizeBatchSampler``: batches of samples of similar sizes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from ..batch.padding import Padding
from ..core.errors import BatchTypeError, BatchValueError, check_int, type_name
from ._arguments import (
    check_arguments,
    check_flags,
    check_state,
    find_ranks,
    import_planner,
)

if TYPE_CHECKING:  # these modules need NumPy, which is optional
    from .planner import Plan
    from .report import SizeBatchReport

#: The version of the format of a state.
_VERSION = 1
_WHERE = "SizeBatchSampler:"


class SizeBatchSampler(Sampler[list[int]]):
    """A batch sampler that puts samples of similar sizes together.

    Such batches need little padding. The samples are shuffled, windows of them are
    divided like the points of a k-d tree until one batch is left, and the batches are
    shuffled. All ranks calculate the same plan without communication. They have the
    same number of batches, and the batches of one step have similar costs.

    The interface is that of torch's ``DistributedSampler``, but of batches: pass it as
    ``batch_sampler``, and call `set_epoch` before each epoch. ``max_padded`` is the
    ``max_tokens`` of fairseq, for any number of dimensions and with the padding;
    ``max_batch_size`` is its ``max_sentences``. `state_dict` and `load_state_dict` are
    torchdata's ``Stateful`` protocol.

    Args:
        sizes: The integer sizes of the dimensions that are padded: an array, a tensor
            or a sequence, ``(n,)`` or ``(n, d)``. For example the lengths of texts, or
            the heights and widths of images. Or a function that returns the size, or
            the sizes, of the sample of an index. It is called once for each sample.
        batch_size: The number of samples of a batch.
        max_padded: Instead of ``batch_size``: the largest number of elements of a
            batch with its padding, that is tokens or pixels.
        max_batch_size: The largest number of samples of a batch of ``max_padded``.
        padding: The `Padding` of the field. The sampler uses its target shapes, and
            with its ``buckets`` or ``size_divisor`` the batches have few shapes.
        shuffle: Make the plan random. Otherwise the windows are in the order of the
            data set, and the batches in the order of the windows.
        seed: The seed of the plan. It must be the same on all ranks.
        window: The number of batches that are divided together. A larger number means
            less padding. A smaller number means more random batches.
        drop_last: Drop the samples that do not fill a batch on each rank. They are
            other ones in each epoch. Otherwise the last batch is smaller, and the last
            step repeats batches on ranks that would have none.
        num_replicas: The number of ranks. None: the size of the default group of
            ``torch.distributed``, 1 if it is not initialised.
        rank: The rank of this process. None: its rank in that group, 0 without one.
        skip_oversized: Leave out samples that alone exceed ``max_padded``, instead of
            an error. `num_skipped` is their number.
        num_samples: The number of samples, if ``sizes`` is a function.
        progress: Show a progress bar for calls of ``sizes``, if tqdm is installed.
        cache: The path of a file for the sizes, if ``sizes`` is a function. If the file
            does not exist, the sizes are evaluated and written. Otherwise they are
            read, and the function is called only for the first and the last sample, to
            compare them. Delete the file if other sizes change.

    Attributes:
        epoch: The number of the epoch, by `set_epoch`.
        sizes: The sizes as an array ``(n, d)``.
        num_skipped: The number of samples that were left out as oversized.

    Raises:
        ImportError: NumPy is not installed.
        TypeError: An argument has the wrong type.
        ValueError: An argument has an impossible value, or a sample exceeds
            ``max_padded``. The message names the sample.

    Example:
        >>> lengths = [3, 90, 4, 80, 5, 70]
        >>> sampler = SizeBatchSampler(lengths, batch_size=3, shuffle=False)
        >>> list(sampler)
        [[0, 2, 4], [5, 3, 1]]
        >>> sampler = SizeBatchSampler(lengths, max_padded=180, shuffle=False)
        >>> list(sampler)
        [[0, 2, 4], [5, 3], [1]]
    """

    def __init__(
        self,
        sizes: Any,
        batch_size: int | None = None,
        *,
        max_padded: int | None = None,
        max_batch_size: int | None = None,
        padding: Padding | None = None,
        shuffle: bool = True,
        seed: int = 0,
        window: int = 50,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        skip_oversized: bool = False,
        num_samples: int | None = None,
        progress: bool = True,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        planner = import_planner(_WHERE)
        if isinstance(sizes, Sampler):
            raise BatchTypeError(
                f"{_WHERE} sizes must be the sizes of the samples, but is a sampler "
                f"({type_name(sizes)}). If Lightning has replaced the sampler, set "
                "use_distributed_sampler=False of its Trainer."
            )
        options, self._arguments = check_arguments(
            _WHERE,
            batch_size=batch_size,
            max_padded=max_padded,
            max_batch_size=max_batch_size,
            padding=padding,
            shuffle=shuffle,
            seed=seed,
            window=window,
            drop_last=drop_last,
            skip_oversized=skip_oversized,
        )
        check_flags(_WHERE, progress=progress)
        self.num_replicas, self.rank = find_ranks(_WHERE, num_replicas, rank)
        if callable(sizes):
            self.sizes = _evaluate_sizes(sizes, num_samples, progress, cache)
        else:
            _check_unused(num_samples=num_samples, cache=cache)
            self.sizes = planner.check_sizes(sizes)
        self.batch_size, self.drop_last = batch_size, drop_last
        shapes = planner.PaddedShapes(padding, self.sizes.shape[1])
        shapes.check_largest(self.sizes)
        self._planner = planner.Planner(
            sizes=self.sizes,
            shapes=shapes,
            candidates=planner.find_candidates(
                self.sizes, shapes, options["max_padded"], skip_oversized
            ),
            **options,
        )
        self.num_skipped = len(self.sizes) - len(self._planner.candidates)
        self._arguments["num_samples"] = len(self.sizes)
        self._arguments["checksum"] = self._planner.checksum()
        self.epoch = 0
        # The parts of this epoch before the last change of the number of ranks.
        self._history: list[list[int]] = []
        # The steps of this part that were yielded, and those that iter() skips.
        self._step = self._first_step = 0
        self._plan: Plan | None = None
        self._plan_key: Any = None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank in this epoch, after a loaded position."""
        first, self._first_step = self._first_step, 0
        if not first and self._step:  # a new pass, not the rest of a resumed one
            self._history = []
        self._step = first
        plan = self._make_plan()
        for step in range(first, len(plan.steps)):
            self._step = step + 1
            yield plan.batch(step, self.rank)
        self._step, self._history = 0, []

    def __len__(self) -> int:
        """Return the number of batches of each rank in this epoch.

        With ``max_padded`` it may differ between epochs. In a resumed epoch it includes
        the batches before the loaded position.
        """
        before = sum(num_steps for _, num_steps in self._history)
        return before + len(self._make_plan().steps)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which determines the plan.

        A loaded position is kept if its epoch has the same number.
        """
        epoch = check_int(epoch, 0, "SizeBatchSampler.set_epoch: epoch")
        if epoch != self.epoch:
            self.epoch, self._history = epoch, []
            self._step = self._first_step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded.

        It is the same on all ranks after the same number of batches. ``json`` and
        ``torch.save`` support it. Loaders prefetch batches: take the state of the
        loader, which has the state of this sampler at the batch in use.
        """
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "history": copy.deepcopy(self._history),
            "num_replicas": self.num_replicas,
            "step": self._step or self._first_step,
            "arguments": dict(self._arguments),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue after a position.

        The number of ranks may have changed: the samples that no rank has used are
        divided between the ranks of today, and each is used once.

        Args:
            state_dict: A return value of `state_dict`, of any rank.

        Raises:
            ValueError: The state has another format, or belongs to a sampler with other
                arguments or sizes.
        """
        state = check_state("SizeBatchSampler", state_dict, _VERSION, self._arguments)
        self.epoch, self._history = state["epoch"], copy.deepcopy(state["history"])
        step, num_replicas = state["step"], state["num_replicas"]
        if num_replicas != self.num_replicas and step:
            self._history.append([num_replicas, step])
            step = 0
        self._first_step, self._step = step, 0

    def report(self) -> SizeBatchReport:
        """Compare the plan of this epoch with random batches.

        Returns:
            The share of padding, the number of shapes, the balance of the ranks, and
            the number of steps. ``print`` shows them as a table.
        """
        from .report import make_report

        return make_report(self._planner, self._make_plan(), self.epoch)

    def _make_plan(self) -> Plan:
        """Return the plan of the rest of this epoch. The last one is kept."""
        history = [(replicas, num_steps) for replicas, num_steps in self._history]
        key = (self.epoch, history)
        if self._plan is None or key != self._plan_key:
            self._plan = self._planner.plan(self.epoch, self.num_replicas, history)
            self._plan_key = key
        return self._plan


def _check_unused(**options: Any) -> None:
    """Check that options for a function ``sizes`` are None."""
    for name, value in options.items():
        if value is not None:
            raise BatchValueError(
                f"{_WHERE} {name} must be None if sizes is not a function, but is "
                f"{value!r}. Remove {name}."
            )


def _evaluate_sizes(
    size_of: Any, num_samples: int | None, progress: bool, cache: Any
) -> Any:
    """Return the sizes that a function has for all samples, or those of a file."""
    from ._measure import measure_sizes

    rule = "an integer, as sizes is a function,"
    number = check_int(num_samples, 0, f"{_WHERE} num_samples", rule)
    if cache is not None and not isinstance(cache, (str, os.PathLike)):
        raise BatchTypeError(
            f"{_WHERE} cache must be the path of a file or None, but is {cache!r} "
            f"({type_name(cache)})."
        )
    return measure_sizes(
        size_of, number, progress, None if cache is None else Path(cache)
    )
