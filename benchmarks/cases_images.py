"""Cases of one field: ragged or equal tensors become one tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from pyparallel import DataContainer, ImagePreprocessor, collate, pad_stack

from . import data, limits, peers
from ._harness import Case, Contender, ours
from .peers import MEAN, STD

_F32, _U8 = torch.float32, torch.uint8
#: The least size that all sizes of a normalised batch are multiples of.
DIVISOR = 32


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases; ``quick`` shrinks them."""
    size = (50, 83) if quick else (800, 1333)
    photos = partial(data.photos, *size)
    note = f"{len(photos())} real photos, resized to {size[1]}x{size[0]}"
    if photos():
        yield Case(
            "photos float32",
            note,
            lambda: _stacks([photo.float() for photo in photos()]),
            main=True,
        )
        yield Case("photos uint8", note, lambda: _stacks(photos()), main=True)
    glyphs = data.glyphs(32 if quick else 1024)
    if glyphs:
        letters = f"{len(glyphs)} letters of DejaVu Sans, cut out, uint8"
        yield Case("glyph crops", letters, partial(_stacks, glyphs))
    yield from _synthetic(quick)
    coco = f"16 images, uint8, sizes drawn from COCO's, resized to {size[1]}x{size[0]}"
    drawn = partial(data.random_tensors, data.coco_shapes(16, *size), _U8)
    yield Case("normalise and pad", f"synthetic: {coco}", lambda: _normalised(drawn()))
    if photos():
        yield Case("normalise and pad photos", note, lambda: _normalised(photos()))


