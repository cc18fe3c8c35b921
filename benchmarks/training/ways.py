"""The ways to load the batches of a training: other loaders, and ours step by step.

Each way is a function of a `Pipeline` and of the epoch's batches of indices. It returns
a loader, whose ``iter()`` is an epoch. Two workers read the samples in every way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader

from pyparallel import DataLoader, PreDataLoader, SizeBatchSampler

from .pipelines import EqualImages, Pipeline

#: The packages of peers that are not installed, with the missing module.
ABSENT: dict[str, str] = {}
for _module, _package in (
    ("spdl", "SPDL"),
    ("torchdata", "torchdata"),
    ("nvidia.dali", "DALI"),
):
    # Only their own ways import them: they need time and memory.
    if not (find_spec(_module.split(".")[0]) and find_spec(_module)):
        ABSENT[_package] = f"no module {_module}"

WORKERS = 2
Order = list[list[int]]


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


class Batches:
    """A loader whose ``iter()`` calls a function for an iterator."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


def by_torch(pipeline: Pipeline, order: Order, num_workers: int = WORKERS) -> Any:
    """Return torch's loader with the collate function of its users."""
    return TorchLoader(
        pipeline.dataset,
        batch_sampler=order,
        num_workers=num_workers,
        collate_fn=pipeline.collate,
        persistent_workers=num_workers > 0,
    )


def by_nodes(pipeline: Pipeline, order: Order) -> Any:
    """Return torchdata's nodes with threads."""
    from torchdata import nodes

    def read(batch: list[int]) -> Any:
        return pipeline.collate([pipeline.dataset[i] for i in batch])

    batches = nodes.SamplerWrapper(order)
    mapped = nodes.ParallelMapper(batches, read, num_workers=WORKERS, method="thread")
    return nodes.Loader(nodes.Prefetcher(mapped, WORKERS))


def by_spdl(pipeline: Pipeline, order: Order) -> Any:
    """Return a pipeline of SPDL with threads, a new one for each epoch."""
    from spdl.pipeline import PipelineBuilder

    def read(batch: list[int]) -> Any:
        return pipeline.collate([pipeline.dataset[i] for i in batch])

    def start() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(order)
        builder = builder.pipe(read, concurrency=WORKERS, output_order="input")
        running = builder.add_sink(WORKERS).build(num_threads=WORKERS)
        with running.auto_stop():
            yield from running

    return Batches(start)


def by_dali(pipeline: Pipeline, order: Order) -> Any:
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

    def start() -> Iterator[Any]:
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

    return Batches(start)


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
    def make(pipeline: Pipeline, order: Order) -> Any:
        return by_ours(pipeline, order, **parts)

    sizes = parts.get("sizes", False)
    return Way(
        make,
        "ours",
        ordered=not sizes,
        fits=lambda pipeline: not sizes or pipeline.sizes is not None,
    )


TORCH = "torch's loader, 2 processes"
#: All ways by name. Each of ours has the parts of the one before it.
WAYS: dict[str, Way] = {
    TORCH: Way(by_torch),
    "torch's loader, no workers": Way(lambda p, order: by_torch(p, order, 0)),
    "torchdata's nodes, 2 threads": Way(by_nodes, package="torchdata"),
    "SPDL, 2 threads": Way(by_spdl, package="SPDL"),
    "DALI on the CPU, 2 threads": Way(
        by_dali,
        package="DALI",
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
