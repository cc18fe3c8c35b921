"""Loaders to stop and to resume, and their expected batches."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from pyparallel import DataLoader
from pyparallel.loader._state_format import decode

Batch = tuple[int, Any]


class Numbers:
    """The map-style dataset 0, 1, 2, ... that counts its reads."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(index)


class Eager:
    """A sampler that draws its order when its iterator is created."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class ByPython(Eager):
    """A sampler that draws every index from ``random`` when it is needed."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(self.length) for _ in range(self.length))


class ByNumPy(Eager):
    """A sampler that draws from NumPy."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.permutation(self.length).tolist()


class Counting(Eager):
    """A stateful sampler; subclasses define its behaviour after its end."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.next, self.epoch_seen = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            yield (self.next * 7 + self.epoch_seen) % self.length
        self.next = 0
        self.epoch_seen += 1

    def state_dict(self) -> dict[str, Any]:
        return vars(self)  # the live dictionary, which changes later

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Skipping(Eager):
    """A stateful sampler that skips in its next epoch, as torchdata's does."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.given, self.skip = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.skip = self.skip, 0
        for number in range(self.given, self.length):
            self.given += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["given"]


class WithState(Eager):
    """A sampler with a stateful iterator."""

    def __iter__(self) -> Iterator[int]:
        return Cursor(self.length)


class Cursor(Iterator[int]):
    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at * 5 % self.length

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class TensorCursor(Cursor):
    def __next__(self) -> Any:
        return torch.tensor(super().__next__())


class Uneven(IterableDataset[Any]):
    """A dataset that gives each worker its own number of samples, in random order."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def share(self) -> tuple[int, int]:
        info = get_worker_info()
        return (info.id, self.lengths[info.id]) if info else (0, self.lengths[0])

    def __iter__(self) -> Iterator[Any]:
        worker, length = self.share()
        for number in torch.randperm(length).tolist():
            yield torch.tensor(100 * worker + number)


class UnevenStateful(Uneven):
    """The same with a state, and with an order for each epoch."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.next, self.round = 0, 0

    def __iter__(self) -> Iterator[Any]:
        worker, length = self.share()
        while self.next < length:
            self.next += 1
            yield torch.tensor(1000 * self.round + 100 * worker + self.next)
        self.next = 0
        self.round += 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.round = state["next"], state["round"]


class UnevenLoaded(Uneven):
    """The same in order. Each epoch begins at the loaded state, which may be the end.

    Hugging Face's IterableDataset does the same.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.first = self.next = 0

    def __iter__(self) -> Iterator[Any]:
        worker, length = self.share()
        for number in range(self.first, length):
            self.next = number + 1
            yield torch.tensor(100 * worker + number)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = self.next = state["next"]


class UnevenCursors(Uneven):
    """The same with the state in the iterators."""

    def __iter__(self) -> Iterator[Any]:
        return TensorCursor(self.share()[1])


class UnevenSelf(Uneven):
    """The same as its own iterator, which ``iter()`` rewinds."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return self

    def __next__(self) -> Any:
        worker, length = self.share()
        if self.at == length:
            raise StopIteration
        self.at += 1
        return torch.tensor(100 * worker + self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class UnevenOnward(UnevenSelf):
    """The same as its own iterator, which begins the next round at its end."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.at = self.round = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return super().__next__() + 1000 * self.round
        except StopIteration:
            self.at, self.round = 0, self.round + 1
            raise

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.round = state["at"], state["round"]


class UnevenDraws(Uneven):
    """The same with the random state of the process in the iterators' states."""

    def __iter__(self) -> Iterator[Any]:
        return Drawing(self.share()[1])


class Drawing(Cursor):
    def __next__(self) -> Any:
        super().__next__()
        return torch.randint(1000, ())

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(torch.tensor(state["random"], dtype=torch.uint8))


