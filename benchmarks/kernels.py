"""Run each kernel once for a kernel profiler, on more data than fit in a cache.

Use it with ncu, as ``python -m benchmarks.kernels``; it measures no time itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from pyparallel import backend

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def pad_copy(device: torch.device, num: int, side: int) -> tuple[Tensor, list[Tensor]]:
    """Pad float32 images, mostly of odd widths; return the batch and the images."""
    shapes = [(3, side - i % 7, side - 3 * i % 64) for i in range(num)]
    samples = [torch.rand(shape, device=device) for shape in shapes]
    batch = torch.empty(num, 3, side, side, device=device)
    backend.pad_copy(batch, samples, bytes(4))
    return batch, samples


def pack(device: torch.device, num: int, side: int) -> tuple[Tensor, list[Tensor]]:
    """Pack leaves with odd numbers of bytes; return the slab and the leaves."""
    nbytes = [128 * side - 1 - 2 * (i % 50) for i in range(60 * num)]
    leaves = [
        torch.randint(0, 256, (n,), dtype=torch.uint8, device=device) for n in nbytes
    ]
    plan = backend.plan_slab(leaves)
    slab = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    backend.pack(slab, leaves, plan)
    return slab, leaves


def image_batch(
    device: torch.device, num: int, side: int
) -> tuple[Tensor, list[Tensor]]:
    """Normalise and pad uint8 images; return the batch and the images."""
    shapes = [(3, side - i % 7, side - 3 * i % 64) for i in range(num)]
    images = [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        for shape in shapes
    ]
    batch = torch.empty(num, 3, side, side, device=device)
    backend.image_batch(batch, images, None, MEAN, STD, (0, 0, 0), False, True)
    return batch, images


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch the kernels and name them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.description = __doc__
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--num", default=16, type=int, help="number of images")
    parser.add_argument(
        "--side", default=1024, type=int, help="side of an image in pixels"
    )
    args = parser.parse_args(arguments)
    for launch in (pad_copy, pack, image_batch):
        made, _ = launch(args.device, args.num, args.side)
        print(f"{launch.__name__}: {made.nbytes >> 20} MiB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
