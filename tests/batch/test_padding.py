"""Padding: valid and invalid arguments, and containers with a Padding."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, Padding, collate

pytestmark = pytest.mark.asan


def test_a_padding_is_a_value_whose_text_shows_the_chosen_options() -> None:
    padding = Padding(buckets=[[4, 4], (8, 8)], side=["left", "right"], mask=True)
    text = "Padding(buckets=((4, 4), (8, 8)), side=('left', 'right'), mask=True)"
    assert repr(padding) == text and repr(Padding()) == "Padding()"
    assert padding == eval(text) == pickle.loads(pickle.dumps(padding))
    assert hash(padding) == hash(eval(text)) and padding != Padding()
    with pytest.raises(dataclasses.FrozenInstanceError):
        padding.mask = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        Padding(32)  # type: ignore[misc]


INTEGER = "must be an integer of 1 or more, but is"
SIDE = "side must be 'right', 'left' or 'center', or a tuple of these, but is"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"size_divisor": 0}, ValueError, f"size_divisor {INTEGER} 0."),
    ({"size_divisor": 2.0}, TypeError, f"size_divisor {INTEGER} 2.0 (float)."),
    ({"size_divisor": "8"}, TypeError,
     "size_divisor must be an integer or a sequence of integers, but is '8' (str)."),
    ({"size_divisor": (2, -1)}, ValueError, f"size_divisor[1] {INTEGER} -1."),
    ({"shape": ()}, ValueError, "shape must have a size, but is empty."),
    ({"shape": 4}, TypeError, "shape must be a sequence of integers, but is 4 (int)."),
    ({"buckets": 4}, TypeError,
     "buckets must be a sequence of shapes, but is 4 (int)."),
    ({"buckets": (4, 8)}, TypeError,
     "buckets[0] must be a sequence of integers, but is 4 (int)."),
    ({"side": "top"}, ValueError, f"{SIDE} 'top'."),
    ({"side": ("left", 1)}, ValueError, f"{SIDE} ('left', 1)."),
    ({"side": 1}, TypeError, "side must be names of sides, but is 1 (int)."),
    ({"mask": 1}, TypeError, "mask must be True or False, but is 1 (int)."),
    ({"shape": (4,), "buckets": [(4,)]}, ValueError,
     "shape must not be given together with buckets, but both are. Make the shape one "
     "of the buckets."),
    ({"shape": (4,), "size_divisor": 2}, ValueError,
     "size_divisor must be 1 with shape, but is 2. Give sizes that are multiples of "
     "it."),
    ({"buckets": [(4,)], "size_divisor": (2,)}, ValueError,
     "size_divisor must be 1 with buckets, but is (2,). Give sizes that are multiples "
     "of it."),
    ({"shape": (4, 4), "side": ("left",)}, ValueError,
     "side must have 2 entries like shape, but has 1."),
    ({"buckets": [(4, 4), (8,)]}, ValueError,
     "buckets[1] must have 2 entries like buckets[0], but has 1."),
]  # fmt: skip


@pytest.mark.parametrize("options, cls, message", REFUSED)
def test_impossible_options_are_refused(
    options: dict[str, Any], cls: type[Exception], message: str
) -> None:
    with pytest.raises(cls) as caught:
        Padding(**options)
    assert str(caught.value) == f"Padding: {message}"


CONTAINERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"padding": 32, "stack": True}, TypeError,
     "padding must be a Padding, but is 32 (int)."),
    ({"padding": Padding()}, ValueError,
     "padding must come with stack=True and cpu_only=False, but stack is False and "
     "cpu_only False."),
    ({"padding": Padding(), "stack": True, "pad_dims": None}, ValueError,
     "pad_dims must be 1, 2 or 3 with a padding, but is None."),
    ({"padding": Padding(shape=(8,)), "stack": True}, ValueError,
     "padding must give shape for 2 padded dimensions, but gives (8,). Give 2 of "
     "them."),
    ({"padding": Padding(buckets=[(8, 8)]), "stack": True, "pad_dims": 1}, ValueError,
     "padding must give buckets[0] for 1 padded dimension, but gives (8, 8). Give 1 of "
     "them."),
    ({"ragged": True, "stack": True}, ValueError,
     "ragged must not come with stack or cpu_only, but stack is True and cpu_only "
     "False. Choose one of the three."),
]  # fmt: skip


@pytest.mark.parametrize("flags, cls, message", CONTAINERS)
def test_flags_that_contradict_each_other_are_refused(
    flags: dict[str, Any], cls: type[Exception], message: str
) -> None:
    with pytest.raises(cls) as caught:
        DataContainer(torch.ones(1, 2, 2), **flags)
    assert str(caught.value) == f"DataContainer: {message}"
    state = {"_data": 1, "_stack": False, "_padding_value": 0, "_cpu_only": False}
    state |= {"_pad_dims": 2} | {f"_{name}": flag for name, flag in flags.items()}
    with pytest.raises(cls) as again:
        object.__new__(DataContainer).__setstate__(state)
    assert str(again.value) == f"DataContainer: {message}"


def test_the_options_are_keywords_only_and_kept() -> None:
    with pytest.raises(TypeError):
        DataContainer(1, True, 0, False, 2, Padding())  # type: ignore[misc]
    plain = DataContainer(torch.ones(1))
    assert (plain.padding, plain.ragged) == (None, False)
    padded = DataContainer(torch.ones(1), stack=True, padding=Padding(mask=True))
    ragged = DataContainer(torch.ones(1), ragged=True)
    for container in (padded, ragged):
        again = pickle.loads(pickle.dumps(container))
        for twin in (again, copy.copy(container), container.to("cpu")):
            assert (twin.padding, twin.ragged) == (container.padding, container.ragged)
    assert padded.padding == Padding(mask=True)
    assert set(vars(padded)) - set(vars(plain)) == {"_padding"}
    assert set(vars(ragged)) - set(vars(plain)) == {"_ragged"}
    with pytest.raises(AttributeError):
        plain.padding = Padding()  # type: ignore[misc]


def images(*sizes: tuple[int, int], padding: Padding) -> list[dict[str, Any]]:
    return [
        {"img": DataContainer(torch.ones(3, *size), stack=True, padding=padding)}
        for size in sizes
    ]


MISFITS: list[tuple[Padding, list[tuple[int, int]], str]] = [
    (Padding(shape=(4, 6)), [(4, 6), (4, 7)],
     "batch[1]['img'] must be at most (4, 6), the shape of the padding, in the padded "
     "dimensions, but is (4, 7) there. Resize it before collating, or allow a larger "
     "shape."),
    (Padding(buckets=[(2, 8), (8, 2)]), [(1, 8), (1, 1), (8, 1)],
     "batch[2]['img'] must be held by one of the buckets ((2, 8), (8, 2)), in the "
     "padded dimensions, but is (8, 1) there, and with the samples before it (8, 8). "
     "Resize it before collating, or allow a larger shape."),
]  # fmt: skip


@pytest.mark.parametrize("padding, sizes, message", MISFITS)
def test_a_sample_that_does_not_fit_is_named(
    padding: Padding, sizes: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        collate(images(*sizes, padding=padding), 4)
    assert str(caught.value) == message
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize("other", [None, Padding(size_divisor=2, mask=True)])
@pytest.mark.parametrize("swap", [False, True])
def test_a_column_has_one_padding(other: Padding | None, swap: bool) -> None:
    padding = Padding(size_divisor=2)
    batch = [{"a": DataContainer(torch.ones(1, 2, 2), True)} for _ in range(4)]
    for i, item in enumerate((padding, padding, padding, other)[:: -1 if swap else 1]):
        batch[i]["a"] = DataContainer(torch.ones(1, 2, 2), True, padding=item)
    found, first = (padding, other) if swap else (other, padding)
    with pytest.raises(ValueError) as caught:
        collate(batch, 2)
    assert str(caught.value) == (
        f"batch[{1 if swap else 3}]['a'] must have the padding of batch[0]['a'], but "
        f"has {found} where {first} was expected. Give every sample the same padding."
    )
