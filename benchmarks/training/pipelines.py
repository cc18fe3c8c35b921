"""Four trainings, from files to the loss of a step, as users write them.

Each function makes a `Pipeline`: the data set, the collate function that users of torch
write, ours for an equal batch, and a small model with its step. The files are made of
data that installed packages contain.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import zlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

import pyparallel
from pyparallel import Collate, List, Pad

from .. import data

Batch = dict[str, Any]
#: A step: it trains with a batch, and returns the loss.
Step = Callable[[Batch], Tensor]


class Pipeline(NamedTuple):
    """A training.

    Attributes:
        title: the title of its table.
        note: a description of the data, the model and the batch.
        dataset: reads the files. Each sample has its number as ``index``.
        batch_size: the samples of a batch.
        collate: as users of torch write it.
        ours: pyparallel's collate function for the same batch.
        training: makes a new model, and returns its step.
        sizes: of the samples, for `SizeBatchSampler`; None if all are equal.
    """

    title: str
    note: str
    dataset: Any
    batch_size: int
    collate: Callable[[list[Batch]], Batch]
    ours: Callable[[list[Batch]], Batch]
    training: Callable[[], Step]
    sizes: Any = None


def trained(model: nn.Module, loss_of: Step) -> Step:
    """Return a step with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types
        optimizer.step()
        return loss.detach()

    return step


# ------------------------------------------------------------------------ photographs
class Photographs(Dataset[Batch]):
    """JPEG files with boxes, read by Pillow: uint8 ``(3, H, W)``."""

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
        self.paths = [str(folder / each["file"]) for each in about]
        self.sizes = [each["size"] for each in about]
        self.boxes = [torch.tensor(each["boxes"]) for each in about]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Batch:
        return {"image": decoded(self.paths[i]), "boxes": self.boxes[i], "index": i}


def decoded(path: str) -> Tensor:
    """Return an image of a file: uint8 ``(3, H, W)``."""
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def pad_images(samples: list[Batch]) -> Batch:
    """Pad images to the largest one, as torchvision's detection models do."""
    images = [sample["image"] for sample in samples]
    height, width = (max(image.shape[d] for image in images) for d in (1, 2))
    batch = images[0].new_zeros((len(images), 3, height, width))
    for slot, image in zip(batch, images, strict=True):
        slot[:, : image.shape[1], : image.shape[2]].copy_(image)
    boxes = [sample["boxes"] for sample in samples]
    index = torch.tensor([sample["index"] for sample in samples])
    return {"image": batch, "boxes": boxes, "index": index}


def write_photographs(folder: Path, num: int, sizes: Sequence[data.Shape]) -> None:
    """Write parts of the installed photographs as JPEGs, and their annotations.

    Files of an earlier call stay as they are.
    """
    if (folder / "annotations.json").exists():
        return
    photos, draw = data.photos(), random.Random(0)
    about = []
    for i, (_, height, width) in zip(range(num), sizes, strict=False):
        photo = photos[i % len(photos)]
        top = draw.randint(0, max(0, photo.shape[1] - height))
        left = draw.randint(0, max(0, photo.shape[2] - width))
        part = photo[:, top : top + height, left : left + width]
        pixels = part.permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(folder / f"{i:04}.jpg", quality=90)
        height, width = part.shape[1:]
        boxes = []
        for _ in range(draw.randint(1, 20)):
            x, y = draw.uniform(0, 0.9) * width, draw.uniform(0, 0.9) * height
            boxes.append([x, y, draw.uniform(x, width), draw.uniform(y, height)])
        about.append({"file": f"{i:04}.jpg", "size": [height, width], "boxes": boxes})
    (folder / "annotations.json").write_text(json.dumps(about), encoding="utf-8")


