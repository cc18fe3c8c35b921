"""One table of behaviours, in which torch's loader and ours run side by side.

`test_data_loader` compares batches for all arguments. This file has the rest: what
workers see, errors, ends, and the names that other libraries use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import types
import urllib.error
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pyparallel import DataLoader

pytestmark = [pytest.mark.one_backend, pytest.mark.cuda_torch]

#: The kinds of workers.
KINDS: dict[str, dict[str, Any]] = {
    "inline": {},
    "1 worker": {"num_workers": 1},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent": {"num_workers": 2, "persistent_workers": 1},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "persistent threads": {
        "num_workers": 2,
        "worker_method": "thread",
        "persistent_workers": True,
    },
}
#: Behaviours that threads cannot have: they share the global random states and the
#: variables of the process.
NOT_OF_THREADS = {
    "worker info, seeds and random numbers",
    "worker_init_fn",
    "batches read at once",
}
with_kinds = pytest.mark.parametrize("kind", KINDS)
#: For the errors of a batch, which the number of workers and their life do not change.
with_ways = pytest.mark.parametrize("kind", ["inline", "fork", "threads"])


class Map(Dataset[Any]):
    """Calls a function with each index."""

    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        self.length, self.read = length, read

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class Batched(Map):
    """Reads a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.read(index) for index in indices]


