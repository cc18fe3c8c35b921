"""``pyparallel.SizeBatchSampler``: batches of samples of similar sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import Sampler

from ..batch.padding import Padding
from ..core.errors import BatchTypeError, BatchValueError, check_int, type_name
from ..core.text import plural
from ._arguments import (
    check_arguments,
    check_flags,
    check_history,
    check_numbers,
    check_state,
    import_planner,
    limit_text,
)
from ._loaders import (
    advice_if_replaced,
    check_batches,
    check_dataset,
    check_loader_of_pass,
)
from .ranks import Ranks

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
    ``batch_sampler``. Each pass is another epoch, with or without `set_epoch`. A pass
    begins with its first batch. All ranks must begin the same passes. ``max_padded`` is
    the ``max_tokens`` of fairseq, for any number of dimensions and with the padding;
    ``max_batch_size`` is its ``max_sentences``. `state_dict` and `load_state_dict` are
    torchdata's ``Stateful`` protocol.

    Args:
        sizes: the integer sizes of the dimensions that are padded: an array, a tensor
            or a sequence, ``(n,)`` or ``(n, d)``. For example the lengths of texts, or
            the heights and widths of images. Or a function that returns the size, or
            the sizes, of the sample of an index. It is called once for each sample.
        batch_size: the number of samples of a batch.
        max_padded: instead of ``batch_size``: the largest number of elements of a
            batch with its padding, that is tokens or pixels.
        max_total: instead of ``batch_size``: the largest sum of all sizes of a batch,
            for fields without padding, such as the nodes and edges of graphs. Such
            batches are cut from the shuffled samples, whatever their sizes.
        max_batch_size: the largest number of samples of a batch of ``max_padded`` or
            ``max_total``.
        padding: the `Padding` of the field. The sampler uses its target shapes, and
            with its ``buckets`` or ``size_divisor`` the batches have few shapes.
        shuffle: make the plan random. Otherwise the windows are in the order of the
            data set, and the batches in the order of the windows.
        seed: the seed of the plan. It must be the same on all ranks.
        window: the number of batches that are divided together. A larger number means
            less padding. A smaller number means more random batches.
        drop_last: drop the samples that do not fill a batch on each rank. They are
            other ones in each epoch. Otherwise the last batch is smaller, and the last
            step repeats batches on ranks that would have none.
        num_replicas: the number of ranks. None: the size of the default group of
            ``torch.distributed`` at the first ``iter()``, ``len()`` or `report`, 1 if
            it is not initialised.
        rank: the rank of this process. None: its rank in that group, 0 without one.
        skip_oversized: leave out samples that alone exceed ``max_padded`` or
            ``max_total``, instead of an error. `num_skipped` is their number.
        plan_size: the largest number of places of a plan, for data sets of more
            samples. Then samples of similar sizes share a place. Each batch of places
            is used several times in an epoch, with other samples. ``drop_last`` also
            drops at most one place, and samples that fill no batch of places. Without
            ``shuffle``, the order is that of the sizes.
        num_samples: the number of samples, if ``sizes`` is a function.
        progress: show a progress bar for calls of ``sizes``, if tqdm is installed.
        cache: the path of a file for the sizes, if ``sizes`` is a function. If the file
            does not exist, the sizes are evaluated and written. Otherwise they are
            read, and the function is called only for the first and the last sample, to
            compare them. Delete the file if other sizes change.

    Attributes:
        sizes: the sizes as an array ``(n, d)``.
        num_skipped: the number of samples that were left out as oversized.

    Raises:
        ImportError: NumPy is not installed.
        TypeError: an argument has the wrong type.
        ValueError: an argument has an impossible value, or a sample exceeds
            ``max_padded`` or ``max_total``. The message names the sample.

    Example:
        >>> lengths = [3, 90, 4, 80, 5, 70]
        >>> sampler = SizeBatchSampler(lengths, batch_size=3, shuffle=False)
        >>> list(sampler)
        [[0, 2, 4], [5, 3, 1]]
        >>> sampler = SizeBatchSampler(lengths, max_padded=180, shuffle=False)
        >>> list(sampler)
        [[0, 2, 4], [5, 3], [1]]
    """

    #: The loader need not save the global random states with each batch.
    _draws_at_start = True

    def __init__(
        self,
        sizes: Any,
        batch_size: int | None = None,
        *,
        max_padded: int | None = None,
        max_total: int | None = None,
        max_batch_size: int | None = None,
        padding: Padding | None = None,
        shuffle: bool = True,
        seed: int = 0,
        window: int = 50,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        skip_oversized: bool = False,
        plan_size: int | None = None,
        num_samples: int | None = None,
        progress: bool = True,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        planner = import_planner(_WHERE)
        if isinstance(sizes, Sampler):
            raise BatchTypeError(
                f"{_WHERE} sizes must be the sizes of the samples, but is a sampler "
                f"({type_name(sizes)}). {advice_if_replaced()}"
            )
        options, self._arguments = check_arguments(
            _WHERE,
            batch_size=batch_size,
            max_padded=max_padded,
            max_total=max_total,
            max_batch_size=max_batch_size,
            padding=padding,
            shuffle=shuffle,
            seed=seed,
            window=window,
            drop_last=drop_last,
            skip_oversized=skip_oversized,
        )
        if plan_size is not None:
            plan_size = check_int(plan_size, 1, f"{_WHERE} plan_size")
        self._arguments["plan_size"] = plan_size
        check_flags(_WHERE, progress=progress)
        self._ranks = Ranks(_WHERE, num_replicas, rank)
        self.sizes: Any
        if callable(sizes):
            self.sizes = _evaluate_sizes(sizes, num_samples, progress, cache)
        else:
            _check_unused(num_samples=num_samples, cache=cache)
            self.sizes = planner.check_sizes(sizes)
        self.batch_size: int | None = batch_size
        self.drop_last: bool = drop_last
        shapes = planner.PaddedShapes(padding, self.sizes.shape[1])
        shapes.check_largest(self.sizes)
        budget = planner.Budget(shapes, options["max_padded"], options["max_total"])
        candidates = planner.find_candidates(self.sizes, budget, skip_oversized)
        places = planner.Places.of(self.sizes, candidates, plan_size)
        self._planner = planner.Planner(places, shapes, **options)
        self.num_skipped: int = len(self.sizes) - places.num_samples
        self._arguments["num_samples"] = len(self.sizes)
        self._arguments["checksum"] = planner.checksum(self.sizes)
        # Where a pass begins, or the position after the last batch.
        self._position = _first(0)
        # The number of the epoch after this one, if the position is used.
        self._next_epoch = 1
        # Where the last pass began, None after set_epoch() or load_state_dict().
        self._reported: _Position | None = None
        self._kept: tuple[Any, Plan] | None = None

    @property
    def epoch(self) -> int:
        """The number of the current epoch, between two passes that of the next."""
        return self._position.epoch

    @property
    def num_replicas(self) -> int:
        """The number of ranks."""
        return self._ranks.use()[0]

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._ranks.use()[1]

    @property
    def sampler(self) -> SizeBatchSampler:
        """This object: Lightning, accelerate and mmengine call its ``set_epoch``."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank in this epoch, after a loaded position.

        Raises:
            ValueError: the sizes are not those of the loader's dataset, if it is known;
                accelerate divides the batches again; or the group of
                ``torch.distributed`` has changed.
        """
        check_loader_of_pass(self, yields_batches=True)
        num_replicas, rank = self._ranks.use()
        start = self._find_start()
        # set_epoch() may follow before the first batch, unless this is a rest.
        is_rest = bool(start.history or start.step)
        return self._pass(num_replicas, rank, start if is_rest else None)

    def _find_start(self) -> _Position:
        """Return the position where the next pass begins."""
        if self._position.is_used:
            self._position = _first(self._next_epoch)
        return self._position

    def _pass(
        self, num_replicas: int, rank: int, rest: _Position | None
    ) -> Iterator[list[int]]:
        position = rest or self._find_start()
        if position is self._position:  # set_epoch() was not called since iter()
            self._next_epoch = position.next_epoch
        position = position.divide(num_replicas)
        self._reported = position
        plan = self._make_plan(position)
        for step in range(position.step, len(plan.steps)):
            # In one assignment, because another thread may call set_epoch().
            self._position = position._replace(step=step + 1, is_used=True)
            yield plan.batch(step, rank)
        self._position = _first(self._next_epoch)

    def __len__(self) -> int:
        """Return the number of batches of each rank in this epoch.

        With ``max_padded`` or ``max_total`` it may differ between epochs. In a resumed
        epoch it includes the batches before the loaded position.
        """
        position = self._position.divide(self._ranks.use()[0])
        before = sum(num_steps for _, num_steps in position.history)
        return before + len(self._make_plan(position).steps)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next pass begins.

        It determines the plan. Without this call, each pass begins the epoch after that
        of the pass before it, even if that pass was left. A loaded position is kept if
        its epoch has the same number.
        """
        epoch = check_int(epoch, 0, "SizeBatchSampler.set_epoch: epoch")
        self._next_epoch = epoch  # for a pass that yields further batches
        self._reported = None
        if self._position.is_used or epoch != self._position.epoch:
            self._position = _first(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded.

        It is the same on all ranks after the same number of batches. ``json`` and
        ``torch.save`` support it. Loaders prefetch batches: take the state of the
        loader, which has the state of this sampler at the batch in use.
        """
        position = self._position
        return {
            "version": _VERSION,
            "epoch": position.epoch,
            "next_epoch": self._next_epoch if position.is_used else position.next_epoch,
            "history": [list(part) for part in position.history],
            "num_replicas": position.num_replicas or self._ranks.peek()[0],
            "step": position.step,
            "arguments": dict(self._arguments),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue after a position.

        The number of ranks may have changed: the samples that no rank has used are
        divided between the ranks of today, and each is used once. At the end of an
        epoch, ``iter()`` yields nothing, and the one after it begins the next epoch.

        Args:
            state_dict: a return value of `state_dict`, of any rank.

        Raises:
            ValueError: the state has another format, or belongs to a sampler with other
                arguments or sizes. The sampler is unchanged.
        """
        state = check_state("SizeBatchSampler", state_dict, _VERSION, self._arguments)
        least = {"epoch": 0, "next_epoch": 0, "step": 0, "num_replicas": 1}
        numbers = check_numbers("SizeBatchSampler", state, **least)
        history = check_history("SizeBatchSampler", state)
        self._position = _Position(history=history, is_used=False, **numbers)
        self._reported = None

    def report(self) -> SizeBatchReport:
        """Compare the plan of an epoch with random batches.

        It is the epoch of the last pass. Before a pass, and after `set_epoch`, it is
        the epoch that the next pass begins. With ``plan_size`` it has the largest sizes
        of the samples that share a place.

        Returns:
            The share of padding, the number of shapes, the balance of the ranks, and
            the number of steps. ``print`` shows them as a table.
        """
        from .report import make_report

        position = self._reported or self._position
        position = position.divide(self._ranks.use()[0])
        return make_report(self._planner, self._make_plan(position), position.epoch)

    def check_loader(self, loader: Any) -> None:
        """Check that a loader can use this sampler. `DataLoader` calls it.

        Args:
            loader: a loader with this ``batch_sampler``.

        Raises:
            TypeError: the sampler was passed as ``sampler``.
            ValueError: the number of sizes is not the number of samples of the dataset.
        """
        check_batches(self, loader)
        check_dataset(self, loader, len(self.sizes))

    def __repr__(self) -> str:
        """Return the main arguments in one line."""
        samples = plural(len(self.sizes), "sample")
        return (
            f"{type(self).__name__}({samples}, {limit_text(self._arguments)}, "
            f"epoch={self.epoch}, {self._ranks!r})"
        )

    def _make_plan(self, position: _Position) -> Plan:
        """Return the plan of a part of an epoch. The last one is kept."""
        key = (position.epoch,), position.num_replicas, position.history
        kept = self._kept  # in one reference, because threads may share the sampler
        if kept is None or key != kept[0]:
            kept = self._kept = None  # before the memory of the next one is needed
            kept = self._kept = key, self._planner.plan(*key)
        plan = kept[1]
        num_steps = len(plan.steps)
        if position.step > num_steps:
            raise BatchValueError(
                f"{_WHERE} a loaded position must be in its epoch of {num_steps} "
                f"batches, but is after batch {position.step}. Load an undamaged state."
            )
        return plan


class _Position(NamedTuple):
    """A place in an epoch.

    Attributes:
        epoch: the number of the epoch.
        next_epoch: the number of the epoch after it.
        history: the parts of the epoch before the last change of the number of ranks:
            their numbers of ranks and of steps.
        num_replicas: the number of ranks of the last part, 0 before its first step.
        step: the number of its steps that were yielded.
        is_used: a pass of this sampler has yielded the last of these steps.
    """

    epoch: int
    next_epoch: int
    history: tuple[tuple[int, int], ...] = ()
    num_replicas: int = 0
    step: int = 0
    is_used: bool = False

    def divide(self, num_replicas: int) -> _Position:
        """Return the position for a number of ranks, which may be another one."""
        if num_replicas == self.num_replicas or not self.step:
            return self._replace(num_replicas=num_replicas)
        history = (*self.history, (self.num_replicas, self.step))
        return self._replace(history=history, num_replicas=num_replicas, step=0)


def _first(epoch: int) -> _Position:
    """Return the start of an epoch."""
    return _Position(epoch, epoch + 1)


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
