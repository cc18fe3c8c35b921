"""Cases of one field: batch ragged or equal tensors into one tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from pyparallel import DataContainer, collate, pad_stack

from . import data, limits, peers
from ._harness import Case, Contender
from .backends import AS_LOADED, ours, use_backend

_Samples = Callable[[], list[Tensor]]


def cases(quick: bool) -> list[Case]:
    """Return the cases; ``quick`` shrinks them."""
    return [*_real(quick), *_synthetic(quick)]


def _real(quick: bool) -> list[Case]:
    """Return tensors cut out of installed photographs and fonts."""
    size = (50, 83) if quick else (800, 1333)
    num_photos = len(data.photos(50, 83))
    note = f"{num_photos} real photos, resized to {size[1]}x{size[0]}"
    glyphs = partial(data.glyphs, 32 if quick else 1024)
    num_glyphs = len(glyphs())
    found = []
    if num_photos:
        found += [
            _case(
                "photos float32", note, lambda: _floats(data.photos(*size)), main=True
            ),
            _case("photos uint8", note, lambda: data.photos(*size), main=True),
        ]
    if num_glyphs:
        note = f"{num_glyphs} letters of DejaVu Sans, cut out, uint8"
        found.append(_case("glyph crops", note, glyphs))
    return found


def _synthetic(quick: bool) -> list[Case]:
    scale = 16 if quick else 1
    draw = "sizes drawn from COCO's, resized to"
    detection = data.coco_shapes(16, 800 // scale, 1333 // scale)
    small = data.coco_shapes(16, 320 // scale, 640 // scale)
    rng = random.Random(1)
    near = near_224(4 if quick else 32)
    crops = [
        (3, rng.randint(12, 16), rng.randint(12, 16)) for _ in range(1024 // scale)
    ]
    tiny = [(3, 4 + i % 3, 5 + i % 4) for i in range(8)]
    lengths = [(1, rng.randint(1, 64)) for _ in range(64)]
    f32, u8 = torch.float32, torch.uint8
    one = [(3, 4000 // scale, 6000 // scale)]
    draws = {
        "detection float32": (f"16 images, {draw} 1333x800", detection, f32),
        "detection uint8": (f"16 images, {draw} 1333x800", detection, u8),
        "small uint8": (f"16 images, {draw} 640x320", small, u8),
        "small float32": (f"16 images, {draw} 640x320", small, f32),
        "32 images near 224": (f"{len(near)}x3x(200 to 256)^2, float32", near, f32),
        "equal shapes": (
            f"{len(near)}x3x224x224, float32",
            [(3, 224, 224)] * len(near),
            f32,
        ),
        "one big": (f"1 image, {one[0][2]}x{one[0][1]}, uint8", one, u8),
        "many small": (f"{len(crops)}x3x(12 to 16)^2, float32", crops, f32),
        "tiny": ("8x(3, 4 to 6, 5 to 8), float32", tiny, f32),
    }
    main = {"detection float32", "detection uint8", "equal shapes", "many small"}
    found = [
        _case(title, f"synthetic: {note}", _drawn(shapes, dtype), main=title in main)
        for title, (note, shapes, dtype) in draws.items()
    ]
    labels = "synthetic: 64x(1, 1 to 64), int64, pad_dims=1"
    drawn = _drawn(lengths, torch.int64)
    found.append(_case("ragged labels", labels, drawn, pad_dims=1))
    for title, dtype in (
        ("detection float32", torch.bfloat16),
        ("detection float32", torch.float16),
        ("many small", torch.bfloat16),
    ):
        note, shapes, source = draws[title]
        cast = partial(casts, shapes, source, dtype)
        name = f"{title} to {str(dtype).removeprefix('torch.')}"
        found.append(Case(name, f"synthetic: {note}", cast))
    return found


def near_224(num: int) -> list[data.Shape]:
    """Return ragged shapes that are common in classification."""
    rng = random.Random(1)
    return [(3, rng.randint(200, 256), rng.randint(200, 256)) for _ in range(num)]


def _case(
    title: str, note: str, samples: _Samples, pad_dims: int = 2, main: bool = False
) -> Case:
    return Case(title, note, lambda: stacks(samples(), pad_dims), main)


def _drawn(shapes: Sequence[data.Shape], dtype: torch.dtype) -> _Samples:
    return partial(data.random_tensors, shapes, dtype)


def _floats(images: Sequence[Tensor]) -> list[Tensor]:
    return [image.float() for image in images]


def stacks(samples: list[Tensor], pad_dims: int, value: int = 0) -> list[Contender]:
    """Compare ways to make one padded tensor of ragged ones."""
    shapes = [tuple(sample.shape) for sample in samples]
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]
    equal = len(set(shapes)) == 1
    padded = [peers.pad(sample, target, value) for sample in samples]
    contenders = [
        *collates(samples, pad_dims, value),
        Contender(
            "new_full + copy_", lambda: peers.full_then_copy(samples, target, value)
        ),
        Contender(
            "F.pad + stack", lambda: peers.pad_then_stack(samples, target, value)
        ),
        *_of_images(samples, pad_dims, target, value),
    ]
    if pad_dims == 1:
        flat = [sample[0] for sample in samples]
        contenders.append(
            Contender("pad_sequence", lambda: pad_sequence(flat, True, value)[:, None])
        )
    if equal:
        contenders.append(
            Contender("torch default_collate", lambda: default_collate(samples))
        )
    # Without padding, torch.stack does all of the work; otherwise only a part.
    kind = "peer" if equal else "limit"
    return [
        *contenders,
        Contender("torch.stack, already padded", lambda: torch.stack(padded), kind),
        *limits.copies(torch.stack(padded)),
    ]


def casts(
    shapes: Sequence[data.Shape], source: torch.dtype, dtype: torch.dtype
) -> list[Contender]:
    """Compare ways to make one padded tensor of another dtype."""
    samples = data.random_tensors(shapes, source)
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]

    def cast() -> list[Tensor]:
        return [sample.to(dtype) for sample in samples]

    def padded(tensors: list[Tensor]) -> Tensor:
        use_backend(AS_LOADED)
        return pad_stack(tensors, pad_dims=2)

    return [
        *ours(lambda: pad_stack(samples, pad_dims=2, dtype=dtype)),
        Contender("to(dtype), pad_stack", lambda: padded(cast())),
        Contender("pad_stack, to(dtype)", lambda: padded(samples).to(dtype)),
        Contender(
            "to(dtype), F.pad + stack",
            lambda: peers.pad_then_stack(cast(), target, 0),
        ),
        Contender("pad_stack, no cast", lambda: padded(samples), "limit"),
    ]


def collates(samples: list[Tensor], pad_dims: int, value: int = 0) -> list[Contender]:
    """Return ours and mmcv's, which take samples in DataContainers."""
    options: Any = {"stack": True, "pad_dims": pad_dims, "padding_value": value}
    batch = [DataContainer(sample, **options) for sample in samples]
    mmcv = None
    if peers.mmcv_collate is not None:
        theirs = [peers.MmcvContainer(sample, **options) for sample in samples]
        mmcv = partial(peers.first_chunk, peers.mmcv_collate, theirs)
    return [
        *ours(partial(peers.first_chunk, collate, batch)),
        Contender("mmcv 1.x collate", mmcv),
    ]


def _of_images(
    samples: list[Tensor], pad_dims: int, target: list[int], value: int
) -> list[Contender]:
    """Return the contenders that take only images, and those that take only floats."""
    found = []
    if pad_dims == 2:
        mmengine = None
        if peers.stack_batch is not None:
            mmengine = partial(peers.stack_batch, samples, 1, value)
        found.append(Contender("mmengine stack_batch", mmengine))
    if samples[0].is_floating_point():
        nested = partial(peers.nested_then_padded, samples, target, value)
        found.append(Contender("torch.nested, padded", nested))
    return found
