"""ImgDataPreprocessor and stack_batch: values, shapes, errors that name an image."""

from __future__ import annotations

import copy
import math
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pyparallel import Padded
from pyparallel.mmengine import ImgDataPreprocessor, data_preprocessor, stack_batch

pytestmark = pytest.mark.also_peers


def padded(tensors: Any, divisor: int = 1, value: float = 0) -> Any:
    """Return what `stack_batch` must, by one F.pad for each tensor."""
    rest = [tuple(each.shape[1:]) for each in tensors]
    target = [
        math.ceil(max(sizes) / divisor) * divisor for sizes in zip(*rest, strict=True)
    ]
    rows = []
    for each in tensors:
        ends = [size - have for size, have in zip(target, each.shape[1:], strict=True)]
        margins = [side for end in reversed(ends) for side in (0, end)]
        rows.append(F.pad(each, margins, value=value))
    return torch.stack(rows)


def normalized(x: Any, mean: Any, std: Any, swap: bool) -> Any:
    """Return one image after its steps, in torch's operators."""
    if swap:
        x = torch.stack([x[2], x[1], x[0]])
    x = x.float()
    if mean is None:
        return x
    column = (-1, 1, 1)
    return (x - torch.tensor(mean).view(column)) / torch.tensor(std).view(column)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def images(*shapes: Any, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(0, 256, shape, generator=generator) for shape in shapes]
    return [each.to(dtype) for each in made]


RAGGED = images((3, 5, 7), (3, 8, 2), (3, 1, 1))


CASES = [
    {},
    {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]},
    {"mean": [127], "std": [3]},
    {"mean": [1, 2, 3], "std": [7, 11, 13], "bgr_to_rgb": True},
    {"rgb_to_bgr": True},
    {"mean": [0.1], "std": [0.3, 0.7, 1.9], "bgr_to_rgb": True},
]
PADS = [{}, {"pad_size_divisor": 4, "pad_value": 114}, {"pad_value": -0.1}]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("case", CASES)
def test_a_list_has_the_bits_of_one_step_after_the_other(
    case: Any, pads: Any, dtype: torch.dtype
) -> None:
    given = [each.to(dtype) for each in RAGGED]
    before = [each.clone() for each in given]
    preprocessor = ImgDataPreprocessor(**case, **pads)
    result = preprocessor(MappingProxyType({"inputs": given}))
    swap = case.get("bgr_to_rgb", False) or case.get("rgb_to_bgr", False)
    args = (case.get("mean"), case.get("std"), swap)
    steps = [normalized(each, *args) for each in given]
    expected = padded(steps, pads.get("pad_size_divisor", 1), pads.get("pad_value", 0))
    assert same_bits(result["inputs"], expected)
    assert type(result) is dict and result["data_samples"] is None
    assert all(map(torch.equal, given, before))
    # A model that saves its weights saves nothing of the preprocessor.
    assert not preprocessor.state_dict() and not list(preprocessor.children())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_a_tensor_has_the_bits_of_its_images(
    case: Any, pads: Any, dtype: torch.dtype, format: Any
) -> None:
    batch = torch.stack(images((3, 5, 7), (3, 5, 7), dtype=dtype))
    batch = batch.contiguous(memory_format=format)
    preprocessor = ImgDataPreprocessor(**case, **pads)
    result = preprocessor({"inputs": batch, "data_samples": [1, 2]})
    listed = preprocessor({"inputs": list(batch)})
    assert same_bits(result["inputs"], listed["inputs"])
    assert result["data_samples"] == [1, 2]


def test_the_kernel_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = data_preprocessor.ImagePreprocessor.forward

    def forward(self: Any, given: Any) -> Any:
        calls.append(len(given))
        return plain(self, given)

    monkeypatch.setattr(data_preprocessor.ImagePreprocessor, "forward", forward)
    preprocessor = ImgDataPreprocessor([1.0, 2, 3], [4, 5, 6], 2, 9, bgr_to_rgb=True)
    preprocessor({"inputs": RAGGED})
    preprocessor({"inputs": torch.zeros(2, 3, 4, 4)})
    assert calls == [3, 2]
    others: list[Any] = [
        [RAGGED[0], RAGGED[1].float()],
        [RAGGED[0].double()],
        [RAGGED[0].float().requires_grad_()],
        [torch.zeros(3, 0, 2)],
        torch.zeros(0, 3, 2, 2),
        torch.zeros(1, 2, 2, 3).permute(0, 3, 1, 2),
    ]
    for other in others:
        preprocessor({"inputs": other})
    assert calls == [3, 2]
    preprocessor.double()
    assert preprocessor({"inputs": RAGGED})["inputs"].dtype == torch.float64
    assert calls == [3, 2]
    ImgDataPreprocessor([1], [1])({"inputs": [torch.zeros(5, 2, 2)]})
    ImgDataPreprocessor([1], [0])({"inputs": [torch.zeros(1, 2, 2)]})
    assert calls == [3, 2]
    ImgDataPreprocessor([1], [1])({"inputs": [torch.zeros(4, 2, 2)]})
    assert calls == [3, 2, 1]


