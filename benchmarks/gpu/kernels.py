"""Run each kernel alone: once for a kernel profiler, or timed against a device copy.

Use it with ncu, as ``python -m benchmarks.gpu.kernels``; that measures no time itself.
``--time`` prints the time of each kernel on the device, the rate of its reads and
writes, and its share of the rate of a copy on the same device. Rates need a GPU:
``--device cpu`` runs all workloads and prints no figure.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyparallel import backend

from ..peers import MEAN, STD
from .target import DryRun, Gpu, target

#: The key of the copy in the ceilings of a GPU.
COPY = "ceiling: device to device, read + write"


class Workload(NamedTuple):
    """One launch, and the tensors that it writes and reads."""

    launch: Callable[[], None]
    made: Tensor
    sources: list[Tensor]

    @property
    def nbytes(self) -> int:
        """The number of bytes that are written and read."""
        return self.made.nbytes + sum(each.nbytes for each in self.sources)


def pad_copy(samples: list[Tensor], shape: Sequence[int]) -> Workload:
    """Pad the last dimensions of samples to a shape."""
    first = samples[0]
    batch = torch.empty((len(samples), *shape), dtype=first.dtype, device=first.device)
    item = bytes(first.element_size())
    return Workload(partial(backend.pad_copy, batch, samples, item), batch, samples)


def pad_images(device: torch.device, num: int, side: int) -> Workload:
    """Pad float32 images, mostly of odd widths."""
    shapes = [(3, side - i % 7, side - 3 * i % 64) for i in range(num)]
    images = [torch.rand(shape, device=device) for shape in shapes]
    return pad_copy(images, (3, side, side))


def pad_rows(width: int, device: torch.device, num: int, side: int) -> Workload:
    """Pad rows of ``width`` bytes, such as the boxes of each image."""
    most = 12 * num * side**2 // 64 // width + 7  # as many bytes as the images
    shapes = [(most - i % 7, width // 4 - i % 2) for i in range(64)]
    rows = [torch.rand(shape, device=device) for shape in shapes]
    return pad_copy(rows, (most, width // 4))


def pack_leaves(nbytes: Sequence[int], device: torch.device) -> Workload:
    """Pack leaves of these numbers of bytes."""
    leaves = [
        torch.randint(0, 256, (n,), dtype=torch.uint8, device=device) for n in nbytes
    ]
    plan = backend.plan_slab(leaves)
    slab = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    return Workload(partial(backend.pack, slab, leaves, plan), slab, leaves)


def pack_large(device: torch.device, num: int, side: int) -> Workload:
    """Pack leaves with odd numbers of bytes."""
    return pack_leaves([128 * side - 1 - 2 * (i % 50) for i in range(60 * num)], device)


def pack_tiny(count: int, device: torch.device, num: int, side: int) -> Workload:
    """Pack ``count`` leaves of 4 to 560 bytes: one small slab."""
    return pack_leaves([4 + 37 * i % 557 for i in range(count)], device)


def image_batch(
    source: torch.dtype, value: torch.dtype, pixels: bool
) -> Callable[[torch.device, int, int], Workload]:
    """Normalise and pad images, (h, w, C) if ``pixels``."""

    def make(device: torch.device, num: int, side: int) -> Workload:
        images = []
        for i in range(num):
            shape = (side - i % 7, side - 3 * i % 64, 3)
            image = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
            image = image.to(source).permute(2, 0, 1)
            images.append(image if pixels else image.contiguous())
        batch = torch.empty(num, 3, side, side, dtype=value, device=device)
        given = (batch, images, None, MEAN, STD, (0, 0, 0), False)
        return Workload(partial(backend.image_batch, *given, exact=True), batch, images)

    return make


Make = Callable[[torch.device, int, int], Workload]
_BYTE, _FLOAT, _BRAIN = torch.uint8, torch.float32, torch.bfloat16
#: The kernels under a profiler.
PROFILED: dict[str, Make] = {
    "pad_copy": pad_images,
    "pack": pack_large,
    "image_batch": image_batch(_BYTE, _FLOAT, False),
}
#: All timed workloads.
TIMED: dict[str, Make] = {
    "pad_copy, images of float32": pad_images,
    "pad_copy, rows of 28 bytes": partial(pad_rows, 28),
    "pad_copy, rows of 300 bytes": partial(pad_rows, 300),
    "pack, large leaves": pack_large,
    "pack, 64 tiny leaves": partial(pack_tiny, 64),
    "pack, 528 tiny leaves": partial(pack_tiny, 528),
    "image_batch, uint8 to float32": image_batch(_BYTE, _FLOAT, False),
    "image_batch, uint8 to bfloat16": image_batch(_BYTE, _BRAIN, False),
    "image_batch, uint8 (h, w, C) to float32": image_batch(_BYTE, _FLOAT, True),
    "image_batch, uint8 (h, w, C) to bfloat16": image_batch(_BYTE, _BRAIN, True),
    "image_batch, float32 to float32": image_batch(_FLOAT, _FLOAT, False),
    "image_batch, float32 to bfloat16": image_batch(_FLOAT, _BRAIN, False),
}


def timed(where: DryRun, num: int, side: int) -> Iterator[str]:
    """Run the workloads; return a line for each, with figures of a GPU alone."""
    copy = where.ceilings()[COPY] if isinstance(where, Gpu) else None
    for name, make in TIMED.items():
        work = make(where.device, num, side)
        work.launch()
        where.sync()
        seconds = [where.device_seconds(work.launch, 1e-4) for _ in range(20)]
        line = f"{name}: {work.nbytes / 1e6:.4g} MB read and written"
        known = [each for each in seconds if each is not None]
        if copy is not None and known:
            middle = statistics.median(known)
            rate = work.nbytes / middle / 1e9
            line += f", {1e6 * middle:.4g} us ({1e6 * min(known):.4g} to "
            line += f"{1e6 * max(known):.4g}), {rate:.4g} GB/s, "
            line += f"{rate / copy:.2f} of a device copy"
        yield line


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch the kernels, and name or time them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels")
    parser.description = __doc__
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--num", default=16, type=int, help="number of images")
    parser.add_argument(
        "--side", default=1024, type=int, help="side of an image in pixels"
    )
    parser.add_argument("--time", action="store_true", help="print rates of a GPU")
    args = parser.parse_args(arguments)
    if args.time:
        where = target(args.device)
        if where.dry:
            print("A dry run: figures need a GPU.")
        for name, value in where.machine().items():
            print(f"{name}: {value}")
        for line in timed(where, args.num, args.side):
            print(line, flush=True)
        return 0
    for name, make in PROFILED.items():
        work = make(torch.device(args.device), args.num, args.side)
        work.launch()
        print(f"{name}: {work.made.nbytes >> 20} MiB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
