"""Subclasses whose ``__iter__`` or ``state_dict`` is not that of this package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import IterableDataset

from pyparallel import DataLoader, LoaderWarning, PreDataLoader
from pyparallel.core import errors

pytestmark = pytest.mark.one_backend

ALL = [[0, 1], [2, 3], [4, 5], [6, 7]]


class Plain(DataLoader[Any]):
    """A generator that yields each batch as it is read."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Changed(DataLoader[Any]):
    """A generator that changes each batch."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch.clone()


class Chosen(DataLoader[Any]):
    """A generator that leaves batches out."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if int(batch[0]) != 2:
                yield batch


class Derived(Changed):
    """A generator around the generator of its base."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch.clone()


class Noted(DataLoader[Any]):
    """A generator that asks for the state itself, before it yields."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.noted = self.state_dict()
            yield batch.clone()


class Kept(DataLoader[Any]):
    """A class that keeps a reference to the iterator, as SpeechBrain's."""

    def __iter__(self) -> Any:
        self.kept = super().__iter__()
        return self.kept


class Around:
    """An iterator around ours, as torch_geometric's ``DataLoaderIterator``."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.batches).clone()


class Wrapped(DataLoader[Any]):
    """A class that makes another iterator around ours."""

    def _get_iterator(self) -> Any:
        return Around(super()._get_iterator())


class Extended(DataLoader[Any]):
    """A class that adds an entry to the state."""

    def state_dict(self) -> Any:
        return {"loader": super().state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["loader"])


class OneAhead(DataLoader[Any]):
    """A generator that reads one batch ahead."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held


class InThread(DataLoader[Any]):
    """A generator that reads in a thread, as MONAI's ``ThreadDataLoader``."""

    def __iter__(self) -> Any:
        source, queue = super().__iter__(), Queue[Any](1)

        def fill() -> None:
            for batch in source:
                queue.put(batch)
            queue.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        while (batch := queue.get()) is not None:
            yield batch
        thread.join()