def detector() -> Step:
    """Return the step of a convolutional net that finds the centres of boxes."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 4), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU()),
        nn.Conv2d(32, 5, 1),
    )

    def loss_of(batch: Batch) -> Tensor:
        found = net(batch["image"].float().sub_(120).div_(60))
        target = torch.zeros_like(found[:, 0])
        distance = found.new_zeros(())
        for i, boxes in enumerate(batch["boxes"]):
            x, y = ((boxes[:, :2] + boxes[:, 2:]) / 32).long().unbind(1)
            x, y = x.clamp(max=found.shape[3] - 1), y.clamp(max=found.shape[2] - 1)
            target[i, y, x] = 1
            distance = distance + (found[i, 1:, y, x].T - boxes / 640).abs().mean()
        loss = nn.functional.binary_cross_entropy_with_logits(found[:, 0], target)
        return loss + distance / len(target)

    return trained(net, loss_of)


def photographs(folder: Path, quick: bool = False) -> Pipeline:
    """Return the detection in photographs of different sizes."""
    num, batch_size = (8, 4) if quick else (128, 8)
    write_photographs(folder, num, data.coco_shapes(num, 640, 640))
    dataset = Photographs(folder)
    return Pipeline(
        "photographs of different sizes",
        f"{num} JPEGs of COCO's sizes with 1 to 20 boxes, cut from the photographs of "
        "scikit-image, scikit-learn and matplotlib; batches of "
        f"{batch_size}; a net of 4 convolutions",
        dataset,
        batch_size,
        pad_images,
        Collate(image=Pad(), boxes=List()),
        detector,
        dataset.sizes,
    )


# ------------------------------------------------------------------------ equal images
class EqualImages(Dataset[Batch]):
    """Thumbnails in JPEG files: the centre as normalized float32 ``(3, 224, 224)``."""

    def __init__(self, paths: Sequence[str], photos: int) -> None:
        self.paths = paths
        self.labels = [i % photos for i in range(len(paths))]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Batch:
        image = decoded(self.paths[i])[:, 16:-16, 16:-16]
        image = image.float().sub_(120).div_(60).contiguous()
        return {"image": image, "label": self.labels[i], "index": i}


def classifier() -> Step:
    """Return the step of a convolutional net that classifies images."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, 16)),
    )
    return trained(
        net,
        lambda batch: nn.functional.cross_entropy(net(batch["image"]), batch["label"]),
    )


def equal_images(folder: Path, quick: bool = False) -> Pipeline:
    """Return the classification of equal images."""
    num, batch_size = (16, 8) if quick else (384, 32)
    write_photographs(folder, num, [(3, 256, 256)] * num)
    paths = Photographs(folder).paths
    return Pipeline(
        "equal images",
        f"{num} JPEGs of 256x256 pixels, with the centre taken as float32; "
        f"batches of {batch_size} by default_collate; a net of 3 convolutions",
        EqualImages(paths, sum(map(len, data.PHOTOS.values()))),
        batch_size,
        default_collate,
        pyparallel.collate,
        classifier,
    )


# -------------------------------------------------------------------------------- text
_WORDS = re.compile(rb"\w+|[^\w\s]")
_VOCABULARY, _LONGEST = 4096, 512


