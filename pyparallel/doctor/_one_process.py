"""The self-test in this process: collate and scatter, on every kind of target."""

from __future__ import annotations

from typing import Any

import torch

import pyparallel


def one_process() -> str | None:
    """Collate and scatter two ragged samples; return what is wrong, or None."""
    try:
        targets = [-1] + ([0] if torch.cuda.is_available() else [])
        for target in targets:
            batch: Any = pyparallel.collate(_samples(), samples_per_gpu=2)
            wrong = _wrong(pyparallel.scatter(batch, [target])[0])
            if wrong is not None:
                return f"target {target}: {wrong}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _samples() -> list[dict[str, Any]]:
    images = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[5.0, 6, 7]]])
    container = pyparallel.DataContainer
    left = pyparallel.Padding(side="left", mask=True)
    return [
        {
            "img": container(image, stack=True, padding_value=9),
            "boxes": container(torch.full((i, 2), i)),
            "ids": container(image[0, 0], stack=True, pad_dims=1, padding=left),
            "points": container(image[0, :, :2], ragged=True),
            "meta": container({"index": i}, cpu_only=True),
        }
        for i, image in enumerate(images)
    ]


def _wrong(found: Any) -> str | None:
    """Say what is wrong with the batch of `_samples`: written down, not computed."""
    expected = torch.tensor([[[[1.0, 2, 9], [3, 4, 9]]], [[[5, 6, 7], [9, 9, 9]]]])
    if not torch.equal(found["img"].cpu(), expected):
        return f"the images are {found['img'].tolist()}"
    if [box.tolist() for box in found["boxes"]] != [[], [[1, 1]]]:
        return f"the boxes are {found['boxes']}"
    if found["ids"].data.tolist() != [[0, 1, 2], [5, 6, 7]]:
        return f"the ids are {found['ids']}"
    if found["ids"].mask.tolist() != [[False, True, True], [True] * 3]:
        return f"the mask is {found['ids'].mask}"
    if found["points"].offsets.tolist() != [0, 2, 3]:
        return f"the points are {found['points']}"
    if found["meta"] != [{"index": 0}, {"index": 1}]:
        return f"the metadata are {found['meta']}"
    return None
