"""Track the position of a loader's iterator in its epoch, and restore it.

The position is the number of batches that the consumer has received, not the number
that workers have prepared. If the sampler has no state of its own, its order is
repeated: the random states of the start of the epoch are restored, and the same number
of indices is drawn again, without reading the dataset. A checksum detects different
indices.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..core.errors import LoaderWarning, type_name, warn_once
from ..core.stateful import is_stateful
from ..core.torch_private import ExceptionWrapper
from . import _random_state
from ._dataset_state import DatasetStates
from ._loader_state import (
    find_epochs,
    find_generators,
    ordering_parts,
    sample_numbers,
    set_epochs,
    state_between_epochs,
)
from ._passes import Pass
from ._random_state import SampleTask
from ._ranks import check_ranks, find_ranks, sampler_of
from ._sampler_state import (
    Order,
    draws_at_start,
    has_other_replicas,
    save_own_state,
    unwrap_batch_sampler,
)
from ._state_format import encode
from .arguments import Loader
from .sample_errors import (
    ErrorPolicy,
    SampleError,
    no_batch_error,
    warn_of_left_out,
)


class Progress:
    """One epoch of one iterator of a loader.

    Attributes:
        dataset: the states of the dataset.
        order: the indices, unless the dataset is iterable.
        num_delivered: the number of batches of the epoch that the consumer has
            received, or that raised an exception or were left out.
        samples: the seed and the number of the epoch, for ``sample_seeds`` and
            replacements. None: the tasks of workers are indices.
        errors: the samples of the epoch that raised an error, see ``on_error``.
        num_left_out: the number of batches that this iterator has left out.
        policy: reads samples if ``on_error`` is not ``"raise"``, else None.
        seeds_samples: whether each sample has its own random states, or the function
            that gets its seed.
        base_seed: the base seed of the workers.
        program_draws: whether only the program draws from the global random states
            after the start of the epoch, because the sampler is one of torch's, or of
            this package.
        finished: the epoch has ended.
        failed: a batch of the epoch raised an exception.
        epochs_seen: the numbers of ``set_epoch`` when the epoch began or ended.
        reader: the thread of a `PreDataLoader` that reads ahead of its loop. None after
            the loop has received all batches.
        num_in_loop: ``num_delivered`` at the last batch that the loop of a
            `PreDataLoader` has received.
        outer: the pass of a subclass that made the iterator, see Note [passes].
    """

    reader: threading.Thread | None = None
    num_in_loop = 0
    num_left_out = 0

    def __init__(self, loader: Loader, *, reset: bool = False) -> None:
        """Begin an epoch, or continue one if the loader has loaded a state.

        ``reset``: the iterator continues with the same workers.

        Raises:
            RuntimeError: the sampler does not yield the same indices again.
        """
        last: Progress | None = loader._progress
        state = loader._loaded or state_between_epochs(loader, last, asks_dataset=False)
        state = {**state, "samples": sample_numbers(loader, state["samples"])}
        self._parts = ordering_parts(loader)
        if state["epoch"] is None:  # the user may have called set_epoch() since
            state["epochs"] = find_epochs(self._parts)
        self.samples: dict[str, int] | None = state["samples"]
        self.seeds_samples: Any = loader.sample_seeds
        self.policy = ErrorPolicy(loader) if loader.on_error != "raise" else None
        self.errors = [SampleError(*error) for error in state["errors"]]
        self._generators = find_generators(self._parts)
        self._sampler = loader._index_sampler
        self._replaced = loader._replaced
        self._num_skipped = loader._num_skipped
        self._ranks = find_ranks(self._sampler)
        self._iterable = state["loader"]["dataset"] == "iterable"
        self._initial = state
        self.outer: Pass | None = loader._pass
        self.order: Order | None = None
        self.num_delivered = self._num_before = 0  # _num_before: by earlier iterators
        self.finished = self.failed = self._read_after_error = False
        self.base_seed: int | None = state["base_seed"]
        was_left = last is not None and not last.finished
        self.dataset = DatasetStates(loader, state, left=reset and was_left)
        # The sampler is in the middle of an epoch that was left, until its iter().
        self._begins_anew = was_left and state["sampler"] is not None
        has_seed = self.base_seed is None  # persistent workers draw no new seed
        self._epoch = {
            "start": state["random"],
            "epochs": state["epochs"],
            "iterators": state["loader"]["iterators"] if has_seed else 1,
            "seeds": has_seed,
        }
        # Whether `indices` calls iter() of the sampler again, after the base seed.
        self._restarts = self._epoch["iterators"] == 2
        # Random states to restore after torch draws the base seed, and at the end.
        self._random_after_seed: dict[str, Any] | None = None
        self._random_at_end: dict[str, Any] | None = None
        self._continued = loader._loaded is not None
        self._has_workers = loader.num_workers > 0
        self.program_draws = self._has_workers and (
            self._iterable or draws_at_start(self._sampler)
        )
        if self._continued:
            self._continue(state)
        self.epochs_seen = find_epochs(self._parts)
        self.dataset.number = self.epochs_seen.get("dataset")

    def _continue(self, state: dict[str, Any]) -> None:
        """Restore samplers and random states from a state."""
        own = (state["sampler"] or {}).get("own")
        if own is not None and not is_stateful(unwrap_batch_sampler(self._sampler)):
            raise self._order_error(
                "continue at the state of a sampler, but "
                f"{type_name(self._sampler)} has no load_state_dict"
            )
        if state["epoch"] is not None:
            self._epoch = {name: state["epoch"][name] for name in self._epoch}
            self.num_delivered = self._num_before = state["given"]
            self.dataset.turn = state["epoch"]["turn"]
            set_epochs(self._parts, self._epoch["epochs"])
            if not self._iterable:
                self._continue_order(state)
                return
            if self._num_skipped:
                raise RuntimeError(
                    "DataLoader.load_state_dict: the loop must get the first batch "
                    "after the state, but skip_first_batches of accelerate leaves out "
                    f"{self._num_skipped} more. The state skips batches itself, so "
                    "leave out skip_first_batches."
                )
        elif state["sampler"] is not None:
            self._prepare_sampler(state)
            # Its state may have another number than set_epoch() has set since.
            set_epochs(self._parts, state["epochs"])
        _random_state.restore(self._epoch["start"], self._generators)
        if self._iterable:
            if self.base_seed is not None:
                self._random_at_end = state["random"]
        elif self.base_seed is not None:
            self.order = Order(self._sampler)
            self._random_after_seed = _random_state.capture(self._generators)

    def _prepare_sampler(self, state: dict[str, Any]) -> None:
        """Restore a stateful sampler that was between two epochs."""
        if not state["given"]:
            unwrap_batch_sampler(self._sampler).load_state_dict(
                copy.deepcopy(state["sampler"]["own"])
            )
        elif not Order(self._sampler, state["sampler"]).is_at_end():
            raise RuntimeError(
                "DataLoader.load_state_dict: the sampler must be at the end of its "
                f"epoch after {state['given']} batches, but yields more after its "
                "state was restored. Make its load_state_dict continue at the position "
                "of state_dict."
            )

    def _continue_order(self, state: dict[str, Any]) -> None:
        """Restore the order of the indices, and the random states.

        If the state is of another rank, this rank keeps its own random states. With
        those of one saved rank, all ranks would draw the same numbers.
        """
        own = _random_state.capture(self._generators)
        _random_state.restore(self._epoch["start"], self._generators)
        is_moved = self._replay(state)
        if is_moved is None:
            raise self._order_error(
                f"yield its first {state['epoch']['drawn']} batches of indices again, "
                "but yields others with the restored random states"
            )
        self._restarts = False
        if is_moved:
            _random_state.restore(own, self._generators)
            self._epoch.update(start=own, seeds=True)
            self.base_seed = None
        else:
            self._random_after_seed = state["random"]

    def _order_error(self, text: str) -> RuntimeError:
        text = f"DataLoader.load_state_dict: the sampler must {text}"
        if self._replaced is not None:
            return RuntimeError(
                f"{text}. The reason: another library has made this loader from one "
                f"that loaded the state, with {type_name(self._sampler)} in place of "
                f"{self._replaced}. The state skips batches itself, so leave out "
                "skip_first_batches of accelerate. If the library divides the batches "
                "of ranks, load a state of the loader that the library returned."
            )
        return RuntimeError(
            f"{text}. Load the state of the same rank, sampler and data. If the "
            "sampler has its own randomness, add state_dict and load_state_dict to it."
        )

    def _replay(self, state: dict[str, Any]) -> bool | None:
        """Draw the same indices again, with the current numbers of the epoch.

        If the state is of another rank, its indices are drawn and compared. If the
        number of ranks has changed, the unused ones of all ranks are dealt again.

        Returns:
            True if the state is of another rank. None if the indices differ.
        """
        epoch, num_delivered = state["epoch"], state["given"]
        saved, now = state["ranks"], self._ranks
        sampler, before, is_moved = self._sampler, 0, False
        if saved is not None and now is not None:
            is_moved = check_ranks(sampler, saved, now)
            now["history"] = copy.deepcopy(saved["history"])
            before = sum(batches for _, batches in saved["history"])
            if is_moved or before:
                sampler = sampler_of(sampler, saved if is_moved else now)
        self.order = order = Order(sampler, state["sampler"])
        if epoch["seeds"]:
            generator = self._parts.get("generator")
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        if has_other_replicas(self._sampler, state["sampler"]):
            # The stopped loader had drawn batches ahead that no rank has today.
            order.resume_counting(num_delivered)
            return True
        try:
            if state["sampler"] is not None:
                order.resume_counting(num_delivered)
            else:
                if epoch["iterators"] == 2:
                    order.restart()
                order.resume_counting(before)
                skipped = enumerate(order.skip(num_delivered - before), before)
                self.dataset.set_replays([self._task(*task) for task in skipped])
            order.look_ahead(epoch["drawn"] - num_delivered)
        except StopIteration:
            pass
        # A sampler may draw random numbers at its end, so go there only if it had.
        at_end = order.is_at_end() if epoch["exhausted"] else False
        is_same = (
            order.num_drawn == epoch["drawn"]
            and at_end == epoch["exhausted"]
            and (state["sampler"] is not None or order.digest == epoch["digest"])
        )
        if not is_same:
            return None
        if is_moved and now is not None:
            self._move(saved, now, before, num_delivered)
        return is_moved

    def _move(
        self, saved: dict[str, Any], now: dict[str, Any], before: int, delivered: int
    ) -> None:
        """Continue with the samples of this rank after a state of another one.

        Args:
            saved: the ranks of the state, as in `find_ranks`.
            now: those of this job. Their history is that of the state.
            before: the batches of earlier parts of the epoch.
            delivered: the batches of the epoch that each rank has delivered.
        """
        order: Any = self.order
        if order.num_drawn == delivered and order.is_at_end():
            self._ranks = saved  # drop_last may have left out samples: they stay out
            return
        has_same_number = saved["num_replicas"] == now["num_replicas"]
        if not has_same_number:
            now["history"].append([saved["num_replicas"], delivered - before])
        is_dealt = bool(now["history"])
        self.order = Order(
            sampler_of(self._sampler, now) if is_dealt else self._sampler
        )
        self.order.resume_counting(before if has_same_number else delivered)
        if has_same_number:
            self.order.skip(delivered - before)

    def indices(self) -> Iterator[Any]:
        """Return the tasks of the epoch.

        Note: [iterators of a sampler]. With workers, torch calls ``iter()`` of the
        sampler before it draws the base seed, and again after that. A sampler may draw
        its order in ``iter()``, and then it draws two. So a loader that continues a
        state calls ``iter()`` as often as the saved one, with any number of workers.
        """
        if self._iterable:
            return iter(self._sampler)
        if self.order is None:
            self.order = Order(self._sampler)
        elif self._restarts:
            self.order.restart()
        if self._begins_anew:
            self._initial["sampler"] = save_own_state(self._sampler)
            self.epochs_seen = self._initial["epochs"] = find_epochs(self._parts)
        if self._has_workers or self.samples is not None:
            return map(self._make_task, self.order)
        return self.order  # the indices are the tasks

    def pass_over(self, loader: Loader) -> None:
        """Continue at the position of a checkpoint of SpeechBrain.

        Its ``SaveableDataLoader``, as another base of the loader, has the number of
        batches in an attribute, which SpeechBrain's patch of torch's iterators reads.

        Raises:
            RuntimeError: the sampler has fewer batches.
        """
        count = vars(loader).get("_speechbrain_recovery_skip_to")
        if count is None or self.order is None:
            return
        vars(loader)["_speechbrain_recovery_skip_to"] = None
        found = sum(1 for _ in itertools.islice(self.order, count))
        if found < count:
            raise RuntimeError(
                f"DataLoader: the sampler must have at least {count} batches, the "
                "position in the checkpoint of SpeechBrain, but has "
                f"{found}. Load the checkpoint of the same data and batch size."
            )
        self.num_delivered = self._num_before = count
        self.order.drop_states(count)

    def choose_base_seed(self, drawn: int) -> int:
        """Return the base seed of the workers: the restored one, or the one drawn."""
        if self.base_seed is None:
            self.base_seed = drawn
        if self._random_after_seed is not None:
            _random_state.restore(self._random_after_seed, self._generators)
        return self.base_seed

    def _make_task(self, indices: Any) -> Any:
        """Return the task for the last indices of the order."""
        order: Any = self.order
        if order.stateful:
            # A restored stateful sampler does not draw past indices again, so workers
            # could not replay them.
            self.dataset.request_states()
        return self._task(order.num_yielded - 1, indices)

    def _task(self, number: int, indices: Any) -> Any:
        """Return the task for the indices of a batch of this epoch."""
        if self.samples is None:
            return indices
        return SampleTask(self.samples["seed"], self.samples["epoch"], number, indices)

    def finish_setup(self) -> None:
        """Restore the last random states, after torch has made its iterator."""
        if self._random_at_end is not None:
            _random_state.restore(self._random_at_end, self._generators)

    def count_batch(self, position: int) -> None:
        """Count a batch that the consumer receives.

        Args:
            position: the number of batches, including this one, that torch's iterator
                has passed. Ignored without workers, and for an iterable dataset.
        """
        order = self.order
        if order is None:
            self.num_delivered += 1
            self._read_after_error = self._read_after_error or self.failed
        else:
            passed = self._num_before + position
            self.num_delivered = passed if self._has_workers else order.num_yielded
            if order.stateful:
                order.drop_states(self.num_delivered)
        if (report := self.dataset.report) is not None:
            self.dataset.store(report)

    def position_of_loop(self) -> int:
        """Return the number of batches of the epoch that the loop has passed."""
        if self.reader in (None, threading.current_thread()):
            return self.num_delivered
        return self.num_in_loop

    def unread_state(self) -> dict[str, Any] | None:
        """Return the loaded state if the loop has received no batch since, else None.

        The iterator was only made, as by the check of a framework.
        """
        is_ahead = self.reader is not None  # and the thread may have read all of it
        if not self._continued or (self.finished and not is_ahead):
            return None
        position = self.num_in_loop if is_ahead else self.num_delivered
        num_read = position - self._num_before
        if num_read == 1 and self._initial["epoch"] is not None:
            warn_once(
                "PP224",
                "DataLoader: the loop must be the first to iterate after "
                "load_state_dict, but an iterator that was left after one batch has "
                "continued the loaded state. So another epoch begins now, at its "
                "start. Load the state after such a call of next(iter(loader)).",
                LoaderWarning,
            )
        return None if num_read else self._initial

    def leave_out(self) -> None:
        """Count a batch without samples, before it counts as delivered."""
        warn_of_left_out(self.num_delivered)
        self.num_left_out += 1

    def check_end(self) -> None:
        """Raise ``ValueError`` if the epoch has ended, and every batch was left out."""
        if self.num_left_out and self.num_left_out == self.num_delivered:
            self.num_left_out = 0
            self.finish()
            raise no_batch_error(self.errors[-1])

    def finish(self) -> None:
        """End the epoch. Its last batches may have raised exceptions."""
        self.finished = True
        self.epochs_seen = find_epochs(self._parts)
        if self.order is not None:
            self.num_delivered = self.order.num_yielded
            self.order.drop_states(self.num_delivered)

    def position(self, loader: Loader) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the state from which the next batch is read.

        Note: [positions]. A `PreDataLoader` asks for a position with each batch, and
        the program for a state now and then. To copy all random states would take
        longer than to receive a small batch. If only the program draws from the global
        ones during the epoch, the function returns those at the time of its call.

        Raises:
            RuntimeError: the next batch is unknown.
            Exception: an error of ``state_dict`` of the dataset.
        """
        dataset = self.dataset
        if dataset.tracker is not None:
            dataset.request_states()
        if dataset.unknown:
            raise RuntimeError(
                "DataLoader.state_dict must know the state of all workers, but the "
                "previous epoch was left before its end and persistent workers "
                f"{sorted(dataset.unknown)} have delivered no batch since. Call "
                "state_dict later in this epoch, or finish epochs."
            )
        if self.finished or not self.num_delivered:
            return partial(_encode, self._fixed_state(loader))
        order, drawn, generators = self.order, None, {}
        if order is not None:
            drawn = order.num_drawn, order.digest, order.exhausted, order.state
        if own := self._generators:
            generators = {name: each.get_state() for name, each in own.items()}
        return partial(
            self._state_at,
            self.num_delivered,
            len(self.errors),
            drawn,
            dataset.turn,
            self._copy_records() if dataset.records or not self._has_workers else {},
            generators,
            None if self.program_draws else _random_state.raw_states(),
        )

    def _state_at(
        self,
        num_delivered: int,
        num_errors: int,
        drawn: tuple[int, int, bool, Any] | None,
        turn: int,
        workers: dict[str, dict[str, Any]],
        generators: dict[str, torch.Tensor],
        shared: tuple[Any, ...] | None,
    ) -> dict[str, Any]:
        """Return the state at a position, see `position`."""
        num_drawn, digest, exhausted, sampler = drawn or (0, 0, False, None)
        if has_other_replicas(self._sampler, sampler):
            # The loaded state: no batch of these ranks has been delivered since.
            num_drawn, exhausted = num_delivered, False
        epoch = {"drawn": num_drawn, "digest": digest, "exhausted": exhausted}
        random = shared or _random_state.raw_states()
        state = {
            **self._initial,
            "base_seed": self.base_seed,
            "sampler": sampler,
            "given": num_delivered,
            "ranks": self._ranks,
            "workers": workers,
            "epoch": {**self._epoch, **epoch, "turn": turn},
            "random": _random_state.encode(random, generators),
            "epochs": self._epoch["epochs"],
            "errors": [list(error) for error in self.errors[:num_errors]],
        }
        return _encode(state)

    def _fixed_state(self, loader: Loader) -> dict[str, Any]:
        """Return the state outside of an epoch and before its first batch."""
        if self.finished:
            return state_between_epochs(loader, self)
        if self._continued or self._has_workers:
            return self._initial
        return {**self._initial, "workers": self._copy_records()}

    def _copy_records(self) -> dict[str, dict[str, Any]]:
        workers = self.dataset.copy_records(self.num_delivered)
        if self._read_after_error and any(r["state"] is None for r in workers.values()):
            raise RuntimeError(
                "DataLoader.state_dict must know which samples were delivered, but a "
                "batch of this epoch raised an exception, and the iterable dataset has "
                "no known state. Add state_dict and load_state_dict to the dataset, "
                "and set snapshot_every_n_steps=1 of the loader."
            )
        return workers


def _encode(state: dict[str, Any]) -> dict[str, Any]:
    """Return an encoded state, or raise the error of its sampler or dataset."""
    for part in (state["sampler"], *(r["state"] for r in state["workers"].values())):
        if isinstance(part, ExceptionWrapper):
            part.reraise()
    return encode(state)
