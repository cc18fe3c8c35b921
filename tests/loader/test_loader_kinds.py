"""Every kind of batch arrives as with torch's loader, with any collate function."""

from __future__ import annotations

import itertools
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate_tensor_fn

import pyparallel
from pyparallel.core.errors import _warned
from tests.support.batch.batch_kinds import ALL, FOREIGN, OWN, leaf, sparse
from tests.support.loader.loader_sets import (
    Making,
    Tagged,
    as_list,
    messages,
    num_fds,
    only,
    same,
)

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning"),
    pytest.mark.filterwarnings("ignore:.PP205. DataLoader. some tensors of a batch"),
    pytest.mark.timeout(120),
]


def arrived(cls: Any, name: str) -> Any:
    """Return the batches of one kind, two, and the loader that gave them."""
    loader = cls(Making(ALL[name], 2), num_workers=1, collate_fn=only)
    return list(loader), loader


def storages(batches: list[Any]) -> list[bytes]:
    return [bytes(storage.tolist()) for storage in batches]


@pytest.mark.parametrize("name", ALL)
def test_a_batch_arrives_as_with_torch(name: str) -> None:
    ours, loader = arrived(pyparallel.DataLoader, name)
    made = [ALL[name](i) for i in range(2)]
    if name == "storage":
        assert storages(ours) == storages(made)
        assert loader.stats().ring_hits == 2
        return
    assert same(ours, made)
    if name in ("permuted", "channels_last"):
        strides = [[t.stride() for t in tree_leaves(batch)] for batch in (ours, made)]
        assert strides[0] == strides[1]
    if name not in ("conj", "negative"):  # torch loses these flags
        assert same(ours, arrived(TorchLoader, name)[0])
    stats = loader.stats()
    missed = 2 if name in FOREIGN else 0
    has_bytes = name in OWN and name not in ("empty", "arrays", "scalars", "text")
    if name != "arrays":
        assert (stats.ring_hits, stats.ring_misses) == (2 * has_bytes, missed)


def many(i: int) -> dict[str, torch.Tensor]:
    return {str(n): torch.full((100, 100), float(i)) for n in range(40)}


def subclasses(i: int) -> list[torch.Tensor]:
    return [torch.ones(n).as_subclass(Tagged) for n in range(1, 40)]


COLLATE: dict[str, Any] = {
    "default": (many, torch.utils.data.default_collate),
    "collate": (many, pyparallel.collate),
    "rules": (many, pyparallel.Collate()),
    "a function": (many, as_list),
    "subclasses": (subclasses, torch.utils.data.default_collate),
    "subclasses in a list": (subclasses, as_list),
    "gradients": (lambda i: [leaf(i) for _ in range(40)], as_list),
}


@pytest.mark.usefixtures("in_ring")
@pytest.mark.filterwarnings("ignore:.PP201")
@pytest.mark.parametrize("slabs", [0, 1])
@pytest.mark.parametrize("name", COLLATE)
def test_a_batch_outside_the_ring_needs_one_descriptor_and_no_file(
    name: str, slabs: int
) -> None:
    make, collate_fn = COLLATE[name]

    def limit(worker: int) -> None:
        # Room for the queue's own, but not for 40 tensors.
        files = num_fds() + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    options: Any = {"collate_fn": collate_fn, "worker_init_fn": limit}
    data = Making(make, 40)
    loader = pyparallel.DataLoader(data, 2, num_workers=1, ring_slabs=slabs, **options)
    counts, kept = [], []
    for batch in loader:
        kept = [*kept[-1:], batch]
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        assert "/torch_" not in maps  # a name in /dev/shm, also of deleted files
        counts.append(num_fds())
    assert loader.stats().ring_misses >= 5
    assert max(counts[5:]) <= max(counts[:5]) + 1
    expected = collate_fn([make(i) for i in (38, 39)])
    assert same(kept[-1], expected)


class Meta(torch.Tensor):
    """Results have the source of their first argument, as in MONAI and fastai."""

    source = ""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        first = args[0][0] if args and isinstance(args[0], list | tuple) else args[0]
        if isinstance(found, cls):
            found.source = getattr(first, "source", "")
        return found


class OwnReduce(Meta):
    """Pickles its storage by itself, as in fastai."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = self.untyped_storage(), self.dtype, self.shape, self.source
        return rebuild, parts


def rebuild(storage: Any, dtype: Any, shape: Any, source: str) -> OwnReduce:
    flat: Any = torch.empty(0, dtype=dtype)
    made = flat.set_(storage).view(shape).as_subclass(OwnReduce)
    made.source = source
    return made


class Unwrapped(torch.Tensor):
    """Results of operators are plain, as in tv_tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Inner(torch.Tensor):
    """Has no memory: operators run on the tensor in it, as in PyG's Index."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        shape, dtype = held.shape, held.dtype
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inside = tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*inside[0], **inside[1]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Inner, (self.held,)


def of_class(cls: Any) -> Any:
    def make(i: int) -> Any:
        plain = torch.full((100, 100), float(i))
        if cls is Inner:
            return Inner(plain)
        made: Any = plain.as_subclass(cls)
        if cls is not torch.Tensor:
            made.source = f"file{i}"
        return made

    return make


def by_name(samples: list[Any]) -> Any:
    """Call torch's function by its name, as MONAI does, and say where the result is."""
    found = collate_tensor_fn(samples)
    plain = torch.Tensor.as_subclass(found, torch.Tensor)
    return {"x": found, "shared": torch.zeros(1) + plain.is_shared()}


