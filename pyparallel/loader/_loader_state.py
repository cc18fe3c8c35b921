"""The state of a loader between two epochs, and states that earlier versions wrote."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import IterableDataset

from . import _random_state
from ._sampler_state import is_stateful, state_of, with_state
from ._state_parts import arguments_of, epochs_of, generators_of, parts_of

#: Of the form of the state. A state of another version is refused.
VERSION = 2


def idle_state(loader: Any, before: Any, *, asks: bool = True) -> dict[str, Any]:
    """Return the state of a loader from which the next ``iter()`` begins an epoch.

    Args:
        loader: the ``DataLoader``.
        before: the `Progress` of its last epoch, None if there was none.
        asks: whether to ask a dataset in this process for its state.
    """
    parts = parts_of(loader)
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
        if (own := state_of(loader.dataset)) is not None:
            record = {"given": 0, "ended": False, "state": {"own": own}, "random": None}
            workers = {"0": record}
    if before is not None and ended and before.order is not None:
        sampler = before.order.state
    elif is_stateful(inner := with_state(loader._index_sampler)):
        sampler = {"own": state_of(inner), "iterator": None, "ended": False}
    return {
        "version": VERSION,
        "loader": arguments_of(loader),
        "random": _random_state.capture(generators_of(parts)),
        "epochs": epochs_of(parts),
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
