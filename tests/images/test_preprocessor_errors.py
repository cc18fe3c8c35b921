"""Errors of ImagePreprocessor, with complete messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backends import last
from collate_errors import freed

from pyparallel import ImagePreprocessor, Ragged
from pyparallel.core.errors import EmptyBatchError

pytestmark = pytest.mark.asan

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