class Shards(IterableDataset[int]):
    """Shards of different lengths, one for each worker."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 3  # fewer than there are

    def __iter__(self) -> Any:
        info = get_worker_info()
        lengths = self.lengths if info is None else [self.lengths[info.id]]
        return iter([10 * i + length for length in lengths for i in range(length)])


def seen(index: int) -> list[Any]:
    """Return all that a dataset sees of its worker, and its random numbers."""
    info = get_worker_info()
    about = None if info is None else [info.id, info.num_workers, type(info.dataset)]
    threads = None if info is None else torch.get_num_threads()
    drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    seed = None if info is None else info.seed
    return [index, about, threads, drawn, seed, os.environ.get("OF_INIT")]


def known(index: int) -> list[Any]:
    """Return all that a dataset sees of its worker, without random numbers."""
    info = get_worker_info()
    if info is None:
        return [index]
    about = info.id, info.num_workers, info.seed, type(info.dataset)
    return [index, about, torch.get_num_threads()]


def set_variable(worker: int) -> None:
    os.environ["OF_INIT"] = f"{worker} {get_worker_info().seed} {torch.rand(())}"


def as_is(samples: Any) -> Any:
    return samples


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [list(loader) for _ in range(count)]


def seed_everything() -> None:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)


#: Each returns a result that must be equal for both classes.
BEHAVIOURS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "worker info, seeds and random numbers": lambda cls, kind: epochs(
        cls(Map(6, seen), 2, collate_fn=as_is, shuffle=True, **kind)
    ),
    "worker info": lambda cls, kind: epochs(
        cls(Map(6, known), 2, collate_fn=as_is, shuffle=True, **kind)
    ),
    "worker_init_fn": lambda cls, kind: epochs(
        cls(Map(6, seen), 2, collate_fn=as_is, worker_init_fn=set_variable, **kind)
    ),
    "batches read at once": lambda cls, kind: epochs(
        cls(Batched(5, seen), 2, collate_fn=as_is, **kind)
    ),
    "batches read at once, worker info": lambda cls, kind: epochs(
        cls(Batched(5, known), 2, collate_fn=as_is, **kind)
    ),
    "ends of streams": lambda cls, kind: epochs(cls(Shards(5, 1), 2, **kind)),
    "ends of streams, short batches dropped": lambda cls, kind: epochs(
        cls(Shards(5, 2), 2, drop_last=True, **kind)
    ),
    "streams without batches": lambda cls, kind: epochs(
        cls(Shards(3, 0), None, **kind)
    ),
    "an epoch that was left": lambda cls, kind: left(
        cls(range(9), 2, shuffle=True, **kind)
    ),
    "two iterators": lambda cls, kind: two(
        cls(range(6), 2, shuffle=True, **{**kind, "persistent_workers": False})
    ),
    "the length of a stream": lambda cls, kind: length_warnings(cls, kind),
    "an iterator that has ended": lambda cls, kind: ended(cls(range(3), 2, **kind)),
    "another thread": lambda cls, kind: in_thread(cls(range(5), 2, **kind)),
    "the error of an index, and the rest": lambda cls, kind: around_an_error(
        cls(Map(6, fail_at_2), 1, **kind)
    ),
    "a sampler that raises": lambda cls, kind: around_an_error(
        cls(range(9), sampler=Raising(), **kind)
    ),
}


class Raising:
    """A sampler that raises after its second index."""

    def __iter__(self) -> Any:
        yield from range(2)
        raise LookupError("the sampler")


def fail_at_2(index: int) -> int:
    if index == 2:
        raise KeyError(f"no {index}")
    return index


def left(loader: Any) -> list[Any]:
    found = []
    for number in range(3):
        for batch in loader:
            found.append(batch)
            if number < 2:
                break
    return found


def two(loader: Any) -> list[Any]:
    first, second = iter(loader), iter(loader)
    return [*zip(first, second, strict=True)]


def length_warnings(cls: Any, kind: Any) -> Any:
    loader = cls(Shards(5, 1), None, **kind)
    assert len(loader) == 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = list(loader)
    texts = [re.sub("0x[0-9a-f]+", "", str(each.message)) for each in caught]
    return found, [text for text in texts if "fork" not in text]


def ended(loader: Any) -> list[Any]:
    batches = iter(loader)
    return [next(batches, "end") for _ in range(5)]


def in_thread(loader: Any) -> list[Any]:
    found, batches = [], iter(loader)
    for _ in range(4):
        thread = threading.Thread(target=lambda: found.append(next(batches, "end")))
        thread.start()
        thread.join()
    return found


def around_an_error(loader: Any) -> list[Any]:
    batches, found = iter(loader), []
    for _ in range(7):
        try:
            found.append(next(batches, "end"))
        except (KeyError, LookupError) as error:
            found.append(type(error))
            if type(error) is LookupError:
                return found
    return found


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@with_kinds
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_behaviour_is_that_of_torch(behaviour: str, kind: str) -> None:
    both = []
    for cls in (TorchLoader, DataLoader):
        options = dict(KINDS[kind])
        is_thread = options.get("worker_method") == "thread"
        if is_thread and behaviour in NOT_OF_THREADS:
            return
        if cls is TorchLoader:
            options.pop("worker_method", None)
        seed_everything()
        try:
            found: Any = BEHAVIOURS[behaviour](cls, options)
        except LookupError as error:  # while torch draws ahead, in iter()
            found = type(error)
        drawn = torch.rand(3).tolist(), random.random(), np.random.rand()
        both.append((str(found), drawn))
    if (behaviour, kind) != ("a sampler that raises", "inline"):
        assert "end" in both[1][0] or both[1][0]
    assert both[1] == both[0]


class Code(Exception):
    """An exception with a keyword that its constructor needs."""

    def __init__(self, *, code: int) -> None:
        super().__init__("the code")
        self.code = code


class Defaulted(Exception):
    """An exception with an attribute that a text alone does not restore."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Slotted(Exception):
    """An exception with an attribute that is not in its dict."""

    __slots__ = ("code",)

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses every assignment."""

    code: int


class Described(Exception):
    """An exception whose class has an attribute that torch takes for a keyword."""

    message = "described"

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Locked(Exception):
    """An exception with two arguments, and an attribute that does not pickle."""

    def __init__(self, path: str, code: int) -> None:
        super().__init__(path, code)
        self.path, self.code, self.lock = path, code, threading.Lock()


class Exits(Exception):
    """An exception that ends the program if it is made in another way."""

    def __init__(self, code: int) -> None:
        if type(code) is not int:
            raise SystemExit(3)
        super().__init__(code)
        self.code = code


class Opened(Exception):
    """An exception with an argument that does not pickle."""

    def __init__(self, lock: Any, code: int) -> None:
        super().__init__(lock, code)
        self.code = code


class Response(Exception):
    """An exception that asks another object for its attributes, as `HTTPError` does."""

    def __init__(self, lock: Any, *, code: int) -> None:
        super().__init__("a response")
        self.file, self.code = lock, code

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["file"], name)


def grouped() -> BaseException:
    """Return an exception group with exceptions that do not pickle."""
    inner: list[Any] = [ValueError("x"), Code(code=5), Opened(threading.Lock(), 7)]
    try:
        return ExceptionGroup("all", inner)
    except NameError:  # Python 3.10 has no groups
        return Defaulted("x", 7)


def local() -> type[Exception]:
    class Local(ValueError):
        """A class that does not pickle."""

    return Local


def unknown() -> type[Exception]:
    """Return a class of a module that only this process has."""
    module: Any = types.ModuleType(f"made_in_process_{os.getpid()}")
    sys.modules[module.__name__] = module
    exec("class Unknown(ValueError): pass", vars(module))
    found: type[Exception] = module.Unknown
    return found


#: The error that a sample raises, the class that arrives, and attributes that arrive.
ERRORS: dict[str, tuple[Callable[[], BaseException], type, dict[str, Any]]] = {
    "text": (lambda: ValueError("x"), ValueError, {}),
    "key": (lambda: KeyError("x"), KeyError, {}),
    "system": (lambda: FileNotFoundError(2, "x"), FileNotFoundError, {"errno": 2}),
    "default": (lambda: Defaulted("x", 7), Defaulted, {"code": 7}),
    "process": (
        lambda: subprocess.CalledProcessError(3, ["x"]),
        subprocess.CalledProcessError,
        {"returncode": 3, "cmd": ["x"]},
    ),
    "http": (
        lambda: urllib.error.HTTPError("x", 404, "gone", {}, None),  # type: ignore[arg-type]
        urllib.error.HTTPError,
        {"code": 404},
    ),
    "keyword": (lambda: Code(code=5), Code, {"code": 5}),
    "slots": (lambda: Slotted("x", 7), Slotted, {"code": 7}),
    "frozen": (lambda: Frozen(7), Frozen, {"code": 7}),
    "message": (lambda: Described("x", 7), Described, {"code": 7}),
    "lock": (lambda: Locked("x", 7), Locked, {"code": 7, "path": "x"}),
    "exit": (lambda: Exits(7), Exits, {"code": 7}),
    "import": (
        lambda: ModuleNotFoundError("x", name="y"),
        ModuleNotFoundError,
        {"name": "y"},
    ),
    "unicode": (
        lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        UnicodeDecodeError,
        {"reason": "why"},
    ),
    "cancelled": (lambda: asyncio.CancelledError("x"), asyncio.CancelledError, {}),
    "argument": (lambda: Opened(threading.Lock(), 7), Opened, {"code": 7}),
    "response": (lambda: Response(threading.Lock(), code=7), Response, {"code": 7}),
    "group": (grouped, type(grouped()), {}),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@with_ways
@pytest.mark.parametrize("name", ERRORS)
def test_an_exception_keeps_its_class_and_its_attributes(name: str, kind: str) -> None:
    make, cls, attributes = ERRORS[name]

    def read(index: int) -> int:
        if index == 3:
            raise make()
        return index

    batches = iter(DataLoader(Map(6, read), **KINDS[kind]))
    assert [int(next(batches)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(cls) as caught:
        next(batches)
    assert type(caught.value) is cls
    for attribute, value in attributes.items():
        assert getattr(caught.value, attribute) == value
    parts = getattr(caught.value, "exceptions", ())
    assert [(type(it), getattr(it, "code", None)) for it in parts] == [
        (type(it), getattr(it, "code", None))
        for it in getattr(make(), "exceptions", ())
    ]
    assert traceback.format_exception(caught.value)  # it can be printed
    if "threads" in kind:
        assert batches._workers == []
        assert [int(batch) for batch in batches] == [4, 5]
        assert traceback.extract_tb(caught.tb)[-1].name == "read"
    elif KINDS[kind] and not issubclass(cls, Exception):
        (dead,) = (batches._workers[i] for i in (1 % len(batches._workers),))
        dead.join(10)
        assert dead.exitcode is not None


@pytest.mark.filterwarnings("ignore:.PP215")
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (local, "Local", "does not pickle"),
        (unknown, "Unknown", "cannot be imported here"),
    ],
    ids=["local", "unknown"],
)
@with_ways
def test_a_class_that_does_not_pickle_keeps_its_name_and_text(
    kind: str,
    make: Callable[[], type[Exception]],
    name: str,
    reason: str,
    on_error: Any,
) -> None:
    def read(index: int) -> int:
        if index == 3:
            raise make()("of the sample")
        return index

    loader = DataLoader(
        Map(6, read), 2, collate_fn=as_is, on_error=on_error, **KINDS[kind]
    )
    if on_error == "skip":
        assert list(loader) == [[0, 1], [2], [4, 5]]
        assert loader.sample_errors[0].error.endswith(f"{name}: of the sample")
        return
    batches = iter(loader)
    assert next(batches) == [0, 1]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        next(batches)
    assert "of the sample" in str(caught.value)
    if kind == "fork":
        assert type(caught.value) is RuntimeError
        assert f"{name}, which {reason}, was raised" in str(caught.value)
    else:
        assert type(caught.value).__name__ == name
    assert list(batches) == [[4, 5]]


class Fails:
    """Raises an exception at some indices, in each place of the user's code."""

    def __init__(self, error: type[BaseException], place: str) -> None:
        self.error, self.place = error, place

    def read(self, index: int) -> int:
        if self.place.startswith("__get") and index == 3:
            raise self.error
        return index

    def collate(self, samples: Any) -> Any:
        if self.place == "collate_fn" and 3 in samples:
            raise self.error
        return torch.tensor(samples)

    def init(self, worker: int) -> None:
        if self.place == "worker_init_fn":
            raise self.error


