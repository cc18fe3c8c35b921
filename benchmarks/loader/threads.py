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

from .. import data
from .._harness import MIN_ROUNDS, Case, Contender, Goal
from ..processes import peak_of_epoch
from .epochs import Make, Run, Ways, case, first_batch, per_batch
from .others import BARE, PEERS, Peer, absent, by_pool

PROCESSES, BY_TORCH = "our processes", "torch's processes"
_BATCH, _WORKERS = 8, 2
#: The least rounds of decoders. Two equal loaders differ by 5 % in 5 rounds.
_DECODER_ROUNDS = 15
#: The packages of all samples and contenders.
_PACKAGES = ("PIL", "cv2", *PEERS)


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


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases, each with two workers."""
    num_batches = 4 if quick else 16
    kinds: dict[str, tuple[list[bytes], Callable[[bytes], Tensor]]] = {
        "text of 100 kB, zlib": (_texts(24), decode_text),
        "transform of pure Python": (_texts(24, 50_000), count_words),
        "ragged collate": ([bytes(40_000 * i) for i in range(1, 25)], torch_bytes),
    }
    if not absent(("PIL", "cv2")):
        jpegs = _jpegs(quick)
        kinds["JPEG, resize and flip by Pillow"] = (jpegs, decode_jpeg)
        kinds["JPEG, resize and flip by OpenCV"] = (jpegs, decode_by_opencv)
    for name, (samples, decode) in kinds.items():
        dataset = Coded(samples, decode, num_batches * _BATCH)
        # The GIL serializes pure Python: this is a loss.
        goals = [] if "Python" in name else [Goal(BY_TORCH, 1), Goal(PROCESSES, 1)]
        yield case(
            f"threads: {name}",
            f"{_BATCH} samples in a batch, padded by pad_stack; 2 workers, an epoch",
            partial(
                _contenders,
                *(dataset, "fork", True, per_batch(), quick),
                weighs=not quick
                or decode is torch_bytes,  # it takes a new process each
            ),
            num_batches,
            goals,
            min_rounds=_DECODER_ROUNDS if "JPEG" in name else MIN_ROUNDS,
        )
    start = Coded(_texts(24), decode_text, 2 * _BATCH)
    method = "fork" if quick else "spawn"
    yield case(
        f"threads: first batch, processes by {method}",
        "from iter() to the first batch; 2 workers",
        partial(_contenders, start, method, False, first_batch, quick),
        2,
        [] if quick else [Goal(BY_TORCH, 10), Goal(PROCESSES, 10)],
    )


def _contenders(
    dataset: Coded,
    method: str,
    persistent: bool,
    run: Run,
    quick: bool,
    weighs: bool = False,
) -> list[Contender]:
    """Return threads with both backends, processes of both loaders, and others."""
    missing = absent(_PACKAGES)
    if missing and not quick:
        raise RuntimeError(
            "benchmarks: the cases of threads must compare all contenders, but "
            f"these packages are missing: {missing}. Run: make peers"
        )

    def loader(kind: Any, **options: Any) -> Callable[[], Any]:
        options.update(num_workers=_WORKERS, persistent_workers=persistent)
        return partial(kind, dataset, _BATCH, collate_fn=pad_stack, **options)

    order = [range(i, i + _BATCH) for i in range(0, len(dataset), _BATCH)]
    ways = Ways(run, more=_memory if weighs else lambda make: {})
    processes = {"multiprocessing_context": method}
    return [
        *ways.ours(loader(DataLoader, worker_method="thread")),
        ways.peer(PROCESSES, loader(DataLoader, **processes), "ours"),
        ways.peer(BY_TORCH, loader(TorchLoader, **processes)),
        *(
            ways.peer(
                name,
                partial(Peer, start, order, dataset, pad_stack)
                if package not in missing
                else None,
            )
            for package, (name, start) in PEERS.items()
        ),
        ways.peer(BARE, partial(Peer, by_pool, order, dataset, pad_stack), "limit"),
    ]


def _memory(make: Make) -> dict[str, int]:
    """Return the peak of memory of a process with a loader and of its workers."""
    return {"memory": peak_of_epoch(make)}


# ----------------------------------------------------------------------------- samples
def decode_jpeg(coded: bytes) -> Tensor:
    """Decode an image, resize it to a third and flip it: uint8 ``(3, H, W)``."""
    from PIL import Image

    with Image.open(io.BytesIO(coded)) as image:
        size = image.width // 3, image.height // 3
        image = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(size[1], size[0], 3).permute(2, 0, 1).contiguous()


def decode_by_opencv(coded: bytes) -> Tensor:
    """Decode an image as `decode_jpeg` does, in one thread."""
    import cv2
    import numpy as np

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
    from PIL import Image

    size = (200, 333) if quick else (800, 1333)
    images = data.photos(*size)
    images = images or data.random_tensors(data.coco_shapes(8, *size), torch.uint8)
    found = []
    for image in images:
        coded = io.BytesIO()
        pixels = image.permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(coded, "JPEG")
        found.append(coded.getvalue())
    return found