WITH_MEMORY = [torch.Tensor, Meta, OwnReduce, Unwrapped]
CLASSES = [
    *itertools.product([*WITH_MEMORY, Inner], [default_collate, as_list]),
    # torch's function cannot share a tensor without memory.
    *itertools.product(WITH_MEMORY, [by_name]),
]


@pytest.mark.parametrize(("cls", "collate_fn"), CLASSES)
def test_every_class_of_tensors_uses_the_ring(cls: Any, collate_fn: Any) -> None:
    data = Making(of_class(cls), 8)
    # torch's workers lose the class of a tensor without memory.
    theirs = list(TorchLoader(data, 2, collate_fn=collate_fn))
    loader = pyparallel.DataLoader(data, 2, num_workers=1, collate_fn=collate_fn)
    ours = list(loader)
    assert (loader.stats().ring_hits, loader.stats().ring_misses) == (4, 0)
    if collate_fn is by_name:
        # The first batch shows that the function is called.
        assert [bool(batch.pop("shared")) for batch in ours] == [1, 0, 0, 0]
        assert not any(batch.pop("shared") for batch in theirs)
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert type(one) is type(other) and vars(one).keys() == vars(other).keys()
        assert getattr(one, "source", "") == getattr(other, "source", "")
        parts = getattr(one, "held", one), getattr(other, "held", other)
        assert same(*(torch.Tensor.as_subclass(each, torch.Tensor) for each in parts))


class Kept:
    """A collate function that also writes into shared memory of its own."""

    def __init__(self) -> None:
        self.own = torch.zeros(2, 100, 100).share_memory_()

    def __call__(self, samples: list[Any]) -> Any:
        torch.stack(samples, out=self.own)
        return collate_tensor_fn(samples)


def test_shared_memory_of_a_collate_function_stays_its_own() -> None:
    collate_fn = Kept()
    data = Making(of_class(torch.Tensor), 8)
    for batch in pyparallel.DataLoader(data, 2, num_workers=1, collate_fn=collate_fn):
        last = batch
    assert same(collate_fn.own, last)


@pytest.mark.parametrize("numel", [3, 5000])
def test_arrays_can_be_written_though_the_worker_could_not(numel: int) -> None:
    array = np.arange(numel, dtype=np.float32)
    array.flags.writeable = False
    dataset = Making(lambda i: array, 2)
    for batch in pyparallel.DataLoader(dataset, num_workers=1, collate_fn=only):
        assert same(batch, array)
        batch += 1
        assert torch.from_numpy(batch)[2] == 3


def test_a_tensor_with_a_graph_is_refused() -> None:
    loader = pyparallel.DataLoader(
        Making(lambda i: leaf(i) * 2, 1), num_workers=1, collate_fn=only
    )
    with pytest.raises(RuntimeError) as caught:
        next(iter(loader))
    assert (
        "DataLoader: a tensor of a batch must be detached, because an autograd graph "
        "cannot be sent to another process, but one of shape (2,) has a graph. Call "
        "detach() in the dataset."
    ) in str(caught.value)


@pytest.mark.filterwarnings("default:.PP205. DataLoader. some tensors of a batch")
def test_foreign_tensors_are_counted_and_explained_once() -> None:
    _warned.clear()
    loader = pyparallel.DataLoader(Making(sparse, 3), num_workers=1, collate_fn=only)
    with pytest.warns(pyparallel.LoaderWarning) as caught:
        assert all(batch.is_sparse for batch in loader)
    ours = [each for each in caught if each.category is pyparallel.LoaderWarning]
    assert messages(ours) == [  # torch warns, too, once in a process
        "[PP205] DataLoader: some tensors of a batch are sparse, nested or on a "
        "device, so torch sends them outside the ring, which is slower. Convert them "
        "in collate_fn."
    ]
    assert (loader.stats().ring_hits, loader.stats().ring_misses) == (0, 3)


class Timed(torch.utils.data.Dataset[torch.Tensor]):
    """4 samples that sleep for 20 ms."""

    def __getitem__(self, index: int) -> torch.Tensor:
        # A loader in a dataset has samples and times of its own.
        (inner,) = pyparallel.DataLoader([index])
        time.sleep(0.02)
        return inner

    def __len__(self) -> int:
        return 4


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.05)
    return torch.stack(samples)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_time_of_the_dataset_is_counted_with_and_without_workers(
    num_workers: int,
) -> None:
    options: Any = {"num_workers": num_workers, "collate_fn": slow_collate}
    loader = pyparallel.DataLoader(Timed(), 2, **options)
    begun = time.perf_counter()
    assert len(list(loader)) == 2
    seconds = time.perf_counter() - begun
    stats = loader.stats()
    # No sleep is any shorter, and no dataset of four samples computes for long.
    assert 0.08 <= stats.fetch_seconds <= seconds - 0.1
    assert 0.1 <= stats.collate_seconds <= seconds - 0.08
    assert 0 < stats.fetch_cpu_seconds < 0.04
    assert stats.collate_cpu_seconds < 0.04
    assert (stats.pack_seconds > 0) is (stats.pack_cpu_seconds > 0) is (num_workers > 0)
    assert stats.num_workers == num_workers and stats.cores >= 1
