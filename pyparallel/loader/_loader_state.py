"""Save what a loader is between two epochs: its arguments, samplers and generators.

`state_between_epochs` returns the state from which the next ``iter()`` begins an epoch.
`from_version_1` converts states that earlier versions wrote.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import IterableDataset

from . import _random_state
from ._sampler_state import copy_state, is_stateful, unwrap_batch_sampler

#: Of the form of the state. A state of another version is refused.
VERSION = 2


def ordering_parts(loader: Any) -> dict[str, Any]:
    """Return what gives a loader its order, by name, everything once."""
    found = {"generator": loader.generator, "sampler": loader.sampler}
    found["batch_sampler"] = loader.batch_sampler
    found["batch_sampler.sampler"] = getattr(loader.batch_sampler, "sampler", None)
    parts: dict[str, Any] = {}
    for name, part in found.items():
        if part is not None and all(part is not other for other in parts.values()):
            parts[name] = part
    return parts


def find_generators(parts: dict[str, Any]) -> dict[str, torch.Generator]:
    """Return the generators of a loader and its samplers, by the name of the part."""
    found: dict[str, torch.Generator] = {}
    for name, part in parts.items():
        made = part if name == "generator" else getattr(part, "generator", None)
        known = any(made is other for other in found.values())
        if isinstance(made, torch.Generator) and not known:
            found[name] = made
    return found


def find_epochs(parts: dict[str, Any]) -> dict[str, int]:
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


def saved_arguments(loader: Any) -> dict[str, Any]:
    """Return the arguments of a loader that its state depends on."""
    kind = "iterable" if isinstance(loader.dataset, IterableDataset) else "map-style"
    names = ("batch_size", "drop_last", "num_workers", "sample_seeds")
    return {"dataset": kind, **{name: getattr(loader, name) for name in names}}


def state_between_epochs(
    loader: Any, before: Any, *, asks: bool = True
) -> dict[str, Any]:
    """Return the state of a loader from which the next ``iter()`` begins an epoch.

    Args:
        loader: the ``DataLoader``.
        before: the `Progress` of its last epoch, None if there was none.
        asks: whether to ask a dataset in this process for its state.
    """
    parts = ordering_parts(loader)
    ended = before is not None and before.finished
    kept = loader.persistent_workers and before is not None
    inside = loader.num_workers == 0
    workers: dict[str, Any] = {}
    sampler = None
    if before is not None and (kept or (inside and ended and asks)):
        workers = {
            k: {**v, "ended": True} for k, v in before.dataset.now(before.given).items()
        }
    elif inside and asks and _is_map_style(loader.dataset):
        if (own := copy_state(loader.dataset)) is not None:
            record = {"given": 0, "ended": False, "state": {"own": own}, "random": None}
            workers = {"0": record}
    if before is not None and ended and before.order is not None:
        sampler = before.order.state
    elif is_stateful(inner := unwrap_batch_sampler(loader._index_sampler)):
        sampler = {"own": copy_state(inner), "iterator": None, "ended": False}
    return {
        "version": VERSION,
        "loader": saved_arguments(loader),
        "random": _random_state.capture(find_generators(parts)),
        "epochs": find_epochs(parts),
        "samples": _next_samples(loader, before),
        "base_seed": before.base_seed if kept else None,
        "sampler": sampler,
        "given": before.given if before is not None and ended else 0,
        "workers": workers,
        "epoch": None,
    }


def _next_samples(loader: Any, before: Any) -> dict[str, int] | None:
    """Return the seed and the epoch for random states of samples in the next epoch."""
    if not loader.sample_seeds:
        return None
    if before is not None and before.samples is not None:
        return {**before.samples, "epoch": before.samples["epoch"] + 1}
    generator = loader.generator or torch.default_generator
    return {"seed": generator.initial_seed(), "epoch": 0}


def from_version_1(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of version 1, which had tensors, in today's form."""
    convert = _random_state.from_version_1
    state = copy.deepcopy(state)
    workers = {str(worker): record for worker, record in state["workers"].items()}
    for record in workers.values():
        record["random"] = record["random"] and convert(record["random"])
    if state["epoch"] is not None:
        state["epoch"]["start"] = convert(state["epoch"]["start"])
    state.update(version=VERSION, random=convert(state["random"]), workers=workers)
    state["loader"]["sample_seeds"] = False
    state["samples"] = None
    return state


def _is_map_style(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset)
