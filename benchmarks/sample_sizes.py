"""Synthetic sizes of samples, as data sets have them."""

from __future__ import annotations

from typing import Any

import numpy as np


def coco_sizes(number: int) -> Any:
    """Return heights and widths of photographs resized to fit in 1333x800.

    As in COCO, most photographs have one of a few ratios, and the longer side is 640.
    """
    generator = np.random.default_rng(0)
    short = generator.choice([480, 427, 426, 425], number, p=[0.55, 0.25, 0.1, 0.1])
    is_other = generator.random(number) < 0.3
    short = np.where(is_other, generator.integers(300, 641, number), short)
    scale = np.minimum(800 / short, 1333 / 640)
    sides = np.stack([short * scale, 640 * scale], axis=1).round().astype(int)
    is_portrait = generator.random(number) < 0.27
    return np.where(is_portrait[:, None], sides[:, ::-1], sides)


def demo_sizes(number: int) -> Any:
    """Return heights and widths as of the scenes of ``examples/ragged_digits.py``."""
    generator = np.random.default_rng(1)
    heights = generator.integers(16, 49, number)
    return np.stack([heights, generator.integers(24, 129, number)], axis=1)


def sentence_lengths(number: int) -> Any:
    """Return log-normal numbers of tokens."""
    lengths = np.random.default_rng(2).lognormal(3, 0.7, number)
    return np.clip(lengths, 1, 512).astype(int)


def audio_lengths(number: int) -> Any:
    """Return numbers of frames with a gamma distribution."""
    lengths = np.random.default_rng(3).gamma(2, 300, number)
    return np.clip(lengths, 30, 3500).astype(int)
