"""Save a loader between two epochs: its arguments, samplers and generators.

`state_between_epochs` returns the state from which the next ``iter()`` begins an epoch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ..core.stateful import copy_state, is_stateful
from ..core.torch_private import ExceptionWrapper
from . import _random_state
from ._sampler_state import has_other_replicas, save_own_state, save_sampler
from .arguments import Loader


def ordering_parts(loader: Loader) -> dict[str, Any]:
    """Return the parts of a loader that determine its order, by name, without doubles.

    These are its generator, its sampler, its batch sampler with the sampler inside, and
    a dataset with ``set_epoch``.
    """
    found = {"generator": loader.generator, "sampler": loader.sampler}
    found["batch_sampler"] = batches = loader.batch_sampler
    found["batch_sampler.sampler"] = getattr(batches, "sampler", None)
    inner = getattr(batches, "batch_sampler", None)  # that accelerate divides
    found["batch_sampler.batch_sampler.sampler"] = getattr(inner, "sampler", None)
    found.update(dataset_part(loader.dataset))
    parts: dict[str, Any] = {}
    for name, part in found.items():
        if part is not None and all(part is not other for other in parts.values()):
            parts[name] = part
    return parts


def dataset_part(dataset: Any) -> dict[str, Any]:
    """Return a dataset by its name in `ordering_parts`, if it has ``set_epoch``."""
    has_method = callable(getattr(dataset, "set_epoch", None))
    return {"dataset": dataset} if has_method else {}


def unread_numbers(dataset: Any) -> dict[str, int]:
    """Return the integers of a dataset whose ``set_epoch`` sets no ``epoch``."""
    part = dataset_part(dataset)
    found = getattr(dataset, "__dict__", {}) if part and not find_epochs(part) else {}
    return {name: value for name, value in found.items() if type(value) is int}


def find_generators(parts: dict[str, Any]) -> dict[str, torch.Generator]:
    """Return the generators of a loader and its samplers, by the name of the part."""
    found: dict[str, torch.Generator] = {}
    for name, part in parts.items():
        if name == "dataset":  # its copies in workers have generators of their own
            continue
        generator = part if name == "generator" else getattr(part, "generator", None)
        is_known = any(generator is other for other in found.values())
        if isinstance(generator, torch.Generator) and not is_known:
            found[name] = generator
    return found


def find_epochs(parts: dict[str, Any]) -> dict[str, int]:
    """Return the epoch numbers that ``set_epoch`` has set, by the name of the part."""
    found = {name: getattr(part, "epoch", None) for name, part in parts.items()}
    return {k: v for k, v in found.items() if type(v) is int}


def set_epochs(parts: dict[str, Any], numbers: dict[str, int]) -> None:
    """Restore the epoch numbers of the parts."""
    for name, number in numbers.items():
        part: Any = parts.get(name)
        if name == "dataset" and find_epochs({name: part}) == {name: number}:
            continue  # it would pass its number on to the dataset inside of it
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)
        elif part is not None:
            with contextlib.suppress(AttributeError):  # a read-only property
                part.epoch = number


def restore_epochs(loader: Loader, saved: dict[str, int]) -> None:
    """Restore the epoch numbers of a state between two epochs.

    The user may have called ``set_epoch`` for the next epoch before loading the state.
    Such a number is kept. It differs from the last one that the loader has seen, or it
    was set before a new loader was made, and is larger than the saved one.
    """
    parts = ordering_parts(loader)
    now, progress = find_epochs(parts), loader._progress
    # It sees them when it is made, when it loads a state, and around each epoch.
    seen = loader._epochs_seen if progress is None else progress.epochs_seen
    is_new = loader._progress is None and not loader._has_loaded
    for name, number in saved.items():
        has_set = name in now and (
            now[name] != seen.get(name, now[name]) or (is_new and now[name] > number)
        )
        if not has_set:
            set_epochs(parts, {name: number})


def saved_arguments(loader: Loader) -> dict[str, Any]:
    """Return the arguments of a loader that its state depends on."""
    style = "iterable" if isinstance(loader.dataset, IterableDataset) else "map-style"
    names = ("batch_size", "drop_last", "num_workers")
    found = {"dataset": style, **{name: getattr(loader, name) for name in names}}
    return {**found, "sample_seeds": loader.sample_seeds is not False}


def state_between_epochs(
    loader: Loader, last: Any, *, asks_dataset: bool = True
) -> dict[str, Any]:
    """Return the state of a loader from which the next ``iter()`` begins an epoch.

    Args:
        loader: the ``DataLoader``.
        last: the `Progress` of its last epoch, None if there was none.
        asks_dataset: whether to save the state of a dataset in this process, and to
            raise an error of the sampler's ``state_dict``. Not before an epoch.
    """
    parts = ordering_parts(loader)
    has_ended = last is not None and last.finished
    keeps_workers = loader.persistent_workers and last is not None
    in_process = loader.num_workers == 0
    is_shared = shares_dataset(loader)
    workers: dict[str, Any] = {}
    if last is not None and (
        keeps_workers or is_shared or (in_process and has_ended and asks_dataset)
    ):
        records = last.dataset.copy_records(last.num_delivered)
        workers = {k: {**record, "ended": True} for k, record in records.items()}
    elif is_shared or (in_process and asks_dataset):
        # The loader that loads the state may have read its dataset.
        state = save_sampler(lambda: _first_state(loader))
        if isinstance(state, ExceptionWrapper):
            if isinstance(loader.dataset, IterableDataset):
                state = None  # an iterable may have no state before its iter()
            elif asks_dataset:
                state.reraise()
        if state is not None:
            record = {"given": 0, "ended": False, "state": state, "random": None}
            workers = {"0": record}
    sampler, given = _sampler_between_epochs(loader, last if has_ended else None)
    if asks_dataset and isinstance(sampler, ExceptionWrapper):
        sampler.reraise()
    iterators = loader._iterators or (2 if loader.num_workers else 1)
    return {
        "loader": {**saved_arguments(loader), "iterators": iterators},
        "random": _random_state.capture(find_generators(parts)),
        "epochs": find_epochs(parts),
        "samples": sample_numbers(loader, _next_samples(last)),
        "ranks": None,
        "errors": [],
        "base_seed": last.base_seed if keeps_workers else None,
        "sampler": sampler,
        "given": given,
        "workers": workers,
        "epoch": None,
    }


def _sampler_between_epochs(loader: Loader, ended: Any) -> tuple[Any, int]:
    """Return the state of the sampler, and the number of batches before it.

    ``ended`` is the `Progress` of an epoch that has ended, or None.
    """
    state, given = None, 0
    if ended is not None:
        state, given = ended.order and ended.order.state, ended.num_delivered
    if has_other_replicas(loader._index_sampler, state):
        state, given = None, 0  # these ranks had no batch left after a loaded state
    if state is None:  # also after an epoch without batches
        state = save_own_state(loader._index_sampler)
    return state, given


def _first_state(loader: Loader) -> dict[str, Any] | None:
    """Return the state of a dataset that has no iterator, None without state."""
    own = None if loader.replay_dataset else copy_state(loader.dataset)
    return None if own is None else {"own": own}


def _next_samples(last: Any) -> dict[str, int] | None:
    """Return the seed and the number of the epoch after a `Progress`."""
    if last is None or last.samples is None:
        return None
    return {**last.samples, "epoch": last.samples["epoch"] + 1}


def sample_numbers(
    loader: Loader, known: dict[str, int] | None
) -> dict[str, int] | None:
    """Return the seed and the number of an epoch, None if the loader needs neither.

    It needs them for ``sample_seeds``, and for replacements of samples of a map-style
    dataset. ``known`` are those of a loaded state or after the last epoch, if any.
    """
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    replaces = loader.on_error != "raise" and is_map_style
    if loader.sample_seeds is False and not replaces:
        return None
    generator = loader.generator or torch.default_generator
    return known or {"seed": generator.initial_seed(), "epoch": 0}


def shares_dataset(loader: Loader) -> bool:
    """Return True if the one thread of the workers changes the dataset's state here.

    The next epoch continues with it. Several threads have no position to save.
    """
    is_thread = loader.worker_method == "thread" and loader.num_workers == 1
    return is_thread and is_stateful(loader.dataset) and not loader.replay_dataset
