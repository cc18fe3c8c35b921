"""Batches of every kind of field in workers, pinning, scatter and the wrappers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from pyparallel import (
    DataContainer,
    Padded,
    Padding,
    Ragged,
    collate,
    scatter,
    scatter_kwargs,
)
from tests.support.batch import samples
from tests.support.loader.worker_allocations import with_allocations

EVERYTHING = Padding(size_divisor=4, side="center", sizes=True, mask=True)
ONLY_MASK = Padding(side="left", mask=True)
# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def sample(i: int) -> dict[str, Any]:
    image = torch.full((3, 2 + i % 3, 5 - i % 2), float(i))
    tokens = torch.arange(1, 2 + i)
    return {
        "plain": DataContainer(image.clone(), stack=True, padding_value=-1),
        "img": DataContainer(image, True, -1, padding=EVERYTHING),
        "tokens": DataContainer(tokens, True, 0, pad_dims=1, padding=ONLY_MASK),
        "points": DataContainer(torch.full((i, 2), float(i)), ragged=True),
        "boxes": DataContainer(torch.full((i % 4, 4), float(i))),
        "meta": DataContainer({"index": i}, cpu_only=True),
        "pair": samples.Pair(i, torch.ones(2) * i),
    }


def make_batch(count: int = 4, chunk: int = 2) -> dict[str, Any]:
    return collate([sample(i) for i in range(count)], chunk)


def check(part: dict[str, Any], first: int, stop: int) -> None:
    """Compare the part of one target with its samples."""
    img, tokens, points = part["img"], part["tokens"], part["points"]
    assert (type(img), type(tokens), type(points)) == (Padded, Padded, Ragged)
    assert tokens.sizes is None
    for row, i in enumerate(range(first, stop)):
        image, boxes = sample(i)["img"].data, sample(i)["boxes"].data
        height, width = image.shape[1:]
        assert part["plain"][row, :, :height, :width].equal(image.to(part["plain"]))
        assert img.sizes[row].tolist() == [height, width]
        inside = img.mask[row].expand(3, -1, -1)
        assert torch.equal(img.data[row][inside], image.flatten())
        assert (img.data[row][~inside] == -1).all()
        assert tokens.data[row][tokens.mask[row]].tolist() == list(range(1, 2 + i))
        assert points.unbind()[row].tolist() == [[i, i]] * i
        assert torch.equal(part["boxes"][row], boxes)
    assert len(points.lengths()) == len(img.data) == len(part["boxes"]) == stop - first
    assert part["meta"] == [{"index": i} for i in range(first, stop)]
    assert type(part["pair"]) is samples.Pair
    assert part["pair"].left.tolist() == list(range(first, stop))
    assert part["pair"].right.tolist() == [[i, i] for i in range(first, stop)]


# ------------------------------------------------------------------------- in workers
def all_samples(spoil: str = "") -> list[dict[str, Any]]:
    """Return 8 samples; every second one of float64, or one that requires grad."""
    made = [sample(i) for i in range(8)]
    if spoil == "mixed":
        for each in made[1::2]:
            each["plain"] = DataContainer(each["plain"].data.double(), True, 0.5)
    elif spoil:
        spoilt = made[1][spoil]
        (spoilt.right if spoil == "pair" else spoilt.data).requires_grad_()
    return made


def made_tensors(batch: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that collate allocates, except for those of numbers."""
    names = ("plain", "img", "tokens", "points")
    chunks = [chunk for name in names for chunk in batch[name].data]
    fields = [[c] if isinstance(c, torch.Tensor) else c.fields() for c in chunks]
    tensors = [each for field in fields for each in field if each is not None]
    return [*tensors, batch["pair"].right]


def report(batch: list[Any]) -> Any:
    """Return the batch, and the worker's view of its memory."""
    made, allocated = with_allocations(lambda: collate(batch, 2))
    tensors = made_tensors(made)
    handed_over = [each.untyped_storage().data_ptr() for each in tensors]
    return made, allocated, handed_over, [each.is_shared() for each in tensors]


