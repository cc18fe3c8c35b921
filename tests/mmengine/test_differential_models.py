"""Batches and models compared with mmengine 0.10.7: equal results.

Runs where mmengine is installed.
"""

from __future__ import annotations

import logging
import math
import os
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyparallel import mmengine as ours
from pyparallel.mmengine import _cast_data, _upstream

if not _upstream.available:
    if os.environ.get("PYPARALLEL_NO_SKIP", "0") not in ("", "0"):
        raise RuntimeError(_upstream.reason)
    pytest.skip(_upstream.reason, allow_module_level=True)

import mmengine.dataset as their_data
import mmengine.model as theirs
from mmengine.logging import MMLogger
from mmengine.model.utils import detect_anomalous_params, stack_batch
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS, MODELS, Registry
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from tests.support.mmengine.compare import attempt, same
from tests.support.mmengine.models import batch, toy_model

pytestmark = pytest.mark.peers

bounded = settings(deadline=None, max_examples=150)
Point = namedtuple("Point", ["x", "y"])


class Own(BaseDataElement):
    """A data element with its own ``to``."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.new(metainfo={"by": "itself"})


def elements() -> Any:
    def make(n: int) -> BaseDataElement:
        boxes = InstanceData(boxes=torch.zeros(n, 4), names=["a"] * n)
        mask = PixelData(mask=torch.ones(1, 2, n + 1))
        inner = BaseDataElement(
            metainfo={"n": n}, t=torch.zeros(n), text="t", own=Own()
        )
        data = {"boxes": boxes, "mask": mask, "inner": inner, "array": np.ones(n)}
        return BaseDataElement(metainfo={"id": n}, **data)

    return st.integers(0, 3).map(make)


# --------------------------------------------------------------------- cast_data
LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.integers(0, 5).map(lambda n: torch.full((n,), float(n))),
    st.integers(0, 5).map(np.arange),
    st.builds(Own),
    elements(),
)


def nests(children: Any) -> Any:
    lists = st.lists(children, max_size=3)
    keys = st.text(max_size=2)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        st.dictionaries(keys, children, max_size=3),
        st.builds(Point, children, children),
    )


@bounded
@given(st.recursive(LEAVES, nests, max_leaves=10), st.sampled_from(["cpu", "meta"]))
def test_cast_data_as_mmengine_does_it(data: Any, device: str) -> None:
    mine, other = ours.BaseDataPreprocessor(), theirs.BaseDataPreprocessor()
    mine.to(device), other.to(device)
    assert same(mine.cast_data(data), other.cast_data(data))


def test_tensors_of_data_elements_are_copied_with_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = []

    def move(leaves: Any, parts: Any, *_: Any) -> Any:
        copies.append([each for each in parts if isinstance(each, torch.Tensor)])
        return [
            each.to("meta") if isinstance(each, torch.Tensor) else each
            for each in parts
        ]

    monkeypatch.setattr(_cast_data, "move", move)
    monkeypatch.setattr(_cast_data, "resolve_target", lambda *_: None)
    mine = ours.BaseDataPreprocessor()
    mine._device = torch.device("cuda", 0)
    boxes = InstanceData(boxes=torch.zeros(2, 4), labels=torch.zeros(2))
    sample = BaseDataElement(gt=boxes, t=torch.zeros(1), own=Own())
    result = mine.cast_data({"inputs": [torch.zeros(3)], "data_samples": [sample]})
    assert [len(each) for each in copies] == [4]
    sent = result["data_samples"][0]
    assert sent.gt.boxes.is_meta and sent.gt.labels.is_meta and sent.t.is_meta
    assert sent.own.by == "itself" and sample.t.device == torch.device("cpu")


def test_our_preprocessors_are_instances_of_mmengine_and_follow_its_models() -> None:
    for cls in (ours.BaseDataPreprocessor, ours.ImgDataPreprocessor):
        assert issubclass(cls, getattr(theirs, cls.__name__))
    model = toy_model(theirs.BaseModel)(ours.BaseDataPreprocessor())
    model.to("meta")
    assert model.data_preprocessor.device == torch.device("meta")
    mixed = toy_model(ours.BaseModel)(theirs.BaseDataPreprocessor())
    nn.Sequential(mixed).to("meta")
    assert mixed.data_preprocessor.device == torch.device("meta")
    built = toy_model(ours.BaseModel)({"type": "ImgDataPreprocessor"})
    assert type(built.data_preprocessor) is MODELS.get("ImgDataPreprocessor")


# ------------------------------------------------------------------------- images
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))
OPTIONS = st.fixed_dictionaries(
    {
        "pad_size_divisor": st.sampled_from([1, 2, 3, 5, 32]),
        "pad_value": st.sampled_from([0, 114, -0.5, 1e30, math.nan]),
    },
    optional={"bgr_to_rgb": st.booleans()},
)
MEANS = st.lists(st.floats(-200, 200, width=32), min_size=3, max_size=3)
NUMBERS = st.one_of(
    st.sampled_from([(None, None), ([0.1], [0.3]), ([1.0], [0.0])]),
    st.just(([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])),
    st.just(([7], [0.3, 0.1, 9.0])),
    st.tuples(MEANS, MEANS),
)
DTYPES = [torch.uint8, torch.float32, torch.float64, torch.int16, torch.float16]


def bits(result: Any) -> tuple[Any, ...]:
    """Return what two batches of images must share."""
    image = result["inputs"].contiguous()
    return image.shape, image.dtype, image.numpy().tobytes(), result["data_samples"]


@pytest.mark.filterwarnings(r"ignore:\[PP103\]")  # any mean, also of bytes
@bounded
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    channels=st.sampled_from([1, 3, 4, 6]),
    dtype=st.sampled_from(DTYPES),
    numbers=NUMBERS,
    options=OPTIONS,
    cast=st.sampled_from([None, None, torch.float64, torch.float16]),
    seed=st.integers(0, 99),
)
def test_a_list_of_images_has_the_same_bits(
    shapes: Any,
    channels: int,
    dtype: Any,
    numbers: Any,
    options: Any,
    cast: Any,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = [
        torch.randint(0, 256, (channels, *shape), generator=generator).to(dtype)
        for shape in shapes
    ]
    results = []
    for cls in (ours.ImgDataPreprocessor, theirs.ImgDataPreprocessor):
        preprocessor = cls(*numbers, **options).to(cast)
        results.append(attempt(preprocessor, {"inputs": list(images)}))
        same_size = torch.stack([images[0]] * 2)
        data = {"inputs": same_size, "data_samples": [1, 2]}
        results.append(attempt(preprocessor, data))
    for mine, other in ((results[0], results[2]), (results[1], results[3])):
        if isinstance(other, Exception):
            assert isinstance(mine, ValueError | TypeError), (mine, other)
        else:
            assert bits(mine) == bits(other)


@bounded
@given(
    shapes=st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=3),
    num_dims=st.integers(1, 3),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3),
    divisor=st.integers(1, 6),
    value=st.sampled_from([0, 3, -1.5, 300]),
)
def test_stack_batch_as_mmengine_does_it(
    shapes: Any, num_dims: int, dtypes: Any, divisor: int, value: float
) -> None:
    tensors = [
        torch.ones(shape[:num_dims], dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]
    mine = attempt(ours.stack_batch, tensors, divisor, value)
    other = attempt(stack_batch, tensors, divisor, value)
    if isinstance(other, Exception):
        assert isinstance(mine, ValueError), (mine, other)
    elif not isinstance(mine, Exception):
        assert same(mine, other)
    else:  # -1.5 or 300 in a dtype that cannot hold it: mmengine pads with less
        assert "padding_value that" in str(mine)


# ----------------------------------------------------------------------- collates
COLLATES = [
    (ours.pseudo_collate, their_data.pseudo_collate),
    (ours.default_collate, their_data.default_collate),
]
ITEMS = st.one_of(
    st.integers(-3, 3),
    st.floats(-2, 2),
    st.booleans(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.none(),
    st.integers(1, 2).map(torch.zeros),
    st.integers(1, 2).map(np.ones),
    elements(),
)


def collated(children: Any) -> Any:
    lists = st.lists(children, max_size=2)
    pairs = st.dictionaries(st.sampled_from("ab"), children, max_size=2)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        lists.map(UserList),
        st.builds(Point, children, children),
        st.builds(range, st.integers(0, 2)),
        pairs,
        pairs.map(OrderedDict),
        pairs.map(UserDict),
    )


SAMPLES = st.recursive(ITEMS, collated, max_leaves=5)


def is_mixed(batch: Any) -> bool:
    """Return True if only some samples have a container at the same place."""
    first = batch[0]
    containers = (dict, UserDict, list, tuple, deque, UserList, range)
    if isinstance(first, str | bytes):
        return False
    if not isinstance(first, containers):
        return any(isinstance(each, containers) for each in batch)
    mappings = isinstance(first, dict | UserDict)
    kinds = (dict, UserDict) if mappings else containers[2:]
    if not all(isinstance(each, kinds) for each in batch):
        return True
    if not mappings:
        return any(map(is_mixed, zip(*batch, strict=False)))
    columns = [[each[key] for each in batch if key in each] for key in first]
    return any(map(is_mixed, columns))


@pytest.mark.parametrize(("mine", "theirs"), COLLATES)
@bounded
@given(data=st.data(), num=st.integers(1, 3), alike=st.booleans(), form=st.booleans())
def test_collates_as_mmengine_does_it(
    mine: Any, theirs: Any, data: Any, num: int, alike: bool, form: bool
) -> None:
    one = data.draw(SAMPLES)
    batch = [one if alike else data.draw(SAMPLES) for _ in range(num)]
    batch = batch if form else tuple(batch)
    result, expected = attempt(mine, batch), attempt(theirs, batch)
    if isinstance(expected, Exception):
        assert isinstance(result, ValueError | TypeError), (result, expected)
        for cls in (KeyError, RuntimeError):
            if isinstance(expected, cls) and not is_mixed(batch):
                assert isinstance(result, cls), (result, expected)
    elif isinstance(result, Exception):
        assert is_mixed(batch), result
    else:
        assert same(result, expected)


LOSSES = st.dictionaries(
    st.sampled_from(["loss", "loss_a", "b_loss", "acc", "lo"]),
    st.one_of(
        st.floats(-9, 9, width=32).map(torch.tensor),
        st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=3).map(torch.tensor),
        st.lists(st.floats(-9, 9, width=32).map(torch.tensor), max_size=3),
        st.floats(-1, 1),
    ),
)


@bounded
@given(LOSSES)
def test_losses_as_mmengine_has_them(losses: Any) -> None:
    mine = attempt(toy_model(ours.BaseModel)().parse_losses, losses)
    other = attempt(toy_model(theirs.BaseModel)().parse_losses, losses)
    if isinstance(other, Exception) or not isinstance(other[0], torch.Tensor):
        assert isinstance(mine, ValueError | TypeError)  # FIXED: 0 for no loss
        return
    assert same(mine[0], other[0])
    logged = {key: value for key, value in mine[1].items() if key != "loss_own"}
    expected = other[1]
    if "loss_own" in mine[1]:  # FIXED: it took the place of the sum
        assert same(mine[1]["loss_own"], expected["loss"])
        expected["loss"] = other[0]
    assert same(OrderedDict(logged), expected)


def test_a_model_of_either_base_trains_to_the_same_bits() -> None:
    results = []
    for base in (ours.BaseModel, theirs.BaseModel):
        torch.manual_seed(1)
        model = toy_model(base)()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapper = OptimWrapper(optimizer, accumulative_counts=2)
        log_vars = [model.train_step(batch(i), wrapper) for i in range(4)]
        values = [parameter.tolist() for parameter in model.parameters()]
        predicted = model.val_step(batch(9)).tolist()
        names = [list(each) for each in log_vars]
        others = [each["err"].tolist() for each in log_vars]
        results.append((values, predicted, model.test_step(batch(9)).tolist(), others))
        assert len({tuple(each) for each in names}) == 1
    assert results[0] == results[1]
    assert issubclass(ours.BaseModel, theirs.BaseModel)


def test_weights_are_initialised_by_mmengine() -> None:
    class Configured(ours.BaseModel):
        def __init__(self) -> None:
            super().__init__(
                init_cfg={"type": "Constant", "val": 3.0, "layer": "Linear"}
            )
            self.linear = nn.Linear(2, 2)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args

    model = Configured()
    model.init_weights()
    assert model.linear.weight.tolist() == [[3.0] * 2] * 2 and model.is_init


# ------------------------------------------------------------- anomalies, wrappers
def test_anomalous_parameters_as_mmengine_finds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(MMLogger.get_current_instance(), "handle", records.append)
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)])
    model[2].bias.requires_grad_(False)
    for loss in (model[0](torch.ones(1)), torch.zeros(1), model[1].weight * 2):
        found = []
        for detect in (detect_anomalous_params, ours.detect_anomalous_params):
            records.clear()
            detect(loss.sum(), model)
            found.append(
                [(each.levelno, each.name, each.getMessage()) for each in records]
            )
        assert found[0] == found[1] and found[0]


def test_wrappers_are_those_of_mmengine() -> None:
    assert ours.MODEL_WRAPPERS is MODEL_WRAPPERS
    for name in (
        "MMDistributedDataParallel",
        "MMSeparateDistributedDataParallel",
        "MMFullyShardedDataParallel",
    ):
        assert issubclass(getattr(ours, name), getattr(theirs, name))
    model = nn.Linear(1, 1)
    wrapper = nn.DataParallel(model)
    child = Registry("model_wrapper", parent=MODEL_WRAPPERS, scope="differential")
    try:
        for check in (ours.is_model_wrapper, theirs.is_model_wrapper):
            assert check(wrapper) and not check(wrapper, child)
            assert not check(model) and not check(model, child)
    finally:
        del MODEL_WRAPPERS.children["differential"]
