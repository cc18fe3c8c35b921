"""The self-test of a GPU: each kernel and each copy against torch, bit for bit.

Inputs are random and small, and cover the paths of `csrc/cuda`: rows that are shorter
and longer than a warp's part, unaligned slots, all widths of elements, and steps that
are still running when the next copy begins. torch computes the expected values, on the
host.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import pyparallel

from ..transfer import layout

#: The time limit of all checks of a GPU.
SECONDS = 18.0
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16),
    *(torch.int32, torch.float32, torch.int64, torch.float64, torch.complex128),
)
#: The widths of rows: those of boxes, of labels, of small and of large images.
_WIDTHS = (1, 7, 33, 300, 4097)
_TALLEST = 200  # of an image
#: Additions to a large tensor that keep a GPU busy for some milliseconds.
_STEP_LENGTH, _STEP_NUMEL = 100, 1 << 24


def test(device: torch.device) -> tuple[list[str], list[str]]:
    """Run all checks on a GPU.

    Returns:
        The names of the checks that passed, and the errors. The time limit is an error
        for each check that did not begin.
    """
    passed, errors = [], []
    deadline = time.monotonic() + SECONDS
    with torch.random.fork_rng(devices=[]), torch.cuda.device(device):
        torch.manual_seed(0)
        for check in _CHECKS:
            name = check.__name__.strip("_").replace("_", " ")
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{SECONDS:g} s must be enough, but are over.")
                check(device, random.Random(0))
                passed.append(name)
            except Exception as error:
                errors.append(f"{name}: {type(error).__name__}: {error}")
    return passed, errors


def _padding(device: torch.device, numbers: random.Random) -> None:
    for dtype in _DTYPES:
        for width in _WIDTHS:
            samples = [
                _random((numbers.randint(1, 5), numbers.randint(1, width)), dtype)
                for _ in range(3)
            ]
            found: Any = pyparallel.pad_stack(
                [each.to(device) for each in samples], padding_value=1, mask=True
            )
            ones = [torch.ones(each.shape, dtype=torch.bool) for each in samples]
            what = f"{dtype}, rows of up to {width}"
            _compare(found.data, _pad_stack(samples, 2, 1), what)
            _compare(found.mask, _pad_stack(ones, 2, 0), f"the mask of {what}")


def _images(device: torch.device, numbers: random.Random) -> None:
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    rows = [torch.tensor(each).view(3, 1, 1) for each in (mean, std)]
    for dtype in (torch.float32, torch.bfloat16):
        for memory in (torch.contiguous_format, torch.channels_last):
            images = [
                _random(
                    (3, *(numbers.randint(1, _TALLEST) for _ in range(2))),
                    torch.uint8,
                )
                for _ in range(4)
            ]
            expected = _pad_stack([(each - rows[0]) / rows[1] for each in images], 2, 0)
            preprocess = pyparallel.ImagePreprocessor(
                mean, std, dtype=dtype, memory_format=memory
            )
            found: Any = preprocess([each.to(device) for each in images])
            _compare(found, expected.to(dtype), f"{dtype}, {memory}")


def _packed_copies(device: torch.device, numbers: random.Random) -> None:
    leaves = [
        _random((numbers.randint(0, 90),), numbers.choice(_DTYPES)) for _ in range(300)
    ]
    for pinned in (False, True):
        batch = [each.pin_memory() for each in leaves] if pinned else leaves
        moved = pyparallel.scatter(batch, [device.index])[0]
        returned = pyparallel.to_host([each.clone() for each in moved])
        for i, (leaf, there, back) in enumerate(
            zip(leaves, moved, returned, strict=True)
        ):
            _compare(there, leaf, f"tensor {i} on the device")
            _compare(back, leaf, f"tensor {i} back on the host")


def _large_copies(device: torch.device, numbers: random.Random) -> None:
    leaf = _random((8 * layout.DIRECT_NBYTES + numbers.randint(1, 99),), torch.uint8)
    for source in (leaf, leaf.pin_memory()):
        moved = pyparallel.scatter({"a": source, "b": source[1:]}, [device.index])[0]
        _compare(moved["a"], leaf, f"pinned={source.is_pinned()}")
        _compare(moved["b"], leaf[1:], f"unaligned, pinned={source.is_pinned()}")


def _copies_during_steps(device: torch.device, numbers: random.Random) -> None:
    """Use each batch on a busy stream, while the next ones arrive in used memory."""
    batches = [
        {"a": _random((numbers.randint(1, 200_000),), torch.int32)} for _ in range(24)
    ]
    sums = []
    for batch in pyparallel.PreDataLoader(batches, device, queue_size=3):
        _run_step(device)
        sums.append(batch["a"].sum())
        del batch
    for i, (found, batch) in enumerate(zip(sums, batches, strict=True)):
        _compare(found, batch["a"].sum(), f"the sum of batch {i}")


def _pinned_rings(device: torch.device, numbers: random.Random) -> None:
    """Copy batches from recycled pinned memory."""
    samples = [_random((numbers.randint(1, 50_000),), torch.float32) for _ in range(64)]
    loader = pyparallel.DataLoader(
        samples,
        batch_size=4,
        num_workers=2,
        worker_method="thread",
        pin_memory=True,
        collate_fn=pyparallel.pad_stack,
    )
    for i, batch in enumerate(pyparallel.PreDataLoader(loader, device)):
        _run_step(device)
        _compare(batch, _pad_stack(samples[4 * i : 4 * i + 4], 1, 0), f"batch {i}")


_CHECKS: tuple[Callable[[torch.device, random.Random], None], ...] = (
    *(_padding, _images, _packed_copies, _large_copies, _copies_during_steps),
    _pinned_rings,
)


def _run_step(device: torch.device) -> None:
    """Queue work on the current stream."""
    large = torch.zeros(_STEP_NUMEL, device=device)
    for _ in range(_STEP_LENGTH):
        large.add_(1)


def _random(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return random values that the dtype holds, on the host."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, device="cpu")
    high = 2 if dtype == torch.bool else 127
    return torch.randint(0, high, tuple(shape), device="cpu").to(dtype)


def _pad_stack(samples: list[torch.Tensor], dims: int, value: int) -> torch.Tensor:
    """Return the samples in one tensor, with their last dimensions padded."""
    sides = [max(each.shape[i] for each in samples) for i in range(-dims, 0)]
    first = samples[0]
    result = first.new_full((len(samples), *first.shape[:-dims], *sides), value)
    for row, sample in zip(result, samples, strict=True):
        inside: Any = (..., *map(slice, sample.shape[-dims:]))
        row[inside] = sample
    return result


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    host = found.cpu()
    if host.dtype != expected.dtype or host.shape != expected.shape:
        raise ValueError(
            f"{what} must be {expected.dtype} {tuple(expected.shape)}, but is "
            f"{host.dtype} {tuple(host.shape)}."
        )
    if not torch.equal(host, expected):
        wrong = int((host != expected).sum())
        raise ValueError(
            f"{what} must be equal to torch's, but {wrong} of {host.numel()} values "
            "differ."
        )