class Texts(Dataset[Batch]):
    """Parts of files of sources, as numbers of words."""

    def __init__(self, parts: Sequence[tuple[str, int, int, int]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> Batch:
        path, start, end, label = self.parts[i]
        with open(path, "rb") as file:
            file.seek(start)
            tokens = tokenized(file.read(end - start))
        return {"tokens": tokens, "length": len(tokens), "label": label, "index": i}


def tokenized(text: bytes) -> Tensor:
    """Return the numbers of the words of a text."""
    words = _WORDS.findall(text)[:_LONGEST]
    return torch.tensor([zlib.crc32(word) % (_VOCABULARY - 1) + 1 for word in words])


def pad_texts(samples: list[Batch]) -> Batch:
    """Pad the words by `pad_sequence`, and stack the rest."""
    rest = [{k: v for k, v in each.items() if k != "tokens"} for each in samples]
    tokens = pad_sequence([each["tokens"] for each in samples], batch_first=True)
    batch: Batch = default_collate(rest)
    return {"tokens": tokens, **batch}


def transformer() -> Step:
    """Return the step of a transformer that finds the package of a text."""
    torch.manual_seed(0)
    words = nn.Embedding(_VOCABULARY, 64)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    head = nn.Linear(64, len(_SOURCES))
    model = nn.ModuleList([words, encoder, head])

    def loss_of(batch: Batch) -> Tensor:
        tokens, length = batch["tokens"], batch["length"]
        padding = torch.arange(tokens.shape[1]) >= length[:, None]
        found = encoder(words(tokens), src_key_padding_mask=padding)
        mean = found.masked_fill(padding[..., None], 0).sum(1) / length[:, None]
        return nn.functional.cross_entropy(head(mean), batch["label"])

    return trained(model, loss_of)


#: The packages of the texts.
_SOURCES = ("jinja2", "torch", "PIL", "matplotlib")


def text(folder: Path, quick: bool = False) -> Pipeline:
    """Return the classification of texts of different lengths."""
    num, batch_size = (32, 8) if quick else (512, 16)
    parts = []
    for label, package in enumerate(_SOURCES):
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        found = []
        for path in sorted(Path(spec.origin).parent.glob("*.py")):
            content = path.read_bytes()
            ends = [each.start() for each in re.finditer(rb"\n\n\n", content)]
            for start, end in zip([0, *ends], [*ends, len(content)], strict=True):
                if end - start > 64:
                    found.append((str(path), start, end, label))
        parts += random.Random(label).sample(found, num // len(_SOURCES))
    dataset = Texts(parts)
    lengths = [dataset[i]["length"] for i in range(num)]
    return Pipeline(
        "texts of different lengths",
        f"{num} functions and classes in the sources of {', '.join(_SOURCES)}, up to "
        f"{_LONGEST} words, tokenized in Python; batches of {batch_size}; a "
        "transformer of 2 layers",
        dataset,
        batch_size,
        pad_texts,
        Collate(tokens=Pad()),
        transformer,
        lengths,
    )


# ------------------------------------------------------------------------------- table
class Table(Dataset[Batch]):
    """Rows of a CSV file, repeated: a tensor for each of the 30 columns."""

    def __init__(self, path: Path, num: int) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
        rows = [
            [float(cell) for cell in row]
            for row in csv.reader(io.StringIO("\n".join(lines)))
        ]
        table = torch.tensor(rows)
        self.labels = table[:, -1].long()
        self.columns = ((table - table.mean(0)) / table.std(0)).T[:-1]
        self.names = [f"column{i}" for i in range(len(self.columns))]
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Batch:
        row = i % len(self.labels)
        sample = {
            name: column[row]
            for name, column in zip(self.names, self.columns, strict=True)
        }
        return {**sample, "label": self.labels[row], "index": i}


def perceptron() -> Step:
    """Return the step of a net of two layers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))

    def loss_of(batch: Batch) -> Tensor:
        columns = [v for k, v in batch.items() if k.startswith("column")]
        return nn.functional.cross_entropy(net(torch.stack(columns, 1)), batch["label"])

    return trained(net, loss_of)


def table(folder: Path, quick: bool = False) -> Pipeline:
    """Return the classification of rows of many small fields."""
    num, batch_size = (64, 16) if quick else (4096, 64)
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "datasets/data/breast_cancer.csv"
    return Pipeline(
        "a table of many small fields",
        f"{num} rows of scikit-learn's breast_cancer.csv, repeated, with 30 columns; "
        f"batches of {batch_size} by default_collate; a perceptron of 2 layers",
        Table(path, num),
        batch_size,
        default_collate,
        pyparallel.collate,
        perceptron,
    )


#: All pipelines by name. Each makes its files in a folder.
PIPELINES: dict[str, Callable[[Path, bool], Pipeline]] = {
    "photographs": photographs,
    "equal_images": equal_images,
    "text": text,
    "table": table,
}