@pytest.mark.parametrize(
    ("error", "on_error"),
    [
        (GeneratorExit, "raise"),
        *((StopIteration, on_error) for on_error in ("raise", "skip", "replace")),
    ],
)
@with_ways
@pytest.mark.parametrize(
    "place", ["__getitem__", "__getitems__", "collate_fn", "worker_init_fn"]
)
def test_no_code_but_the_sampler_ends_an_epoch(
    place: str, kind: str, on_error: Any, error: type[BaseException]
) -> None:
    options = KINDS[kind]
    if place == "worker_init_fn" and not options:
        return  # it is not called
    fails = Fails(error, place)
    cls = Batched if place == "__getitems__" else Map
    loader = DataLoader(
        cls(8, fails.read),
        2,
        collate_fn=fails.collate,
        worker_init_fn=fails.init,
        on_error=on_error,
        **options,
    )
    got = []
    with pytest.raises(RuntimeError) as caught:
        for batch in loader:
            got.append(batch.tolist())
    at = {"__getitem__": "at index 3", "worker_init_fn": "in worker 0"}
    where = at.get(place, "in the batch of indices [2, 3]")
    what = "the dataset" if place.startswith("__get") else place
    text = f"but {what} raised {error.__name__} "
    assert text in str(caught.value)
    if on_error == "raise" or not place.startswith("__get"):
        assert f"{text}{where}. Raise another" in str(caught.value)
    assert got == ([] if place == "worker_init_fn" else [[0, 1]])


