"""Collate: one rule for each field, compared with torch's pad, stack and cat."""

from __future__ import annotations

import itertools
import math
import pickle
import re
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

import pyparallel
from pyparallel import (
    Collate,
    Concat,
    DataContainer,
    List,
    Pad,
    Padded,
    Ragged,
    Stack,
    collate,
)
from pyparallel.core import errors
from tests.support.processes.backends import both, using

RULES = {"Pad": Pad, "Stack": Stack, "Concat": Concat, "List": List}


def assert_same(found: Any, expected: Any) -> None:
    """Compare two batches with all types, dtypes and shapes."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert list(found) == list(expected)
        for key in found:
            assert_same(found[key], expected[key])
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(found, Padded | Ragged):
        assert_same(found.fields(), expected.fields())
    elif isinstance(found, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.is_contiguous() and torch.equal(found, expected)
    else:
        assert found == expected


def detections(num: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "image": torch.full((3, 20 + i, 30 - i), float(i)),
            "boxes": torch.full((i, 4), float(i)),
            "caption": "word " * i,
            "id": i,
        }
        for i in range(num)
    ]


DETECTION = Collate(
    image=Pad(size_divisor=32, value=2, mask=True),
    boxes=Concat(),
    caption=List(),
    id=Stack(),
)


# --------------------------------------------------------------------- names of fields
Pair = namedtuple("Pair", "image label")


@dataclass
class Target:
    boxes: Any
    label: int


BOXES = [torch.ones(2, 4), torch.zeros(1, 4)]
JOINED = Ragged(torch.cat(BOXES), torch.tensor([0, 2, 3]))


@pytest.mark.parametrize(
    ("rules", "wrap", "read"),
    [
        (Collate(x=Concat()), lambda x: {"x": x}, lambda b: b["x"]),
        (Collate({"x": Concat()}), lambda x: {"x": x}, lambda b: b["x"]),
        (Collate({"x.y": Concat()}), lambda x: {"x.y": x}, lambda b: b["x.y"]),
        (Collate({"1": Concat()}), lambda x: {1: x}, lambda b: b[1]),
        (Collate(**{"x.y": Concat()}), lambda x: {"x": {"y": x}},
         lambda b: b["x"]["y"]),
        (Collate(x={"y": Concat()}), lambda x: {"x": {"y": x}}, lambda b: b["x"]["y"]),
        (Collate({"x.boxes": Concat()}), lambda x: {"x": Target(x, 1)},
         lambda b: b["x"].boxes),
        (Collate(Concat()), lambda x: (x, 1), lambda b: b[0]),
        (Collate(Stack(), Concat()), lambda x: [1, x], lambda b: b[1]),
        (Collate({1: Concat()}), lambda x: ("text", x), lambda b: b[1]),
        (Collate(Stack(), {"y": Concat()}), lambda x: (1, {"y": x}),
         lambda b: b[1]["y"]),
        (Collate(image=Concat()), lambda x: Pair(x, 1), lambda b: b.image),
        (Collate(default=Concat()), lambda x: x, lambda b: b),
        (Collate(default=Concat()), lambda x: {"x": (x, "text")}, lambda b: b["x"][0]),
    ],
)  # fmt: skip
def test_a_field_is_found_by_its_name(
    rules: Collate, wrap: Callable[[Any], Any], read: Callable[[Any], Any]
) -> None:
    assert_same(read(rules([wrap(x) for x in BOXES])), JOINED)


def test_a_field_without_a_rule_is_batched_by_torchs_rules() -> None:
    samples = [{"a": torch.ones(2), "b": 1.5, "c": "x", "d": (1, 2)}] * 2
    expected = collate(samples) | {"a": [torch.ones(2)] * 2}
    assert_same(Collate(a=List())(samples), expected)


def test_the_default_is_the_rule_of_every_other_field() -> None:
    samples = [{"a": [1] * n, "b": {"c": torch.ones(n)}, "d": "x"} for n in (1, 2)]
    ragged = Collate(a=Pad(), default=Concat())(samples)
    below = Collate({"b.c": Concat()}, default=List())(samples)
    for found in (ragged, below):
        assert found["b"]["c"].offsets.tolist() == [0, 1, 3]
        assert found["d"] == ["x", "x"]
    assert ragged["a"].tolist() == [[1, 0], [1, 1]]
    assert below["a"] == [[1], [1, 1]]
    # List keeps fields of any type whole, but not the sample.
    assert Collate(default=List())(samples)["b"] == [each["b"] for each in samples]


@both
def test_the_default_is_the_rule_of_equal_values_too(backend: ModuleType) -> None:
    samples = [{"a": torch.ones(2), "b": {"c": torch.ones(2)}}] * 2
    with using(backend):
        found = Collate(default=Concat())(samples)
        kept = Collate(default=List())(samples)
    joined = Ragged(torch.ones(4), torch.tensor([0, 2, 4]))
    assert_same(found, {"a": joined, "b": {"c": joined}})
    assert_same(kept["a"], [torch.ones(2)] * 2)


def test_a_function_gets_the_values_of_its_field() -> None:
    rules = Collate(x=sum, default=max)
    assert rules([{"x": 2, "y": 3}, {"x": 5, "y": 1}]) == {"x": 7, "y": 3}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(
    ("rules", "samples", "field"),
    [
        (Collate({"x.y": torch.stack}), [{"x": {"y": 1}}], "x.y"),
        (Collate(default=torch.stack), [1], "default"),
    ],
)
def test_the_error_of_a_function_has_the_name_of_its_field(
    rules: Collate, samples: list[Any], field: str
) -> None:
    found: Any = raised(rules, samples)
    assert isinstance(found, TypeError) and str(found).startswith("expected Tensor")
    assert found.__notes__ == [f"Collate: in the rule of {field!r}."]


@pytest.mark.parametrize(
    ("value", "values"),
    [
        (0.5, [torch.ones(1), torch.ones(2)]),
        (0.5, [torch.ones(1).int(), torch.ones(1).int()]),
        (2.0, [torch.ones(1).int(), torch.ones(2).int()]),
        (True, [torch.ones(1).bool(), torch.ones(2).bool()]),
        (-1, [torch.ones(1).bool(), torch.ones(1).bool()]),
    ],
)
def test_pad_takes_values_that_the_padding_can_hold(
    value: float, values: list[torch.Tensor]
) -> None:
    expected = torch.nn.utils.rnn.pad_sequence(
        values, batch_first=True, padding_value=value
    )
    assert_same(Collate(x=Pad(value))(of(*values))["x"], expected)


@both
@pytest.mark.parametrize(
    ("value", "values", "expected"),
    [
        (0.5, [[1, 2], [0.5]], [[1, 2], [0.5, 0.5]]),
        (-0.5, [[True, False], [0.5]], [[1, 0], [0.5, -0.5]]),
        (2, [[True, False], [3]], [[1, 0], [3, 2]]),
        (0.5, [[0.5, 1.0], [1]], "torch.int64 can hold, but has 0.5."),
        (-0.5, [[1, 2], [0.5], [1]], "torch.int64 can hold, but has -0.5."),
        (math.nan, [[0.5, 1.0], [1]], "torch.int64 can hold, but has nan."),
        (2, [[3, 4], [True]], "torch.bool can hold, but has 2."),
    ],
)
def test_each_padded_value_can_hold_the_padding(
    value: float, values: Any, expected: Any, backend: ModuleType
) -> None:
    rules = Collate(x=Pad(value))
    with using(backend):
        if isinstance(expected, list):
            assert rules(of(*values))["x"].tolist() == expected
            return
        text = str(raised(rules, of(*values)))
    assert f"batch[{len(values) - 1}]['x'] must have a padding_value that " in text
    assert f"{expected} Use another value, or convert the samples" in text


# ------------------------------------------------------------------ values of a field
_KEEP_LIST = "Use List() to keep the values in a list."


def of(*values: Any) -> list[Any]:
    return [{"x": value} for value in values]


@pytest.mark.parametrize("rule", [Stack(), Pad(), Pad(mask=True), Concat()], ids=repr)
@pytest.mark.parametrize("kind", ["arrays", "lists", "tuples", "images"])
def test_arrays_images_and_lists_are_batched_like_tensors(rule: Any, kind: str) -> None:
    values: list[Any] = {
        "arrays": [numpy.ones((2, 3), numpy.float32), numpy.zeros((2, 3), "f4")],
        "lists": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        "tuples": [(1.5, 2.0), (0.5, 1.0)],
    }.get(kind, [])
    if kind == "images":
        image = pytest.importorskip("PIL.Image")
        values = [image.new("L", (3, 2), 7), image.new("L", (3, 2), 9)]
    tensors = [
        torch.tensor(numpy.asarray(x) if kind == "images" else x) for x in values
    ]
    found = Collate(x=rule)([{"x": x} for x in values])
    assert_same(found["x"], Collate(default=rule)(tensors))


@pytest.mark.parametrize(
    ("rule", "advised"),
    [
        (Pad(divisor=8), Pad(dims=3, divisor=(8, 8, 1))),
        (Pad(dims=3, size_divisor=8), Pad(dims=3, size_divisor=(8, 8, 1))),
        (Pad(shape=(8, 8)), Pad(dims=3, shape=(8, 8, 3))),
        (Pad(buckets=[(4, 4), (8, 8)]), Pad(dims=3, buckets=[(4, 4, 3), (8, 8, 3)])),
        (Pad(size_divisor=(8,)), None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("width", [5, 6])
def test_pad_keeps_the_channels_of_pil_images(
    rule: Pad, advised: Pad | None, width: int
) -> None:
    image = pytest.importorskip("PIL.Image")
    images = [image.new("RGB", (size, 4), (1, 2, 3)) for size in (5, width)]
    found = raised(Collate(x=rule), of(*images))
    advice = f"Use {advised!r}." if advised else _KEEP_LIST
    assert str(found) == (
        f"Collate, {rule!r}: batch[0]['x'] must keep the 3 channels of a PIL image, "
        f"its last dimension, but Pad would pad them. {advice}"
    )
    if advised:
        expected = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
        for data, size in zip(expected, (5, width), strict=True):
            data[:4, :size] = torch.tensor([1, 2, 3])
        assert_same(Collate(x=advised)(of(*images))["x"], expected)


@pytest.mark.parametrize("rule", [Pad(), Pad(dims=3), Pad(size_divisor=8)], ids=repr)
@pytest.mark.parametrize(("mode", "shape"), [("L", (4, 5)), ("RGBA", (4, 5, 4))])
def test_pil_images_to_pad_have_one_number_of_channels(
    rule: Pad, mode: str, shape: tuple[int, ...]
) -> None:
    image = pytest.importorskip("PIL.Image")
    images = [image.new(each, (5, 4)) for each in ("RGB", mode)]
    assert str(raised(Collate(x=rule), of(*images))) == (
        f"Collate, {rule!r}: batch[1]['x'] must have the channels of batch[0]['x'], "
        f"but has shape {shape} where (4, 5, 3) was expected. Convert the PIL images "
        'to one mode, as with convert("RGB").'
    )


@pytest.mark.parametrize(
    ("rule", "shape"), [(Concat(), (1, 4)), (Pad(), (3, 1, 4))], ids=repr
)
def test_an_empty_list_has_the_dtype_and_width_of_the_others(
    rule: Any, shape: tuple[int, ...]
) -> None:
    values: list[Any] = [[], [[1, 2, 3, 4]], []]
    batch = Collate(x=rule)([{"x": x} for x in values])["x"]
    data = batch.values if isinstance(batch, Ragged) else batch
    assert (data.dtype, tuple(data.shape)) == (torch.int64, shape)


@pytest.mark.parametrize(
    ("rule", "shape", "mask"),
    [
        (Pad(size_divisor=4, mask=True), (2, 3, 8, 4), (2, 8, 4)),
        (Pad(dims=1, size_divisor=4, mask=True), (2, 3, 5, 4), (2, 4)),
        (Pad(shape=(4, 5, 6), mask=True), (2, 4, 5, 6), (2, 4, 5, 6)),
        (Pad(buckets=[(9, 9), (8, 3)], mask=True), (2, 3, 8, 3), (2, 8, 3)),
    ],
    ids=repr,
)
def test_options_of_pad(
    rule: Pad, shape: tuple[int, ...], mask: tuple[int, ...]
) -> None:
    batch = Collate(x=rule)([{"x": torch.ones(3, 5, 2)}] * 2)["x"]
    assert (tuple(batch.data.shape), tuple(batch.mask.shape)) == (shape, mask)
    assert batch.sizes.shape == (2, len(mask) - 1)
    assert batch.data.sum() == 2 * 30


def test_sizes_come_with_the_mask_unless_chosen() -> None:
    samples = [{"x": torch.ones(n)} for n in (1, 2)]
    assert type(Collate(x=Pad())(samples)["x"]) is torch.Tensor
    equal = Collate(x=Pad(dims=1))([{"x": torch.ones(1, 2)}] * 2)
    assert equal["x"].tolist() == [[[1, 1]], [[1, 1]]]
    only_mask = Collate(x=Pad(mask=True, sizes=False))(samples)["x"]
    only_sizes = Collate(x=Pad(sizes=True))(samples)["x"]
    assert only_mask.sizes is None
    assert only_mask.mask.tolist() == [[True, False], [True, True]]
    assert only_sizes.mask is None and only_sizes.sizes.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    "rules",
    [
        DETECTION,
        Collate(),
        Collate(Pad(), Stack()),
        Collate({"class": Stack()}),
        Collate(self=List()),
        Collate({"target.boxes": Concat(), "default": List()}, default=Stack()),
    ],
    ids=repr,
)
def test_the_text_of_a_collate_is_its_code(rules: Collate) -> None:
    again = eval(repr(rules), {**RULES, "Collate": Collate})
    assert repr(again) == repr(rules) == repr(pickle.loads(pickle.dumps(rules)))
    assert vars(again) == vars(rules)


# ---------------------------------------------------------------------------- messages
_NOT_A_TENSOR = (
    "must be a tensor, a numeric array, a PIL image, a number or a list of numbers of "
    "equal lengths, but is"
)


WRONG: list[tuple[Collate, list[Any], type[Exception], str]] = [
    (Collate(x=Stack()), of(torch.ones(2, 4), torch.ones(3, 4)), ValueError,
     "Collate, Stack(): batch[1]['x'] must match batch[0]['x'], but has shape (3, 4) "
     "where (2, 4) was expected. Use Pad(dims=2), Concat() or List()."),
    (Collate(x=Stack()), of([1], [[1]]), ValueError,
     "Collate, Stack(): batch[1]['x'] must match batch[0]['x'] in its number of "
     "dimensions, but has shape (1, 1) where (1,) was expected. Use List() to keep the "
     "values in a list."),
    (Collate(x=Stack()), of("a", "b"), TypeError,
     f"Collate, Stack(): batch[0]['x'] {_NOT_A_TENSOR} str. Use List() to keep the "
     "values in a list."),
    (Collate(x=Stack()), of(1, "b"), TypeError,
     "Collate, Stack(): batch[1]['x'] must be int like batch[0]['x'], but is str. Use "
     "List() to keep the values in a list."),
    (Collate(x=Stack()), of(2**80), ValueError,
     "Collate, Stack(): batch[0]['x'] must be a number that a tensor can hold, but is "
     "1208925819614629174706176. Use List() to keep the values in a list."),
    (Collate({"x.y": Pad(size_divisor=2)}),
     of({"y": torch.ones(3, 4, 4)}, {"y": torch.ones(1, 4, 4)}), ValueError,
     "Collate, Pad(size_divisor=2): batch[1]['x']['y'] must match batch[0]['x']['y'] "
     "outside its last 2 dimensions, but has shape (1, 4, 4) where (3, 4, 4) was "
     "expected. Make the samples equal in dimension 0 (colour images: "
     'convert("RGB")), or use List().'),
    (Collate(x=Pad(mask=True)), of(torch.ones(3, 4, 4), torch.ones(1, 4, 4)),
     ValueError,
     "Collate, Pad(mask=True): batch[1]['x'] must match batch[0]['x'] outside its last "
     "2 dimensions, but has shape (1, 4, 4) where (3, 4, 4) was expected. Make the "
     'samples equal in dimension 0 (colour images: convert("RGB")), or use List() or '
     "Pad(dims=3, mask=True)."),
    (Collate(x=Pad(size_divisor=(2, 2))), of(torch.ones(5, 4, 7), torch.ones(6, 4, 7)),
     ValueError,
     "Collate, Pad(size_divisor=(2, 2)): batch[1]['x'] must match batch[0]['x'] "
     "outside its last 2 dimensions, but has shape (6, 4, 7) where (5, 4, 7) was "
     "expected. Make the samples equal in dimension 0, or use List()."),
    (Collate(x=Stack()), of(torch.ones(3, 4, 5), torch.ones(1, 4, 4)), ValueError,
     "Collate, Stack(): batch[1]['x'] must match batch[0]['x'], but has shape "
     "(1, 4, 4) where (3, 4, 5) was expected. Make the samples equal in dimension 0 "
     '(colour images: convert("RGB")), or use Pad(dims=3) or List().'),
    (Collate(x=Pad(size_divisor=4, mask=True)),
     of(torch.ones(5, 6, 3), torch.ones(6, 5, 3)), ValueError,
     "Collate, Pad(size_divisor=4, mask=True): batch[1]['x'] must match batch[0]['x'] "
     "outside its last 2 dimensions, but has shape (6, 5, 3) where (5, 6, 3) was "
     "expected. Use Pad(dims=3, size_divisor=(4, 4, 1), mask=True) or List()."),
    (Collate(x=Pad(shape=(8, 7), side=("left", "right"))),
     of(torch.ones(5, 6, 3), torch.ones(6, 5, 3)), ValueError,
     "Collate, Pad(shape=(8, 7), side=('left', 'right')): batch[1]['x'] must match "
     "batch[0]['x'] outside its last 2 dimensions, but has shape (6, 5, 3) where "
     "(5, 6, 3) was expected. Use Pad(dims=3, shape=(8, 7, 3), side=('left', 'right', "
     "'right')) or List()."),
    (Collate(x=Pad(buckets=[(7, 7), (8, 8)])),
     of(torch.ones(5, 6, 3), torch.ones(6, 5, 3)), ValueError,
     "Collate, Pad(buckets=((7, 7), (8, 8))): batch[1]['x'] must match batch[0]['x'] "
     "outside its last 2 dimensions, but has shape (6, 5, 3) where (5, 6, 3) was "
     "expected. Use Pad(dims=3, buckets=((7, 7, 3), (8, 8, 3))) or List()."),
    (Collate(x=Pad(dims=2)), of([1], [1, 2]), ValueError,
     "Collate, Pad(dims=2): batch[0]['x'] must have at least 2 dimensions, but has "
     "shape (1,). Use Pad(dims=1), Concat() or List()."),
    (Collate(x=Pad(-1)), of(torch.ones(1).byte(), torch.ones(2).byte()), ValueError,
     "Collate, Pad(value=-1): batch[0]['x'] must have a padding_value that torch.uint8 "
     "can hold, but has -1. Use another value, or convert the samples to another "
     "dtype."),
    (Collate(x=Pad(0.5)), of([1, 2], [1]), ValueError,
     "Collate, Pad(value=0.5): batch[1]['x'] must have a padding_value that "
     "torch.int64 can hold, but has 0.5. Use another value, or convert the samples to "
     "another dtype."),
    (Collate(x=Pad(-1, size_divisor=2)), of(torch.ones(1).bool()), ValueError,
     "Collate, Pad(value=-1, size_divisor=2): batch[0]['x'] must have a padding_value "
     "that torch.bool can hold, but has -1. Use another value, or convert the samples "
     "to another dtype."),
    (Collate(x=Pad(shape=(2,))), of([1], [1, 2, 3]), ValueError,
     "Collate, Pad(shape=(2,)): batch[1]['x'] must be at most (2,), the shape of the "
     "padding, in the padded dimensions, but is (3,) there. Resize it before "
     "collating, or allow a larger shape."),
    (Collate(x=Pad()), of({"y": 1}, {"y": 2}), TypeError,
     f"Collate, Pad(): batch[0]['x'] {_NOT_A_TENSOR} dict. Give rules to its fields by "
     "dotted names, or use List()."),
    (Collate(x=Concat()), of(1, 2), ValueError,
     "Collate, Concat(): batch[0]['x'] must have at least 1 dimension to be ragged, "
     "but has shape (). Use Stack() or List()."),
    (Collate(x=Concat()), of(torch.ones(2, 3), torch.ones(2, 4)), ValueError,
     "Collate, Concat(): batch[1]['x'] must match batch[0]['x'] outside dimension 0, "
     "but has shape (2, 4) where (2, 3) was expected. Use Pad(dims=1) or List()."),
    (Collate(), of([1], [1, 2]), ValueError,
     "Collate, no rule for 'x': batch[1]['x'] must have 1 items like batch[0]['x'], "
     "but has 2. Use Pad(dims=1), Concat() or List()."),
    (Collate({"x.1": List()}), of((torch.ones(2), 1), (torch.ones(3), 1)), ValueError,
     "Collate, no rule for 'x.0': batch[1]['x'][0] must match batch[0]['x'][0], but "
     "has shape (3,) where (2,) was expected. Use Pad(dims=1), Concat() or List()."),
    (Collate(), of(1, None), TypeError,
     "Collate, no rule for 'x': batch[1]['x'] must be a tensor, a numeric array, a "
     "number, a string or a container of these, but is None. Use List() to keep the "
     "values in a list."),
    (Collate(), [torch.ones(1), torch.ones(2)], ValueError,
     "Collate, default=None: batch[1] must match batch[0], but has shape (2,) where "
     "(1,) was expected. Use Pad(dims=1), Concat() or List()."),
]  # fmt: skip


#: A rule in a text, whose arguments nest at most two levels of parentheses.
_RULE = re.compile(r"(?:Pad|Stack|Concat|List)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")


def raised(call: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        call(*args)
    return caught.value


@pytest.mark.parametrize(("rules", "samples", "error", "text"), WRONG)
def test_an_error_names_rule_field_and_sample_and_its_advice_works(
    rules: Collate, samples: list[Any], error: type[Exception], text: str
) -> None:
    found = raised(rules, samples)
    assert isinstance(found, error) and isinstance(found, pyparallel.Error)
    assert str(found) == text
    advised = _RULE.findall(text.split(". ")[-1])
    if "dtype" in text or "Resize" in text:
        assert not advised  # advice about the samples
        return
    assert "List()" in advised
    wrong = next((name for name in rules._rules), "x")
    name = {"Collate({'x.1': List()})": "x.0"}.get(repr(rules), wrong)
    for each in advised:
        rule = eval(each, RULES)
        whole = isinstance(samples[0], torch.Tensor)
        Collate(default=rule)(samples) if whole else Collate({name: rule})(samples)


@pytest.mark.parametrize(
    ("rules", "samples", "text"),
    [
        (Collate(Pad()), [([1], 2), ([1],)],
         "Collate: batch[1] must have 2 items like batch[0], but has 1. Give every "
         "sample the same fields."),
        (Collate({"x.0": Pad()}), of(([1], 2), ([1],)),
         "Collate: batch[1]['x'] must have 2 items like batch[0]['x'], but has 1. Give "
         "every sample the same fields."),
        (Collate(default=Pad()), [{"x": [1]}, [1]],
         "Collate: batch[1] must be a mapping like batch[0], but is list. Give every "
         "sample the same fields."),
        (Collate(x=Stack()), of(DataContainer(1)),
         f"Collate, Stack(): batch[0]['x'] {_NOT_A_TENSOR} pyparallel.DataContainer. "
         "Return the value without DataContainer from the data set, or use the "
         "function collate."),
        (Collate(x=Pad()), [{"x": [1], "y": 1}, {"x": [1]}],
         "batch[1] must have the keys of batch[0], but lacks 'y'. Give every sample "
         "the same keys."),
        (Collate(x=Pad()), [{"x": [1]}, {"x": [1]}, {"x": [1], "y": 1, "z": 2}],
         "batch[0] must have the keys of batch[2], but lacks 'y', 'z'. Give every "
         "sample the same keys."),
        (Collate(default=Pad()), of({"y": 1}, {"y": 1, "z": 2}),
         "batch[0]['x'] must have the keys of batch[1]['x'], but lacks 'z'. Give every "
         "sample the same keys."),
        (Collate(), [{"y": 1, "z": 1}, {"y": 1, "x": 1}],
         "batch[1] must have the keys of batch[0], but lacks 'z'. Give every sample "
         "the same keys."),
        (Collate(mask=Pad()), [{"x": 1}, {"x": 1}, {"x": 1, "mask": [1]}],
         "Collate, Pad(): batch[0] must have the field 'mask' like batch[2], but has "
         "'x'. Give every sample the same keys."),
        (Collate({"x.y": Pad()}), of({"a": 1}, {"y": [1]}),
         "Collate, Pad(): batch[0]['x'] must have the field 'y' like batch[1], but has "
         "'a'. Give every sample the same keys."),
        (Collate(imge=Pad()), [{"image": 1, "id": 2}],
         "Collate, Pad(): batch[0] must have the field 'imge', but has 'image', 'id'. "
         "Correct the name, or remove the rule."),
        (Collate({"target.boxes": Concat()}), [{"target": 3}],
         "Collate, Concat(): batch[0]['target'] must have the field 'boxes', but has "
         "no fields (int). Correct the name, or remove the rule."),
        (Collate(Pad(), Stack()), [Pair(1, 2)],
         "Collate, Pad(): batch[0] must have the field '0', but has 'image', 'label'. "
         "Correct the name, or remove the rule."),
        (Collate(Pad()), [torch.ones(2)],
         "Collate, Pad(): batch[0] must have the field '0', but has no fields "
         "(torch.Tensor). Use Collate(default=Pad()) for samples without fields."),
    ],
    ids=repr,
)  # fmt: skip
@both
def test_a_rule_without_a_field_is_an_error(
    backend: ModuleType, rules: Collate, samples: list[Any], text: str
) -> None:
    with using(backend):
        found = raised(rules, samples)
    assert isinstance(found, pyparallel.Error) and str(found) == text
    if "must have the field" in text:
        assert isinstance(found, KeyError) and isinstance(found, ValueError)


_ANY = "Pad(...), Stack(), Concat(), List() or a function of the list of values"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Collate(boxes=Ragged), TypeError,
         f"Collate: the rule of 'boxes' must be {_ANY}, but is <class "
         "'pyparallel.Ragged'> (type). Use Concat(), whose result is a Ragged."),
        (lambda: Collate(target={"x": Pad}), TypeError,
         f"Collate: the rule of 'target.x' must be {_ANY}, but is <class "
         "'pyparallel.Pad'> (type). Use Pad()."),
        (lambda: Collate(default="pad"), TypeError,
         f"Collate: the rule of default must be {_ANY}, but is 'pad' (str). Use "
         f"{_ANY}."),
        (lambda: Collate([{"x": torch.ones(2)}]), TypeError,  # type: ignore[arg-type]
         f"Collate: the rule of '0' must be {_ANY}, but is list. Use {_ANY}. Set "
         "collate_fn to an instance, such as Collate(), not to the class."),
        (lambda: Pad(mask="yes"), TypeError,  # type: ignore[arg-type]
         "Pad: mask must be True or False, but is 'yes' (str)."),
        (lambda: Pad(size_divisor="8"), TypeError,  # type: ignore[arg-type]
         "Pad: size_divisor must be an integer or a sequence of integers, but is '8' "
         "(str)."),
        (lambda: Collate({"a.b": Pad(), "a": List()}), ValueError,
         "Collate: 'a' must have one rule, but has a rule, and 'a.b' has another one. "
         "Remove one of them."),
        (lambda: Collate({"a": Pad()}, a=List()), ValueError,
         "Collate: 'a' must have one rule, but has Pad() and List(). Remove one of "
         "them."),
        (lambda: Pad(divisor=2, size_divisor=2), TypeError,  # type: ignore[call-arg]
         "Pad: divisor is another name of size_divisor, but both were given. Remove "
         "divisor."),
        (lambda: Pad(size_divisor=0), ValueError,
         "Pad: size_divisor must be an integer of 1 or more, but is 0."),
        (lambda: Pad(size_divisor=2, shape=(4,)), ValueError,
         "Pad: size_divisor must be 1 with shape, but is 2. Give sizes that are "
         "multiples of it."),
        (
            lambda: Pad("x"),  # type: ignore[arg-type]
            TypeError,
            "Pad: value must be a real number, but is 'x' (str).",
        ),
        (lambda: Pad(dims=0), ValueError,
         "Pad: dims must be None or an integer of 1 or more, but is 0."),
        (lambda: Pad(dims=1, shape=(4, 4)), ValueError,
         "Pad: dims must be 2, the number of sizes in the other options, but is 1. "
         "Omit dims, or change these options."),
        (lambda: DETECTION([]), ValueError,
         "Collate: batch must have at least one sample, but is empty."),
        (
            lambda: DETECTION({"image": 1}),  # type: ignore[arg-type]
            TypeError,
            "Collate: batch must be a sequence of samples, but is dict.",
        ),
        (lambda: Collate.auto([]), ValueError,
         "Collate.auto: dataset must have at least one sample, but is empty."),
        (lambda: Collate.auto([{"a": 1, "b": 1}, {"a": 2}]), ValueError,
         "Collate.auto: batch[1] must have the keys of batch[0], but lacks 'b'. Give "
         "every sample the same keys."),
        (lambda: Collate.auto([[1, 2, 3], [4, 5]]), ValueError,
         "Collate.auto: batch[1] must have 3 items like batch[0], but has 2. Give "
         "every sample the same fields."),
        (lambda: Collate.auto([1], 0), ValueError,
         "Collate.auto: num_samples must be an integer of 1 or more, but is 0."),
    ],
)  # fmt: skip
def test_wrong_arguments_are_errors(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    found = raised(make)
    assert isinstance(found, error) and str(found) == text


# --------------------------------------------------------------------- Collate.auto
@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which warnings have been issued."""
    monkeypatch.setattr(errors, "_warned", set())


