"""Cases of worker threads: decoding, text, pure Python, and the first batch."""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from pyparallel import DataLoader, pad_stack

from .. import data, peers
from .epochs import Counted, Epochs, contenders, in_our_loader, peer, per_batch
from .images import Comparison, Goal
from .in_process import first_batch

try:
    from PIL import Image
except ImportError as error:
    Image = None  # type: ignore[assignment]  # the stubs name a module
    peers.ABSENT["Pillow"] = str(error)

try:
    import cv2
    import numpy as np
except ImportError as error:
    cv2 = None
    peers.ABSENT["OpenCV"] = str(error)

try:
    from spdl.pipeline import PipelineBuilder
except ImportError as error:
    PipelineBuilder = None
    peers.ABSENT["SPDL"] = str(error)

try:
    from torchdata import nodes
except ImportError as error:
    nodes = None
    peers.ABSENT["torchdata"] = str(error)

PROCESSES, BY_TORCH = "our processes", "torch's processes"
NODES = "torchdata's nodes, threads"
SPDL = "SPDL, threads"
#: The packages of these contenders and their samples, by their names in `peers.ABSENT`.
_PACKAGES = ("Pillow", "OpenCV", "SPDL", "torchdata")
_BATCH = 8


class Coded(Dataset[Any]):
    """Samples in memory, which are decoded when they are read.

    Args:
        samples: the coded samples, repeated.
        decode: makes a tensor of a sample.
        num: the number of samples of an epoch.
    """

    def __init__(
        self, samples: Sequence[bytes], decode: Callable[[bytes], Tensor], num: int
    ) -> None:
        self.samples, self.decode, self.num = samples, decode, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Tensor:
        return self.decode(self.samples[i % len(self.samples)])


class Nodes:
    """A loader of torchdata's nodes, which reads and collates in two threads."""

    def __init__(self, dataset: Coded) -> None:
        indices = nodes.SamplerWrapper(torch.utils.data.SequentialSampler(dataset))

        def read(batch: list[int]) -> Tensor:
            return pad_stack([dataset[i] for i in batch])

        batches = nodes.Batcher(indices, _BATCH)
        mapped = nodes.ParallelMapper(batches, read, num_workers=2, method="thread")
        self._loader = nodes.Loader(mapped)
        self._num = len(dataset) // _BATCH

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._loader)


class Pipeline:
    """A pipeline of SPDL for each epoch, which reads and collates in two threads."""

    def __init__(self, dataset: Coded) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset) // _BATCH

    def __iter__(self) -> Iterator[Tensor]:
        builder = PipelineBuilder().add_source(range(len(self._dataset)))
        builder = builder.aggregate(_BATCH, drop_last=True)
        builder = builder.pipe(self._read, concurrency=2, output_order="input")
        pipeline = builder.add_sink(2).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline

    def _read(self, batch: list[int]) -> Tensor:
        return pad_stack([self._dataset[i] for i in batch])


def cases(quick: bool) -> list[Comparison]:
    """Return the cases, each with two workers."""
    num = _BATCH * (4 if quick else 16)
    kinds = {
        "text of 100 kB, zlib": (_texts(24), decode_text),
        "transform of pure Python": (_texts(24, 50_000), count_words),
        "ragged collate": ([bytes(40_000 * i) for i in range(1, 25)], torch_bytes),
    }
    if Image is not None:
        jpegs = _jpegs(quick)
        kinds["JPEG, resize and flip by Pillow"] = (jpegs, decode_jpeg)
        if cv2 is not None:
            kinds["JPEG, resize and flip by OpenCV"] = (jpegs, decode_by_opencv)
    found = [
        Comparison(
            f"threads: {name}",
            "fields",
            f"{_BATCH} samples in a batch, padded by pad_stack; 2 workers, an epoch",
            partial(_contenders, Coded(*about, num), "fork", True, _drop_each, quick),
            # The GIL serializes pure Python: this is a loss.
            [] if "Python" in name else [Goal(BY_TORCH, 1), Goal(PROCESSES, 1)],
        )
        for name, about in kinds.items()
    ]
    start = Coded(_texts(24), decode_text, 2 * _BATCH)
    method = "fork" if quick else "spawn"
    return [
        *found,
        Comparison(
            f"threads: first batch, processes by {method}",
            "fields",
            "from iter() to the first batch; 2 workers",
            partial(_contenders, start, method, False, first_batch, quick),
            [] if quick else [Goal(BY_TORCH, 10), Goal(PROCESSES, 10)],
        ),
    ]


