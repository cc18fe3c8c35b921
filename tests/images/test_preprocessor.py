"""ImagePreprocessor: its results, their memory, their transfer, and its errors."""

from __future__ import annotations

import copy
import pickle
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pyparallel
from pyparallel import ImagePreprocessor, Padded, Ragged
from pyparallel.backend import _python
from pyparallel.core import errors
from pyparallel.core.errors import EmptyBatchError
from pyparallel.transfer import to_device
from tests.support.errors.collate_errors import freed
from tests.support.processes.backends import both, last, using

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]


def photos(num: int = 3, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(num)
    shapes = [(3, 20 + 3 * i, 31 - 2 * i) for i in range(num)]
    return [torch.randint(0, 256, x, generator=seeded).to(dtype) for x in shapes]


def by_hand(
    images: list[torch.Tensor],
    target: tuple[int, int],
    pad_value: float = 0,
    swap: bool = False,
) -> torch.Tensor:
    """Return the batch made by torch's operators, one step at a time."""
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    done = []
    for each in images:
        pixels = ((each.flip(0) if swap else each).float() - mean) / std
        margins = (0, target[1] - each.shape[2], 0, target[0] - each.shape[1])
        done.append(F.pad(pixels, margins, value=pad_value))
    return torch.stack(done)


@both
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_result_has_the_bits_of_torch(
    backend: ModuleType, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    options: dict[str, Any] = {"size_divisor": (4, 8), "pad_value": 114}
    options |= {"dtype": dtype, "memory_format": layout, "return_mask": True}
    for source in (torch.uint8, torch.float32, torch.float64, torch.int16):
        with using(backend):
            found = ImagePreprocessor(MEAN, STD, **options)(photos(dtype=source))
        expected = by_hand(photos(), (28, 32), 114).to(dtype)
        assert type(found) is Padded and found.sizes is None
        assert found.data.dtype is dtype and torch.equal(found.data, expected)
        assert found.data.is_contiguous(memory_format=layout)
        for mask, each in zip(found.mask, photos(), strict=True):
            height, width = each.shape[1:]
            assert mask[:height, :width].all() and mask.sum() == height * width


@both
def test_padding_may_be_normalised_with_the_pixels(backend: ModuleType) -> None:
    # mmcv pads an image, here blue first, and then swaps and normalises all of it.
    value = (10, 20, 30)
    options: dict[str, Any] = {"pad_value": value, "swap_channels": True}
    padded = []
    for each in photos():
        margins = (0, 31 - each.shape[2], 0, 26 - each.shape[1])
        rows = [F.pad(x, margins, value=v) for x, v in zip(each, value, strict=True)]
        padded.append(torch.stack(rows))
    with using(backend):
        pre = ImagePreprocessor(MEAN, STD, pad_before_normalize=True, **options)
        assert torch.equal(pre(photos()), by_hand(padded, (26, 31), swap=True))
        after = ImagePreprocessor(MEAN, STD, **options)(photos())
        assert after[2, :, 0, -1].tolist() == [10, 20, 30]


@both
def test_padding_is_normalised_in_two_steps_as_pixels_are(backend: ModuleType) -> None:
    # For these numbers one rounding of all of it gives another last bit.
    value, mean, std = (np.float32(each) for each in (31.7, 116.82, 56.47))
    expected = (value - mean) / std
    assert expected != np.float32((float(value) - float(mean)) / float(std))
    options: dict[str, Any] = {"pad_value": 31.7, "pad_before_normalize": True}
    images = [torch.zeros(1, 2, 2), torch.zeros(1, 2, 3)]
    with using(backend):
        batch = ImagePreprocessor(116.82, 56.47, **options)(images)
    assert batch[0, 0, :, 2].tolist() == [float(expected)] * 2


@both
def test_one_number_serves_all_channels_and_no_numbers_change_nothing(
    backend: ModuleType,
) -> None:
    with using(backend):
        plain = ImagePreprocessor()(photos(1))
        assert torch.equal(plain[0], photos(1)[0].float())
        for mean, std in ((2, [4.0]), (torch.tensor(2), torch.tensor([4]))):
            assert torch.equal(ImagePreprocessor(mean, std)(photos(1)), (plain - 2) / 4)


@both
def test_one_tensor_is_a_batch_of_equal_images(backend: ModuleType) -> None:
    stacked = torch.stack([photos(1)[0]] * 2)
    with using(backend):
        batch = ImagePreprocessor(MEAN, STD, size_divisor=32)(stacked)
    assert torch.equal(batch, by_hand(list(stacked), (32, 32)))
    last = stacked.contiguous(memory_format=torch.channels_last)
    assert torch.equal(ImagePreprocessor(MEAN, STD, size_divisor=32)(last), batch)


@both
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_flow_and_change_no_bit(
    backend: ModuleType, exact: bool, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"pad_value": (1, 2, 1e39), "swap_channels": True}
    options |= {"dtype": dtype, "memory_format": torch.channels_last}
    pre = ImagePreprocessor(MEAN, STD, exact=exact, **options)
    leaves = [each.requires_grad_() for each in photos(dtype=torch.float32)]
    with using(backend):
        batch = pre(leaves)
        with torch.no_grad():
            plain = pre(leaves)
    assert not plain.requires_grad
    assert batch.is_contiguous(memory_format=torch.channels_last)
    if exact or backend is _python:
        assert torch.equal(batch, plain)
    else:
        torch.testing.assert_close(batch, plain)
    weights = torch.rand_like(batch)
    batch.backward(weights)
    for leaf, row in zip(leaves, weights, strict=True):
        inside = row[:, : leaf.shape[1], : leaf.shape[2]].float()
        expected = (inside / torch.tensor(STD).view(3, 1, 1)).flip(0)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected)


def test_transforms_of_torch_func_use_torch() -> None:
    pre = ImagePreprocessor(2.0, 4.0, pad_value=9)
    other = torch.zeros(1, 3, 3)
    found = torch.func.grad(lambda x: pre([x, other]).sum())(torch.ones(1, 2, 2))
    assert found.tolist() == [[[0.25, 0.25], [0.25, 0.25]]]
    rows = torch.func.vmap(lambda x: pre([x, other]))(torch.ones(5, 1, 2, 2))
    assert torch.equal(rows[3], pre([torch.ones(1, 2, 2), other]))


@both
@pytest.mark.parametrize("channels", [1, 3])
def test_every_way_makes_the_memory_format(backend: ModuleType, channels: int) -> None:
    pre = ImagePreprocessor(2.0, 4.0, memory_format=torch.channels_last)
    images = [torch.ones(channels, 2, 3), torch.ones(channels, 3, 2)]
    with using(backend):
        plain = pre(images)
        graph = pre([each.clone().requires_grad_() for each in images])
        rows = torch.func.vmap(lambda x: pre([x, images[1]]))(torch.stack(images[:1]))
    assert plain.stride() == graph.stride() == rows[0].stride()
    assert torch.equal(plain, graph) and torch.equal(plain, rows[0])


# ---------------------------------------------------------------------- as a module
def test_it_is_a_module_without_state() -> None:
    pre = ImagePreprocessor(MEAN, STD, swap_channels=True, return_mask=True)
    model = torch.nn.Sequential(pre, torch.nn.Linear(1, 1))
    assert list(model.state_dict()) == ["1.weight", "1.bias"]
    for again in (copy.deepcopy(pre), pickle.loads(pickle.dumps(pre))):
        assert repr(again) == repr(pre)
        assert torch.equal(again(photos()).data, pre(photos()).data)
    assert pre.half()(photos()).data.dtype is torch.float32


# -------------------------------------------------------------------- how it travels
def test_images_are_sent_in_one_copy_in_memory_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []

    def start_copy(parts: Any, target: Any) -> Any:
        sent.append((parts, target))
        return lambda: [each.clone() for each in parts]

    monkeypatch.setattr(to_device, "start_copy", start_copy)
    first, second, third = photos()
    turned = second.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    batch = ImagePreprocessor(MEAN, STD, device="cpu")([first, turned, third])
    assert torch.equal(batch, by_hand(photos(), (26, 31)))
    ((parts, target),) = sent
    assert target == torch.device("cpu")
    assert [each.dtype for each in parts] == [torch.uint8] * 3
    assert all(each.is_contiguous() for each in parts)
    images = (first, turned, third)
    assert [x.data_ptr() for x in parts] == [x.data_ptr() for x in images]


@both
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_arrays_and_pil_images_are_images(backend: ModuleType, mode: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    arrays = [photo.permute(1, 2, 0).contiguous().numpy() for photo in photos()]
    pictures = [pillow.fromarray(array).convert(mode) for array in arrays]
    pixels = [torch.tensor(np.asarray(picture)) for picture in pictures]
    pixels = [x[None] if x.dim() == 2 else x.permute(2, 0, 1) for x in pixels]
    preprocess = ImagePreprocessor(100, 50)
    with using(backend):
        expected = preprocess(pixels)
        assert torch.equal(preprocess(pictures), expected)
        assert torch.equal(preprocess([x.numpy() for x in pixels]), expected)
        assert torch.equal(preprocess([pictures[0], *pixels[1:]]), expected)


@both
def test_mean_and_std_are_of_scaled_images(backend: ModuleType) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    with using(backend):
        (got,) = ImagePreprocessor(mean, std, scale=1 / 255)(photos(1))
        (alone,) = ImagePreprocessor(scale=1 / 255)(photos(1))
    (photo,) = photos(1)
    numbers = torch.tensor([mean, std], dtype=torch.float64).view(2, 3, 1, 1)
    want = (photo.double() / 255 - numbers[0]) / numbers[1]
    assert torch.allclose(got.double(), want, rtol=0, atol=2e-6)
    assert torch.equal(alone, photo / 255)


def test_bytes_with_a_mean_of_values_up_to_1_are_a_warning() -> None:
    errors._warned.clear()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for quiet in (
        ImagePreprocessor(mean, std, scale=1 / 255),
        ImagePreprocessor(MEAN, STD),
        ImagePreprocessor(0, 255),
        ImagePreprocessor(),
    ):
        quiet(photos())
    ImagePreprocessor(mean, std)([photo / 255 for photo in photos()])
    with pytest.warns(pyparallel.BatchWarning) as caught:
        ImagePreprocessor(mean, std)(photos())
        ImagePreprocessor(mean, std)(photos())
    (warning,) = caught
    assert str(warning.message) == (
        "[PP103] ImagePreprocessor: images are uint8 with values up to 255, but mean "
        "(0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225) are for values up to 1. "
        "The result is too large. Pass scale=1/255, or multiply both by 255."
    )


# --------------------------------------------------------------------------- errors
NAN = float("nan")
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mean": 1}, ValueError, "mean and std must be given together, but only mean is."),
    ({"mean": "1", "std": 1}, TypeError,
     "mean must be a number or one for each channel, but is '1'."),
    ({"mean": 0, "std": [1, None]}, TypeError,
     "std must be a number or one for each channel, but is [1, None]."),
    ({"pad_value": ()}, ValueError, "pad_value must have 1 to 4 entries, but has 0."),
    ({"mean": 0, "std": [1, 0]}, ValueError, "std[1] must not be 0, but is 0.0."),
    ({"mean": NAN, "std": 1}, ValueError, "mean[0] must be finite, but is nan."),
    ({"mean": 0, "std": 1e39}, ValueError, "std[0] must be finite, but is 1e+39."),
    ({"pad_value": (1, 10**400)}, ValueError,
     "pad_value[1] must be a number that a double can hold, but is a larger integer."),
    ({"scale": 10**400}, ValueError,
     "scale must be a number that a double can hold, but is a larger integer."),
    ({"scale": 0}, ValueError, "scale must be positive and finite, but is 0.0."),
    ({"scale": (1, 1)}, TypeError, "scale must be a number, but is (1, 1)."),
    ({"dtype": torch.float64}, TypeError,
     "dtype must be torch.float32, torch.float16 or torch.bfloat16, but is "
     "torch.float64."),
    ({"memory_format": torch.preserve_format}, TypeError,
     "memory_format must be torch.contiguous_format or torch.channels_last, but is "
     "torch.preserve_format."),
    ({"swap_channels": 1}, TypeError, "swap_channels must be True or False, but is 1."),
    ({"size_divisor": (1, 2, 3)}, ValueError,
     "padding must give size_divisor for 2 padded dimensions, but gives (1, 2, 3). "
     "Give 2 of them."),
    ({"device": "disk"}, ValueError,
     "a device must be -1 or name a device, but is 'disk'."),
]  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS, ids=last)
def test_options_that_cannot_be_are_refused_at_once(case: Any) -> None:
    options, error, message = case
    with pytest.raises(error) as caught:
        ImagePreprocessor(**options)
    assert str(caught.value) == f"ImagePreprocessor: {message}"


