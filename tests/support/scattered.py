"""Batches to scatter, and their expected results."""

from __future__ import annotations

from typing import Any

import torch

from pyparallel import DataContainer as DC


def samples(num: int) -> list[dict[str, Any]]:
    return [
        {
            "img": DC(torch.full((2, 3 + i, 4), float(i)), stack=True),
            "boxes": DC(torch.full((i % 3, 4), i)),
            "meta": DC({"i": i}, cpu_only=True),
            "label": torch.tensor(i),
        }
        for i in range(num)
    ]


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested dicts and sequences."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if not isinstance(tree, dict | list | tuple):
        return []
    parts = tree.values() if isinstance(tree, dict) else tree
    return [tensor for part in parts for tensor in tensors(part)]
