"""Cases of many fields: dicts and nests, collated, scattered and packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from pyparallel import Collate, DataContainer, List, Pad, backend, collate, scatter
from pyparallel.batch import pytree

from . import data, peers
from ._harness import Case, Contender, Record, ours
from .cases_images import near_224

#: As in the example of NVIDIA's multi_tensor_copier.
NUM_LEAVES = 528

_HAND = "by hand: F.pad + stack, lists"

_OPTIONS: dict[str, dict[str, Any]] = {
    "img": {"stack": True},
    "mask": {"stack": True, "padding_value": 255},
    "gt_bboxes": {},
    "gt_labels": {},
    "img_metas": {"cpu_only": True},
}


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases; ``quick`` shrinks them."""
    num, images = (16, 2) if quick else (256, 16)
    samples = "16 samples: img 3x(200 to 256)^2, a mask padded with 255, boxes, labels"
    nest = f"{NUM_LEAVES} tensors of some 280 bytes in nested dicts, lists and tuples"
    fields = f"{num} samples of 10 float32 tensors of 8, no containers"
    for title, note, make, kept in (
        ("detection dict", f"{samples}, metadata", _dicts, images),
        ("detection dict, rules", f"{samples}, without containers", _by_rules, images),
        ("many small fields", fields, _fields, num),
        ("scatter detection dict", f"{samples}, collated; to [-1]", _scattered, images),
        (f"scatter {NUM_LEAVES} leaves", f"{nest}; to [-1]", scattered, NUM_LEAVES),
        (f"pack {NUM_LEAVES} leaves", f"{nest}; copied", packed, NUM_LEAVES),
    ):
        yield Case(
            title,
            f"synthetic: {note}",
            partial(make, kept),
            main=title == "detection dict",
            finish=_no_rate if title.startswith("scatter") else lambda record: None,
        )


def _no_rate(record: Record) -> None:
    """Leave out the bytes of a result that copies nothing."""
    record["nbytes"] = 0


def _dicts(num: int) -> list[Contender]:
    """Compare ways to batch detection samples of five fields."""
    raw = data.detection_samples(near_224(num))

    def by_hand() -> dict[str, Any]:
        return {key: DataContainer([value]) for key, value in _by_hand(raw).items()}

    return [*collate_samples(raw), Contender(_HAND, by_hand)]


def _by_hand(raw: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for key, options in _OPTIONS.items():
        batch[key] = values = [sample[key] for sample in raw]
        if options.get("stack"):
            sizes = zip(*(value.shape for value in values), strict=True)
            fill = options.get("padding_value", 0)
            target = list(map(max, sizes))
            batch[key] = peers.pad_then_stack(values, target, fill)
    return batch


def _by_rules(num: int) -> list[Contender]:
    """Compare `Collate` with `collate` of the same fields in containers."""
    raw = data.detection_samples(near_224(num))
    boxed = _boxed(raw, DataContainer)
    rules = Collate(img=Pad(), mask=Pad(255), default=List())

    def chunks(batch: dict[str, Any]) -> dict[str, Any]:
        return {key: container.data[0] for key, container in batch.items()}

    containers = partial(collate, boxed, num)
    return [
        *ours(lambda: rules(raw)),
        Contender("DataContainer and collate", containers, "limit", chunks),
        Contender(_HAND, lambda: _by_hand(raw)),
    ]


def collate_samples(raw: list[dict[str, Any]]) -> list[Contender]:
    """Return ours and mmcv's for detection samples."""
    batch, mmcv = _boxed(raw, DataContainer), None
    if peers.mmcv_collate is not None:
        theirs = _boxed(raw, peers.MmcvContainer)
        mmcv = partial(peers.mmcv_collate, theirs, len(raw))
    return [
        *ours(lambda: collate(batch, len(raw))),
        Contender("mmcv 1.x collate", mmcv),
    ]


def _boxed(
    raw: list[dict[str, Any]], container: Callable[..., Any]
) -> list[dict[str, Any]]:
    return [
        {key: container(sample[key], **_OPTIONS[key]) for key in _OPTIONS}
        for sample in raw
    ]


def _fields(num: int, num_fields: int = 10) -> list[Contender]:
    """Compare ways to batch samples that are dicts of small equal tensors."""
    generator = torch.Generator().manual_seed(0)
    names = [f"field{i}" for i in range(num_fields)]
    batch = [
        {name: torch.rand(8, generator=generator) for name in names} for _ in range(num)
    ]

    def by_hand() -> dict[str, Tensor]:
        return {name: torch.stack([sample[name] for sample in batch]) for name in names}

    mmcv = peers.mmcv_collate and partial(peers.mmcv_collate, batch, num)
    return [
        *ours(lambda: collate(batch, num)),
        Contender("mmcv 1.x collate", mmcv),
        Contender("torch default_collate", lambda: default_collate(batch)),
        Contender("by hand: torch.stack", by_hand),
    ]


def _scattered(num: int) -> list[Contender]:
    """Compare ways to take the tensors of a collated batch out of their containers."""
    raw = data.detection_samples(near_224(num))
    batch, mmcv = collate(_boxed(raw, DataContainer), num), None
    if peers.mmcv_scatter is not None:
        theirs = peers.mmcv_collate(_boxed(raw, peers.MmcvContainer), num)
        mmcv = partial(peers.mmcv_scatter, theirs, [-1])

    def by_hand() -> list[dict[str, Any]]:
        return [{key: peers.contiguous(box.data[0]) for key, box in batch.items()}]

    return [
        *ours(lambda: scatter(batch, [-1])),
        Contender("mmcv 1.x scatter", mmcv),
        Contender("by hand: recursion", by_hand),
    ]


def scattered(num_leaves: int) -> list[Contender]:
    """Compare ways to walk nested tensors that stay on the host.

    No tensor is copied: there is one target, and all tensors are contiguous.
    """
    batch = data.nested_batch(num_leaves)
    return [
        *ours(lambda: scatter(batch, [-1])),
        Contender(
            "mmcv 1.x scatter",
            peers.mmcv_scatter and partial(peers.mmcv_scatter, batch, [-1]),
        ),
        Contender("by hand: recursion", lambda: [peers.contiguous(batch)]),
    ]


def packed(num_leaves: int) -> list[Contender]:
    """Compare ways to copy nested tensors; ours and tensordict's make one block."""
    batch, tensordict = data.nested_batch(num_leaves), None
    if peers.TensorDict is not None:
        # Created beforehand and not timed: its users already have a TensorDict.
        theirs = peers.TensorDict(peers.in_mappings(batch), batch_size=[])
        tensordict = theirs.consolidate
    return [
        *ours(lambda: _pack_and_rebuild(batch)),
        Contender(
            "tensordict consolidate",
            tensordict,
            view=lambda result: peers.out_of_mappings(result.to_dict(), batch),
        ),
        Contender("by hand: clone each", lambda: peers.clone_each(batch)),
        Contender("by hand: cat + split", lambda: peers.cat_then_split(batch)),
    ]


def _pack_and_rebuild(tree: Any) -> Any:
    """Return a copy of nested CPU tensors, packed into one slab.

    This is the work of `scatter` on the host for one device, without the device's copy.
    """
    leaves, structure = pytree.flatten(tree)
    plan = backend.plan_slab(leaves)
    slab = backend.empty((plan.nbytes,), torch.uint8)
    backend.pack(slab, leaves, plan)
    return pytree.unflatten(structure, backend.views(slab, plan))
