"""Cases of calls on two threads: real work, and no work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pyparallel import parallel_apply

from . import data, torch_on_host
from ._harness import Contender
from .loader.images import Goal

OURS = "ours"
LOOP = "a loop, 1 thread"
INSIDE = "a loop, 2 threads inside of torch"
POOL = "concurrent.futures, kept"
TORCH = "torch, new threads"
TWO = ["cpu", "cpu"]
#: The goal for work: the time of one thread relative to two threads.
SPEED_UP = Goal(LOOP, 1.7)
#: The goal for overhead: the time of torch relative to ours for empty functions.
OVERHEAD = Goal(TORCH, 5.0)


class Comparison(NamedTuple):
    """One comparison; ``kind`` is ``work`` or ``overhead``."""

    title: str
    note: str
    kind: str
    goal: Goal
    contenders: Callable[[], list[Contender]]


def cases(quick: bool) -> list[Comparison]:
    """Return all comparisons."""
    works = [
        ("numpy: sort", "8 arrays of 100,000 doubles", _numbers, np.sort),
        (
            "numpy: Fourier transform of large images",
            "8 images of 512 x 512 doubles",
            partial(_planes, 8, 512),
            _fourier,
        ),
        (
            "numpy: Fourier transform of small images",
            "64 images of 128 x 128 doubles",
            partial(_planes, 64, 128),
            _fourier,
        ),
        ("torch: blur", "8 photographs, 300x200 at most, 15 x 15 taps", _photos, _blur),
    ]
    return [
        *(
            Comparison(title, note, "work", SPEED_UP, _Work(make, function, quick))
            for title, note, make, function in works
        ),
        *(
            Comparison(
                f"{number} calls of nothing",
                f"{number} functions that return their input, one for each thread",
                "overhead",
                OVERHEAD,
                _Nothing(number),
            )
            for number in (2, 4, 8)
        ),
    ]


class _Work(NamedTuple):
    """One function over eight items: in a loop and on two threads."""

    make: Callable[[bool], list[Any]]
    function: Callable[[Any], Any]
    quick: bool

    def __call__(self) -> list[Contender]:
        items, function = self.make(self.quick), self.function
        pool = ThreadPoolExecutor(2)
        parts = items[: len(items) // 2], items[len(items) // 2 :]

        def loop(some: list[Any] = items) -> list[Any]:
            return [function(item) for item in some]

        def inside() -> list[Any]:
            torch.set_num_threads(2)
            try:
                return loop()
            finally:
                torch.set_num_threads(1)

        def threads() -> list[Any]:
            # Tuples are lists of arguments: each module gets its part.
            first, second = torch_on_host.parallel_apply(
                [loop, loop], [(part,) for part in parts], None, TWO
            )
            return [*first, *second]

        found = [
            Contender(OURS, lambda: parallel_apply(function, items, TWO), "ours"),
            Contender(LOOP, loop),
            Contender(POOL, lambda: list(pool.map(function, items))),
            Contender(TORCH, threads),
        ]
        if isinstance(items[0], Tensor):
            found.append(Contender(INSIDE, inside))
        return [each_view(contender) for contender in found]


def each_view(contender: Contender) -> Contender:
    """Convert arrays to tensors, which are compared bit by bit."""

    def view(results: list[Any]) -> list[Tensor]:
        return [torch.as_tensor(result) for result in results]

    return Contender(contender.name, contender.call, contender.kind, view)


class _Nothing(NamedTuple):
    """Empty functions, one on each thread, in torch's form of the call."""

    number: int

    def __call__(self) -> list[Contender]:
        functions, inputs = [_same] * self.number, list(range(self.number))
        devices = ["cpu"] * self.number
        pool = ThreadPoolExecutor(self.number)
        return [
            Contender(
                OURS, lambda: parallel_apply(functions, inputs, None, devices), "ours"
            ),
            Contender(
                TORCH,
                lambda: torch_on_host.parallel_apply(functions, inputs, None, devices),
            ),
            # It passes on no modes and starts no threads.
            Contender(POOL, lambda: list(pool.map(_same, inputs)), "limit"),
        ]


def _same(x: Any) -> Any:
    return x


def _numbers(quick: bool) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.random(1000 if quick else 100_000) for _ in range(8)]


def _planes(number: int, side: int, quick: bool) -> list[Any]:
    random = np.random.default_rng(0)
    side = 16 if quick else side
    return [random.random((side, side)) for _ in range(number)]


def _fourier(plane: Any) -> Any:
    return np.fft.ifft2(np.fft.fft2(plane)).real


def _photos(quick: bool) -> list[Any]:
    found = data.photos(200, 300)[:8]
    if len(found) < 8:  # these packages may be absent
        found = data.random_tensors([(3, 200, 300)] * 8, torch.uint8)
    return [photo[:, :32, :32] if quick else photo for photo in found]


def _blur(photo: Tensor) -> Tensor:
    x = torch.arange(-7.0, 8.0)
    taps = torch.exp(-(x**2) / 18.0)
    row = (taps / taps.sum()).view(1, 1, 1, -1)
    planes = photo.float().unsqueeze(1)
    across = F.conv2d(planes, row, padding=(0, 7))
    return F.conv2d(across, row.transpose(2, 3), padding=(7, 0)).squeeze(1)