def raise_of(cls: type[BaseException]) -> None:
    raise cls("bad")


class Refusing:
    """A batch that raises an error when it is pickled, or when it is unpickled."""

    def __init__(self, error: type[BaseException], place: str) -> None:
        self.error, self.place = error, place

    def __reduce__(self) -> Any:
        if self.place == "pickling":
            raise_of(self.error)
        return raise_of, (self.error,)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "error", [StopIteration, ValueError, asyncio.CancelledError, KeyboardInterrupt]
)
@pytest.mark.parametrize("place", ["pickling", "unpickling"])
def test_a_batch_that_refuses_pickle_is_an_error_at_its_turn(
    place: str, error: type[BaseException], persistent: bool
) -> None:
    if place == "pickling" and error is KeyboardInterrupt:
        return  # it ends the worker, as in a sample

    def collate(samples: Any) -> Any:
        return Refusing(error, place) if 3 in samples else samples

    loader = DataLoader(
        range(8),
        2,
        collate_fn=collate,
        num_workers=2,
        persistent_workers=persistent,
    )
    ended = f"epoch, but the {place} of a batch raised StopIteration "
    for _ in range(2):
        batches = iter(loader)
        assert next(batches) == [0, 1]
        with pytest.raises((RuntimeError, error)) as caught:
            next(batches)
        text = str(caught.value)
        assert (ended in text) if error is StopIteration else ("bad" in text)
        assert isinstance(caught.value, error) != (error is StopIteration)
        noted = "".join([text, *getattr(caught.value, "__notes__", [])])
        at = {"pickling": "in the batch of ", "unpickling": "of worker 1, "}
        assert f"{at[place]}indices [2, 3]" in noted
        if place == "unpickling" or issubclass(error, Exception):
            assert list(batches) == [[4, 5], [6, 7]]