class Remembering(Numbers):
    """A stateful map-style dataset: a sample is the number of reads before it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor([index, self.reads])

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


#: Arguments of a loader by name, from the number of samples and a generator.
ORDERS: dict[str, Callable[[int, torch.Generator], dict[str, Any]]] = {
    "sequential": lambda n, g: {},
    "shuffle": lambda n, g: {"shuffle": True},
    "shuffle, generator": lambda n, g: {"shuffle": True, "generator": g},
    "replacement, generator": lambda n, g: {
        "sampler": RandomSampler(range(n), True, 40 + n, g),
        "generator": g,
    },
    "distributed": lambda n, g: {"sampler": DistributedSampler(range(n), 2, 1)},
    "batch sampler": lambda n, g: {
        "batch_sampler": BatchSampler(RandomSampler(range(n)), 3, False)
    },
    "lists": lambda n, g: {"batch_sampler": [[0, n - 1], [1], [0]]},
    "eager": lambda n, g: {"sampler": Eager(n)},
    "eager, one by one": lambda n, g: {"sampler": Eager(n), "batch_size": None},
    "numpy": lambda n, g: {"sampler": ByNumPy(n)},
    "python": lambda n, g: {"sampler": ByPython(n)},
    "counting": lambda n, g: {"sampler": Counting(n)},
    "counting, one by one": lambda n, g: {"sampler": Counting(n), "batch_size": None},
    "skipping": lambda n, g: {"sampler": Skipping(n)},
    "iterator with state": lambda n, g: {"sampler": WithState(n)},
}


@dataclasses.dataclass
class Case:
    """A loader, and a consumer that draws random numbers between its batches.

    Each loader has a copy of ``dataset``, which nothing has read.
    """

    order: str = "shuffle"
    length: int = 10
    batch_size: int = 3
    dataset: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    epochs: int = 3
    draws: bool = True

    def loader(self, **options: Any) -> DataLoader:
        dataset = copy.deepcopy(self.dataset) or Numbers(self.length)
        generator = torch.Generator().manual_seed(7)
        order = ORDERS[self.order](self.length, generator) if self.order else {}
        if "batch_sampler" not in order:
            order.setdefault("batch_size", self.batch_size)
        return DataLoader(dataset, **{**order, **self.options, **options})

    def run(
        self,
        loader: DataLoader,
        first: int = 0,
        stop: Callable[[int, str], None] = lambda epoch, moment: None,
    ) -> list[Batch]:
        """Return the batches of all epochs from ``first`` on; report each moment."""
        found: list[Batch] = []
        for epoch in range(first, self.epochs):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            batches = iter(loader)
            stop(epoch, "begin")
            for batch in batches:
                found.append((epoch, batch.tolist()))
                if self.draws:
                    torch.rand(3), random.random(), np.random.rand(2)
                stop(epoch, "batch")
            stop(epoch, "end")
        return found


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@dataclasses.dataclass
class Stop:
    """A moment at which a run could be stopped.

    ``given``: the number of batches before it in all epochs. ``state``: saved bytes.
    """

    epoch: int
    moment: str
    given: int
    state: bytes

    @property
    def next_epoch(self) -> int:
        """The epoch of the next batch."""
        return self.epoch + (self.moment == "end")

    def load(self) -> dict[str, Any]:
        return torch.load(io.BytesIO(self.state), weights_only=True)


def opened(loader: DataLoader) -> dict[str, Any]:
    """Return the entries inside of the state of a loader."""
    return decode(loader.state_dict())


def saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def uninterrupted(
    case: Case, first: Stop | None = None, **options: Any
) -> tuple[list[Batch], list[Stop]]:
    """Return all batches of a case after a stop, and all moments to stop at."""
    seed(1 if first is None else 2)
    loader = case.loader(**options)
    if first is None:
        first = Stop(0, "before", 0, saved(loader.state_dict()))
    else:
        loader.load_state_dict(first.load())
    stops, given = [first], first.given

    def stop(epoch: int, moment: str) -> None:
        nonlocal given
        given += moment == "batch"
        stops.append(Stop(epoch, moment, given, saved(loader.state_dict())))

    return case.run(loader, first.next_epoch, stop), stops


def continued(case: Case, stop: Stop, **options: Any) -> list[Batch]:
    """Return the batches of a new loader after a stop, with other global seeds."""
    seed(2)
    loader = case.loader(**options)
    loader.load_state_dict(stop.load())
    return case.run(loader, stop.next_epoch)