class Twice(DataLoader[Any]):
    """A generator that yields all batches of two at once."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        for batch in batches:
            yield torch.cat([batch, next(batches)])


class Endless:
    """The batch sampler of timm, which begins again after its end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class OneIterator(DataLoader[Any]):
    """One iterator for all epochs, as in ``MultiEpochsDataLoader`` of timm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Endless(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator: Any = None
        self.begin()

    def begin(self) -> None:
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        sampler: Any = self.batch_sampler
        return len(sampler.sampler)

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.begin()
        for _ in range(len(self)):
            yield next(self.iterator)


class LateIterator(OneIterator):
    """The same, as in newer versions of timm."""

    def begin(self) -> None:
        if hasattr(self, "begun"):
            super().begin()
        self.begun = True


EXACT = [Plain, Changed, Chosen, Derived, Noted, Kept, Wrapped, Extended]
AHEAD = {
    OneAhead: "has read 2 and yielded 1 batches",
    InThread: "reads batches in another thread",
    Twice: "has read 2 and yielded 1 batches",
}
with_workers = pytest.mark.parametrize("num_workers", [0, 2])


def make(cls: Any, num_workers: int) -> Any:
    return cls(range(8), batch_size=2, num_workers=num_workers)


def numbers(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def rest_of(cls: Any, state: Any, num_workers: int) -> list[Any]:
    loader = make(cls, num_workers)
    loader.load_state_dict(state)
    return numbers(loader)


@with_workers
@pytest.mark.parametrize("ahead", [False, True], ids=["itself", "PreDataLoader"])
@pytest.mark.parametrize("cls", EXACT)
def test_a_subclass_that_follows_the_loop_has_its_position(
    cls: Any, ahead: bool, num_workers: int
) -> None:
    whole = [each for each in ALL if cls is not Chosen or each != [2, 3]]
    loader = make(cls, num_workers)
    batches: Any = PreDataLoader(loader) if ahead else loader
    found = []
    for number, batch in enumerate(batches, 1):
        found.append(batch.tolist())
        if ahead and number == 1:
            with pytest.raises(RuntimeError, match="a PreDataLoader reads this loader"):
                loader.state_dict()
        assert rest_of(cls, batches.state_dict(), num_workers) == whole[number:]
        if cls is Noted and not ahead:
            assert rest_of(cls, loader.noted, num_workers) == whole[number:]
    assert found == whole
    assert rest_of(cls, batches.state_dict(), num_workers) == whole  # the next epoch
    if ahead:
        batches.load_state_dict(batches.state_dict())
    assert numbers(batches) == whole


@with_workers
@pytest.mark.parametrize("ahead", [False, True], ids=["itself", "PreDataLoader"])
@pytest.mark.parametrize("cls", AHEAD)
def test_a_subclass_that_does_not_follow_the_loop_refuses_its_state(
    cls: Any, ahead: bool, num_workers: int
) -> None:
    whole = numbers(make(cls, num_workers))
    loader = make(cls, num_workers)
    batches: Any = PreDataLoader(loader) if ahead else loader
    iterator = iter(batches)
    next(iterator)
    text = f"the position of the loop, but {cls.__name__}.__iter__ {AHEAD[cls]}. Use"
    with pytest.raises(RuntimeError, match=text):
        batches.state_dict()
    for _ in iterator:
        pass
    # All of the epoch has reached the loop.
    assert rest_of(cls, batches.state_dict(), num_workers) == whole
    assert numbers(batches) == whole


@with_workers
@pytest.mark.parametrize("cls", [OneIterator, LateIterator])
def test_a_class_with_one_iterator_for_all_epochs_refuses_states(
    cls: Any, num_workers: int
) -> None:
    text = "OneIterator.__iter__ reads one iterator in several epochs. Use pyparallel"
    loader, plain = make(cls, num_workers), make(DataLoader, num_workers)
    for _ in range(2):
        next(iter(loader))
        with pytest.raises(RuntimeError, match=f"DataLoader.state_dict .*{text}"):
            loader.state_dict()
    loader = make(cls, num_workers)
    assert numbers(loader) == numbers(loader) == ALL
    batches = iter(plain)
    next(batches)
    loader.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=f"DataLoader.load_state_dict .*{text}"):
        next(iter(loader))
    late = make(LateIterator, num_workers)
    late.load_state_dict({**plain.state_dict()})
    with pytest.raises(RuntimeError):  # its order is endless
        next(iter(late))


def test_a_base_with_iterators_of_its_own_is_refused() -> None:
    class Own(torch.utils.data.DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return iter([])

    text = "^Both must use the iterators of pyparallel.DataLoader, but Own makes itera"
    with pytest.raises(TypeError, match=text):
        type("Both", (Own, DataLoader), {})
    type("Both", (DataLoader, Own), {})
    type("Both", (Wrapped, Own), {})


@with_workers
@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_the_position_by_the_name_of_torch_is_that_of_the_loop(
    num_workers: int,
) -> None:
    """SpeechBrain saves this attribute of the iterator that it keeps."""

    def read(index: int) -> int:
        if index in (0, 1, 5):
            raise ValueError(f"{index} is damaged")
        return index

    class Rows(torch.utils.data.Dataset[int]):  # no length, so no replacement
        def __getitem__(self, index: int) -> int:
            return read(index)

    def found(wrap: Any) -> list[Any]:
        options: Any = {"num_workers": num_workers, "on_error": "skip"}
        loader = Kept(Rows(), batch_sampler=ALL, **options)
        loop = wrap(loader)
        return [(each.tolist(), loader.kept._num_yielded) for each in loop] + [
            loader.kept._num_yielded
        ]

    expected = found(lambda loader: loader)
    assert found(PreDataLoader) == expected
    # The first batch was left out, and counts.
    assert expected == [([2, 3], 2), ([4], 3), ([6, 7], 4), 4]


class Positioned(IterableDataset[int]):
    """A stream with a position of its own, which each worker yields."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 8:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a function in another thread, which ends."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result(20)