class Reopened(IterableDataset[int]):
    """Fails at one call of ``iter()``. The numbers tell the call."""

    def __init__(self, error: type[Exception], call: int) -> None:
        self.error, self.call, self.calls = error, call, 0

    def __iter__(self) -> Any:
        self.calls += 1
        if self.calls == self.call:
            raise self.error("bad")
        return iter(range(10 * self.calls, 10 * self.calls + 4))


@with_kinds
@pytest.mark.parametrize("error", [StopIteration, ValueError])
def test_a_stream_that_cannot_begin_is_an_error(
    error: type[Exception], kind: str
) -> None:
    text = "bad"
    if error is StopIteration:
        text = r"but iter\(\) of the dataset raised StopIteration at the start"
    options = {**KINDS[kind], "num_workers": min(1, KINDS[kind].get("num_workers", 0))}
    with pytest.raises((RuntimeError, ValueError), match=text):
        next(iter(DataLoader(Reopened(error, 1), 2, **options)))
    if "persistent" not in kind:
        return  # a later epoch has new workers, or none
    loader = DataLoader(Reopened(error, 2), 2, collate_fn=as_is, **options)
    assert next(iter(loader)) == [10, 11]
    batches = iter(loader)
    with pytest.raises((RuntimeError, ValueError), match=text) as caught:
        next(batches)
    assert "samples" not in str(caught.value)  # those of the last epoch
    assert list(batches) == [[30, 31], [32, 33]]


