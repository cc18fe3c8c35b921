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
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, IterDataPipe

from . import _random_state
from ._order import Order, is_stateful, state_of, with_state
from ._parts import arguments_of, epochs_of, generators_of, parts_of, set_epochs
from ._source import Extra, Source

#: Of the form of the state. A state of another version is refused.
VERSION = 1


def idle_state(
    loader: Any, before: Progress | None, *, asks: bool = True
) -> dict[str, Any]:
    """Return the state of a loader from which the next ``iter()`` begins an epoch.

    Args:
        loader: the ``DataLoader``.
        before: its last epoch, if there was one.
        asks: whether to ask a dataset in this process for its state.
    """
    parts = parts_of(loader)
    ended = before is not None and before.finished
    kept = loader.persistent_workers and before is not None
    inside = loader.num_workers == 0
    workers: dict[int, Any] = {}
    sampler = None
    if before is not None and (kept or (inside and ended and asks)):
        workers = {k: {**v, "ended": True} for k, v in before.workers().items()}
    elif inside and asks and _is_map_style(loader.dataset):
        if (own := state_of(loader.dataset)) is not None:
            record = {"given": 0, "ended": False, "state": {"own": own}, "random": None}
            workers = {0: record}
    if before is not None and ended and before.order is not None:
        sampler = before.order.state
    elif is_stateful(inner := with_state(loader._index_sampler)):
        sampler = {"own": state_of(inner), "iterator": None, "ended": False}
    return {
        "version": VERSION,
        "loader": arguments_of(loader),
        "random": _random_state.capture(generators_of(parts)),
        "epochs": epochs_of(parts),
        "base_seed": before.base_seed if kept and before is not None else None,
        "sampler": sampler,
        "given": before.given if before is not None and ended else 0,
        "workers": workers,
        "epoch": None,
    }


def _is_map_style(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset)


