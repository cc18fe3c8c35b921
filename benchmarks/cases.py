"""What is measured: batches of samples, and what turns them into one batch.

Sizes are synthetic: drawn from sizes that are frequent among COCO images, with rough
weights, and scaled as detection configurations do. The values are random.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from pyparallel import DataContainer, _backend, collate
from pyparallel._backend import _reference

from ._harness import Contender

try:
    from mmcv.parallel import DataContainer as MmcvContainer
    from mmcv.parallel import collate as mmcv_collate
except ImportError:
    mmcv_collate = None
try:
    from mmengine.model.utils import stack_batch
except ImportError:
    stack_batch = None

#: (height, width) and how many of 100 images have it, roughly.
_COCO = [
    ((480, 640), 42),
    ((640, 480), 16),
    ((427, 640), 14),
    ((426, 640), 10),
    ((640, 427), 6),
    ((500, 375), 4),
    ((375, 500), 4),
    ((640, 640), 4),
]


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: for the table.
        note: what the data are, synthetic or not.
        contenders: makes the data and the functions.
    """

    title: str
    note: str
    contenders: Callable[[], list[Contender]]


def cases(quick: bool) -> list[Case]:
    """Return all cases; with ``quick``, tiny versions that only prove that they run."""
    scale = 16 if quick else 1
    num_batches = 16 if quick else 256
    draw = "sizes drawn from COCO's, resized to"
    detection = _coco(16, 800 // scale, 1333 // scale)
    small = _coco(16, 320 // scale, 640 // scale)
    rng = random.Random(1)
    near = [(3, rng.randint(200, 256), rng.randint(200, 256)) for _ in range(32)]
    tiny = [(3, 4 + i % 3, 5 + i % 4) for i in range(8)]
    lengths = [(1, rng.randint(1, 64)) for _ in range(64)]
    f32, u8 = torch.float32, torch.uint8
    return [
        _images("detection float32", f"16 images, {draw} 1333x800", detection, f32),
        _images("detection uint8", f"16 images, {draw} 1333x800", detection, u8),
        _images("small uint8", f"16 images, {draw} 640x320", small, u8),
        _images("small float32", f"16 images, {draw} 640x320", small, f32),
        _images("32 images near 224", "32x3x(200 to 256)^2, float32", near, f32),
        _images("equal shapes", "32x3x224x224, float32", [(3, 224, 224)] * 32, f32),
        _images("tiny", "8x(3, 4 to 6, 5 to 8), float32", tiny, f32),
        Case(
            "ragged labels",
            "64x(1, 1 to 64), int64, pad_dims=1",
            partial(_stacks, lengths, torch.int64, 1, 0),
        ),
        Case(
            "detection dict",
            "16 samples: img 3x(200 to 256)^2, a mask padded with 255, boxes, labels, "
            "metadata",
            partial(_dicts, near[:16]),
        ),
        Case(
            "many small fields",
            f"{num_batches} samples of 10 float32 tensors of 8, no containers",
            partial(_fields, num_batches, 10),
        ),
    ]


def _images(
    title: str, note: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> Case:
    return Case(title, f"synthetic: {note}", partial(_stacks, shapes, dtype, 2, 0))


def _coco(num: int, short: int, long: int) -> list[tuple[int, int, int]]:
    sizes, weights = zip(*_COCO, strict=True)
    drawn = random.Random(0).choices(sizes, weights, k=num)
    result = []
    for height, width in drawn:
        factor = min(short / min(height, width), long / max(height, width))
        result.append((3, round(height * factor), round(width * factor)))
    return result


def _random(shape: Sequence[int], dtype: torch.dtype, generator: Any) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype, generator=generator)
    return torch.randint(1, 100, shape, dtype=dtype, generator=generator)


#: What `collate` looks at in `_backend`, for each backend; `ours` replaces it there.
_SWAPPED = ("name", "pad_copy", "stack_equal")
AS_LOADED = {each: getattr(_backend, each) for each in _SWAPPED}
IN_PYTHON = {each: getattr(_reference, each) for each in _SWAPPED[1:]}


def use_backend(functions: Mapping[str, Any]) -> None:
    """Make `collate` use these functions; `AS_LOADED` is what was there at first."""
    for name, function in functions.items():
        setattr(_backend, name, function)


def ours(call: Callable[[], Any]) -> list[Contender]:
    """Return ``call`` with the compiled and with the pure Python backend."""

    def with_backend(functions: Mapping[str, Any]) -> Callable[[], Any]:
        def run() -> Any:
            use_backend(functions)
            return call()

        return run

    native = with_backend(AS_LOADED) if AS_LOADED["name"] == "native" else None
    python = with_backend({"name": "python", **IN_PYTHON})
    return [
        Contender("ours, native", native, "ours"),
        Contender("ours, Python", python, "ours"),
    ]


def _stacks(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, pad_dims: int, value: int
) -> list[Contender]:
    """Compare ways to make one padded tensor of ragged ones."""
    generator = torch.Generator().manual_seed(0)
    samples = [_random(shape, dtype, generator) for shape in shapes]
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = [pad(sample, target, value) for sample in samples]
    out = torch.stack(padded)
    options: Any = {"stack": True, "pad_dims": pad_dims, "padding_value": value}
    batch = [DataContainer(sample, **options) for sample in samples]
    mmcv = mmengine = None
    if mmcv_collate is not None:
        theirs = [MmcvContainer(sample, **options) for sample in samples]
        mmcv = partial(first_chunk, mmcv_collate, theirs)
    if stack_batch is not None and pad_dims == 2:
        mmengine = partial(stack_batch, samples, 1, value)
    contenders = [
        *ours(partial(first_chunk, collate, batch)),
        Contender("mmcv 1.x collate", mmcv),
        Contender("new_full + copy_", lambda: full_then_copy(samples, target, value)),
        Contender("F.pad + stack", lambda: pad_then_stack(samples, target, value)),
    ]
    if pad_dims == 2:
        contenders.append(Contender("mmengine stack_batch", mmengine))
    if pad_dims == 1:
        flat = [sample[0] for sample in samples]
        contenders.append(
            Contender("pad_sequence", lambda: pad_sequence(flat, True, value)[:, None])
        )
    warm = torch.zeros_like(out)

    def memcpy() -> None:
        ctypes.memmove(warm.data_ptr(), out.data_ptr(), out.nbytes)

    # Without padding to do, torch.stack does the whole work; else it does a part.
    kind = "limit" if len(set(shapes)) > 1 else "peer"
    return [
        *contenders,
        Contender("torch.stack, already padded", lambda: torch.stack(padded), kind),
        Contender("clone of the output", out.clone, "limit"),
        Contender("memcpy into warm memory", memcpy, "limit"),
    ]


def first_chunk(collate: Callable[..., Any], batch: Sequence[Any]) -> Tensor:
    """Return the one tensor that a collate function makes of the whole batch."""
    result: Tensor = collate(batch, len(batch)).data[0]
    return result


def pad(sample: Tensor, target: Sequence[int], value: float) -> Tensor:
    """Return a sample padded at the end of its dimensions."""
    margins: list[int] = []
    for have, size in zip(reversed(sample.shape), reversed(target), strict=True):
        margins += [0, size - have]
    return F.pad(sample, margins, value=value)


def pad_then_stack(
    samples: Sequence[Tensor], target: Sequence[int], value: float
) -> Tensor:
    """Pad each sample, then stack: two passes over everything."""
    return torch.stack([pad(sample, target, value) for sample in samples])


def full_then_copy(
    samples: Sequence[Tensor], target: Sequence[int], value: float
) -> Tensor:
    """Fill the batch, then copy the samples in, as detectron2's ImageList does."""
    out = samples[0].new_full((len(samples), *target), value)
    for sample, slot in zip(samples, out, strict=True):
        slot[tuple(map(slice, sample.shape))].copy_(sample)
    return out


def _dicts(shapes: Sequence[tuple[int, int, int]]) -> list[Contender]:
    """Compare ways to batch detection samples of five fields."""
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    raw: list[dict[str, Any]] = []
    for i, (channels, height, width) in enumerate(shapes):
        num = rng.randint(1, 20)
        raw.append(
            {
                "img": torch.rand(channels, height, width, generator=generator),
                "mask": _random((1, height, width), torch.uint8, generator),
                "gt_bboxes": torch.rand(num, 4, generator=generator),
                "gt_labels": _random((num,), torch.int64, generator),
                "img_metas": {"index": i, "shape": (height, width), "scale": 1.0},
            }
        )
    options: dict[str, Any] = {
        "img": {"stack": True},
        "mask": {"stack": True, "padding_value": 255},
        "gt_bboxes": {},
        "gt_labels": {},
        "img_metas": {"cpu_only": True},
    }

    def boxed(container: Any) -> list[dict[str, Any]]:
        return [
            {key: container(sample[key], **options[key]) for key in options}
            for sample in raw
        ]

    def by_hand() -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for key in options:
            batch[key] = values = [sample[key] for sample in raw]
            if options[key].get("stack"):
                sizes = zip(*(value.shape for value in values), strict=True)
                fill = options[key].get("padding_value", 0)
                batch[key] = pad_then_stack(values, list(map(max, sizes)), fill)
        return {key: DataContainer([value]) for key, value in batch.items()}

    num, batch, mmcv = len(raw), boxed(DataContainer), None
    if mmcv_collate is not None:
        theirs = boxed(MmcvContainer)
        mmcv = partial(mmcv_collate, theirs, num)
    return [
        *ours(lambda: collate(batch, num)),
        Contender("mmcv 1.x collate", mmcv),
        Contender("by hand: F.pad + stack, lists", by_hand),
    ]


def _fields(num: int, num_fields: int) -> list[Contender]:
    """Compare ways to batch samples that are dicts of small equal tensors."""
    generator = torch.Generator().manual_seed(0)
    names = [f"field{i}" for i in range(num_fields)]
    batch = [
        {name: torch.rand(8, generator=generator) for name in names} for _ in range(num)
    ]

    def by_hand() -> dict[str, Tensor]:
        return {name: torch.stack([sample[name] for sample in batch]) for name in names}

    mmcv = None if mmcv_collate is None else partial(mmcv_collate, batch, num)
    return [
        *ours(lambda: collate(batch, num)),
        Contender("mmcv 1.x collate", mmcv),
        Contender("torch default_collate", lambda: default_collate(batch)),
        Contender("by hand: torch.stack", by_hand),
    ]
