"""The training of a pipeline as a user of torch writes it, for `predicted`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from .pipelines import PIPELINES
from .ways import TORCH, WAYS, order_of


def main(name: str, folder: str, *quick: str) -> None:
    """Train for three epochs with the files of a folder."""
    torch.set_num_threads(1)
    pipeline = PIPELINES[name](Path(folder), bool(quick))
    loader = WAYS[TORCH].make(pipeline, order_of(pipeline))
    step = pipeline.training()
    for _ in range(3):
        for batch in loader:
            step(batch).item()


if __name__ == "__main__":
    main(*sys.argv[1:])