def test_attributes_that_subclasses_change_count() -> None:
    preprocessor = ImgDataPreprocessor([1], [1])
    given = {"inputs": [torch.zeros(1, 1, 1), torch.zeros(1, 1, 2)]}
    assert preprocessor(given)["inputs"].flatten().tolist() == [-1, 0, -1, -1]
    preprocessor.pad_value = 5
    assert preprocessor(given)["inputs"].flatten().tolist() == [-1, 5, -1, -1]
    preprocessor.mean.fill_(3)
    assert preprocessor(given)["inputs"].flatten().tolist() == [-3, 5, -3, -3]
    preprocessor.std = torch.full((1, 1, 1), 2.0)
    assert preprocessor(given)["inputs"].flatten().tolist() == [-1.5, 5, -1.5, -1.5]
    preprocessor.pad_size_divisor = 3
    assert preprocessor(given)["inputs"].shape == (2, 1, 3, 3)
    other = copy.deepcopy(preprocessor)
    other.mean.fill_(1)
    assert other(given)["inputs"][0, 0, 0, 0] == -0.5
    assert preprocessor(given)["inputs"][0, 0, 0, 0] == -1.5


def test_an_override_of_cast_data_may_collate() -> None:
    class Collating(ImgDataPreprocessor):
        def cast_data(self, data: Any) -> Any:
            if isinstance(data, list) and isinstance(data[0], dict):
                data = {"inputs": [sample["inputs"] for sample in data]}
            return super().cast_data(data)

    result = Collating()([{"inputs": torch.full((1, 1, 1), 3.0)}] * 2)
    assert result["inputs"].flatten().tolist() == [3, 3]


def test_numbers_made_in_inference_mode() -> None:
    with torch.inference_mode():
        preprocessor = ImgDataPreprocessor([1.0], [2.0])
    result = preprocessor({"inputs": [torch.zeros(1, 1, 1)]})
    assert result["inputs"].item() == -0.5


def test_numbers_with_a_gradient_or_without_values() -> None:
    preprocessor = ImgDataPreprocessor([1.0], [2.0])
    given = {"inputs": [torch.zeros(1, 1, 1)]}
    preprocessor.mean.requires_grad_()
    preprocessor(given)["inputs"].backward()
    assert preprocessor.mean.grad is not None and preprocessor.mean.grad.item() == -0.5
    meta = ImgDataPreprocessor([1.0], [2.0]).to("meta")
    for inputs in ([torch.zeros(1, 1, 2)] * 2, torch.zeros(2, 1, 1, 2)):
        batch = meta({"inputs": inputs})["inputs"]
        assert batch.is_meta and batch.shape == (2, 1, 1, 2)


def test_tuples_scalars_and_sizes_beyond_the_range_of_float32_are_stacked() -> None:
    assert stack_batch((torch.ones(2), torch.ones(2))).shape == (2, 2)
    assert stack_batch([torch.ones(()), torch.zeros(())]).tolist() == [1, 0]
    assert stack_batch([torch.ones(1, 2)], pad_size_divisor=4.0).shape == (1, 1, 4)
    whole = ImgDataPreprocessor(pad_size_divisor=4.0)  # as a config may give it
    assert whole({"inputs": torch.ones(1, 1, 2, 2)})["inputs"].shape == (1, 1, 4, 4)
    size = 2**24 + 1
    tensor = torch.zeros(1, size, dtype=torch.uint8)
    assert stack_batch([tensor, tensor[:, :3]]).shape == (2, 1, size)


def test_a_padding_value_that_no_double_holds_is_refused_where_it_is_written() -> None:
    preprocessor = ImgDataPreprocessor(pad_size_divisor=4, pad_value=10**400)
    whole = torch.ones(1, 3, 4, 4)
    for inputs in (whole, list(whole)):
        assert torch.equal(preprocessor({"inputs": inputs})["inputs"], whole)
    text = "must have a padding_value that a double can hold, but has a larger integer."
    for cut in (whole[..., :3], list(whole[..., :3])):
        inputs = f"data['inputs'][0] {text}"
        refused(ValueError, inputs, preprocessor, {"inputs": cut})