class Unpicklable:
    """An index that does not pickle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __index__(self) -> int:
        return 2


class Untold(ValueError):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise TypeError


def refuse(error: type[Exception]) -> Any:
    raise error("not here")


class Unbuildable:
    """An index that pickles, but cannot be rebuilt."""

    def __init__(self, error: type[Exception] = ValueError) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return refuse, (self.error,)


class Unsendable:
    """An index whose pickling raises an error without a text."""

    def __reduce__(self) -> Any:
        raise Untold


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("options", [{}, {"timeout": 30}, {"persistent_workers": True}])
@pytest.mark.parametrize(
    ("index", "rule"),
    [
        (Unpicklable(), r"the indices \[<.*Unpicklable.*>\] of the sampler Indices"),
        (Unsendable(), r"of the sampler Indices must pickle .* raised Untold: \."),
        (Unbuildable(), "the indices of the sampler must unpickle in worker"),
        (Unbuildable(Untold), r"must unpickle in worker \d, but raised Untold: \."),
    ],
    ids=["pickle", "pickle without text", "rebuild", "rebuild without text"],
)
def test_an_index_that_cannot_be_sent_is_an_error_at_its_turn(
    index: Any, rule: str, options: dict[str, Any], place: int
) -> None:
    class Indices:
        def __iter__(self) -> Any:
            indices: list[Any] = [0, 1, 2, 3, 4]
            indices[place] = index
            return iter(indices)

    loader = DataLoader(range(5), sampler=Indices(), num_workers=2, **options)
    for _ in range(2):
        batches = iter(loader)
        assert [int(next(batches)) for _ in range(place)] == [0, 1, 2][:place]
        with pytest.raises(RuntimeError, match=rule):
            next(batches)
        rest = [0, 1, 2, 3, 4][place + 1 :]
        assert [int(batch) for batch in batches] == rest


@pytest.mark.parametrize("cls", [TorchLoader, DataLoader])
def test_a_late_batch_is_an_error_in_the_words_of_torch(cls: Any) -> None:
    loader = cls(Map(4, lambda index: time.sleep(60)), num_workers=1, timeout=0.3)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0\.3 seconds"):
        next(iter(loader))


@pytest.mark.parametrize("in_order", [False, 0])
def test_without_order_the_first_batch_that_is_ready_comes_first(in_order: Any) -> None:
    ready = torch.multiprocessing.get_context("fork").Event()

    def read(index: int) -> int:
        if index == 0:
            ready.wait(60)
        return index

    loader = DataLoader(
        Map(4, read), num_workers=2, in_order=in_order, multiprocessing_context="fork"
    )
    found = []
    for batch in loader:
        found.append(int(batch))
        if len(found) == 2:
            ready.set()
    assert found[:2] == [1, 3] and sorted(found) == [0, 1, 2, 3]


def test_the_names_that_other_libraries_use() -> None:
    loader: DataLoader[int] = DataLoader(
        range(6), 2, num_workers=2, persistent_workers=True
    )
    assert loader._iterator is None and loader._dataset_kind == 0
    # timm sets a batch sampler after this.
    assert loader._DataLoader__initialized is True  # type: ignore[attr-defined]
    batches = loader._get_iterator()
    assert isinstance(batches, _BaseDataLoaderIter)
    assert batches._index_sampler is loader._index_sampler and len(batches) == 3
    assert batches._num_yielded == 0
    next(batches)
    assert batches._num_yielded == 1
    assert [worker.is_alive() for worker in batches._workers] == [True, True]
    batches._reset(loader)  # PyG
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    batches._reset(loader, first_iter=False)
    assert batches._num_yielded == 0 and len(list(batches)) == 3
    workers = list(batches._workers)
    batches._shutdown_workers()  # composer, Lightning
    batches._shutdown_workers()
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(NotImplementedError):
        batches.__getstate__()


@with_kinds
def test_torch_geometric_transforms_the_batches_of_an_iterator(kind: str) -> None:
    """The pattern of its ``NodeLoader`` and ``DataLoaderIterator``, on our class."""

    class Transforming:
        def __init__(self, iterator: Any) -> None:
            self.iterator = iterator

        def __iter__(self) -> Any:
            return self

        def _reset(self, loader: Any, first_iter: bool = False) -> None:
            self.iterator._reset(loader, first_iter)

        def __len__(self) -> int:
            return len(self.iterator)

        def __next__(self) -> Any:
            return [-each for each in next(self.iterator)]

    class Nodes(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return Transforming(super()._get_iterator())

    loader = Nodes(range(5), 2, collate_fn=as_is, **KINDS[kind])
    for _ in range(3):
        assert list(loader) == [[0, -1], [-2, -3], [-4]]
    assert len(iter(loader)) == 3


def test_composer_ends_the_workers_in_the_middle_of_an_epoch() -> None:
    """The pattern of ``Trainer.close`` and of its ``DataSpec``, on our class."""
    loader = DataLoader(range(8), 2, num_workers=2, persistent_workers=True)
    for _ in range(2):
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()
            loader._iterator = None
        assert [batch.tolist() for batch in loader][3] == [6, 7]


def test_a_loader_inside_a_dataset_of_workers() -> None:
    def read(index: int) -> list[int]:
        return [int(each) for each in DataLoader(range(index, index + 2))]

    both = [
        [batch[0] for batch in cls(Map(3, read), num_workers=2, collate_fn=as_is)]
        for cls in (TorchLoader, DataLoader)
    ]
    assert both[0] == both[1] == [[0, 1], [1, 2], [2, 3]]
