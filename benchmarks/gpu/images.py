"""Cases of images: ragged uint8 images become one normalised, padded batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import data, peers
from .._harness import Contender
from . import image_ways as ways
from .case import Goal, GpuCase, Made, Rotation, close_to
from .target import DryRun

MMENGINE = "mmengine ImgDataPreprocessor"
STYLE = "mmengine-style chain"
TIMM = "timm-style chain, already padded"
COMPILED = "torch.compile'd chain, already padded"
NESTED = "torch.nested to_padded_tensor, already normalised"
COPY = "device copy of the same size"
MMCV = "mmcv 1.x collate + scatter"
MMCV_STYLE = "mmcv-style: float32, pad, stack, .to"
MMCV_PINNED = "mmcv-style, pinned"
TIMM_HOST = "timm-style: pad uint8 in pinned memory, .to, chain"

_ROWS, _LAST = torch.contiguous_format, torch.channels_last


def cases(quick: bool) -> list[GpuCase]:
    """Return the cases; ``quick`` shrinks them."""
    scale, num = (16, 4) if quick else (1, 16)
    shapes = data.coco_shapes(num, 800 // scale, 1333 // scale)
    note = f"synthetic: {num} images, sizes drawn from COCO's, uint8"
    forms = [ways.Form(torch.float32, _ROWS), ways.Form(torch.bfloat16, _ROWS)]
    forms += [ways.Form(torch.float32, _LAST), ways.Form(torch.bfloat16, _LAST)]
    forms.append(ways.Form(torch.float32, _ROWS, swap=True, mask=True))
    found = []
    for form in forms:
        share = 0.85 if form.dtype is torch.float32 else 0.80
        goals = [Goal(COPY, share, of="device"), Goal(COMPILED, 1, of="device")]
        if not form.mask:
            goals.append(Goal(TIMM, 3.5, of="device"))
        for peer in (MMENGINE, STYLE):
            goals += [Goal(peer, 5, of="device"), Goal(peer, 20, of="host")]
        if form == forms[0]:
            goals.append(Goal(NESTED, 2.5, of="device"))
        goals.append(Goal(count="launches", most=2 if form.mask else 1))
        found.append(
            GpuCase(
                f"images, {form}",
                f"{note}, on the device already",
                partial(_kernel, shapes, form),
                goals,
            )
        )
    goals = [Goal(peer, 4) for peer in (MMCV, MMCV_STYLE, MMCV_PINNED)]
    goals.append(Goal(TIMM_HOST, 1.5))
    end = f"{note}, from pageable memory of the host; mmcv-style: float32, normalised"
    make = partial(_end_to_end, shapes, forms[0])
    whole = GpuCase("images from the host, float32 NCHW", end, make, goals)
    return [found[0], whole, *found[1:]]


class Batch(NamedTuple):
    """One batch of images in all forms that the contenders take."""

    images: list[Tensor]
    floats: list[Tensor]
    padded: Tensor | None = None
    nested: Any = None


def _batches(shapes: Sequence[data.Shape]) -> list[Batch]:
    """Return three batches; with their results, they are larger than a cache."""
    found = []
    for i in range(3):
        images = drawn(tuple(shapes), i)
        found.append(Batch(images, list(map(ways.normalised, images))))
    return found


@functools.lru_cache(maxsize=3)
def drawn(shapes: tuple[data.Shape, ...], seed: int) -> list[Tensor]:
    """Return random images of these shapes, uint8, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return [data.random_tensor(s, torch.uint8, generator) for s in shapes]


def _on_device(shapes: Sequence[data.Shape], where: DryRun) -> list[Batch]:
    """Return the batches on the device, padded and nested as well."""
    found = []
    for batch in _batches(shapes):
        images, floats = ([x.to(where.device) for x in part] for part in batch[:2])
        with warnings.catch_warnings():  # that the API is a prototype
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor(floats)
        padded = peers.pad_then_stack(images, _target(shapes), 0)
        found.append(Batch(images, floats, padded, nested))
    return found


