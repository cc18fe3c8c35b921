"""The data: photographs and glyphs out of installed packages, and synthetic draws.

Nothing is downloaded or stored here. Without a package, its data are left out; the
notes of the cases state the number of images and glyphs.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from PIL import Image, ImageFont

    # Draws single letters; the other engine rejects code points of partial syllables.
    _BASIC = ImageFont.Layout.BASIC
except ImportError:
    Image = ImageFont = _BASIC = None

Shape = tuple[int, ...]

#: Colour photographs (and two micrographs), by the package that contains them.
PHOTOS = {
    "skimage": [
        "data/astronaut.png",
        "data/chelsea.png",
        "data/coffee.png",
        "data/hubble_deep_field.jpg",
        "data/ihc.png",
        "data/motorcycle_left.png",
        "data/motorcycle_right.png",
        "data/retina.jpg",
        "data/rocket.jpg",
    ],
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
    "matplotlib": ["mpl-data/sample_data/grace_hopper.jpg"],
}

_FONT = "mpl-data/fonts/ttf/DejaVuSans.ttf"

#: (height, width) and the approximate share of COCO images with it, in percent.
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


def rescaled(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """Return the size of an image after mmdet's ``Resize(keep_ratio=True)``.

    It is the largest size within ``(long, short)``, in either orientation.
    """
    factor = min(short / min(height, width), long / max(height, width))
    return int(height * factor + 0.5), int(width * factor + 0.5)


@functools.lru_cache(maxsize=2)
def photos(short: int = 800, long: int = 1333) -> list[Tensor]:
    """Return the photographs that are installed: uint8 ``(3, H, W)``, resized."""
    paths = [
        _installed(package, name) for package in PHOTOS for name in PHOTOS[package]
    ]
    return [_photo(path, short, long) for path in paths if path is not None]


def _installed(package: str, name: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / name
    return path if path.exists() else None


def _photo(path: Path, short: int, long: int) -> Tensor:
    with Image.open(path) as image:
        image = image.convert("RGB")
        height, width = rescaled(image.height, image.width, short, long)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1).contiguous()


def glyphs(num: int, size: int = 32) -> list[Tensor]:
    """Return glyphs of DejaVu Sans, cut out: uint8 ``(1, H, W)``, at most ``num``.

    Their sizes are the sizes of the letters. The list is empty without matplotlib,
    which contains the font.
    """
    path = _installed("matplotlib", _FONT)
    if path is None or ImageFont is None:
        return []
    font = ImageFont.truetype(str(path), size, layout_engine=_BASIC)
    missing = bytes(font.getmask("\U0010ffff"))
    found: list[Tensor] = []
    for code in range(0x21, 0x3000):
        if len(found) == num:
            break
        mask = font.getmask(chr(code))
        width, height = mask.size
        ink = bytes(mask)
        if any(ink) and ink != missing:
            pixels = torch.frombuffer(bytearray(ink), dtype=torch.uint8)
            found.append(pixels.view(1, height, width))
    return found


def coco_shapes(num: int, short: int, long: int) -> list[Shape]:
    """Draw shapes ``(3, H, W)`` with the distribution of resized COCO images."""
    sizes, weights = zip(*_COCO, strict=True)
    drawn = random.Random(0).choices(sizes, weights, k=num)
    return [(3, *rescaled(*size, short, long)) for size in drawn]


def random_tensors(shapes: Sequence[Shape], dtype: torch.dtype) -> list[Tensor]:
    """Return one random tensor for each shape, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    return [random_tensor(shape, dtype, generator) for shape in shapes]


def random_tensor(shape: Shape, dtype: torch.dtype, generator: Any) -> Tensor:
    """Return a random tensor of any dtype."""
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype, generator=generator)
    return torch.randint(1, 100, shape, dtype=dtype, generator=generator)


def detection_samples(shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return detection samples of five fields with images of these shapes."""
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    samples: list[dict[str, Any]] = []
    for i, (channels, height, width) in enumerate(shapes):
        num = rng.randint(1, 20)
        samples.append(
            {
                "img": torch.rand(channels, height, width, generator=generator),
                "mask": random_tensor((1, height, width), torch.uint8, generator),
                "gt_bboxes": torch.rand(num, 4, generator=generator),
                "gt_labels": random_tensor((num,), torch.int64, generator),
                "img_metas": {"index": i, "shape": (height, width), "scale": 1.0},
            }
        )
    return samples


def nested_batch(num_leaves: int) -> list[dict[str, Any]]:
    """Return nested dicts, lists and tuples with exactly ``num_leaves`` tensors.

    Each sample has 33 tensors, with about 280 bytes on average: six cameras, a lidar,
    annotations and a pose, as in a driving data set. The last sample may have fewer.
    """
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)

    def f32(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    def sample() -> dict[str, Any]:
        num = rng.randint(1, 24)
        camera = {
            "intrinsics": (3, 3),
            "pose": (4, 4),
            "boxes": (num, 4),
            "code": (256,),
        }
        return {
            "cameras": [
                {k: f32(*shape) for k, shape in camera.items()} for _ in range(6)
            ],
            "lidar": (f32(rng.randint(8, 64), 4), f32(4, 4), f32(1)),
            "annotations": {
                "boxes": f32(num, 7),
                "velocity": f32(num, 2),
                "labels": random_tensor((num,), torch.int64, generator),
                "ids": random_tensor((num,), torch.int64, generator),
            },
            "ego": {"pose": f32(4, 4), "time": f32(1)},
        }

    whole = [sample() for _ in range(num_leaves // 33)]
    rest = num_leaves % 33
    return [*whole, {f"value{i}": f32(64) for i in range(rest)}] if rest else whole
