"""Nested samples of every kind, at every entry point, on both backends.

Both backends return equal results, or raise errors of one class with a path.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from pyparallel import (
    Collate,
    Concat,
    DataContainer,
    List,
    Pad,
    Padding,
    Ragged,
    Stack,
    collate,
    gather,
    pad_stack,
    scatter,
    to_host,
)
from pyparallel.batch.tensor_fields import TensorFields
from pyparallel.core.errors import Error
from pyparallel.mmengine import default_collate, pseudo_collate
from tests.support.fuzzing.fuzz_operators import BACKENDS
from tests.support.fuzzing.fuzzed import Numbers
from tests.support.processes.backends import using

Point = namedtuple("Point", "x y")


@dataclass
class Record:
    x: Any
    y: Any


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


SHAPES: Sequence[tuple[int, ...]] = [(), (0,), (2,), (3,), (1, 2), (2, 2), (1, 2, 3)]
LEAVES: list[Callable[[Numbers], Any]] = [
    lambda n: torch.ones(n.choose(SHAPES)),
    lambda n: torch.ones(n.choose(SHAPES), dtype=n.choose([torch.int8, torch.float16])),
    lambda n: torch.ones(n.choose(SHAPES)).as_subclass(Tagged),
    lambda n: torch.ones(n.choose(SHAPES), device="meta"),
    lambda n: torch.ones(n.choose(SHAPES), requires_grad=True),
    lambda n: torch.ones(2, 2).to_sparse(),
    lambda n: torch.ones(2, dtype=torch.complex64).conj(),
    lambda n: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda n: np.ones(n.choose(SHAPES), n.choose(["f4", "u1", ">i2", "O", "U1"])),
    lambda n: np.ma.array([1.0, 2.0], mask=[n.maybe(), True]),
    lambda n: n.choose([1, 2**70, -1.5, True, 1j, None, "", "ab", b"a", np.float32(1)]),
    lambda n: n.choose(
        [np.ma.masked, object, Ellipsis, range(2), {1, 2}, float("nan")]
    ),
    lambda n: Ragged(torch.ones(3), torch.tensor([0, n.between(0, 3), 3])),
]
BOXES: list[Callable[[list[Any]], Any]] = [
    list,
    tuple,
    deque,
    UserList,
    lambda items: dict(zip(["a", "", 1, ("b",)], items, strict=False)),
    lambda items: OrderedDict(zip("ab.c", items, strict=False)),
    lambda items: UserDict(zip("ab", items, strict=False)),
    lambda items: MappingProxyType(dict(zip("ab", items, strict=False))),
    lambda items: Point(items[0], items[-1]),
    lambda items: Record(items[0], items[-1]),
]
RULES = [Stack(), Pad(), Pad(dims=1, size_divisor=2, mask=True), Concat(), List()]
RULES += [Pad(value=2.5), Pad(side="left", sizes=True)]


def draw_box(numbers: Numbers, items: list[Any], kind: int) -> Any:
    if kind < len(BOXES):
        return BOXES[kind](items)
    flags = [{}, {"stack": True}, {"stack": True, "pad_dims": 1}, {"cpu_only": True}]
    flags += [{"ragged": True}, {"stack": True, "padding": Padding(mask=True)}]
    return DataContainer(items[0], **numbers.choose(flags))


def draw_samples(numbers: Numbers, count: int, depth: int) -> list[Any]:
    """Draw samples that usually have one structure."""
    if depth == 0 or numbers.maybe(3):
        kind = numbers.between(0, len(LEAVES) - 1)
        return [
            LEAVES[numbers.between(0, len(LEAVES) - 1) if numbers.maybe(8) else kind](
                numbers
            )
            for _ in range(count)
        ]
    kind, size = numbers.between(0, len(BOXES)), numbers.between(1, 3)
    columns = [draw_samples(numbers, count, depth - 1) for _ in range(size)]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return [
        draw_box(numbers, row, numbers.between(0, len(BOXES)))
        if numbers.maybe(10)
        else draw_box(numbers, row[: max(1, size - numbers.maybe(12))], kind)
        for row in rows
    ]


def draw_call(numbers: Numbers) -> Callable[[list[Any]], Any]:
    rule = numbers.choose(RULES)
    name = numbers.choose(["a", "", "x", "0", "1", "a.a", "a.0", "b", "."])
    other = {numbers.choose(["", "a", "y", "a.b"]): numbers.choose(RULES)}
    targets = ["cpu"] * numbers.between(1, 3)
    return numbers.choose(
        [
            collate,
            lambda samples: collate(samples, 1),
            Collate(),
            Collate(default=rule),
            lambda samples: Collate({name: rule})(samples),
            lambda samples: Collate({name: rule, **other})(samples),
            lambda samples: Collate({name: rule}, default=rule)(samples),
            lambda samples: Collate.auto(samples, 2)(samples),
            lambda samples: Collate(x=rule)([{"x": each} for each in samples]),
            pad_stack,
            lambda samples: pad_stack(samples, side="left", mask=True),
            Ragged.from_tensors,
            lambda samples: gather(samples, None),
            lambda samples: gather(samples, "cpu"),
            lambda samples: scatter(samples, targets),
            lambda samples: scatter(samples[0], targets, dim=-1),
            lambda samples: scatter(collate(samples, 1), ["cpu"] * len(samples)),
            lambda samples: scatter(samples, -1, dtype=torch.float64),
            to_host,
            default_collate,
            pseudo_collate,
        ]
    )


def outcome_of(call: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    try:
        return call(samples)
    except (Error, TypeError, ValueError) as error:
        text = str(error)
        assert isinstance(error, Error), f"{type(error).__name__}: {text}"
        # A path, or the place of a call.
        assert re.search(r"\[\d+\]|^inputs|: ", text), f"{type(error).__name__}: {text}"
        assert "must " in text, f"{type(error).__name__}: {text}"
        return type(error)


def same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested or one.layout is not torch.strided:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.detach(), other.detach()
    if one.is_meta:
        return other.is_meta
    return torch.allclose(one, other, 0, 0, equal_nan=True)


def same(one: Any, other: Any) -> bool:
    """Compare results: types, shapes, bits and structures."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other or same_tensors(one, other)
    if isinstance(one, TensorFields):
        return same(one.fields(), other.fields())
    if isinstance(one, DataContainer):
        return same(one.data, other.data)
    if isinstance(one, dict | UserDict | MappingProxyType):
        return list(one) == list(other) and same([*one.values()], [*other.values()])
    if isinstance(one, list | tuple | deque | UserList):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Record):
        return same([one.x, one.y], [other.x, other.y])
    return one is other or str(one) == str(other)


def nested_samples(numbers: Numbers) -> None:
    """Batch, join or divide samples of any kinds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of rare kinds
        samples = draw_samples(numbers, numbers.between(1, 4), 2)
        call = draw_call(numbers)
        found = []
        for backend in BACKENDS:
            with using(backend):
                found.append(outcome_of(call, samples))
    assert all(same(found[0], each) for each in found), found
