"""Samples of other libraries' classes, and lists of samples."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import pyparallel
from pyparallel import (
    Collate,
    DataLoader,
    List,
    Pad,
    PreDataLoader,
    Stack,
    collate,
    gather,
    scatter,
)
from tests.support.processes.backends import both, using


class Fields:
    """A frozen class with a check of its fields."""

    def __init__(self, image: torch.Tensor, id: int) -> None:
        assert isinstance(id, int)
        object.__setattr__(self, "image", image)
        object.__setattr__(self, "id", id)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class Attrs(Fields):
    """A class with the mark of attrs."""

    __attrs_attrs__ = (SimpleNamespace(name="image"), SimpleNamespace(name="id"))


class Model(Fields):
    """A class with the mark of pydantic's models."""

    __pydantic_fields__ = dict.fromkeys(("image", "id"))


class Keyed:
    """The methods of a mapping without its base class, as torch_geometric's Data."""

    def __init__(self, **items: Any) -> None:
        self.named = items

    def keys(self) -> list[str]:
        return list(self.named)

    def __getitem__(self, key: str) -> Any:
        return self.named[key]


def samples_of(make: Callable[..., Any], num: int = 4) -> list[Any]:
    return [make(image=torch.full((2, 3 + i), float(i)), id=i) for i in range(num)]


def fields_of(batch: Any) -> dict[str, Any]:
    names = ("image", "id")
    if isinstance(batch, dict):
        return batch
    return {name: getattr(batch, name) for name in names}


CLASSES = pytest.mark.parametrize("make", [Attrs, Model, Keyed])


@both
@CLASSES
def test_a_sample_of_another_class_is_batched_like_a_dict(
    backend: ModuleType, make: Any
) -> None:
    rules = Collate(image=Pad(mask=True))
    expected = rules(samples_of(dict))
    inside = Collate({"x.image": Pad(mask=True)})
    default = Collate(default=Pad(mask=True))
    with using(backend):
        batch = rules(samples_of(make))
        found = [batch, inside([{"x": each} for each in samples_of(make)])["x"]]
        found += [default(samples_of(make)), scatter(batch, [-1])[0]]
        found += PreDataLoader([batch], "cpu")
        plain = collate(samples_of(make, 1))
    for each in found:
        assert type(each) is (dict if make is Keyed else make)
        assert fields_of(each)["image"] == expected["image"]
    ids = [fields_of(each)["id"] for each in (*found[:2], *found[3:])]
    assert all(torch.equal(each, expected["id"]) for each in ids)
    assert fields_of(plain)["image"].shape == (1, 2, 3)
    chosen = Collate.auto(samples_of(make, 1))
    assert repr(chosen) == "Collate(image=Stack(), id=Stack())"


@pytest.mark.parametrize("make", [Attrs, Model])
def test_batches_of_another_class_are_gathered(make: Any) -> None:
    batch = Collate(image=Pad())(samples_of(make))
    whole = gather([batch, batch], -1)
    assert type(whole) is make and whole.id.tolist() == [0, 1, 2, 3] * 2


class Extended(Model):
    """The same, with extra fields."""

    def __init__(self, image: torch.Tensor, id: int, **extra: Any) -> None:
        super().__init__(image, id)
        vars(self)["__pydantic_extra__"] = extra

    def __getattr__(self, name: str) -> Any:
        extra = vars(self).get("__pydantic_extra__") or {}
        if name not in extra:
            raise AttributeError(name)
        return extra[name]


@both
def test_extra_fields_of_a_model_are_fields(backend: ModuleType) -> None:
    samples = [Extended(torch.ones(2), i, mask=torch.ones(2 + i)) for i in range(2)]
    with using(backend):
        batch = Collate(mask=Pad())(samples)
        (part,) = scatter(batch, "cpu", dtype=torch.float64)
        whole = gather([batch, batch], "cpu")
    assert [each.mask.shape for each in (batch, part, whole)] == [(2, 3)] * 2 + [(4, 3)]
    assert part.mask.dtype == torch.float64 and batch.mask.dtype == torch.float32
    assert {type(each) for each in (batch, part, whole)} == {Extended}
    with pytest.raises(KeyError, match="lacks 'mask'"):
        Collate(image=Pad())([samples[0], Extended(torch.ones(2), 2)])


@dataclass
class Late:
    """A dataclass with a field that need not be set."""

    image: torch.Tensor
    id: int
    area: Any = field(init=False)


@dataclass(slots=True)
class LateSlot(Late):
    """The same in slots."""

    size: Any = field(init=False)


@both
@pytest.mark.parametrize("cls", [Late, LateSlot])
@pytest.mark.parametrize("is_set", [False, True])
def test_a_field_may_be_unset(is_set: bool, cls: Any, backend: ModuleType) -> None:
    samples = samples_of(cls, 2)
    for sample in samples if is_set else ():
        sample.area = 6.0
    rules = Collate(image=Pad())
    with using(backend):
        batch = rules(samples)
        found = [batch, collate(samples[:1]), gather([batch, batch], "cpu")]
        found += scatter(batch, "cpu")
        chosen = Collate.auto(samples[:1])
    assert repr(chosen).count("area") == is_set
    for each in found:
        assert type(each) is cls and not hasattr(each, "size")
        assert hasattr(each, "area") == is_set


