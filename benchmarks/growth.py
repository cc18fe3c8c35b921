"""Growth: the increase of time with samples, leaves and threads.

Two functions are fitted to the minima over the rounds. Sizes begin at two samples or
leaves, because a single one needs no padding and takes a shorter path.

1. ``a + b * n``, by least squares of the relative errors, with ``a >= 0``. ``a`` is the
   fixed time of a call, and ``b`` the time of one more sample or leaf.
2. ``(time - a) ~ n ** e``, by least squares in log-log, over the sizes with
   ``b * n >= a``. ``e`` is the exponent. At these sizes the fixed part is at most half
   of the time, and it is subtracted, because it would flatten the curve.

The report also has the exponent without the subtraction, over the same sizes.

Calls are repeated so that caches are warm at the largest size too. Otherwise small
sizes would be timed with warm caches and large sizes with cold caches, and the
difference would look like growth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from . import data, environment
from ._harness import Contender, Curves, Effort, Record
from ._harness import measure as measure_seconds
from .cases_images import collates as collate_images
from .cases_images import stacks
from .cases_leaves import collate_samples, packed, scattered

#: The expected exponent and its tolerance.
LINEAR, TOLERANCE = 1.0, 0.1

#: The factor by which each contender is called longer at a time than elsewhere.
_LONGER = 15


def growths(quick: bool) -> list[Curves]:
    """Return all curves; with ``quick``, short ones."""
    samples = [2**i for i in range(5 if quick else 11)]
    leaves = (
        [1, 3, 10, 33, 100] if quick else [1, 3, 10, 33, 100, 330, 1000, 3300, 10000]
    )
    synthetic = "synthetic: "
    return [
        Curves(
            "collate, crops",
            f"{synthetic}(1, 17 to 24, 17 to 24) uint8",
            "samples",
            samples,
            partial(_crops, low=17, high=24, channels=1, dtype=torch.uint8),
        ),
        Curves(
            "collate, thumbnails",
            f"{synthetic}(3, 57 to 64, 57 to 64) float32",
            "samples",
            samples,
            partial(_crops, low=57, high=64, channels=3, dtype=torch.float32),
        ),
        Curves(
            "collate, detection samples",
            f"{synthetic}dicts of five fields, images (3, 17 to 24, 17 to 24)",
            "samples",
            samples,
            lambda num: collate_samples(
                data.detection_samples(_ragged(num, 17, 24, 3))
            ),
        ),
        Curves("scatter to [-1]", f"{synthetic}nested", "leaves", leaves, _scattered),
        Curves("pack and rebuild", f"{synthetic}nested", "leaves", leaves, _packed),
    ]


def _ragged(num: int, low: int, high: int, channels: int) -> list[data.Shape]:
    """Return shapes whose distribution does not depend on their number."""
    steps = high - low + 1
    return [(channels, high - i % steps, high - i * 3 % steps) for i in range(num)]


def _crops(
    num: int, low: int, high: int, channels: int, dtype: torch.dtype
) -> list[Contender]:
    shapes = _ragged(num, low, high, channels)
    return collate_images(data.random_tensors(shapes, dtype), 2)


def _scattered(num: int) -> list[Contender]:
    return [each for each in scattered(num) if "hand" not in each.name]


def _packed(num: int) -> list[Contender]:
    return [each for each in packed(num) if "hand" not in each.name]


def measure(growth: Curves, effort: Effort) -> Record:
    """Time all contenders at all sizes, interleaved; fit and return the record."""
    contenders: dict[tuple[str, int], Contender] = {}
    for size in growth.sizes:
        for each in growth.contenders(size):
            contenders[each.name, size] = each
    renamed = [
        Contender(f"{name} {size}", each.call, each.kind)
        for (name, size), each in contenders.items()
    ]
    longer = effort._replace(min_seconds=_LONGER * effort.min_seconds)
    seconds = measure_seconds(renamed, **longer._asdict())
    series = []
    for name in dict.fromkeys(name for name, _ in contenders):
        each = contenders[name, growth.sizes[0]]
        row: Record = {"name": name, "kind": each.kind, "installed": bool(each.call)}
        if each.call is not None:
            minima = [min(seconds[f"{name} {size}"]) for size in growth.sizes]
            row |= {"seconds": minima, "fit": fit(growth.sizes, minima)}
        series.append(row)
    record: Record = {"title": growth.title, "note": growth.note, "x": growth.x}
    done = max(map(len, seconds.values()))
    return {**record, "sizes": growth.sizes, "rounds": done, "series": series}


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Record:
    """Return the fits described above; ``exponent`` is None without three sizes."""
    points = [(n, t) for n, t in zip(sizes, seconds, strict=True) if n > 1]
    fixed, each = _fit_line(*zip(*points, strict=True))
    used = [(n, t) for n, t in points if each * n >= fixed and t > fixed]
    record: Record = {"fixed": fixed, "each": each, "exponent": None}
    if len(used) >= 3:
        record["exponent"] = _slope([(n, t - fixed) for n, t in used])
        record["as_measured"] = _slope(used)
        record["from"], record["to"] = used[0][0], used[-1][0]
    return record


def is_linear(fit: Record) -> bool:
    """Return True if the exponent is within its tolerance."""
    exponent = fit["exponent"]
    return exponent is not None and abs(exponent - LINEAR) <= TOLERANCE


def _fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return a >= 0 and b of ``a + b * n``, by least squares of relative errors."""
    # With u = 1/t and v = n/t, this minimises the sum of (a u + b v - 1) ** 2.
    uu = math.fsum(1 / t**2 for t in seconds)
    uv = math.fsum(n / t**2 for n, t in zip(sizes, seconds, strict=True))
    vv = math.fsum((n / t) ** 2 for n, t in zip(sizes, seconds, strict=True))
    u = math.fsum(1 / t for t in seconds)
    v = math.fsum(n / t for n, t in zip(sizes, seconds, strict=True))
    determinant = uu * vv - uv * uv
    fixed = (u * vv - v * uv) / determinant if determinant > 0 else 0.0
    if fixed <= 0:
        return 0.0, v / vv
    return fixed, (v - fixed * uv) / vv


