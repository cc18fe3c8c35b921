"""Filter a folder of photographs in parallel: blur, sharpen, or find edges.

    python examples/filter_photos.py edges
    python examples/filter_photos.py blur --photos ~/Pictures --out blurred

Without a folder, the script uses the photographs of scikit-learn. One function reads a
photograph of any size, filters it with torch and writes a PNG file. It runs on torch's
number of threads.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from pyparallel import parallel_apply

SUFFIXES = (".jpg", ".jpeg", ".png")


def blur(image: Tensor, sigma: float = 3.0) -> Tensor:
    """Return a photograph ``(3, H, W)`` blurred by a Gaussian."""
    reach = int(3 * sigma)
    x = torch.arange(-reach, reach + 1.0, device=image.device)
    taps = torch.exp(-(x**2) / (2 * sigma**2))
    row = (taps / taps.sum()).view(1, 1, 1, -1)
    planes = F.pad(image.unsqueeze(1), (reach,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(planes, row), row.mT).squeeze(1)


def sharpen(image: Tensor) -> Tensor:
    """Return a photograph ``(3, H, W)`` with its details doubled."""
    return 2 * image - blur(image, 1.0)


def edges(image: Tensor) -> Tensor:
    """Return the Sobel gradient of a photograph ``(3, H, W)`` at each pixel."""
    across = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]], device=image.device)
    grey = F.pad(image.mean(0)[None, None], (1,) * 4, mode="replicate")
    x, y = (F.conv2d(grey, k[None, None])[0] for k in (across, across.T))
    return torch.hypot(x, y).expand(3, -1, -1)


FILTERS = {"blur": blur, "sharpen": sharpen, "edges": edges}


def read(path: Path) -> Tensor:
    """Return a photograph as ``(3, H, W)`` in [0, 1]."""
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


def write(image: Tensor, path: Path) -> None:
    """Write ``(3, H, W)``, clamped to [0, 1], as a PNG file."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu()
    Image.fromarray(pixels.numpy()).save(path)


def filter_photo(path: Path, name: str, out: Path) -> Path:
    """Filter one file on the host; return the path of the new file."""
    written = out / f"{path.stem}-{name}.png"
    write(FILTERS[name](read(path)), written)
    return written


def main() -> None:
    """Filter the photographs of a folder; print the paths of the new files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("filter", choices=FILTERS)
    parser.add_argument(
        "--photos", type=Path, help="a folder; scikit-learn's by default"
    )
    parser.add_argument("--out", type=Path, default=Path("filtered"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()

    folder = args.photos
    if folder is None:
        folder = Path(import_module("sklearn.datasets").__path__[0]) / "images"
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        parser.error(f"{folder} has no files of {', '.join(SUFFIXES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    work = partial(filter_photo, name=args.filter, out=args.out)
    for path in parallel_apply(work, paths, ["cpu"] * args.threads):
        print(path)


if __name__ == "__main__":
    main()