def _synthetic(quick: bool) -> Iterator[Case]:
    scale = 16 if quick else 1
    draw = "16 images, sizes drawn from COCO's, resized to"
    detection = data.coco_shapes(16, 800 // scale, 1333 // scale)
    small = data.coco_shapes(16, 320 // scale, 640 // scale)
    near = near_224(4 if quick else 32)
    rng = random.Random(1)
    sides = partial(rng.randint, 12, 16)
    crops = [(3, sides(), sides()) for _ in range(1024 // scale)]
    one = [(3, 4000 // scale, 6000 // scale)]
    draws: dict[str, tuple[str, Sequence[data.Shape], torch.dtype]] = {
        "detection float32": (f"{draw} 1333x800", detection, _F32),
        "detection uint8": (f"{draw} 1333x800", detection, _U8),
        "small uint8": (f"{draw} 640x320", small, _U8),
        "small float32": (f"{draw} 640x320", small, _F32),
        "32 images near 224": (f"{len(near)}x3x(200 to 256)^2, float32", near, _F32),
        "equal shapes": (
            f"{len(near)}x3x224x224, float32",
            [(3, 224, 224)] * len(near),
            _F32,
        ),
        "one big": (f"1 image, {one[0][2]}x{one[0][1]}, uint8", one, _U8),
        "many small": (f"{len(crops)}x3x(12 to 16)^2, float32", crops, _F32),
        "tiny": (
            "8x(3, 4 to 6, 5 to 8), float32",
            [(3, 4 + i % 3, 5 + i % 4) for i in range(8)],
            _F32,
        ),
        "ragged labels": (
            "64x(1, 1 to 64), int64, pad_dims=1",
            [(1, rng.randint(1, 64)) for _ in range(64)],
            torch.int64,
        ),
    }
    main = {"detection float32", "detection uint8", "equal shapes", "many small"}
    for title, (note, shapes, dtype) in draws.items():
        stacked = partial(_drawn, shapes, dtype, 1 if title == "ragged labels" else 2)
        yield Case(title, f"synthetic: {note}", stacked, main=title in main)
    for title, dtype in (
        ("detection float32", torch.bfloat16),
        ("detection float32", torch.float16),
        ("many small", torch.bfloat16),
    ):
        note, shapes, source = draws[title]
        name = f"{title} to {str(dtype).removeprefix('torch.')}"
        yield Case(name, f"synthetic: {note}", partial(_casts, shapes, source, dtype))


def near_224(num: int) -> list[data.Shape]:
    """Return ragged shapes that are common in classification."""
    rng = random.Random(1)
    return [(3, rng.randint(200, 256), rng.randint(200, 256)) for _ in range(num)]


def _target(samples: Sequence[Tensor]) -> list[int]:
    return [max(sizes) for sizes in zip(*(s.shape for s in samples), strict=True)]


def _drawn(
    shapes: Sequence[data.Shape], dtype: torch.dtype, pad_dims: int
) -> list[Contender]:
    return _stacks(data.random_tensors(shapes, dtype), pad_dims)


def _stacks(samples: list[Tensor], pad_dims: int = 2) -> list[Contender]:
    """Compare ways to make one padded tensor of ragged ones."""
    target = _target(samples)
    equal = len({sample.shape for sample in samples}) == 1
    padded = [peers.pad(sample, target, 0) for sample in samples]

    def of(name: str, function: Callable[..., Any] | None, *more: Any) -> Contender:
        call = partial(function, samples, *more) if function else None
        return Contender(name, call)

    found = [
        *collates(samples, pad_dims),
        of("new_full + copy_", peers.full_then_copy, target, 0),
        of("F.pad + stack", peers.pad_then_stack, target, 0),
    ]
    if pad_dims == 1:
        flat = [sample[0] for sample in samples]
        call = partial(pad_sequence, flat, True)
        found.append(Contender("pad_sequence", call, view=lambda x: x[:, None]))
    else:
        found.append(of("mmengine stack_batch", peers.stack_batch, 1, 0))
    if samples[0].is_floating_point():
        found.append(of("torch.nested, padded", peers.nested_then_padded, target, 0))
    if equal:
        found.append(of("torch default_collate", default_collate))
    # Without padding, torch.stack does all of the work; otherwise only a part.
    kind = "peer" if equal else "limit"
    stack = partial(torch.stack, padded)
    found.append(Contender("torch.stack, already padded", stack, kind))
    return [*found, *limits.copies(stack())]


def collates(samples: list[Tensor], pad_dims: int) -> list[Contender]:
    """Return ours and mmcv's, which take samples in DataContainers."""
    options: Any = {"stack": True, "pad_dims": pad_dims}
    batch = [DataContainer(sample, **options) for sample in samples]
    mmcv = None
    if peers.mmcv_collate is not None:
        theirs = [peers.MmcvContainer(sample, **options) for sample in samples]
        mmcv = partial(peers.first_chunk, peers.mmcv_collate, theirs)
    return [
        *ours(partial(peers.first_chunk, collate, batch)),
        Contender("mmcv 1.x collate", mmcv),
    ]


def _casts(
    shapes: Sequence[data.Shape], source: torch.dtype, dtype: torch.dtype
) -> list[Contender]:
    """Compare ways to make one padded tensor of another dtype."""
    samples = data.random_tensors(shapes, source)
    target = _target(samples)

    def cast() -> list[Tensor]:
        return [sample.to(dtype) for sample in samples]

    return [
        *ours(lambda: pad_stack(samples, pad_dims=2, dtype=dtype)),
        Contender("to(dtype), pad_stack", lambda: pad_stack(cast(), pad_dims=2)),
        Contender(
            "pad_stack, to(dtype)", lambda: pad_stack(samples, pad_dims=2).to(dtype)
        ),
        Contender(
            "to(dtype), F.pad + stack", lambda: peers.pad_then_stack(cast(), target, 0)
        ),
        Contender(
            "pad_stack, no cast", lambda: pad_stack(samples, pad_dims=2), "limit"
        ),
    ]


# -------------------------------------------------------------------- normalised images
def _normalised(images: Sequence[Tensor]) -> list[Contender]:
    """Compare ways to turn ragged uint8 images, BGR, into a batch of floats, RGB."""
    images = list(images)
    preprocess = ImagePreprocessor(MEAN, STD, size_divisor=DIVISOR, swap_channels=True)
    sides = [-(-side // DIVISOR) * DIVISOR for side in _target(images)[1:]]
    target = [3, *sides]
    mmengine = peers.mmengine_preprocessor(DIVISOR, swap=True)
    theirs = mmengine and partial(mmengine, images)
    each = partial(peers.normalise_each, images, target, swap=True)
    return [
        *ours(partial(preprocess, images)),
        Contender("mmengine ImgDataPreprocessor", theirs),
        Contender("normalise each, pad, stack", each),
        Contender("pad as bytes, normalise in place", partial(_whole, images, target)),
        *limits.copies(preprocess(images)),
    ]


def _whole(images: Sequence[Tensor], target: list[int]) -> Tensor:
    """Batch bytes first, and normalise them together, as timm's loader does.

    This also normalises the padding, so the padding is written again.
    """
    mean, std = peers.numbers("cpu")
    batch = peers.full_then_copy(images, target, 0)
    batch = batch.flip(1).float().sub_(mean).div_(std)
    for row, image in zip(batch, images, strict=True):
        row[:, image.shape[1] :] = 0
        row[:, :, image.shape[2] :] = 0
    return batch
