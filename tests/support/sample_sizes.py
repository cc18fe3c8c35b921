"""Synthetic sizes of samples, as data sets have them."""

from __future__ import annotations

from typing import Any

import numpy as np


def coco_sizes(number: int) -> Any:
    """Return heights and widths of photographs resized to fit in 1333x800."""
    generator = np.random.default_rng(0)
    kinds = generator.random(number)
    ratios = np.where(kinds < 0.55, 4 / 3, generator.uniform(0.5, 2, number))
    ratios = np.where((kinds >= 0.55) & (kinds < 0.85), 3 / 4, ratios)
    ratios *= generator.lognormal(0, 0.05, number)
    long = np.minimum(1333, 800 * np.maximum(ratios, 1 / ratios))
    heights = np.where(ratios > 1, long / ratios, long)
    return np.stack([heights, heights * ratios], axis=1).astype(int)


def demo_sizes(number: int) -> Any:
    """Return independent heights and widths, as of the demo's scenes."""
    return np.random.default_rng(1).integers(48, 200, (number, 2))


def sentence_lengths(number: int) -> Any:
    """Return log-normal numbers of tokens."""
    lengths = np.random.default_rng(2).lognormal(3, 0.7, number)
    return np.clip(lengths, 1, 512).astype(int)


def audio_lengths(number: int) -> Any:
    """Return numbers of frames with a gamma distribution."""
    lengths = np.random.default_rng(3).gamma(2, 300, number)
    return np.clip(lengths, 30, 3500).astype(int)
