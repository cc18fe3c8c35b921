"""Cases of images: ragged images become one padded batch, normalised or not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pyparallel
from pyparallel import ImagePreprocessor

from .. import data, peers
from .._harness import Contender, Goal
from ..peers import MEAN, STD
from .case import GpuCase, Made, Rotation, close_to
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
PAD = "F.pad of each, torch.stack"
FILL = "new_full, copy_ of each"
PAD_NESTED = "torch.nested to_padded_tensor, already nested"

DIVISOR = 32
_ROWS, _LAST = torch.contiguous_format, torch.channels_last
Shapes = Sequence[data.Shape]


class Form(NamedTuple):
    """The form of results: dtype, memory layout, and whether channels are swapped."""

    dtype: torch.dtype
    layout: torch.memory_format
    swap: bool = False
    mask: bool = False

    def __str__(self) -> str:
        names = {_ROWS: "NCHW", _LAST: "channels_last"}
        more = ", RGB from BGR" * self.swap + ", with mask" * self.mask
        return f"{str(self.dtype).removeprefix('torch.')} {names[self.layout]}{more}"

    def of(self, batch: Tensor) -> Tensor:
        """Return a batch in this form."""
        return batch.to(self.dtype, memory_format=self.layout)


def cases(quick: bool) -> Iterator[GpuCase]:
    """Yield the cases of normalised images; ``quick`` shrinks them."""
    scale, num = (16, 4) if quick else (1, 16)
    shapes = data.coco_shapes(num, 800 // scale, 1333 // scale)
    note = f"synthetic: {num} images, sizes drawn from COCO's, uint8"
    plain = Form(torch.float32, _ROWS)
    for form in (
        plain,
        Form(torch.bfloat16, _ROWS),
        Form(torch.float32, _LAST),
        Form(torch.bfloat16, _LAST),
        Form(torch.float32, _ROWS, swap=True, mask=True),
    ):
        share = 0.85 if form.dtype is torch.float32 else 0.80
        goals = [Goal(COPY, share, of="device"), Goal(COMPILED, 1, of="device")]
        if not form.mask:
            goals.append(Goal(TIMM, 3.5, of="device"))
        for peer in (MMENGINE, STYLE):
            goals += [Goal(peer, 5, of="device"), Goal(peer, 20, of="host")]
        if form == plain:
            goals.append(Goal(NESTED, 2.5, of="device"))
        goals.append(Goal(count="launches", most=2 if form.mask else 1))
        on_device = f"{note}, on the device already"
        make = partial(_on_device, shapes, form)
        yield GpuCase(f"images, {form}", on_device, make, goals)
        if form == plain:
            goals = [Goal(peer, 4) for peer in (MMCV, MMCV_STYLE, MMCV_PINNED)]
            yield GpuCase(
                "images from the host, float32 NCHW",
                f"{note}, from pageable memory of the host; mmcv-style: float32, "
                "normalised",
                partial(_from_host, shapes, form),
                [*goals, Goal(TIMM_HOST, 1.5)],
            )


def padding_cases(quick: bool) -> Iterator[GpuCase]:
    """Yield the cases of padding alone; ``quick`` shrinks them."""
    num, scale = (4, 16) if quick else (16, 1)
    height, wide, narrow = 800 // scale, 1333 // scale, 667 // scale
    odd = [(3, height, narrow if i % 2 else wide) for i in range(num)]
    coco = data.coco_shapes(num, height, wide)
    for title, shapes in (("widths 1333 and 667", odd), ("COCO's sizes", coco)):
        for dtype, share in ((torch.uint8, 0.65), (torch.float32, 0.85)):
            goals = [Goal(COPY, share, of="device"), Goal(PAD, 2, of="device")]
            if dtype is torch.float32:
                goals.append(Goal(PAD_NESTED, 2.5, of="device"))
            name = str(dtype).removeprefix("torch.")
            yield GpuCase(
                f"padding alone, {name}, {title}",
                f"synthetic: {num} images on the device, padded to the largest",
                partial(_padded, shapes, dtype),
                [*goals, Goal(count="launches", most=1)],
            )


# --------------------------------------------------------------------------------- data
@functools.lru_cache(maxsize=3)
def _drawn(shapes: tuple[data.Shape, ...], seed: int) -> list[Tensor]:
    """Return random images of these shapes, uint8, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return [data.random_tensor(s, torch.uint8, generator) for s in shapes]


