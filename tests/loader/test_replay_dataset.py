"""``replay_dataset=True``: datasets whose own state is not exact continue exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from pyparallel import DataLoader, PreDataLoader, SizeBatcher

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.filterwarnings(r"ignore:\[PP2"),
]

LENGTH, BUFFER = 26, 4


class Shuffled(IterableDataset[int]):
    """A stream with a shuffle buffer, in the manner of Hugging Face's ``datasets``.

    Its state has the number of samples that were read, and not those in the buffer. So
    these are lost, and the position cannot be loaded near the end.
    """

    def __init__(self, fails: bool = False, broken: tuple[int, ...] = ()) -> None:
        self.epoch, self.num_read, self.start = 0, 0, 0
        self.fails, self.broken = fails, broken

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start = epoch, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        own = range(LENGTH)[info.id :: info.num_workers] if info else range(LENGTH)
        generator = random.Random(f"{self.epoch} {info and info.id}")
        buffer: list[int] = []
        for number, sample in enumerate(own[self.start :], self.start + 1):
            self.num_read = number
            if len(buffer) < BUFFER:
                buffer.append(sample)
                continue
            place = generator.randrange(BUFFER)
            buffer[place], sample = sample, buffer[place]
            yield sample
        generator.shuffle(buffer)
        yield from buffer

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise IndexError("list index out of range")
        self.start = state["num_read"]


class Raising(Shuffled):
    """Some samples raise an error."""

    def __iter__(self) -> Iterator[int]:
        return Checked(super().__iter__())


class Checked:
    def __init__(self, samples: Iterator[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Checked:
        return self

    def __next__(self) -> int:
        sample = next(self.samples)
        if sample in (3, 12, 20):
            raise ValueError(f"sample {sample} is damaged")
        return sample


def size_of(sample: int) -> int:
    return 1 + sample % 7


#: Arguments of a loader.
KINDS: dict[str, dict[str, Any]] = {
    "in process": {},
    "workers": {"num_workers": 2},
    "reported": {"num_workers": 2, "snapshot_every_n_steps": 1},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "drop_last": {"drop_last": True, "batch_size": 4},
    "by size": {"batch_size": None},
    "by size, workers": {"batch_size": None, "num_workers": 2},
    "skip": {"on_error": "skip"},
    "skip, workers": {"on_error": "skip", "num_workers": 2},
}


def make(kind: str, ahead: bool, dataset: Any = None, **more: Any) -> tuple[Any, Any]:
    """Return a loader and its stream."""
    options = {"batch_size": 3, "replay_dataset": True, **KINDS[kind], **more}
    stream = dataset or (Raising() if "skip" in kind else Shuffled())
    source = SizeBatcher(stream, size_of, batch_size=3) if "size" in kind else stream
    loader = DataLoader(source, collate_fn=torch.tensor, **options)
    return (PreDataLoader(loader) if ahead else loader), stream


def as_lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def resumed(kind: str, ahead: bool, epoch: int, state: Any, count: int) -> Any:
    """Return the next batches of a new program, its state there, and all others."""
    loader, stream = make(kind, ahead)
    stream.set_epoch(epoch)
    loader.load_state_dict(state)
    batches = iter(loader)
    first = as_lists(itertools.islice(batches, count))
    state = loader.state_dict()
    return first, state, as_lists(batches)


CASES = [*((kind, False) for kind in KINDS), ("in process", True), ("reported", True)]


@pytest.mark.parametrize(("kind", "ahead"), CASES)
def test_every_position_of_two_epochs_continues_twice(kind: str, ahead: bool) -> None:
    loader, stream = make(kind, ahead)
    stream.set_epoch(0)
    expected = [as_lists(loader)]
    stream.set_epoch(1)
    expected.append(as_lists(loader))
    if not KINDS[kind].get("persistent_workers"):  # they keep their copies
        assert expected[0] != expected[1]
    length = len(expected[0])
    positions = [(0, length // 2), (1, 4), (0, 1), (0, length), (0, 0), (1, 1)]
    for epoch, stop in positions[: 3 if "num_workers" in KINDS[kind] else 6]:
        loader, stream = make(kind, ahead)
        if epoch:
            assert as_lists(loader) == expected[0]
        stream.set_epoch(epoch)
        batches = iter(loader)
        done = [next(batches).tolist() for _ in range(stop)]
        assert done == expected[epoch][:stop]
        state = loader.state_dict()
        del batches, loader
        own = 0 if KINDS[kind].get("persistent_workers") else epoch
        more, state, rest = resumed(kind, ahead, own, state, 2)
        assert [*done, *more, *rest] == expected[epoch]
        if stop + 2 < length:
            again, _, rest = resumed(kind, ahead, own, state, 1)
            assert [*done, *more, *again, *rest] == expected[epoch]


@pytest.mark.parametrize("kind", ["in process", "reported"])
def test_after_the_end_of_an_epoch_the_next_one_begins(kind: str) -> None:
    loader, _ = make(kind, False)
    whole = as_lists(loader)
    again, stream = make(kind, False)
    again.load_state_dict(loader.state_dict())
    stream.set_epoch(1)
    expected, other = make(kind, False)
    other.set_epoch(1)
    assert as_lists(again) == as_lists(expected) != whole


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["in process", "reported"])
def test_the_state_of_the_dataset_is_used_without_the_argument_only(
    kind: str, fails: bool
) -> None:
    def part(replays: bool) -> Any:
        loader, _ = make(kind, False, Shuffled(fails), replay_dataset=replays)
        return loader

    expected = as_lists(part(True))
    first = part(False)
    batches = iter(first)
    done = [next(batches).tolist() for _ in range(4)]
    state = first.state_dict()
    inexact = part(False)
    inexact.load_state_dict(state)
    if fails:
        with pytest.raises(IndexError, match="list index out of range"):
            as_lists(inexact)
    else:
        assert [*done, *as_lists(inexact)] != expected
    rescued = part(True)  # also a state that was saved without the argument
    rescued.load_state_dict(state)
    assert [*done, *as_lists(rescued)] == expected


def test_a_shorter_stream_is_an_error_that_names_what_to_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader, _ = make("in process", False)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    again, _ = make("in process", False)
    again.load_state_dict(loader.state_dict())
    monkeypatch.setattr(f"{__name__}.LENGTH", 7)
    with pytest.raises(RuntimeError) as caught:
        next(iter(again))
    assert str(caught.value) == (
        "DataLoader.load_state_dict: the dataset must yield its samples again, but "
        "worker 0 had delivered 5 batches of 3 and now finds 7 samples. Restore its "
        "data, and its epoch with set_epoch."
    )


@pytest.mark.parametrize(
    ("dataset", "value", "message"),
    [
        (
            Shuffled(),
            1,
            "DataLoader: replay_dataset must be True or False, but is 1 (int).",
        ),
        (
            [1, 2],
            True,
            "DataLoader: replay_dataset=True must have an IterableDataset, but has "
            "list, whose samples are read by their index. Remove replay_dataset.",
        ),
    ],
)
def test_wrong_arguments_are_refused(dataset: Any, value: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        DataLoader(dataset, replay_dataset=value)
    assert str(caught.value) == message