def test_auto_chooses_by_shapes_and_warns_once(new_process: None) -> None:
    samples = [
        {**each, "target": (Target(each["boxes"], 1), numpy.ones(3)), "none": None}
        for each in detections(20)
    ]
    with pytest.warns(pyparallel.BatchWarning) as caught:
        chosen = Collate.auto(samples)
        again = Collate.auto(samples)
    rules = {
        "image": Pad(),
        "boxes": List(),
        "caption": List(),
        "id": Stack(),
        "target.0.boxes": List(),
        "target.0.label": Stack(),
        "target.1": Stack(),
        "none": List(),
    }
    assert repr(chosen) == repr(again) == repr(Collate(rules))
    assert [str(each.message) for each in caught] == [
        "[PP105] Collate.auto: shapes differ among 16 samples in 'image', 'boxes', "
        f"'target.0.boxes', so the rules are {Collate(rules)!r}. Write these rules "
        "into the program, with Pad, Concat or List for each of these fields."
    ]
    assert caught[0].filename == __file__
    batch = chosen(samples)
    assert batch["image"].shape == (20, 3, 39, 30)
    assert len(batch["target"][0].boxes) == 20


NESTED = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
#: Arrays of dtypes that torch does not have.
STRANGE = [
    numpy.array(["2020-01-01"], "datetime64[ns]"),
    numpy.zeros(2, [("a", "i4")]),
    numpy.ones(2, numpy.longdouble),
]


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream that knows its length."""

    def __iter__(self) -> Any:
        return iter([{"x": 1}, {"x": 2}])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("samples", "chosen"),
    [
        ([(torch.ones(3), 1)] * 3, Collate(Stack(), Stack())),
        ([torch.ones(3)] * 3, Collate(default=Stack())),
        (["text"] * 3, Collate(default=List())),
        ([{"x": {"a": 1}}, {"x": {"b": 1}}], Collate(x=List())),
        ([{"x": {"a": 1}}, {"x": {"a": 1, "b": 1}}], Collate(x=List())),
        ([{"x": ("a", "b")}, {"x": ("a",)}], Collate(x=List())),
        ([{"x": 1}, {"x": None}], Collate(x=List())),
        ([{"x": torch.eye(2).to_sparse()}] * 2, Collate(x=List())),
        ([{"x": NESTED}] * 2, Collate(x=List())),
        *(([{"x": array}] * 2, Collate(x=List())) for array in STRANGE),
        (Stream(), Collate(x=Stack())),
        (iter([{"x": [1, 2]}] * 3), Collate(x=Stack())),
    ],
)
def test_auto_without_different_shapes_does_not_warn(
    samples: Any, chosen: Collate, new_process: None
) -> None:
    assert repr(Collate.auto(samples)) == repr(chosen)  # a warning would be an error


@pytest.mark.parametrize("array", STRANGE, ids=lambda array: str(array.dtype))
def test_arrays_that_torch_cannot_convert_are_named(array: Any) -> None:
    samples = of(array, array)
    assert str(raised(Collate(x=Pad()), samples)) == (
        "Collate, Pad(): batch[0]['x'] must be a tensor, a numeric array, a PIL image, "
        "a number or a list of numbers of equal lengths, but is numpy.ndarray. Use "
        "List() to keep the values in a list."
    )
    assert str(raised(Collate(), samples)) == (
        "Collate, no rule for 'x': batch[0]['x'] must be a tensor, a numeric array, a "
        "number, a string or a container of these, but is numpy.ndarray of dtype "
        f"{array.dtype}. Use List() to keep the values in a list."
    )


def test_numbers_of_one_field_have_one_dtype_under_every_rule() -> None:
    class Seconds(float):
        pass

    for rule, cls in itertools.product((None, Stack(), Pad()), (float, Seconds)):
        found = Collate(default=rule)([{"t": cls(1732550000.25)}])["t"]
        assert (found.dtype, found.item()) == (torch.float64, 1732550000.25)


def test_lists_of_tensors_are_refused_because_gradients_would_be_lost() -> None:
    one = torch.ones(1, requires_grad=True)
    for value in ([one, one], [1.0, one], [[1.0], (one,)]):
        assert str(raised(Collate(x=Stack()), of(value, value))) == (
            "Collate, Stack(): batch[0]['x'] must be a tensor, a numeric array, a PIL "
            "image, a number or a list of numbers of equal lengths, but is list. Use "
            "List() to keep the values in a list."
        )


def test_samples_that_contain_themselves_have_a_depth() -> None:
    cycle: dict[str, Any] = {}
    cycle["x"] = cycle
    chosen = Collate.auto([cycle, cycle])
    assert repr(chosen) == f"Collate({{'{'.'.join('x' * 64)}': List()}})"
    found = raised(lambda: Collate(default=Stack())([cycle]))
    assert str(found) == (
        "batch[0]['x']['x']['x']... must nest its containers at most 64 deep, but it "
        "nests deeper. Look for a container that contains itself."
    )


@pytest.mark.parametrize("rule", [Pad(), Stack(), Concat()], ids=repr)
def test_a_list_that_contains_itself_is_refused(rule: Any) -> None:
    cycle: list[Any] = [1]
    cycle += [cycle, cycle]
    text = str(raised(Collate(x=rule), of(cycle)))
    assert "batch[0]['x'] must be a tensor, " in text
    assert text.endswith(f" of equal lengths, but is list. {_KEEP_LIST}")
    assert Collate(x=List())(of(cycle))["x"][0] is cycle
    assert repr(Collate.auto(of(cycle))) == "Collate(x=List())"


def test_auto_reads_samples_from_the_whole_data_set() -> None:
    class Recording(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            read.append(i)
            return i

    for num_samples, expected in ((4, [0, 2, 4, 6]), (100, list(range(8)))):
        read: list[int] = []
        Collate.auto(Recording(range(8)), num_samples)
        assert read == expected
