"""Containers, arrays and numbers in samples; loaders and their settings."""

from __future__ import annotations

import math
import threading
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import torch

from pyparallel import DataContainer, DataLoader, PreDataLoader, collate
from tests.support.errors.bad_inputs import Case, Refused, refused
from tests.support.errors.bad_inputs_stack import one
from tests.support.errors.collate_errors import LEAF, TOO_DEEP, cyclic, nested

DC = DataContainer
ONES = torch.ones
Pair = namedtuple("Pair", "a b")


class Lines(list[Any]):
    """A user's list class."""


class Broken(dict[str, Any]):
    """A mapping that fails to read its values."""

    def __getitem__(self, key: str) -> Any:
        raise OSError(f"no {key} any more")


class Endless:
    """A loader without a length."""

    def __iter__(self) -> Any:
        return iter([1, 2])


def holds_itself() -> DataContainer:
    result = DC([])
    result.data.append(result)
    return result


def read_only() -> list[Any]:
    array = np.arange(3.0)
    array.flags.writeable = False
    return [array, array]


def no_leaf(kind: str) -> Refused:
    return refused(f"batch[0] {LEAF.format(kind)}", TypeError)


def no_number(value: int) -> Refused:
    message = f"batch[0] must be a number that a tensor can hold, but is {value}."
    return refused(message, ValueError)


DEEP = refused(f"the batch{TOO_DEEP}", ValueError)

NESTS = {
    "namedtuple": Case(
        lambda: [Pair(ONES(2), 3)] * 2,
        collate,
        lambda: Pair(ONES(2, 2), torch.tensor([3, 3])),
    ),
    "list-subclass": Case(lambda: [Lines([1])] * 2, collate, lambda: [ONES(2).long()]),
    "user-dict": Case(
        lambda: [UserDict(a=1)], collate, lambda: UserDict(a=torch.tensor([1]))
    ),
    "strings": Case(lambda: ["ab", ""], collate, lambda: ["ab", ""]),
    "extra-key": Case(
        lambda: [{"odd": 1}, {"odd": 2, "more": 3}],
        collate,
        lambda: {"odd": torch.tensor([1, 2])},
        (
            "[PP101] batch[1] should have the keys of batch[0], but also has 'more'. "
            "The batch does not contain these keys, as in mmcv. Give every sample the "
            "same keys.",
        ),
    ),
    "broken-mapping": Case(
        lambda: [Broken(a=1), Broken(a=2)], collate, refused("no a any more", OSError)
    ),
    "set-in-a-sample": Case(lambda: [{1}], collate, no_leaf("set")),
    "one-true-per-gpu": Case(
        lambda: [DC(1), DC(2)], lambda x: collate(x, True).data, lambda: [[1], [2]]
    ),
    "container-in-container": Case(
        lambda: [DC(DC(1))], lambda x: one(x)[0].data, lambda: 1
    ),
    "container-in-itself-to": Case(holds_itself, lambda x: x.to("cpu"), DEEP),
    "container-in-itself-pinned": Case(holds_itself, lambda x: x.pin_memory(), DEEP),
    "deque-of-depth-100": Case(
        lambda: nested(100),
        collate,
        refused(f"batch[0][0][0][0]...{TOO_DEEP}", ValueError),
    ),
    "depth-63": Case(
        lambda: [nested(63)],
        lambda x: str(collate(x)),
        lambda: str(nested(63)),
    ),
    "negative-strides": Case(
        lambda: [np.arange(3)[::-1]], collate, lambda: torch.tensor([[2, 1, 0]])
    ),
    "read-only": Case(
        read_only, collate, lambda: torch.tensor([[0.0, 1, 2]] * 2).double()
    ),
    "big-endian": Case(
        lambda: [np.array([1, 2], ">i2")],
        collate,
        lambda: torch.tensor([[1, 2]], dtype=torch.int16),
    ),
    "array-of-no-dims": Case(
        lambda: [np.array(1.5)], collate, lambda: torch.tensor([1.5]).double()
    ),
    "object-array": Case(
        lambda: [np.array([None], object)],
        collate,
        no_leaf("numpy.ndarray of dtype object"),
    ),
    "array-in-itself": Case(
        lambda: [held_by_itself()], collate, no_leaf("numpy.ndarray of dtype object")
    ),
    "2**63": Case(lambda: [2**63], collate, no_number(2**63)),
    "least-integer": Case(
        lambda: [-(2**63)], collate, lambda: torch.tensor([-(2**63)])
    ),
}


def held_by_itself() -> Any:
    array = np.empty(1, object)
    array[0] = array
    return array


def setting(make: Any, message: str, cls: type) -> Case:
    return Case(lambda: [1, 2], make, refused(message, cls))


