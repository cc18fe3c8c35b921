"""The ways to load the batches of a training: other loaders, and ours step by step.

Each way is a function of a `Pipeline` and of the epoch's batches of indices. It returns
a loader, whose ``iter()`` is an epoch. Two workers read the samples in every way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader

from pyparallel import DataLoader, PreDataLoader, SizeBatchSampler

from ..loader.others import Order, Peer, absent, by_nodes, by_spdl
from .pipelines import EqualImages, Pipeline

#: The modules of peers that are not installed. Only their own ways import them: they
#: need time and memory.
ABSENT = absent(("spdl", "torchdata", "nvidia.dali"))

WORKERS = 2


class Way(NamedTuple):
    """A way to load batches.

    Attributes:
        make: returns the loader.
        kind: ``peer`` or ``ours``.
        package: the name of its package in `ABSENT`.
        ordered: its batches are those of the order.
        exact: its batches have equal bits, not only similar values.
        fits: it can load a pipeline.
    """

    make: Callable[[Pipeline, Order], Any]
    kind: str = "peer"
    package: str = ""
    ordered: bool = True
    exact: bool = True
    fits: Callable[[Pipeline], bool] = lambda pipeline: True


def by_torch(pipeline: Pipeline, order: Order, num_workers: int = WORKERS) -> Any:
    """Return torch's loader with the collate function of its users."""
    return TorchLoader(
        pipeline.dataset,
        batch_sampler=order,
        num_workers=num_workers,
        collate_fn=pipeline.collate,
        persistent_workers=num_workers > 0,
    )


def by_dali(pipeline: Pipeline, order: Order) -> Peer:
    """Return DALI's operators on the CPU; the labels are added in Python."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline as Graph

    dataset, size = pipeline.dataset, pipeline.batch_size
    equal = isinstance(dataset, EqualImages)
    graph = Graph(size, WORKERS, None)

    def files() -> Iterator[Any]:
        for batch in order:
            yield [np.fromfile(dataset.paths[i], np.uint8) for i in batch]

    with graph:
        coded = fn.external_source(source=files, cycle="raise", device="cpu")
        images = fn.decoders.image(coded, device="cpu", output_type=types.RGB)
        if equal:
            shape = {"crop": (224, 224), "mean": [120.0] * 3, "std": [60.0] * 3}
            images = fn.crop_mirror_normalize(images, output_layout="CHW", **shape)
        else:
            images = fn.pad(fn.transpose(images, perm=[2, 0, 1]), axes=(1, 2))
        graph.set_outputs(images)
    graph.build()

    def start(order: Order, _: Any) -> Iterator[Any]:
        for batch in order:
            (images,) = graph.run()
            # A copy: the memory of the images is that of a later batch.
            tensor = torch.from_numpy(np.array(images.as_tensor()))
            index = torch.tensor(batch)
            if equal:
                label = torch.tensor([dataset.labels[i] for i in batch])
                yield {"image": tensor, "label": label, "index": index}
            else:
                boxes = [dataset.boxes[i] for i in batch]
                yield {"image": tensor, "boxes": boxes, "index": index}
        with suppress(StopIteration):  # the end of the files
            graph.run()
        graph.reset()

    return Peer(start, order, dataset, list)


def by_ours(
    pipeline: Pipeline,
    order: Order,
    collate: bool = True,
    sizes: bool = False,
    ahead: bool = False,
    **options: Any,
) -> Any:
    """Return our loader with the parts that are switched on."""
    batches: Any = order
    if sizes:
        batches = SizeBatchSampler(pipeline.sizes, pipeline.batch_size)
    loader: Any = DataLoader(
        pipeline.dataset,
        batch_sampler=batches,
        num_workers=WORKERS,
        collate_fn=pipeline.ours if collate else pipeline.collate,
        persistent_workers=True,
        **options,
    )
    return PreDataLoader(loader) if ahead else loader


def _ours(**parts: Any) -> Way:
    sizes = parts.get("sizes", False)
    return Way(
        partial(by_ours, **parts),
        "ours",
        ordered=not sizes,
        fits=lambda pipeline: not sizes or pipeline.sizes is not None,
    )


def _other(start: Any, package: str) -> Way:
    def make(pipeline: Pipeline, order: Order) -> Peer:
        return Peer(start, order, pipeline.dataset, pipeline.collate)

    return Way(make, package=package)


TORCH = "torch's loader, 2 processes"
#: All ways by name. Each of ours has the parts of the one before it.
WAYS: dict[str, Way] = {
    TORCH: Way(by_torch),
    "torch's loader, no workers": Way(partial(by_torch, num_workers=0)),
    "torchdata's nodes, 2 threads": _other(by_nodes, "torchdata"),
    "SPDL, 2 threads": _other(by_spdl, "spdl"),
    "DALI on the CPU, 2 threads": Way(
        by_dali,
        package="nvidia.dali",
        exact=False,
        fits=lambda pipeline: hasattr(pipeline.dataset, "paths"),
    ),
    "ours, 2 processes": _ours(collate=False),
    "... with our collate": _ours(),
    "... with PreDataLoader": _ours(ahead=True),
    "... with SizeBatchSampler": _ours(ahead=True, sizes=True),
    "... with 2 threads instead": _ours(ahead=True, worker_method="thread"),
    "... with 2 threads, SizeBatchSampler": _ours(
        ahead=True, sizes=True, worker_method="thread"
    ),
}


def order_of(pipeline: Pipeline) -> Order:
    """Return the batches of indices of an epoch, shuffled once."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randperm(len(pipeline.dataset), generator=generator).tolist()
    size = pipeline.batch_size
    return [samples[i : i + size] for i in range(0, len(samples), size)]