_drop_each = per_batch(lambda batch: None)


def _contenders(
    dataset: Coded,
    method: str,
    persistent: bool,
    run: Callable[[Any], float],
    quick: bool,
    clock: Counted,
) -> list[Any]:
    """Return threads with both backends, processes of both loaders, and the peers."""
    missing = {name: peers.ABSENT[name] for name in _PACKAGES if name in peers.ABSENT}
    if missing and not quick:
        raise RuntimeError(
            "benchmarks.loader: the cases of threads must compare all contenders, but "
            f"these are missing: {missing}. Run: make peers"
        )

    def loader(kind: Any, **options: Any) -> Callable[[], Any]:
        options.update(num_workers=2, persistent_workers=persistent)
        return partial(kind, dataset, _BATCH, collate_fn=pad_stack, **options)

    def epochs(make: Callable[[], Any]) -> Epochs:
        return Epochs(make, run, clock)

    processes = {"multiprocessing_context": method}
    return [
        *contenders(epochs, loader(DataLoader, worker_method="thread")),
        in_our_loader(PROCESSES, epochs(loader(DataLoader, **processes))),
        peer(BY_TORCH, epochs(loader(TorchLoader, **processes))),
        peer(NODES, epochs(partial(Nodes, dataset)) if nodes else None),
        peer(SPDL, epochs(partial(Pipeline, dataset)) if PipelineBuilder else None),
    ]


# ----------------------------------------------------------------------------- samples
def decode_jpeg(coded: bytes) -> Tensor:
    """Decode an image, resize it to a third and flip it: uint8 ``(3, H, W)``."""
    with Image.open(io.BytesIO(coded)) as image:
        size = image.width // 3, image.height // 3
        image = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(size[1], size[0], 3).permute(2, 0, 1).contiguous()


def decode_by_opencv(coded: bytes) -> Tensor:
    """Decode an image as `decode_jpeg` does, in one thread."""
    cv2.setNumThreads(0)
    pixels = cv2.imdecode(np.frombuffer(coded, np.uint8), cv2.IMREAD_COLOR_RGB)
    size = pixels.shape[1] // 3, pixels.shape[0] // 3
    pixels = cv2.flip(cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR), 1)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def decode_text(coded: bytes) -> Tensor:
    """Return the bytes of a compressed text."""
    return torch_bytes(zlib.decompress(coded))


def torch_bytes(coded: bytes) -> Tensor:
    """Return a copy of the bytes."""
    return torch.frombuffer(bytearray(coded), dtype=torch.uint8)


def count_words(coded: bytes) -> Tensor:
    """Return the length of each word, by a loop in Python."""
    counts = [0]
    for letter in zlib.decompress(coded):
        if letter == 32:
            counts.append(0)
        else:
            counts[-1] += 1
    return torch.tensor(counts)


def _texts(num: int, nbytes: int = 100_000) -> list[bytes]:
    draw = random.Random(0)
    letters = "eeettaaoinshr   "
    return [
        zlib.compress("".join(draw.choices(letters, k=draw.randrange(nbytes))).encode())
        for _ in range(num)
    ]


def _jpegs(quick: bool) -> list[bytes]:
    size = (200, 333) if quick else (800, 1333)
    images = data.photos(*size) or data.random_tensors(
        data.coco_shapes(8, *size), torch.uint8
    )
    found = []
    for image in images:
        coded = io.BytesIO()
        pixels = image.permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(coded, "JPEG")
        found.append(coded.getvalue())
    return found
