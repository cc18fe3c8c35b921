"""Every kind of batch arrives as with torch's loader, with any collate function."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch
from loader_sets import (
    Making,
    Scene,
    Tagged,
    as_list,
    messages,
    num_fds,
    only,
    same,
)
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader as TorchLoader

import pyparallel
from pyparallel import DataContainer, Ragged
from pyparallel.core.errors import _warned

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


def twice(tensor: torch.Tensor) -> Any:
    return {"a": tensor, "b": [tensor], "rows": (tensor[0], tensor[1:])}


def leaf(i: int) -> torch.Tensor:
    return torch.full((2,), float(i), requires_grad=True)


def sparse(i: int) -> torch.Tensor:
    return torch.eye(3).mul(i).to_sparse()


def base(i: int) -> torch.Tensor:
    return torch.arange(120.0).add(i).view(2, 3, 4, 5)


#: What sample ``i`` is, for every kind whose tensors all have a place in the ring.
OWN: dict[str, Callable[[int], Any]] = {
    "bare": lambda i: torch.tensor([i]),
    "dict": lambda i: {"x": torch.ones(i), "y": {"z": [torch.tensor(i)]}},
    "default": lambda i: defaultdict(list, {i: [torch.ones(2)]}),
    "namedtuple": lambda i: samples.Pair(torch.ones(2), None),
    "frozen": lambda i: samples.Frozen(i, torch.ones(3, 3)).right,
    "object": Scene,
    "container": lambda i: DataContainer([[torch.ones(2)], [torch.ones(i)]], True, 7),
    "ragged": lambda i: Ragged.from_tensors([torch.ones(i + 1, 2), torch.ones(3, 2)]),
    "packed": lambda i: pack_sequence([torch.ones(3), torch.ones(2)]),
    "empty": lambda i: [torch.empty(0), torch.empty(3, 0, 2), torch.empty(0).bool()],
    "large": lambda i: torch.full((300_000,), i),
    "permuted": lambda i: [base(i).permute(2, 0, 3, 1), base(i).transpose(1, 2)],
    "channels_last": lambda i: base(i).contiguous(memory_format=torch.channels_last),
    "twice": lambda i: twice(torch.full((3, 4), i)),
    "strided": lambda i: [base(i)[..., ::2], base(i)[:, 1], base(i)[..., 1:3]],
    "with python": lambda i: [torch.ones(2), None, "text", b"bytes", 1.5, {1, 2}, ...],
    "dtypes": lambda i: [
        samples.random_tensor((i + 1, 3), dtype, seed=i) for dtype in samples.DTYPES
    ],
    "conj": lambda i: torch.full((3,), 1 + 2j).conj(),
    "negative": lambda i: torch.full((3,), 1 + 2j).conj().imag,
    "large array": lambda i: np.full((50, 60), i, np.float32),
    "arrays": lambda i: [np.full(3, i), np.arange(6000.0)[::2], np.zeros((0, 3))],
    "Fortran": lambda i: np.asfortranarray(np.arange(5000.0).reshape(50, 100) + i),
    "scalars": lambda i: [np.float32(i), np.int64(i), np.array(i)],
    "text": lambda i: [np.array(["a", "bc"]), np.array([b"d"])],
    "leaf": lambda i: [leaf(i), torch.ones(2)],
    "parameter": lambda i: {"p": torch.nn.Parameter(torch.ones(i + 1)), "t": leaf(i)},
    "expanded": lambda i: torch.ones(1, 3).expand(4, 3),
    "subclass": lambda i: torch.ones(3).as_subclass(Tagged),
    "storage": lambda i: torch.arange(5.0).untyped_storage(),
}
#: Batches without any tensor.
NONE: dict[str, Callable[[int], Any]] = {
    "nothing": lambda i: None,
    "string": lambda i: "text" * 10_000,
    "objects": lambda i: np.array([1, "a", None, [i]], dtype=object),
    "types": lambda i: [torch.float32, torch.Size([i]), torch.device("cpu"), slice(1)],
}
#: What crosses as torch sends it.
FOREIGN: dict[str, Callable[[int], Any]] = {
    "sparse": lambda i: [sparse(i), torch.ones(3)],
    "csr": lambda i: torch.eye(3).to_sparse_csr(),
}
ALL = OWN | NONE | FOREIGN


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
    assert messages(caught) == [
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