def image(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.ones(shape or (3, 4, 5), dtype=dtype)


BATCHES: list[tuple[Any, type[Exception], str]] = [
    ([], EmptyBatchError, " must have at least one image, but is empty."),
    (image(), TypeError,
     " must be a list of tensors (C, h, w), or one tensor (n, C, h, w), but is a "
     "tensor of shape (3, 4, 5)."),
    (Ragged(image(), torch.tensor([0, 3])), TypeError,
     " must be a list of tensors (C, h, w), or one tensor (n, C, h, w), but is "
     "pyparallel.Ragged."),
    ([image(), np.array([None])], TypeError,
     "[1] must be a tensor or a numeric array (C, h, w), or a PIL image, but is "
     "numpy.ndarray. Convert it with torch.as_tensor."),
    ([image(dtype=torch.complex64)], TypeError,
     "[0] must have a dtype of real numbers, but has torch.complex64."),
    ([image().to_sparse()], TypeError,
     "[0] must be a dense tensor, but its layout is torch.sparse_coo. Convert it with "
     "to_dense() before collating."),
    ([image(), image(4, 5)], ValueError,
     "[1] must have shape (C, h, w) with 1 to 4 channels, but has shape (4, 5)."),
    ([image(), image(1, 4, 5)], ValueError,
     "[1] must have 3 channels like images[0], but has shape (1, 4, 5)."),
    ([image(1, 4, 5)], ValueError,
     "[0] must have 3 channels, because mean has 3 entries, but has 1. Pass one for "
     "each channel, or one for all."),
    ([image(), image().to("meta")], ValueError,
     "[1] must be on cpu like images[0], but is on meta."),
    ([image(1).expand(1, 2**40, 1), image(1).expand(1, 1, 2**40)], ValueError,
     "[0] and the samples stacked with it must need less than 2**63 elements, but the "
     "padded shape is (2, 1, 1099511627776, 1099511627776)."),
    ([image(), freed(image(), 7)], ValueError,
     "[1] must lie within its storage, but needs 60 bytes where 7 are left. Collate it "
     "before its storage is resized."),
    ([freed(image(dtype=torch.float64))], ValueError,
     "[0] must lie within its storage, but needs 480 bytes where 0 are left. Collate "
     "it before its storage is resized."),
]  # fmt: skip


@pytest.mark.parametrize("case", BATCHES, ids=last)
def test_batches_that_do_not_fit_name_the_image(case: Any) -> None:
    images, error, message = case
    wide = message.startswith("[0] and the samples")
    pre = ImagePreprocessor(1 if wide else (1, 2, 3), 1)
    with pytest.raises(error) as caught:
        pre(images)
    found = str(caught.value).removeprefix("ImagePreprocessor: ")
    assert found == f"images{message}"