def _slope(points: Sequence[tuple[float, float]]) -> float:
    xs, ys = ([math.log(p[i]) for p in points] for i in (0, 1))
    x, y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    over = math.fsum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return over / math.fsum((a - x) ** 2 for a in xs)


def measure_threads(quick: bool, effort: Effort) -> list[Record]:
    """Time two cases with 1 thread to all cores, interleaved; return their records.

    No exponent is expected: the shared memory bandwidth is the limit.
    """
    counts = sorted({1, 2, *(2**i for i in range(2, 10)), environment.cores()})
    counts = [count for count in counts if count <= environment.cores()]
    scale, records = 16 if quick else 1, []
    for dtype in (torch.float32, torch.uint8):
        shapes = data.coco_shapes(16, 800 // scale, 1333 // scale)
        samples = data.random_tensors(shapes, dtype)
        records.append(_by_threads(samples, counts, effort))
    return records


def _by_threads(
    samples: list[torch.Tensor], counts: list[int], effort: Effort
) -> Record:
    before = torch.get_num_threads()
    calls: list[tuple[Contender, int]] = []

    def with_threads(call: Callable[[], object], count: int) -> Callable[[], object]:
        def run() -> object:
            torch.set_num_threads(count)
            return call()

        return run

    for count in counts:
        torch.set_num_threads(count)  # the limits are built for a number of threads
        calls += [(each, count) for each in stacks(samples, 2) if _shown(each)]
    try:
        renamed = [
            Contender(f"{each.name} {count}", with_threads(each.call, count), each.kind)
            for each, count in calls
            if each.call is not None
        ]
        seconds = measure_seconds(renamed, **effort._asdict())
    finally:
        torch.set_num_threads(before)
    series = []
    for name in dict.fromkeys(each.name for each, _ in calls):
        found = next(each for each, _ in calls if each.name == name)
        row: Record = {"name": name, "kind": found.kind, "installed": bool(found.call)}
        if found.call is not None:
            row["seconds"] = [min(seconds[f"{name} {count}"]) for count in counts]
        series.append(row)
    dtype = str(samples[0].dtype).removeprefix("torch.")
    note = "synthetic: 16 images, sizes drawn from COCO's, resized to 1333x800"
    record: Record = {"title": f"collate, detection {dtype}", "note": note}
    done = max(map(len, seconds.values()))
    return {**record, "x": "threads", "sizes": counts, "rounds": done, "series": series}


def _shown(contender: Contender) -> bool:
    return contender.name.startswith(("ours", "mmcv", "new_full", "non-temporal"))
