"""How far an iterator of a loader has got in its epoch, as a state that can be saved.

What counts is what the consumer has been given, not what workers have prepared. The
order of a sampler without a state of its own is found again: its random state is put
back to where the epoch began and the indices that were drawn are drawn once more,
without reading the dataset; a checksum tells if they are others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from ..core.torch_private import ExceptionWrapper
from . import _random_state
from ._dataset_state import DatasetStates
from ._loader_state import (
    find_generators,
    ordering_parts,
    set_epochs,
    state_between_epochs,
)
from ._random_state import SampleTask
from ._sampler_state import Order, unwrap_batch_sampler


class Progress:
    """One epoch of one iterator of a loader.

    Attributes:
        dataset: the states of the dataset.
        order: the indices, if it is not iterable.
        given: how many batches of the epoch the consumer has got, or seen fail.
        samples: the seed and the number of the epoch, for random states of samples.
        base_seed: of the workers.
        finished: the epoch has ended.
        failed: a batch of it raised an exception.
    """

    def __init__(self, loader: Any, *, reset: bool = False) -> None:
        """Begin an epoch, or continue one if the loader has been given a state.

        Args:
            loader: the ``DataLoader``.
            reset: the iterator goes on with the same workers.

        Raises:
            RuntimeError: the sampler does not give the same indices again.
        """
        before: Progress | None = loader._progress
        state: dict[str, Any]
        state = loader._loaded or state_between_epochs(loader, before, asks=False)
        self.samples: dict[str, int] | None = state["samples"]
        self._generators = find_generators(ordering_parts(loader))
        self._sampler = loader._index_sampler
        self._iterable = state["loader"]["dataset"] == "iterable"
        self._begun = state
        self.order: Order | None = None
        self.given = self._base = 0
        self.finished = self.failed = self._lost = self._prepared = False
        self.base_seed: int | None = state["base_seed"]
        left = reset and before is not None and not before.finished
        self.dataset = DatasetStates(loader, state, left=left)
        self._epoch = {
            "start": state["random"],
            "epochs": state["epochs"],
            "iterators": 2 if loader.num_workers and not reset else 1,
            "seeds": self.base_seed is None,
        }
        #: Random states for when the base seed is drawn, and for when all is set up.
        self._seeded: dict[str, Any] | None = None
        self._opened: dict[str, Any] | None = None
        self._continued = loader._loaded is not None
        self._has_workers = loader.num_workers > 0
        if self._continued:
            self._continue(state, loader)

    def _continue(self, state: dict[str, Any], loader: Any) -> None:
        """Put samplers and random states to where the state says."""
        if state["epoch"] is not None:
            self._epoch = {name: state["epoch"][name] for name in self._epoch}
            self.given = self._base = state["given"]
            self.dataset.turn = state["epoch"]["turn"]
            set_epochs(ordering_parts(loader), self._epoch["epochs"])
        elif state["sampler"] is not None:
            self._prepare_sampler(state)
        _random_state.restore(self._epoch["start"], self._generators)
        if self._iterable:
            self._opened = state["random"] if self.base_seed is not None else None
        elif state["epoch"] is not None:
            self._replay(state, loader.generator)
            self._seeded = state["random"]
        elif self.base_seed is not None:  # workers that went on drew no seed
            self.order = Order(self._sampler)
            self._seeded = _random_state.capture(self._generators)
        self._prepared = self.order is not None

    def _prepare_sampler(self, state: dict[str, Any]) -> None:
        """Put a stateful sampler to where it was between two epochs."""
        if not state["given"]:
            unwrap_batch_sampler(self._sampler).load_state_dict(
                copy.deepcopy(state["sampler"]["own"])
            )
        elif not Order(self._sampler, state["sampler"]).is_at_end():
            raise RuntimeError(
                "DataLoader.load_state_dict: the sampler must be at the end of its "
                f"epoch after {state['given']} batches, but gives more from the state "
                "that it had there. Make its load_state_dict continue where state_dict "
                "was."
            )

    def _replay(self, state: dict[str, Any], generator: torch.Generator | None) -> None:
        """Draw what had been drawn, the last ones for workers to prepare again."""
        epoch, given = state["epoch"], state["given"]
        self.order = order = Order(self._sampler, state["sampler"])
        if epoch["seeds"]:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        try:
            if state["sampler"] is not None:
                order.continue_at(given)
            else:
                if epoch["iterators"] == 2:
                    order.again()
                skipped = enumerate(order.skip(given))
                self.dataset.find_replays([self._task(*task) for task in skipped])
            order.look_ahead(epoch["drawn"] - given)
        except StopIteration:
            pass
        # A sampler may draw random numbers at its end: only if it had been there.
        at_end = order.is_at_end() if epoch["exhausted"] else False
        same = state["sampler"] is not None or order.digest == epoch["digest"]
        if order.drawn != epoch["drawn"] or at_end != epoch["exhausted"] or not same:
            raise RuntimeError(
                f"DataLoader.load_state_dict: the sampler must give its first "
                f"{epoch['drawn']} batches of indices again, but gives others from the "
                f"random state that it had. The state may be another rank's; or the "
                f"sampler or its data changed; or it uses randomness of its own. Then "
                f"give it state_dict and load_state_dict."
            )

    def indices(self) -> Iterator[Any]:
        """Return the tasks of the epoch, when an iterator asks for them."""
        if self._iterable:
            return iter(self._sampler)
        if self.order is None:
            self.order = Order(self._sampler)
        elif not self._prepared:
            self.order.again()
        if self._has_workers or self.samples is not None:
            return map(self._drawn, self.order)
        return self.order  # the indices are the tasks

    def seed(self, drawn: int) -> int:
        """Return the seed of the workers, when an iterator has drawn one."""
        if self.base_seed is None:
            self.base_seed = drawn
        if self._seeded is not None:
            _random_state.restore(self._seeded, self._generators)
        return self.base_seed

    def _drawn(self, indices: Any) -> Any:
        """Return the task for the indices that were just drawn."""
        order: Any = self.order
        if order.stateful:
            self.dataset.want()  # such a sampler does not draw past indices again
        return self._task(order.taken - 1, indices)

    def _task(self, number: int, indices: Any) -> Any:
        """Return the task for the indices of a batch of this epoch."""
        if self.samples is None:
            return indices
        return SampleTask(self.samples["seed"], self.samples["epoch"], number, indices)

    def opened(self) -> None:
        """Note that the iterator stands."""
        if self._opened is not None:
            _random_state.restore(self._opened, self._generators)

    def give_here(self) -> None:
        """Note that the consumer gets a batch that no worker has made."""
        order = self.order
        if order is None:
            self.give(0)
            return
        self.given = order.taken
        if order.stateful:
            order.pass_to(self.given)

    def give(self, position: int) -> None:
        """Note that the consumer gets a batch.

        Args:
            position: how many batches of the order had been asked for with this one,
                since this iterator was made.
        """
        order = self.order
        if order is None:
            self.given += 1
            self._lost = self._lost or self.failed
        else:
            self.given = self._base + position
            order.pass_to(self.given)
        self.dataset.receive()

    def state(self, loader: Any) -> dict[str, Any]:
        """Return the state from which another loader gives the next batch.

        Raises:
            RuntimeError: the next batch is not known.
            Exception: an error of the dataset's ``state_dict``.
        """
        self.dataset.want()
        state = self._state(loader)
        for record in state["workers"].values():
            if isinstance(record["state"], ExceptionWrapper):
                record["state"].reraise()
        return state

    def _state(self, loader: Any) -> dict[str, Any]:
        if self.dataset.unknown:
            raise RuntimeError(
                "DataLoader.state_dict must know the state of all workers, but an "
                "epoch was left in its middle and persistent workers "
                f"{sorted(self.dataset.unknown)} have given nothing since. Take the "
                "state later in this epoch, or finish epochs."
            )
        if self.finished:
            return state_between_epochs(loader, self)
        if not self.given and (self._continued or self._has_workers):
            return dict(self._begun)
        workers = self.dataset.now(self.given)
        if self._lost and any(r["state"] is None for r in workers.values()):
            raise RuntimeError(
                "DataLoader.state_dict must know which samples were given, but a batch "
                "of this epoch raised an exception, and an iterable dataset without a "
                "known state was read on. Give it state_dict and load_state_dict, and "
                "the loader snapshot_every_n_steps=1."
            )
        if not self.given:
            return {**self._begun, "workers": workers}
        order = self.order
        return {
            **self._begun,
            "random": _random_state.capture(self._generators),
            "epochs": self._epoch["epochs"],
            "base_seed": self.base_seed,
            "sampler": order.state if order else None,
            "given": self.given,
            "workers": workers,
            "epoch": {
                **self._epoch,
                "drawn": order.drawn if order else 0,
                "digest": order.digest if order else 0,
                "exhausted": order.exhausted if order else False,
                "turn": self.dataset.turn,
            },
        }
