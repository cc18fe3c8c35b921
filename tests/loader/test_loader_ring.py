"""The ring of a loader: reused slabs, misses, and costs."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel.core import errors
from pyparallel.core.errors import LoaderWarning
from pyparallel.shm import ring as ring_module
from tests.support.loader.loader_sets import Numbers, Sizes, holders, messages, same

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.usefixtures("in_ring"),
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120),
]

OUTSIDE = "this batch was allocated outside the ring, which is slower"


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    errors._warned.clear()


@pytest.mark.parametrize("persistent", [False, True])
def test_slabs_are_free_when_the_last_view_dies(persistent: bool) -> None:
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": persistent}
    loader = pyparallel.DataLoader(Numbers(8), **options)
    for _ in range(2):
        kept = [batch[1, 1:] for batch in loader]
        assert holders(loader).count(ring_module.PARENT) == 4
        assert [row.tolist() for row in kept] == [[i, i] for i in (1.0, 3, 5, 7)]
        del kept
        assert not any(holders(loader))
    stats = loader.stats()
    assert (stats.batches, stats.ring_hits, stats.ring_misses) == (8, 8, 0)


def test_a_batch_too_large_for_a_slab_warns_with_advice() -> None:
    def loader(nbytes: int) -> pyparallel.DataLoader:
        return pyparallel.DataLoader(
            Sizes([1000] * 3), num_workers=1, ring_slabs=4, max_ring_bytes=nbytes
        )

    small = loader(4 * 6400)  # the header takes a page, each slab another one
    with pytest.warns(LoaderWarning) as caught:
        assert [batch[0, 999] for batch in small] == [0, 1, 2]
    assert messages(caught) == [
        "[PP202] DataLoader: a batch of 8000 bytes does not fit into a ring slab of "
        f"3968 bytes (max_ring_bytes / ring_slabs, in whole pages), so {OUTSIDE}. "
        "Increase max_ring_bytes to 36864."
    ]
    assert small.stats().ring_misses == 3
    enough = loader(36_864)
    assert [batch[0, 999] for batch in enough] == [0, 1, 2]
    assert (enough.stats().ring_hits, enough.stats().ring_misses) == (3, 0)


class NoSpace:
    """A ``worker_init_fn``: no slab takes memory from now on, all else does."""

    def __call__(self, worker_id: int) -> None:
        fallocate = os.posix_fallocate

        def refuse(fd: int, start: int, nbytes: int) -> None:
            if start:
                raise OSError(28, "No space left on device")
            fallocate(fd, start, nbytes)

        os.posix_fallocate = refuse


class Caching:
    """A collate function that gives out the same tensor again and again."""

    def __init__(self) -> None:
        self.made: Any = None

    def __call__(self, batch: list[torch.Tensor]) -> Any:
        if self.made is None:
            self.made = pyparallel.collate(batch)
        return {"same": self.made, "new": batch[0]}


#: Options of a loader, the number of its misses, and the warning.
MISSES: dict[str, tuple[dict[str, Any], int, str]] = {
    "full": (
        {"num_workers": 2, "ring_slabs": 4},
        8,
        f"[PP201] DataLoader: all 4 ring slabs are in use, so {OUTSIDE}. Increase "
        "ring_slabs, or release batches sooner.",
    ),
    "no memory": (
        {"num_workers": 1, "worker_init_fn": NoSpace()},
        12,
        "[PP203] DataLoader: the system has no memory for a ring slab of 160000 "
        f"bytes, so {OUTSIDE}. Decrease max_ring_bytes, or free memory.",
    ),
    "kept": (
        {"num_workers": 1, "ring_slabs": 16, "collate_fn": Caching()},
        1,
        "[PP204] DataLoader: the worker keeps a tensor of a batch that is in a ring "
        "slab, so the batch was copied out of the ring, which is slower. Clone tensors "
        "that collate_fn keeps.",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_batches_outside_the_ring_arrive_and_a_warning_says_why(name: str) -> None:
    options, misses, warning = MISSES[name]
    loader = pyparallel.DataLoader(Numbers(12, (40_000,)), **options)
    with pytest.warns(LoaderWarning) as caught:
        batches = list(loader)
    assert messages(caught) == [warning]
    assert loader.stats().ring_misses == misses
    if name == "kept":
        assert [batch["same"].unique().tolist() for batch in batches] == [[0]] * 12
        batches = [batch["new"] for batch in batches]
    assert [batch.unique().tolist() for batch in batches] == [[i] for i in range(12)]
    del batches
    assert name == "kept" or not any(holders(loader))


#: Options of a loader, and how many of two batches are in its ring.
RINGS = [
    ({"ring_slabs": 0}, 0),
    ({"max_ring_bytes": 0}, 0),
    ({"ring_slabs": 1 << 40}, 2),
    ({"prefetch_factor": 70_000}, 2),
    ({"max_ring_bytes": 1 << 80}, 2),
]


@pytest.mark.parametrize("options, hits", RINGS, ids=str)
def test_a_ring_has_any_size_or_none(options: Any, hits: int) -> None:
    loader = pyparallel.DataLoader[torch.Tensor](Numbers(2), num_workers=1, **options)
    assert [batch[0, 0].item() for batch in loader] == [0, 1]
    assert loader.stats().ring_hits == hits
    assert (loader._receiver.ring is None) is (hits == 0)


def test_an_iterator_without_a_ring_continues_next_to_one_with_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(fd: int, start: int, nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    loader = pyparallel.DataLoader(Numbers(3), num_workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refused)
        with pytest.warns(LoaderWarning) as caught:
            ring = loader._receiver.ring_for(1, 2)
    assert ring is None
    assert messages(caught) == [
        "[PP207] DataLoader: the ring could not be allocated, because the system has "
        "no memory left (Cannot allocate memory). Increase the memory of the machine "
        "or its control group, or use smaller batches. Every batch is allocated "
        "outside the ring, which is slower."
    ]
    with monkeypatch.context() as patch:
        patch.setattr(type(loader._receiver), "ring_for", lambda *_: None)
        first = iter(loader)
    second = iter(loader)
    assert [batch[0, 0] for batch in first] == [batch[0, 0] for batch in second]
    assert (loader.stats().ring_hits, loader.stats().ring_misses) == (3, 3)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_child_has_workers_and_a_ring_of_its_own(persistent: bool) -> None:
    loader = pyparallel.DataLoader(
        Numbers(6),
        num_workers=1,
        persistent_workers=persistent,
        multiprocessing_context="fork",  # a child cannot use its parent's fork server
    )
    its = iter(loader)
    first = next(its)
    child = os.fork()
    if not child:
        code = 1
        try:
            inherited, its = its, None
            del inherited
            again = [batch.tolist() for batch in loader]
            code = 40 + (again == [[[i] * 3] for i in range(6)])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 41
    rest = [batch.tolist() for batch in its]
    assert rest == [[[i] * 3] for i in range(1, 6)]
    assert holders(loader).count(ring_module.PARENT) == 1
    assert first.tolist() == [[0] * 3]


def test_a_child_that_drops_its_copies_frees_nothing() -> None:
    loader = pyparallel.DataLoader(Numbers(4), num_workers=1)
    batches = list(loader)
    child = os.fork()
    if not child:
        try:
            del batches
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert holders(loader).count(ring_module.PARENT) == 4
    assert same([batch[0, 0].item() for batch in batches], [0.0, 1.0, 2.0, 3.0])


def raising(made: torch.Tensor) -> Any:
    raise ValueError(f"{made.shape}")


def raising_from(made: torch.Tensor) -> Any:
    try:
        raising(made)
    except ValueError as error:
        raise RuntimeError("of 1, 50, 1000") from error


def not_pickled(made: torch.Tensor) -> Any:
    return [made, lambda: made]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("fail", [raising, raising_from, not_pickled])
def test_an_error_after_an_allocation_frees_the_slab(fail: Any) -> None:
    def failing(batch: list[torch.Tensor]) -> Any:
        made = pyparallel.collate(batch)  # in a slab
        return fail(made) if batch[0][0, 0] < 3 else made

    options: Any = {"num_workers": 1, "collate_fn": failing, "ring_slabs": 1}
    loader = pyparallel.DataLoader(Numbers(4, (50, 1000)), **options)
    batches = iter(loader)
    for _ in range(3):
        with pytest.raises(Exception, match=r"1, 50, 1000|pickle"):
            next(batches)
    assert next(batches).unique().tolist() == [3]
    assert (loader.stats().ring_hits, loader.stats().ring_misses) == (1, 0)


def test_large_batches_of_every_collate_function_use_the_ring() -> None:
    """A reference to a batch in a frame of the worker would move it out, silently."""
    for collate_fn in (None, pyparallel.collate, pyparallel.Collate(), list):
        options: Any = {"num_workers": 1, "collate_fn": collate_fn}
        loader = pyparallel.DataLoader(Numbers(8, (100, 500)), 2, **options)
        assert len(list(loader)) == 4
        assert (loader.stats().ring_hits, loader.stats().ring_misses) == (4, 0)
