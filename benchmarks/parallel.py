"""What does `parallel_apply` gain on two threads?

Compares work that releases the GIL on one thread and on two, and the cost of a call
with torch's function, which starts new threads each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pyparallel import parallel_apply

from . import data, torch_on_host
from ._harness import Case, Contender, Effort, Goal
from .command import Question

LOOP = "a loop, 1 thread"
INSIDE = "a loop, 2 threads inside of torch"
POOL = "concurrent.futures, kept"
TORCH = "torch, new threads"
TWO = ["cpu", "cpu"]


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield work for two threads, then calls of nothing."""
    large, small = "8 images of 512 x 512 doubles", "64 images of 128 x 128 doubles"
    photos = "8 photographs, 300x200 at most, 15 x 15 taps"
    fourier = "numpy: Fourier transform of"
    for title, note, make, function in (
        ("numpy: sort", "8 arrays of 100,000 doubles", _numbers, np.sort),
        (f"{fourier} large images", large, partial(_planes, 8, 512), _fourier),
        (f"{fourier} small images", small, partial(_planes, 64, 128), _fourier),
        ("torch: blur", photos, _photos, _blur),
    ):
        work = partial(_work, partial(make, args.quick), function)
        yield Case(title, note, work, [Goal(LOOP, 1.7)])
    for number in (2, 4, 8):
        note = f"{number} functions that return their input, one for each thread"
        empty = partial(_nothing, number)
        yield Case(f"{number} calls of nothing", note, empty, [Goal(TORCH, 5.0)])


def _work(
    make: Callable[[], list[Any]], function: Callable[[Any], Any]
) -> list[Contender]:
    """Compare one function over eight items: in a loop and on two threads."""
    items = make()
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

    def view(results: list[Any]) -> list[Tensor]:
        return [torch.as_tensor(result) for result in results]

    ways: dict[str, Callable[[], list[Any]]] = {
        "ours": lambda: parallel_apply(function, items, TWO),
        LOOP: loop,
        POOL: lambda: list(pool.map(function, items)),
        TORCH: threads,
    }
    if isinstance(items[0], Tensor):
        ways[INSIDE] = inside
    return [
        Contender(name, call, "ours" if name == "ours" else "peer", view)
        for name, call in ways.items()
    ]


def _nothing(number: int) -> list[Contender]:
    """Compare empty functions, one on each thread, in torch's form of the call."""
    functions, inputs = [_same] * number, list(range(number))
    devices = ["cpu"] * number
    pool = ThreadPoolExecutor(number)
    given = functions, inputs, None, devices
    return [
        Contender("ours", partial(parallel_apply, *given), "ours"),
        Contender(TORCH, partial(torch_on_host.parallel_apply, *given)),
        # It passes on no modes and starts no threads.
        Contender(POOL, lambda: list(pool.map(_same, inputs)), "limit"),
    ]


def _same(x: Any) -> Any:
    return x


def _numbers(quick: bool) -> list[Any]:
    draw = np.random.default_rng(0)
    return [draw.random(1000 if quick else 100_000) for _ in range(8)]


def _planes(number: int, side: int, quick: bool) -> list[Any]:
    draw = np.random.default_rng(0)
    side = 16 if quick else side
    return [draw.random((side, side)) for _ in range(number)]


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


QUESTION = Question(
    "parallel",
    "Calls on two threads",
    cases,
    Effort(max_seconds=10.0),
    malloc=("default", "warm"),
    page={"shown": (LOOP, POOL, TORCH, INSIDE)},
)
