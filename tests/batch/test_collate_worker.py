"""collate in the workers of a real DataLoader."""

from __future__ import annotations

import functools
import gc
import os
from typing import Any

import psutil
import pytest
import samples
import torch
from torch.utils.data import DataLoader, Dataset
from worker_allocations import with_allocations

from pyparallel import DataContainer, collate

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Ragged(Dataset[Any]):
    """Samples like those of a detector, and functions for tests on them."""

    def __init__(self, length: int = 8, spoil: str = "") -> None:
        self.length = length
        self.spoil = spoil

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        image = torch.full((3, 4 + i % 3, 5), float(i))
        if self.spoil == "grad" and i == 1:
            image.requires_grad_()
        sample: dict[str, Any] = {
            "img": DataContainer(image, stack=True, padding_value=-1),
            "boxes": DataContainer(torch.full((i % 4, 4), float(i))),
            "meta": DataContainer({"index": i}, cpu_only=True),
            "name": f"image {i}",
            "pair": samples.Pair(i, torch.ones(2) * i),
        }
        if self.spoil == "mixed" and i % 2:
            sample["img"] = DataContainer(image.double(), True, 0.5)
        return sample


class Report:
    """collate, and return with the batch the worker's view of its memory."""

    def __init__(self, samples_per_gpu: int) -> None:
        self.samples_per_gpu = samples_per_gpu

    def __call__(self, batch: list[Any]) -> Any:
        made, allocated = with_allocations(lambda: collate(batch, self.samples_per_gpu))
        tensors = [*made["img"].data, made["pair"].right]
        handed_over = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        shared = [tensor.is_shared() for tensor in tensors]
        return made, allocated, handed_over, shared


def loader(dataset: Dataset[Any], collate_fn: Any, **options: Any) -> DataLoader[Any]:
    options = {"multiprocessing_context": "fork", "batch_size": 4} | options
    return DataLoader(dataset, num_workers=2, collate_fn=collate_fn, **options)


def read(batches: DataLoader[Any]) -> None:
    """Read all batches, then end workers and feeder threads, also after an error.

    The error and the iterator refer to each other. The garbage collector would close
    the pipes of the queues while their feeders use them. A feeder that meets a closed
    pipe never ends. It closes the pipe of another queue if that has the descriptor now.
    """
    iterator: Any = iter(batches)
    try:
        list(iterator)
    finally:
        iterator._shutdown_workers()
        for queue in iterator._index_queues:
            queue._thread.join()


def check(batch: dict[str, Any], first: int, dtype: torch.dtype) -> None:
    """Compare a batch of four, in chunks of two, with the samples it was made of."""
    plain = [Ragged()[i] for i in range(first, first + 4)]
    images = [image for chunk in batch["img"].data for image in chunk]
    for sample, image in zip(plain, images, strict=True):
        _, rows, columns = sample["img"].size()
        assert image.dtype is dtype
        assert torch.equal(image[:, :rows, :columns], sample["img"].data.to(dtype))
    boxes = [box for chunk in batch["boxes"].data for box in chunk]
    assert all(
        torch.equal(b, s["boxes"].data) for b, s in zip(boxes, plain, strict=True)
    )
    metas = [meta for chunk in batch["meta"].data for meta in chunk]
    assert metas == [sample["meta"].data for sample in plain]
    assert batch["name"] == [sample["name"] for sample in plain]
    assert type(batch["pair"]) is samples.Pair
    assert batch["pair"].left.tolist() == [sample["pair"].left for sample in plain]
    assert (batch["meta"].cpu_only, batch["img"].padding_value) == (True, -1)


@pytest.mark.parametrize("spoil", ["", "mixed"])
def test_stacked_tensors_are_written_once_into_shared_memory(spoil: str) -> None:
    dtype = torch.float64 if spoil == "mixed" else torch.float32
    first = 0
    for batch, allocated, handed_over, shared in loader(Ragged(8, spoil), Report(2)):
        assert sorted(allocated) == sorted(handed_over)
        assert shared == [True] * 3
        assert all(image.is_shared() for image in batch["img"].data)
        assert batch["pair"].right.is_shared()
        check(batch, first, dtype)
        first += 4
    assert first == 8


@pytest.mark.timeout(120)
def test_workers_that_are_not_forked_make_equal_batches() -> None:
    collate_two = functools.partial(collate, samples_per_gpu=2)
    pickled = loader(Ragged(), collate_two, multiprocessing_context="forkserver")
    for i, batch in enumerate(pickled):
        check(batch, 4 * i, torch.float32)


def test_a_tensor_that_requires_grad_is_refused_in_a_worker() -> None:
    with pytest.raises(RuntimeError, match="in DataLoader worker process") as caught:
        read(loader(Ragged(4, "grad"), functools.partial(collate, samples_per_gpu=4)))
    assert (
        "batch[1]['img'] must not require grad in a DataLoader worker, because a graph "
        "cannot cross processes, but it does. Detach it in the dataset."
    ) in str(caught.value)


def same(batch: list[Any]) -> Any:
    return collate(batch)


class Plain(Dataset[Any]):
    """Tensors without containers."""

    def __init__(self, grad: bool = False) -> None:
        self.grad = grad

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.ones(2, requires_grad=self.grad)


def test_plain_tensors_are_shared_or_refused_alike() -> None:
    (batch,) = loader(Plain(), same)
    assert batch.is_shared()
    assert batch.tolist() == [[1, 1]] * 4
    with pytest.raises(RuntimeError, match=r"batch\[0\] must not require grad"):
        read(loader(Plain(grad=True), same))


def test_file_descriptors_do_not_leak() -> None:
    process = psutil.Process(os.getpid())
    counts = []
    options = {"batch_size": 2, "persistent_workers": True}
    batches = loader(
        Ragged(100), functools.partial(collate, samples_per_gpu=2), **options
    )
    for _ in range(2):  # the first round warms everything up
        for batch in batches:
            assert len(batch["img"].data) == 1
            del batch
        gc.collect()
        counts.append(process.num_fds())
    del batches
    assert counts[1] <= counts[0] + 4