def test_a_field_that_only_one_sample_has_is_named() -> None:
    one, other = samples_of(Late, 2)
    one.area = 6.0
    for late, pair in enumerate(([other, one], [one, other])):
        with pytest.raises(KeyError) as caught:
            Collate(image=Pad())(pair)
        assert str(caught.value) == (
            f"batch[{late}] must have the keys of batch[{1 - late}], but lacks 'area'. "
            "Give every sample the same keys."
        )


@CLASSES
@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            Collate(imag=Stack()),
            "Collate, Stack(): batch[0] must have the field 'imag', but has 'image', "
            "'id'. Correct the name, or remove the rule.",
        ),
        (
            Collate(image=Stack()),
            "Collate, Stack(): batch[1]{} must match batch[0]{}, but has shape (2, 4) "
            "where (2, 3) was expected. Use Pad(dims=1) or List().",
        ),
    ],
    ids=repr,
)
def test_an_error_names_the_field_of_another_class(
    make: Any, rules: Collate, text: str
) -> None:
    place = "['image']" if make is Keyed else ".image"
    with pytest.raises(pyparallel.Error) as caught:
        rules(samples_of(make))
    assert str(caught.value) == text.format(place, place)
    with pytest.raises(TypeError) as mixed:
        Collate(image=List())([*samples_of(make, 1), 3])
    assert str(mixed.value).startswith(f"Collate: batch[1] must be a {__name__}.")


def test_the_advice_for_an_object_without_fields_works() -> None:
    samples = [SimpleNamespace(image=torch.ones(2))]
    with pytest.raises(KeyError) as caught:
        Collate(image=Stack())(samples)
    assert str(caught.value) == (
        "Collate, Stack(): batch[0] must have the field 'image', but has no fields "
        "(types.SimpleNamespace). Return its fields in a dict or a dataclass from the "
        "data set."
    )
    assert Collate(image=Stack())([vars(each) for each in samples])


# --------------------------------------------------------------- texts without padding
PACKED = [
    {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "position_ids": [2, 3, 4]},
    {"input_ids": [], "attention_mask": [], "position_ids": []},
    {"input_ids": [8, 9], "attention_mask": [1, 1], "position_ids": [2, 3]},
]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("labels", [None, [[1, 2, 3], [], [4, 0]]])
@both
def test_texts_become_the_arguments_of_a_model_without_padding(
    backend: ModuleType, labels: Any, num_workers: int
) -> None:
    made = [{**each, "id": i} for i, each in enumerate(PACKED)]
    for each, given in zip(made, labels or (), strict=bool(labels)):
        each["labels"] = given
    for samples in (made, [tensors_of(each) for each in made]):
        kept = copy.deepcopy(samples)
        with using(backend):
            rules = Collate(padding_free=True)
            loader = DataLoader(samples, 3, num_workers=num_workers, collate_fn=rules)
            (batch,) = PreDataLoader(loader, "cpu")
        found = {k: x if isinstance(x, int) else x.tolist() for k, x in batch.items()}
        assert found == {
            "input_ids": [[5, 6, 7, 8, 9]],
            "labels": [[-100, 2, 3, -100, 0] if labels else [-100, 6, 7, -100, 9]],
            "position_ids": [[0, 1, 2, 0, 1]],
            "cu_seq_lens_q": [0, 3, 5],
            "cu_seq_lens_k": [0, 3, 5],
            "max_length_q": 3,
            "max_length_k": 3,
            "id": [0, 1, 2],
        }
        assert str(samples) == str(kept)
    rules = Collate(id=List(), flatten=True, padding_free=True)
    assert rules([made[:2], made[2:]])["cu_seq_lens_q"].dtype is torch.int32
    assert repr(rules) == "Collate(id=List(), flatten=True, padding_free=True)"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_tokens_of_any_integers_have_labels_that_are_ignored(
    dtype: torch.dtype,
) -> None:
    ids = torch.tensor([7, 8, 9]).to(dtype)
    for given in (ids, ids.numpy()):
        batch = Collate(padding_free=True)([{"input_ids": given}])
        assert batch["input_ids"].tolist() == [[7, 8, 9]]
        assert batch["labels"].tolist() == [[-100, 8, 9]]
        # The dtype of ``DataCollatorWithFlattening``, which losses need.
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def tensors_of(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: torch.tensor(x, dtype=torch.int64) for k, x in sample.items()}


# ------------------------------------------------------------------- lists of samples
class View(NamedTuple):
    x: torch.Tensor


def crops(seed: int) -> list[list[dict[str, Any]]]:
    rng = random.Random(seed)
    return [
        [
            {"x": torch.rand(rng.randint(1, 3), rng.randint(1, 3)), "at": (i, k)}
            for k in range(rng.randint(0, 3))
        ]
        for i in range(rng.randint(1, 4))
    ] + [[{"x": torch.ones(1, 1), "at": (9, 9)}]]