@pytest.mark.parametrize("spoil", ["", "mixed"])
def test_all_tensors_are_written_once_into_shared_memory(spoil: str) -> None:
    first = 0
    for batch, allocated, handed_over, shared in DataLoader(
        all_samples(spoil), 4, num_workers=2, collate_fn=report
    ):
        assert sorted(allocated) == sorted(handed_over)
        assert shared == [True] * 17
        assert all(each.is_shared() for each in made_tensors(batch))
        dtype = torch.float64 if spoil else torch.float32
        assert [chunk.dtype for chunk in batch["plain"].data] == [dtype] * 2
        assert (batch["meta"].cpu_only, batch["plain"].padding_value) == (True, -1)
        for part in scatter(batch, ["cpu", "cpu"]):
            check(part, first, first + 2)
            first += 2
    assert first == 8


def refusals(_: Any) -> list[str]:
    """Return the errors of batches in which one field requires grad."""
    texts = []
    for field in ("plain", "points", "pair"):
        with pytest.raises(RuntimeError) as caught:
            collate(all_samples(field), 8)
        texts.append(str(caught.value))
    return texts


def test_a_tensor_that_requires_grad_is_refused_in_a_worker() -> None:
    (texts,) = DataLoader(all_samples(), 8, num_workers=1, collate_fn=refusals)
    assert texts == [
        f"batch[1]{path} must not require grad in a DataLoader worker, because a "
        "graph cannot cross processes, but it does. Detach it in the dataset."
        for path in ("['plain']", "['points']", "['pair'].right")
    ]


# ------------------------------------------------------------------------- to devices
@pytest.mark.parametrize("sizes", [[1, 3], [3, 1], [2, 2]])
def test_chunks_are_divided_again(sizes: list[int]) -> None:
    parts = scatter(make_batch(4, 4), ["cpu", "cpu"], chunk_sizes=sizes)
    check(parts[0], 0, sizes[0])
    check(parts[1], sizes[0], 4)


def test_the_excess_is_cut_off() -> None:
    parts = scatter(make_batch(), ["cpu", "cpu"], max_size=1)
    check(parts[0], 0, 1)
    check(parts[1], 2, 3)


def test_a_container_may_hold_one_chunk_itself() -> None:
    batch = make_batch(2)
    one = {key: DataContainer(batch[key].data[0]) for key in ("img", "points")}
    (part,) = scatter(one, ["cpu"])
    assert type(part["img"]) is Padded
    assert type(part["points"]) is Ragged
    assert part["points"].offsets.tolist() == [0, 0, 1]


@pytest.mark.parametrize("options", [{}, {"chunk_sizes": [1, 1]}, {"max_size": 1}])
def test_a_bare_ragged_is_not_split_but_refused(options: dict[str, Any]) -> None:
    bare = Ragged.from_tensors([torch.ones(1), torch.ones(3)])
    batch = {"img": torch.ones(2, 3), "clouds": [torch.zeros(2), bare]}
    with pytest.raises(TypeError) as caught:
        scatter(batch, ["cpu", "cpu"], **options)
    assert str(caught.value) == (
        "inputs['clouds'][1] must be the chunk of a DataContainer to be split, but is "
        "a bare Ragged. Collate it with DataContainer(..., ragged=True), or give it to "
        "one target without chunk_sizes and max_size."
    )
    with pytest.raises(TypeError, match=r"^kwargs\['x'\]\[0\] must be the chunk"):
        scatter_kwargs(None, {"a": torch.ones(2), "x": [bare]}, ["cpu", "cpu"])
    (part,) = scatter(batch, ["cpu"])
    assert torch.equal(part["clouds"][1].offsets, bare.offsets)


def test_pinning_and_pickling_reach_every_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = []

    def fake(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", fake)
    batch = make_batch()
    boxes = [box for chunk in batch["boxes"].data for box in chunk]
    expected = [*made_tensors(batch), batch["pair"].left, *boxes]
    got = pin_memory(batch)
    assert sorted(pinned) == sorted(each.data_ptr() for each in expected)
    check(scatter(got, ["cpu", "cpu"])[1], 2, 4)
    for name, cls in (("points", Ragged), ("img", Padded), ("tokens", Padded)):
        pinned.clear()
        chunk = batch[name].data[0]
        bare = pin_memory({"x": chunk})["x"]
        assert type(bare) is cls
        fields = [each for each in chunk.fields() if each is not None]
        assert sorted(pinned) == sorted(each.data_ptr() for each in fields)
    check(scatter(pickle.loads(pickle.dumps(batch)), ["cpu", "cpu"])[0], 0, 2)
