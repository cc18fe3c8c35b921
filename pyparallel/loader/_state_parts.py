"""What gives a loader its order: its arguments, samplers and generators, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset


def parts_of(loader: Any) -> dict[str, Any]:
    """Return what gives a loader its order, by name, everything once."""
    found = {"generator": loader.generator, "sampler": loader.sampler}
    found["batch_sampler"] = loader.batch_sampler
    found["batch_sampler.sampler"] = getattr(loader.batch_sampler, "sampler", None)
    parts: dict[str, Any] = {}
    for name, part in found.items():
        if part is not None and all(part is not other for other in parts.values()):
            parts[name] = part
    return parts


def generators_of(parts: dict[str, Any]) -> dict[str, torch.Generator]:
    """Return the generators of a loader and its samplers, by the name of the part."""
    found: dict[str, torch.Generator] = {}
    for name, part in parts.items():
        made = part if name == "generator" else getattr(part, "generator", None)
        known = any(made is other for other in found.values())
        if isinstance(made, torch.Generator) and not known:
            found[name] = made
    return found


def epochs_of(parts: dict[str, Any]) -> dict[str, int]:
    """Return the numbers that ``set_epoch`` has set, by the name of the part."""
    found = {name: getattr(part, "epoch", None) for name, part in parts.items()}
    return {k: v for k, v in found.items() if type(v) is int}


def set_epochs(parts: dict[str, Any], numbers: dict[str, int]) -> None:
    """Set the numbers of epochs again."""
    for name, number in numbers.items():
        part: Any = parts.get(name)
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)
        elif part is not None:
            part.epoch = number


def arguments_of(loader: Any) -> dict[str, Any]:
    """Return the arguments of a loader that its state depends on."""
    kind = "iterable" if isinstance(loader.dataset, IterableDataset) else "map-style"
    names = ("batch_size", "drop_last", "num_workers", "sample_seeds")
    return {"dataset": kind, **{name: getattr(loader, name) for name in names}}