def _batches(shapes: Shapes, where: DryRun | None = None) -> list[dict[str, Any]]:
    """Return three batches in all forms that the contenders take.

    With their results, they are larger than a cache.
    """
    found = []
    for i in range(3):
        images = _drawn(tuple(shapes), i)
        mean, std = peers.numbers("cpu")
        batch: dict[str, Any] = {"images": images}
        batch["floats"] = [(image.float() - mean) / std for image in images]
        if where is not None:
            batch = {k: [x.to(where.device) for x in v] for k, v in batch.items()}
            batch["nested"] = _nested(batch["floats"])
            batch["padded"] = peers.pad_then_stack(batch["images"], _target(shapes), 0)
        found.append(batch)
    return found


def _nested(images: list[Tensor]) -> Any:
    with warnings.catch_warnings():  # that the API is a prototype
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(images)


def _target(shapes: Shapes) -> tuple[int, int, int]:
    sides = (max(shape[d] for shape in shapes) for d in (1, 2))
    height, width = (-(-side // DIVISOR) * DIVISOR for side in sides)
    return 3, height, width


def _valid(shapes: Shapes, where: DryRun) -> Tensor:
    """Return a mask of the images in their batch, ``(n, H, W)``."""
    _, height, width = _target(shapes)
    valid = torch.zeros(len(shapes), height, width, dtype=torch.bool)
    for i, (_, h, w) in enumerate(shapes):
        valid[i, :h, :w] = True
    return valid.to(where.device)


def _closeness(form: Form) -> Callable[[Any, Any], str]:
    """Allow the difference that one more rounding causes in values up to 3."""
    return close_to(1e-5 if form.dtype is torch.float32 else 2.0**-6)


def _copy(nbytes: int, where: DryRun) -> Contender:
    """Return a copy on the device that reads and writes these bytes in total."""
    source = torch.randint(256, (nbytes // 2,), dtype=torch.uint8, device=where.device)
    copy = torch.empty_like(source)
    return Contender(COPY, lambda: copy.copy_(source), "limit")


# --------------------------------------------------------------------------------- ways
def _ours(
    form: Form, device: torch.device | None, exact: bool = True
) -> ImagePreprocessor:
    """Return our preprocessor, which first sends images to a device, if any."""
    return ImagePreprocessor(
        MEAN,
        STD,
        size_divisor=DIVISOR,
        dtype=form.dtype,
        memory_format=form.layout,
        return_mask=form.mask,
        swap_channels=form.swap,
        exact=exact,
        device=device,
    )


def _mmengine(form: Form, where: DryRun) -> Callable[[Any], Tensor] | None:
    made = peers.mmengine_preprocessor(DIVISOR, form.swap, where.device)
    return made and (lambda images: form.of(made(images)))


def _timm(form: Form, padded: Tensor) -> Tensor:
    """Normalise a padded batch as timm's loader does, in as few passes as possible."""
    mean, std = peers.numbers(padded.device)
    batch = padded.to(torch.float32, memory_format=form.layout, copy=True)
    return batch.sub_(mean).div_(std).to(form.dtype)


def _compiled(form: Form, where: DryRun) -> Callable[[Tensor], Tensor] | None:
    """Return a chain for padded batches that torch.compile fuses into one kernel."""
    if where.dry:  # compilation takes seconds
        return None
    mean, std = peers.numbers(where.device)

    def chain(padded: Tensor) -> Tensor:
        padded = padded.flip(1) if form.swap else padded
        batch = ((padded.float() - mean) / std).to(form.dtype)
        return batch.contiguous(memory_format=form.layout)

    made: Callable[[Tensor], Tensor] = torch.compile(chain, dynamic=False)
    return made


def _on_device(shapes: Shapes, form: Form, where: DryRun) -> Made:
    """Compare ways to normalise and pad images that are on the device."""
    batches, target = Rotation(_batches(shapes, where)), _target(shapes)
    valid = _valid(shapes, where)

    def with_mask(result: Any) -> Any:
        """Return the batch with zeros as padding, and the mask if the form has one."""
        batch, mask = result, valid
        if not isinstance(result, Tensor):  # a Padded
            batch, mask = result.data, result.mask
        batch = batch.masked_fill(~valid[:, None], 0)
        return (batch, mask) if form.mask else batch

    def chain(images: list[Tensor]) -> Tensor:
        return form.of(peers.normalise_each(images, target, form.swap))

    ways: list[tuple[str, Any, str]] = [
        ("ours", _ours(form, None), "images"),
        ("ours, exact=False", _ours(form, None, exact=False), "images"),
        (MMENGINE, _mmengine(form, where), "images"),
        (STYLE, chain, "images"),
        (COMPILED, _compiled(form, where), "padded"),
    ]
    if not form.swap:
        ways.append((TIMM, partial(_timm, form), "padded"))
    if form == Form(torch.float32, _ROWS):
        full = (len(shapes), *target)
        pad = torch.nested.to_padded_tensor
        ways.append((NESTED, lambda nested: pad(nested, 0.0, full), "nested"))
    contenders = [
        Contender(
            name,
            batches.of(way, part),
            "ours" if name.startswith("ours") else "peer",
            with_mask,
        )
        for name, way, part in ways
    ]
    moved = sum(image.nbytes for image in batches.now["images"])
    moved += len(shapes) * valid[0].numel() * (3 * form.dtype.itemsize + form.mask)
    return Made([*contenders, _copy(moved, where)], batches, _closeness(form))


def _from_host(shapes: Shapes, form: Form, where: DryRun) -> Made:
    """Compare ways to turn images on the host into a batch on the device."""
    batches, target = Rotation(_batches(shapes)), _target(shapes)
    valid, full = _valid(shapes, where), (len(shapes), *target)
    pinned = where.pin(torch.zeros(full, dtype=torch.uint8))
    floats = where.pin(torch.zeros(full))
    if not where.dry:
        peers.give_mmcv_its_streams()

    def masked(batch: Tensor) -> Tensor:
        return batch.masked_fill(~valid[:, None], 0)

    def mmcv(images: list[Tensor]) -> Tensor:
        boxed = [peers.MmcvContainer(x, stack=True) for x in images]
        batch = peers.mmcv_collate(boxed, len(boxed))
        return peers.mmcv_scatter({"img": batch}, [where.index])[0]["img"]

    def mmcv_style(images: list[Tensor]) -> Tensor:
        batch = peers.pad_then_stack(images, target, 0)
        return batch.to(where.device, non_blocking=True)

    def fill(out: Tensor, samples: Sequence[Tensor]) -> Tensor:
        where.sync()  # the previous copy may still read it
        out.zero_()
        for sample, slot in zip(samples, out, strict=True):
            slot[tuple(map(slice, sample.shape))].copy_(sample)
        return out.to(where.device, non_blocking=True, copy=True)

    def timm(images: list[Tensor]) -> Tensor:
        return _timm(form, fill(pinned, images))

    def peer(name: str, way: Any, part: str) -> Contender:
        return Contender(name, batches.of(way, part), view=masked)

    ours = _ours(form, None if where.dry else where.device)
    collated = peer(MMCV, mmcv if peers.mmcv_collate else None, "floats")
    contenders = [
        Contender("ours", batches.of(ours, "images"), "ours", masked),
        Contender(MMCV, collated.call, view=lambda x: masked(peers.pad(x, full, 0))),
        peer(MMCV_STYLE, mmcv_style, "floats"),
        peer(MMCV_PINNED, partial(fill, floats), "floats"),
        peer(TIMM_HOST, timm, "images"),
        peer(MMENGINE, _mmengine(form, where), "images"),
    ]
    return Made(contenders, batches, _closeness(form))


def _padded(shapes: Shapes, dtype: torch.dtype, where: DryRun) -> Made:
    """Compare ways to pad and stack images that are on the device."""
    turns = []
    for i in range(3):  # with their results, they are larger than a cache
        images = [x.to(where.device).to(dtype) for x in _drawn(tuple(shapes), i)]
        nested = _nested(images) if dtype.is_floating_point else None
        turns.append({"images": images, "nested": nested})
    batches = Rotation(turns)
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]
    full = (len(shapes), *target)
    ways: list[tuple[str, Any]] = [
        ("ours", pyparallel.pad_stack),
        (PAD, lambda images: peers.pad_then_stack(images, target, 0)),
        (FILL, lambda images: peers.full_then_copy(images, target, 0)),
    ]
    contenders = [
        Contender(name, batches.of(way, "images"), "ours" if name == "ours" else "peer")
        for name, way in ways
    ]
    if dtype.is_floating_point:
        pad = torch.nested.to_padded_tensor
        of_nested = batches.of(lambda nested: pad(nested, 0.0, full), "nested")
        contenders.append(Contender(PAD_NESTED, of_nested))
    elements = sum(image.numel() for image in batches.now["images"])
    moved = (elements + torch.Size(full).numel()) * dtype.itemsize
    return Made([*contenders, _copy(moved, where)], batches)