class Progress:
    """One epoch of one iterator of a loader.

    Attributes:
        source: the dataset, if it is iterable or stateful.
        order: the indices, if it is not iterable.
        extra: what came with the batch that is about to be given.
        given: how many batches of the epoch the consumer has got, or seen fail.
        records: what is known of every worker that has given something.
        base_seed: of the workers.
        turn: how many workers to pass over before the first one has its turn.
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
        state = loader._loaded or idle_state(loader, before, asks=False)
        self._generators = generators_of(parts_of(loader))
        self._sampler = loader._index_sampler
        self._iterable = state["loader"]["dataset"] == "iterable"
        self._begun = state
        self.source: Source | None = None
        self.order: Order | None = None
        self.extra: Extra | None = None
        self.given = self.turn = self._base = 0
        self.finished = self.failed = self._lost = self._prepared = False
        self.base_seed: int | None = state["base_seed"]
        self.records: dict[int, dict[str, Any]] = copy.deepcopy(state["workers"])
        # Workers that were left in mid-epoch have gone on by nobody knows how much.
        left = reset and before is not None and not before.finished
        self._unknown = set(self.records) if left else set()
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
        self._replays: dict[int, list[Any]] = {}
        self._num_workers = loader.num_workers
        self._auto_collation = loader._auto_collation
        # Persistent workers go on with their dataset, and cannot read an epoch again.
        self._wants = loader._states_wanted or loader.persistent_workers
        self._context = loader.multiprocessing_context or torch.multiprocessing
        self._wanted: Any = None
        if self._continued:
            self._continue(state, loader)

    def _continue(self, state: dict[str, Any], loader: Any) -> None:
        """Put samplers and random states to where the state says."""
        if state["epoch"] is not None:
            self._epoch = {name: state["epoch"][name] for name in self._epoch}
            self.given = self._base = state["given"]
            self.turn = state["epoch"]["turn"]
            set_epochs(parts_of(loader), self._epoch["epochs"])
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
            with_state(self._sampler).load_state_dict(
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
                self._find_replays(order.skip(given))
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

    def _find_replays(self, given: list[Any]) -> None:
        """Note what workers had read whose map-style dataset has an unknown state.

        Workers take turns, and the first one had the first batch.
        """
        for worker, record in self.records.items():
            if record["state"] is None:
                self._replays[worker] = given[worker :: self._num_workers]

    def indices(self) -> Iterator[Any]:
        """Return the indices of the epoch, when an iterator asks for them."""
        if self._iterable:
            return iter(self._sampler)
        if self.order is None:
            self.order = Order(self._sampler)
        elif not self._prepared:
            self.order.again()
        return self.order

    def seed(self, drawn: int) -> int:
        """Return the seed of the workers, when an iterator has drawn one."""
        if self.base_seed is None:
            self.base_seed = drawn
        if self._seeded is not None:
            _random_state.restore(self._seeded, self._generators)
        return self.base_seed

    def read(self, dataset: Any) -> Source | None:
        """Return how the processes that read shall begin, None if that is nothing."""
        if isinstance(dataset, IterDataPipe):  # has a protocol of its own in workers
            return None
        if self._iterable or is_stateful(dataset):
            size = self._begun["loader"]["batch_size"] or 1
            records = self.records if self._continued else {}
            if self._num_workers:
                self._wanted = self._context.RawValue("b", self._wants)
            self.source = Source(
                *(dataset, size, copy.deepcopy(records), self._wanted),
                *(self._replays, self._auto_collation),
            )
        return self.source

    def want_states(self) -> None:
        """Let workers report the states of their dataset from now on."""
        if self._wanted is not None:
            self._wanted.value = True

    def drawn(self) -> None:
        """Note that indices were drawn: the next ones go to a worker."""
        if self.order is not None and self.order.stateful:
            self.want_states()  # such a sampler does not draw past indices again

    def opened(self) -> None:
        """Note that the iterator stands."""
        if self._opened is not None:
            _random_state.restore(self._opened, self._generators)

    def give_here(self) -> None:
        """Note that the consumer gets a batch that no worker has made."""
        self.give(self.order.taken - self._base if self.order is not None else 0)

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
        if self.extra is not None:
            self._record(self.extra)
            self.extra = None

    def _record(self, extra: Extra) -> None:
        record = self.records.get(extra.worker)
        if record is None or record["ended"]:
            record = {"given": 0, "ended": False, "random": None}
            self.records[extra.worker] = record
        record["given"] += 1
        record["state"] = extra.state
        random = extra.random or record["random"]
        record["random"] = random if extra.state is None else None
        self._unknown.discard(extra.worker)
        self.turn = extra.worker + 1

    def workers(self) -> dict[int, dict[str, Any]]:
        """Return what is known of every process that has given something."""
        if self._num_workers or self.source is None:
            return {worker: dict(record) for worker, record in self.records.items()}
        state = self.source.state()
        return {
            0: {"given": self.given, "ended": False, "state": state, "random": None}
        }

    def state(self, loader: Any) -> dict[str, Any]:
        """Return the state from which another loader gives the next batch.

        Raises:
            RuntimeError: nobody can know what the next batch would be.
            Exception: what the dataset's ``state_dict`` raised.
        """
        self.want_states()
        state = self._state(loader)
        for record in state["workers"].values():
            if isinstance(record["state"], ExceptionWrapper):
                record["state"].reraise()
        return state

    def _state(self, loader: Any) -> dict[str, Any]:
        if self._unknown:
            raise RuntimeError(
                "DataLoader.state_dict must know the state of all workers, but an "
                "epoch was left in its middle and persistent workers "
                f"{sorted(self._unknown)} have given nothing since. Take the state "
                "later in this epoch, or finish epochs."
            )
        if self.finished:
            return idle_state(loader, self)
        if not self.given and (self._continued or self._num_workers):
            return dict(self._begun)
        workers = self.workers()
        if self._lost and any(r["state"] is None for r in workers.values()):
            raise RuntimeError(
                "DataLoader.state_dict must know which samples were given, but a batch "
                "of this epoch raised an exception, and an iterable dataset without a "
                "state was read on. Give it state_dict and load_state_dict."
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
                "turn": self.turn,
            },
        }