@both
def test_the_samples_of_all_lists_are_one_batch(backend: ModuleType) -> None:
    rules = Collate(x=Pad(mask=True), at=List(), flatten=True)
    for seed in range(30):
        lists = crops(seed)
        flat: list[Any] = []
        for each in lists:
            flat.extend(each)
        with using(backend):
            found = rules([tuple(x) if seed % 2 else x for x in lists])
            expected = Collate(x=Pad(mask=True), at=List())(flat)
        assert found["x"] == expected["x"] and found["at"] == expected["at"]
    tensors = Collate(default=Stack(), flatten=True)([[torch.ones(2)] * 2] * 3)
    assert tensors.shape == (6, 2)
    assert repr(rules) == "Collate(x=Pad(mask=True), at=List(), flatten=True)"
    assert repr(Collate({"flatten": List()})) == "Collate({'flatten': List()})"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_names_the_list_and_the_sample(num_workers: int) -> None:
    lists = [[{"x": torch.ones(2)}] * 3, [{"x": torch.ones(2)}, {"x": torch.ones(3)}]]
    rules = Collate(x=Stack(), flatten=True)
    loader = DataLoader(lists, 2, num_workers=num_workers, collate_fn=rules)
    with pytest.raises(ValueError, match=r"batch\[1\]\[1\]\['x'\] must match batch\["):
        next(iter(loader))
    with pytest.raises(KeyError) as caught:
        rules([lists[0], [{"x": torch.ones(2)}, {"y": 1}]])
    assert str(caught.value) == (
        "batch[1][1] must have the keys of batch[0][0], but lacks 'x'. Give every "
        "sample the same keys."
    )


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Collate(flatten=Pad()),  # type: ignore[arg-type]
        TypeError,
        "Collate: flatten must be True or False, but is Pad() (pyparallel.Pad). Use "
        'Collate({"flatten": ...}) for a field of this name.',
    ),
    (
        lambda: Collate(flatten=True)([[{"x": 1}], {"x": 1}]),
        TypeError,
        "Collate, flatten=True: batch[1] must be a list of samples, but is dict. "
        "Return a list from the data set, or remove flatten.",
    ),
    (
        lambda: Collate(flatten=True)([View(torch.ones(2))]),
        TypeError,
        f"Collate, flatten=True: batch[0] must be a list of samples, but is {__name__}."
        "View. Return a list from the data set, or remove flatten.",
    ),
    (
        lambda: Collate(flatten=True)([[], []]),
        ValueError,
        "Collate, flatten=True: batch must have at least one sample, but is empty.",
    ),
    (
        lambda: Collate()([[{"x": 1}], [{"x": 1}, {"x": 2}]]),
        ValueError,
        "Collate: batch[1] must have 1 items like batch[0], but has 2. Use "
        "flatten=True for lists of samples.",
    ),
    (
        lambda: Collate(padding_free=1),  # type: ignore[arg-type]
        TypeError,
        "Collate: padding_free must be True or False, but is 1 (int). Use "
        'Collate({"padding_free": ...}) for a field of this name.',
    ),
    (
        lambda: Collate(padding_free=True, attention_mask=Pad()),
        ValueError,
        "Collate, padding_free=True: 'attention_mask' must have no rule, but has one. "
        "Remove the rule, or padding_free.",
    ),
    (
        lambda: Collate(padding_free=True)([View(torch.ones(2))]),
        TypeError,
        "Collate, padding_free=True: batch[0] must be a dict with 'input_ids', but is "
        f"{__name__}.View. Return the ids of the tokens by this name.",
    ),
    (
        lambda: Collate(padding_free=True)([PACKED[1]]),
        ValueError,
        "Collate, padding_free=True: batch must have at least one token, but all 1 "
        "samples are empty. Remove empty samples from the data set.",
    ),
    (
        lambda: Collate(padding_free=True)([{"input_ids": [1, 2], "labels": [1]}]),
        ValueError,
        "Collate, padding_free=True: batch[0]['labels'] must have the shape of "
        "batch[0]['input_ids'], but has shape (1,) where (2,) was expected. Return one "
        "label for each token.",
    ),
    (
        lambda: Collate(padding_free=True)([{"input_ids": [[1, 2]]}]),
        ValueError,
        "Collate, padding_free=True: batch[0]['input_ids'] must be a vector, but has "
        "shape (1, 2). Return vectors from the data set.",
    ),
    (
        lambda: Collate(padding_free=True)(
            [PACKED[0] | {"labels": [1] * 3}, PACKED[2]]
        ),
        KeyError,
        "batch[1] must have the keys of batch[0], but lacks 'labels'. Give every "
        "sample the same keys.",
    ),
    (
        lambda: Collate(padding_free=True)([{"ids": [1]}]),
        TypeError,
        "Collate, padding_free=True: batch[0] must be a dict with 'input_ids', but is "
        "dict with 'ids'. Return the ids of the tokens by this name.",
    ),
]


@pytest.mark.parametrize(("call", "cls", "text"), WRONG)
def test_wrong_samples_and_options_are_named(
    call: Callable[[], Any], cls: type[Exception], text: str
) -> None:
    with pytest.raises(cls) as caught:
        call()
    assert str(caught.value) == text