def queue(size: Any, shown: str, cls: type) -> Case:
    rule = "PreDataLoader: queue_size must be an integer of 1 or more, but is"
    call = lambda x: PreDataLoader(x, queue_size=size)  # noqa: E731 - one of a table
    return setting(call, f"{rule} {shown}.", cls)


def timeout(seconds: Any, shown: str, cls: type) -> Case:
    rule = "PreDataLoader: timeout must be a number of seconds, 0 or more, but is"
    call = lambda x: PreDataLoader(x, timeout=seconds)  # noqa: E731 - as above
    return setting(call, f"{rule} {shown}.", cls)


def ring(option: str, value: Any, shown: str, cls: type) -> Case:
    rule = f"DataLoader: {option} must be None or an integer of 0 or more, but is"
    call = lambda x: DataLoader(x, **{option: value})  # noqa: E731 - as above
    return setting(call, f"{rule} {shown}.", cls)


def loader(value: Any, shown: str) -> Case:
    rule = "PreDataLoader: loader must be iterable, or a function that returns an"
    message = f"{rule} iterable, but is {shown}."
    return Case(lambda: value, PreDataLoader, refused(message, TypeError))


def all_of(given: Any, **options: Any) -> list[Any]:
    with PreDataLoader(given, **options) as batches:
        return list(batches)


def twice(given: Any) -> list[list[Any]]:
    with PreDataLoader(given) as batches:
        return [list(batches), list(batches)]


def after_close(given: Any) -> list[Any]:
    """Use an iterator and its loader after each has been closed."""
    with PreDataLoader(given) as batches:
        begun = iter(batches)
        seen = [next(begun)]
        begun.close()
        seen.append(next(begun, "the end"))
        batches.close()
        seen.append(next(begun, "the end"))
        return [*seen, *batches]


LOADERS = {
    "queue-0": queue(0, "0", ValueError),
    "queue-float": queue(1.5, "1.5 (float)", TypeError),
    "queue-none": queue(None, "None (None)", TypeError),
    "queue-vast": Case(
        lambda: [1, 2], lambda x: all_of(x, queue_size=2**70), lambda: [1, 2]
    ),
    "timeout-minus-1": timeout(-1, "-1", ValueError),
    "timeout-nan": timeout(math.nan, "nan", ValueError),
    "timeout-str": timeout("1", "'1' (str)", TypeError),
    "timeout-true": timeout(True, "True (bool)", TypeError),
    "timeout-1e10": timeout(1e10, "10000000000.0", ValueError),
    "timeout-2**1024": timeout(2**1024, str(2**1024), ValueError),
    "timeout-longest": Case(
        lambda: [1, 2],
        lambda x: all_of(x, timeout=threading.TIMEOUT_MAX / 2),
        lambda: [1, 2],
    ),
    "slabs-minus-1": ring("ring_slabs", -1, "-1", ValueError),
    "slabs-float": ring("ring_slabs", 1.5, "1.5 (float)", TypeError),
    "bytes-minus-1": ring("max_ring_bytes", -1, "-1", ValueError),
    "bytes-str": ring("max_ring_bytes", "1G", "'1G' (str)", TypeError),
    "loader-int": loader(5, "5 (int)"),
    "loader-none": loader(None, "None (None)"),
    "loader-class": Case(
        lambda: object,
        all_of,
        refused(
            "PreDataLoader: loader must be a function that returns an iterable, but "
            "returned object.",
            TypeError,
        ),
    ),
    "loader-function": Case(lambda: lambda: [1, 2], all_of, lambda: [1, 2]),
    "loader-without-length": Case(Endless, all_of, lambda: [1, 2]),
    "length-of-none": Case(
        Endless,
        lambda x: len(PreDataLoader(x)),
        refused("object of type 'Endless' has no len()", TypeError),
    ),
    "loader-by-items": Case(lambda: "ab", all_of, lambda: ["a", "b"]),
    "loader-twice": Case(lambda: [1, 2], twice, lambda: [[1, 2], [1, 2]]),
    "loader-of-one-pass": Case(
        lambda: [1, 2], lambda x: twice(iter(x)), lambda: [[1, 2], []]
    ),
    "after-close": Case(
        lambda: [1, 2], after_close, lambda: [1, "the end", "the end", 1, 2]
    ),
    "cyclic-batch-to-the-host": Case(
        lambda: [cyclic([1])],
        lambda x: all_of(x, device="cpu"),
        refused(f"the batch{TOO_DEEP}", ValueError),
    ),
    "container-in-itself-to-the-host": Case(
        lambda: [holds_itself()], lambda x: all_of(x, device="cpu"), DEEP
    ),
}
