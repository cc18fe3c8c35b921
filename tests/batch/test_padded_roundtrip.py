"""Padded and Ragged in workers, pinning, scatter and the wrappers."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory
from worker_allocations import with_allocations

from pyparallel import (
    DataContainer,
    MMDataParallel,
    Padded,
    Padding,
    Ragged,
    collate,
    scatter,
    scatter_kwargs,
)

EVERYTHING = Padding(size_divisor=4, side="center", sizes=True, mask=True)
ONLY_MASK = Padding(side="left", mask=True)


def sample(i: int) -> dict[str, Any]:
    image = torch.full((3, 2 + i % 3, 5 - i % 2), float(i))
    tokens = torch.arange(1, 2 + i)
    return {
        "img": DataContainer(image, True, -1, padding=EVERYTHING),
        "tokens": DataContainer(tokens, True, 0, pad_dims=1, padding=ONLY_MASK),
        "points": DataContainer(torch.full((i, 2), float(i)), ragged=True),
        "label": i,
    }


def make_batch(count: int = 4, chunk: int = 2) -> dict[str, Any]:
    return collate([sample(i) for i in range(count)], chunk)


def check(part: dict[str, Any], first: int, stop: int) -> None:
    """Compare the part of one target with its samples."""
    img, tokens, points = part["img"], part["tokens"], part["points"]
    assert (type(img), type(tokens), type(points)) == (Padded, Padded, Ragged)
    assert tokens.sizes is None
    for row, i in enumerate(range(first, stop)):
        image = sample(i)["img"].data
        assert img.sizes[row].tolist() == list(image.shape[1:])
        inside = img.mask[row].expand(3, -1, -1)
        assert torch.equal(img.data[row][inside], image.flatten())
        assert (img.data[row][~inside] == -1).all()
        assert tokens.data[row][tokens.mask[row]].tolist() == list(range(1, 2 + i))
        assert points.unbind()[row].tolist() == [[i, i]] * i
    assert len(points.lengths()) == len(img.data) == stop - first
    assert part["label"].tolist() == list(range(first, stop))


class Samples(Dataset[Any]):
    """The samples above, with one that must not be among them if spoilt."""

    def __init__(self, spoilt: bool = False) -> None:
        self.spoilt = spoilt

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        made = sample(i)
        if self.spoilt and i == 1:
            points = torch.ones(2, 2, requires_grad=True)
            made = {"points": DataContainer(points, ragged=True)}
        return {"points": made["points"]} if self.spoilt else made


def tensors(batch: dict[str, Any]) -> list[torch.Tensor]:
    chunks = [c for key in ("img", "tokens", "points") for c in batch[key].data]
    return [each for chunk in chunks for each in chunk.fields() if each is not None]


class Report:
    """collate, and beside the batch which memory the worker allocated for it."""

    def __call__(self, batch: list[Any]) -> Any:
        made, allocated = with_allocations(lambda: collate(batch, 2))
        handed_over = [each.untyped_storage().data_ptr() for each in tensors(made)]
        handed_over.append(made["label"].untyped_storage().data_ptr())
        return made, sorted(allocated), sorted(handed_over)


def loader(dataset: Any, collate_fn: Any, **options: Any) -> DataLoader[Any]:
    context = {"multiprocessing_context": "fork"} | options
    return DataLoader(dataset, 4, num_workers=2, collate_fn=collate_fn, **context)


# When an iterator ends, torch closes queues that their feeder threads may still use.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestInWorkers:
    def test_everything_is_written_straight_into_shared_memory(self) -> None:
        first = 0
        for batch, allocated, handed_over in loader(Samples(), Report()):
            # A label outside of the worker's allocation would be one more copy.
            assert set(allocated) <= set(handed_over)
            assert len(set(handed_over) - set(allocated)) <= 1
            assert len(set(allocated)) >= len(tensors(batch)) == 14
            assert all(each.is_shared() for each in tensors(batch))
            for part, start in zip(
                scatter(batch, ["cpu", "cpu"]), (first, first + 2), strict=True
            ):
                check(part, start, start + 2)
            first += 4
        assert first == 8

    @pytest.mark.timeout(120)
    def test_workers_that_are_not_forked_make_equal_batches(self) -> None:
        two = functools.partial(collate, samples_per_gpu=2)
        pickled = loader(Samples(), two, multiprocessing_context="forkserver")
        for i, batch in enumerate(pickled):
            check(scatter(batch, ["cpu", "cpu"])[1], 4 * i + 2, 4 * i + 4)

    def test_a_sample_that_requires_grad_is_named(self) -> None:
        with pytest.raises(
            RuntimeError, match="in DataLoader worker process"
        ) as caught:
            list(loader(Samples(spoilt=True), functools.partial(collate)))
        assert (
            "batch[1]['points'] must not require grad in a DataLoader worker, because "
            "a graph cannot cross processes, but it does. Detach it in the dataset."
        ) in str(caught.value)


def test_each_target_gets_its_chunks() -> None:
    parts = scatter(make_batch(), ["cpu", "cpu"])
    assert len(parts) == 2
    check(parts[0], 0, 2)
    check(parts[1], 2, 4)


def test_a_single_target_gets_everything() -> None:
    (part,) = scatter(make_batch(3, 3), [-1])
    check(part, 0, 3)


@pytest.mark.parametrize("sizes", [[1, 3], [3, 1], [2, 2]])
def test_chunks_are_divided_again(sizes: list[int]) -> None:
    parts = scatter(make_batch(4, 4), ["cpu", "cpu"], chunk_sizes=sizes)
    check(parts[0], 0, sizes[0])
    check(parts[1], sizes[0], 4)


def test_chunks_of_one_shape_are_joined() -> None:
    fixed = Padding(shape=(4, 4), sizes=True)
    batch = [
        DataContainer(torch.full((1, 2 + i, 1), float(i)), True, padding=fixed)
        for i in range(3)
    ]
    (part,) = scatter(collate(batch, 2), ["cpu"], chunk_sizes=[3])
    assert part.data[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert (part.sizes.tolist(), part.mask) == ([[2, 1], [3, 1], [4, 1]], None)


def test_the_excess_is_cut_off() -> None:
    parts = scatter(make_batch(), ["cpu", "cpu"], max_size=1)
    check(parts[0], 0, 1)
    check(parts[1], 2, 3)


def test_only_floating_point_values_are_cast() -> None:
    parts = scatter(make_batch(), ["cpu", "cpu"], dtype=torch.float16)
    img, points = parts[1]["img"], parts[1]["points"]
    dtypes = [img.data.dtype, img.sizes.dtype, img.mask.dtype]
    assert dtypes == [torch.float16, torch.int64, torch.bool]
    assert (points.values.dtype, points.offsets.dtype) == (torch.float16, torch.int64)


def test_a_container_may_hold_one_chunk_itself() -> None:
    batch = make_batch(2)
    one = {key: DataContainer(batch[key].data[0]) for key in ("img", "points")}
    (part,) = scatter(one, ["cpu"])
    assert type(part["img"]) is Padded
    assert type(part["points"]) is Ragged
    assert part["points"].offsets.tolist() == [0, 0, 1]


@pytest.mark.parametrize("options", [{}, {"chunk_sizes": [1, 1]}])
def test_a_bare_ragged_is_not_split_but_refused(options: dict[str, Any]) -> None:
    bare = Ragged.from_tensors([torch.ones(1), torch.ones(3)])
    batch = {"img": torch.ones(2, 3), "clouds": [torch.zeros(2), bare]}
    with pytest.raises(TypeError) as caught:
        scatter(batch, ["cpu", "cpu"], **options)
    assert str(caught.value) == (
        "inputs['clouds'][1] must be the chunk of a DataContainer to be split, but is "
        "a bare Ragged. Collate it with DataContainer(..., ragged=True), or give it to "
        "one target."
    )
    with pytest.raises(TypeError, match=r"^kwargs\['x'\]\[0\] must be the chunk"):
        scatter_kwargs(None, {"a": torch.ones(2), "x": [bare]}, ["cpu", "cpu"])
    (part,) = scatter(batch, ["cpu"])
    assert torch.equal(part["clouds"][1].offsets, bare.offsets)


def test_the_device_may_be_any() -> None:
    (part,) = scatter(make_batch(2), [torch.device("cpu")])
    moved = make_batch(2)["img"].to("meta").data[0]
    assert type(moved) is Padded
    assert [each.is_meta for each in moved.fields()] == [True] * 3
    check(part, 0, 2)


def test_pinning_and_pickling_reach_every_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = []

    def fake(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", fake)
    batch = make_batch()
    expected = {each.data_ptr() for each in tensors(batch)}
    got = pin_memory(batch)
    assert expected < set(pinned) and len(pinned) == 15
    check(scatter(got, ["cpu", "cpu"])[1], 2, 4)
    bare = pin_memory(batch["points"].data[0])
    assert type(bare) is Ragged
    check(scatter(pickle.loads(pickle.dumps(batch)), ["cpu", "cpu"])[0], 0, 2)


class Model(torch.nn.Module):
    """A model that checks its inputs."""

    def forward(self, **data: Any) -> Any:
        check(data, 0, 2)
        return data["points"].to_padded().sum()

    def train_step(self, data: dict[str, Any], optimizer: Any) -> Any:
        return {"loss": self(**data)}


def test_the_wrapper_passes_padded_batches_to_the_model() -> None:
    model = MMDataParallel(Model(), device_ids=[-1])
    batch = make_batch(2)
    assert model(**batch) == 2
    assert model.train_step(batch, None)["loss"] == 2
