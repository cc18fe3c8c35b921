"""Every kind of batch that a worker may send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence

from pyparallel import DataContainer, Ragged
from tests.support.batch import samples
from tests.support.loader.loader_sets import Scene, Tagged


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
    "frozen parameter": lambda i: torch.nn.Parameter(torch.ones(3, i + 1), False),
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
