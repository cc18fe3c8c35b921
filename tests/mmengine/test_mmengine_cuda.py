"""The mmengine protocol on a GPU: devices, numbers of copies, and values."""

from __future__ import annotations

import pytest
import torch

from pyparallel.mmengine import BaseDataPreprocessor, BaseModel, ImgDataPreprocessor
from tests.support.mmengine.models import batch, toy_model

pytestmark = pytest.mark.cuda


def test_batches_are_copied_to_the_gpu_of_the_model() -> None:
    model = toy_model(BaseModel)().cuda(0)
    assert model.data_preprocessor.device == torch.device("cuda", 0)
    assert model.val_step(batch()).device == torch.device("cuda", 0)
    assert model.cpu().data_preprocessor.device == torch.device("cpu")
    preprocessor = BaseDataPreprocessor().cuda(torch.cuda.device_count() - 1)
    assert preprocessor.device.index == torch.cuda.device_count() - 1


def test_a_batch_is_sent_to_a_gpu_in_one_copy() -> None:
    data = {f"k{i}": [torch.full((i + 1,), i), f"{i}"] for i in range(20)}
    preprocessor = BaseDataPreprocessor().cuda()
    preprocessor.cast_data(data)  # whatever is done once
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA, kinds.CPU]) as profile:
        result = preprocessor.cast_data(data)
        torch.cuda.synchronize()
    copies = [each for each in profile.events() if "Memcpy HtoD" in each.name]
    assert len(copies) == 1
    for i in range(20):
        assert result[f"k{i}"][0].is_cuda
        assert result[f"k{i}"][0].tolist() == [i] * (i + 1)


def test_on_a_gpu_the_bits_are_the_same() -> None:
    shapes = [(3, 5, 7), (3, 8, 2), (3, 1, 1)]
    images = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]
    preprocessor = ImgDataPreprocessor([123.675], [58.395], 32, 114, bgr_to_rgb=True)
    expected = preprocessor({"inputs": images})["inputs"]
    result = preprocessor.cuda()({"inputs": images})["inputs"]
    assert result.is_cuda and torch.equal(result.cpu(), expected)