def here(function: Callable[[], Any]) -> Any:
    return function()


PERSISTENT = [
    {"num_workers": 2, "persistent_workers": True, "worker_method": method}
    for method in ("thread", "multiprocessing")
]
persistent = pytest.mark.parametrize(
    "options", PERSISTENT, ids=["threads", "processes"]
)


@persistent
@pytest.mark.parametrize("num_read", [0, 1, 3])
@pytest.mark.parametrize("makes", ["main", "reader"])
def test_a_thread_keeps_its_pass_while_another_begins_one(
    makes: str, num_read: int, options: Any
) -> None:
    loader = DataLoader(range(8), 2, **options)
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as other:

        def of(thread: Any, function: Any, *arguments: Any) -> Any:
            return thread.submit(function, *arguments).result(20)

        first = of(reader, iter, loader) if makes == "reader" else iter(loader)
        found = [of(reader, next, first).tolist() for _ in range(num_read)]
        if makes == "main" and not num_read:
            found.append(of(reader, next, first).tolist())
        assert of(other, numbers, loader) == ALL
        assert numbers(loader) == ALL
        assert found + of(reader, numbers, first) == ALL


@persistent
def test_a_loop_in_a_loop_ends_the_outer_one_with_a_warning(options: Any) -> None:
    loader = DataLoader(range(8), 2, **options)
    errors._warned.discard("PP223 ")
    outer, text = [], r"\[PP223\] DataLoader: .* after 2 of its batches, so it ends th"
    with pytest.warns(LoaderWarning, match=text):
        for batch in loader:
            outer.append(batch.tolist())
            if len(outer) == 2:
                assert numbers(loader) == ALL
    assert outer == ALL[:2]
    errors._warned.discard("PP223 ")
    # The outer loop has got all of its batches. After that a loop that is left ends.
    for number, _ in enumerate(loader):
        if number == 3:
            assert numbers(loader) == ALL
    workers = loader._iterator._pool
    next(iter(loader))
    assert numbers(loader) == ALL and loader._iterator._pool is workers
    ahead = PreDataLoader(loader)
    batches = iter(ahead)
    ahead.state_dict()  # its thread has begun, so this loop takes no workers of it
    assert numbers(loader) == numbers(batches) == ALL
    assert "PP223 " not in errors._warned


@pytest.mark.parametrize("check", ["kept", "dropped", "thread", "ahead"])
@pytest.mark.parametrize("wrap", [DataLoader.__iter__, PreDataLoader], ids=["", "pre"])
@pytest.mark.parametrize("make", [lambda: range(8), Positioned], ids=["map", "stream"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, PERSISTENT[1]])
def test_an_iterator_without_a_batch_leaves_the_state_to_the_next(
    options: Any, make: Any, wrap: Any, check: str
) -> None:
    def made() -> Any:
        return DataLoader(make(), 2, **options)

    loader = made()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state, rest = loader.state_dict(), numbers(batches)
    loader = made()
    loader.load_state_dict(state)
    kept = []
    if check == "ahead":
        with PreDataLoader(loader) as ahead:
            kept.append(iter(ahead))
            ahead.state_dict()  # the thread has begun
    else:
        kept.append((in_thread if check == "thread" else here)(lambda: iter(loader)))
    if check == "dropped":
        kept.clear()
    assert numbers(wrap(loader)) == rest
    assert len(numbers(wrap(loader))) == len(numbers(made()))


def test_an_iterator_that_is_left_after_a_batch_of_a_loaded_state_warns() -> None:
    loader = DataLoader(range(8), 2)
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    next(iter(loader))
    errors._warned.discard("PP224 ")
    with pytest.warns(LoaderWarning, match=r"\[PP224\] DataLoader: the loop must be t"):
        assert numbers(loader) == ALL
    loader.load_state_dict(state)
    assert numbers(loader) == ALL[1:]  # the advice