def refused(kind: Any, text: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bgr_to_rgb": True, "rgb_to_bgr": True},
         "only one of bgr_to_rgb and rgb_to_bgr must be set, but both are. "
         "Both swap the first and the third channel."),
        ({"mean": [1]}, "mean and std must be given together, but only mean is."),
        ({"std": [1]}, "mean and std must be given together, but only std is."),
        ({"mean": [1, 2], "std": [1]}, "mean must have 1 or 3 values, but has 2."),
        ({"pad_size_divisor": 0},
         "pad_size_divisor must be an integer of 1 or more, but is 0."),
        ({"mean": [1], "std": []}, "std must have 1 or 3 values, but has 0."),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(options: Any, text: str) -> None:
    for kind in (ValueError, AssertionError):
        refused(kind, f"ImgDataPreprocessor: {text}", ImgDataPreprocessor, **options)


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        ((torch.ones(1, 2),), TypeError,
         "stack_batch: tensor_list must be a list of tensors, but is "
         "torch.Tensor."),
        (([],), ValueError,
         "stack_batch: tensor_list must have at least one tensor, but is empty."),
        (([torch.ones(1), 2],), TypeError,
         "tensor_list[1] must be a tensor, but is int."),
        (([torch.ones(1), torch.ones(1, 2)],), ValueError,
         "tensor_list[1] must have 1 dimensions like tensor_list[0], but has shape "
         "(1, 2)."),
        (([torch.ones(1, 2)], 0), ValueError,
         "stack_batch: pad_size_divisor must be an integer of 1 or more, but is "
         "0."),
        (([torch.ones(1, 2, 2), torch.ones(3, 2, 2)],), RuntimeError,
         "tensor_list[1] must have size 1 in dimension 0 like tensor_list[0], but "
         "has shape (3, 2, 2). Convert the images to one number of channels."),
    ],
)  # fmt: skip
def test_values_that_cannot_be_stacked_are_named(
    args: Any, kind: Any, text: str
) -> None:
    refused(kind, text, stack_batch, *args)
    refused((AssertionError, RuntimeError), text, stack_batch, *args)


NORMALIZING = {"mean": [1, 2, 3], "std": [1, 1, 1]}
PADDED = Padded(torch.zeros(1, 3, 2, 2), torch.zeros(1, 2))
NOT_IMAGES = "must be a list of tensors (C, h, w) or one tensor (n, C, h, w), but is"


@pytest.mark.parametrize(
    ("options", "data", "kind", "text"),
    [
        ({}, [RAGGED], TypeError,
         "ImgDataPreprocessor: data must be a mapping with 'inputs', but is list. Use "
         "pseudo_collate or default_collate."),
        ({}, {"img": RAGGED}, KeyError,
         "ImgDataPreprocessor: data must have 'inputs', but has 'img'."),
        ({}, {"inputs": 3}, TypeError, f"data['inputs'] {NOT_IMAGES} int."),
        ({}, {"inputs": PADDED}, TypeError,
         f"data['inputs'] {NOT_IMAGES} pyparallel.Padded."),
        ({}, {"inputs": [RAGGED[0], None]}, TypeError,
         "data['inputs'][1] must be a tensor, but is None."),
        (NORMALIZING, {"inputs": [RAGGED[0], RAGGED[0][:1]]}, ValueError,
         "data['inputs'][1] must have the shape (3, h, w) for a mean of 3 channels, "
         "but has (1, 5, 7)."),
        ({"bgr_to_rgb": True}, {"inputs": [RAGGED[0][:2]]}, ValueError,
         "data['inputs'][0] must have 3 channels in dimension 0 for two of them to be "
         "swapped, but has shape (2, 5, 7)."),
        ({"bgr_to_rgb": True}, {"inputs": torch.zeros(1, 2, 3, 3)}, ValueError,
         "data['inputs'] must have 3 channels in dimension 1 for two of them to be "
         "swapped, but has shape (1, 2, 3, 3)."),
        (NORMALIZING, {"inputs": torch.zeros(1, 4, 3, 3)}, ValueError,
         "data['inputs'] must have 1 or 3 channels in dimension 1 for mean and std of "
         "3, but has shape (1, 4, 3, 3)."),
        ({"mean": [1], "std": [1, 2, 3]}, {"inputs": [torch.ones(2, 3, 3)]}, ValueError,
         "data['inputs'][0] must have 1 or 3 channels in dimension 0 for mean and std "
         "of 3, but has shape (2, 3, 3)."),
        ({}, {"inputs": RAGGED[0]}, AssertionError,
         "data['inputs'] must be a list of tensors or have 4 dimensions (n, C, h, w), "
         "but has shape (3, 5, 7)."),
        ({}, {"inputs": []}, AssertionError,
         "stack_batch: tensor_list must have at least one tensor, but is empty."),
        ({}, {"inputs": [RAGGED[0], RAGGED[1][:1]]}, RuntimeError,
         "data['inputs'][1] must have size 3 in dimension 0 like data['inputs'][0], "
         "but has shape (1, 8, 2). Convert the images to one number of channels."),
    ],
)  # fmt: skip
def test_errors_name_the_image(options: Any, data: Any, kind: Any, text: str) -> None:
    refused(kind, text, ImgDataPreprocessor(**options), data)