def _target(shapes: Sequence[data.Shape]) -> tuple[int, int, int]:
    height, width = (
        -(-max(s[d] for s in shapes) // ways.DIVISOR) * ways.DIVISOR for d in (1, 2)
    )
    return 3, height, width


def _valid(shapes: Sequence[data.Shape], where: DryRun) -> Tensor:
    """Return a mask of the images in their batch, ``(n, H, W)``."""
    _, height, width = _target(shapes)
    valid = torch.zeros(len(shapes), height, width, dtype=torch.bool)
    for i, (_, h, w) in enumerate(shapes):
        valid[i, :h, :w] = True
    return valid.to(where.device)


def _tolerance(dtype: torch.dtype) -> float:
    """Return the difference that one more rounding causes in values up to 3."""
    return 1e-5 if dtype is torch.float32 else 2.0**-6


def _kernel(shapes: Sequence[data.Shape], form: ways.Form, where: DryRun) -> Made:
    """Compare ways to normalise and pad images that are on the device."""
    batches, target = Rotation(_on_device(shapes, where)), _target(shapes)
    valid, numbers = _valid(shapes, where), ways.numbers(where.device)
    make, fast = ways.ours(form, None), ways.ours(form, None, exact=False)
    engine, chain = ways.mmengine(form, where), None
    if not where.dry:  # compilation takes seconds
        chain = ways.compiled(form, numbers)

    def with_mask(result: Any) -> Any:
        """Return the batch with zeros as padding, and the mask if the form has one."""
        batch, mask = result, valid
        if not isinstance(result, Tensor):  # a Padded
            batch, mask = result.data, result.mask
        batch = batch.masked_fill(~valid[:, None], 0)
        return (batch, mask) if form.mask else batch

    def of(function: Callable[[Any], Any] | None, kind: str = "images") -> Any:
        return function and (lambda: function(getattr(batches.now, kind)))

    own = partial(ways.style, form=form, target=target, numbers=numbers)
    contenders = [
        Contender("ours", of(make), "ours", with_mask),
        Contender("ours, exact=False", of(fast), "ours", with_mask),
        Contender(MMENGINE, of(engine), view=with_mask),
        Contender(STYLE, of(own), view=with_mask),
        Contender(COMPILED, of(chain, "padded"), view=with_mask),
    ]
    if not form.swap:
        timm = partial(ways.timm, form=form, numbers=numbers)
        contenders.append(Contender(TIMM, of(timm, "padded"), view=with_mask))
    if form.dtype is torch.float32 and form.layout is _ROWS and not form.swap:
        contenders.append(Contender(NESTED, of(partial(_of_nested, target), "nested")))
    moved = sum(image.nbytes for image in batches.now.images)
    moved += len(shapes) * valid[0].numel() * (3 * form.dtype.itemsize + form.mask)
    source = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=where.device)
    copy = torch.empty_like(source)
    contenders.append(Contender(COPY, lambda: copy.copy_(source), "limit"))
    why = {} if engine else {MMENGINE: ways.mmengine_class()[1]}
    return Made(contenders, batches, close_to(_tolerance(form.dtype)), why)


def _of_nested(target: Sequence[int], nested: Any) -> Tensor:
    batch = torch.nested.to_padded_tensor(nested, 0.0, (nested.size(0), *target))
    return batch


def _end_to_end(shapes: Sequence[data.Shape], form: ways.Form, where: DryRun) -> Made:
    """Compare ways to turn images on the host into a batch on the device."""
    batches, target = Rotation(_batches(shapes)), _target(shapes)
    valid, numbers = _valid(shapes, where), ways.numbers(where.device)
    make = ways.ours(form, None if where.dry else where.device)
    engine = ways.mmengine(form, where)
    full = (len(shapes), *target)
    pinned = where.pin(torch.zeros(full, dtype=torch.uint8))
    floats = where.pin(torch.zeros(full))

    def masked(batch: Tensor) -> Tensor:
        return batch.masked_fill(~valid[:, None], 0)

    if not where.dry:
        peers.give_mmcv_its_streams()

    def mmcv() -> Tensor:
        boxed = [peers.MmcvContainer(x, stack=True) for x in batches.now.floats]
        batch = peers.mmcv_collate(boxed, len(boxed))
        return peers.mmcv_scatter({"img": batch}, [where.index])[0]["img"]

    def mmcv_style() -> Tensor:
        batch = peers.pad_then_stack(batches.now.floats, target, 0)
        return batch.to(where.device, non_blocking=True)

    def fill(out: Tensor, samples: Sequence[Tensor]) -> Tensor:
        where.sync()  # the previous copy may still read it
        out.zero_()
        for sample, slot in zip(samples, out, strict=True):
            slot[tuple(map(slice, sample.shape))].copy_(sample)
        return out.to(where.device, non_blocking=True, copy=True)

    def timm() -> Tensor:
        return ways.timm(fill(pinned, batches.now.images), form, numbers)

    mine = make and (lambda: make(batches.now.images))
    theirs = engine and (lambda: engine(batches.now.images))
    contenders = [
        Contender("ours", mine, "ours", masked),
        Contender(
            MMCV,
            mmcv if peers.mmcv_collate else None,
            view=lambda batch: masked(peers.pad(batch, full, 0)),
        ),
        Contender(MMCV_STYLE, mmcv_style, view=masked),
        Contender(MMCV_PINNED, lambda: fill(floats, batches.now.floats), view=masked),
        Contender(TIMM_HOST, timm, view=masked),
        Contender(MMENGINE, theirs, view=masked),
    ]
    why = {} if engine else {MMENGINE: ways.mmengine_class()[1]}
    return Made(contenders, batches, close_to(_tolerance(form.dtype)), why)
