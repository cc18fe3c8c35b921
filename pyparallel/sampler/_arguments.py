"""Check arguments and states for the samplers of this folder."""

from __future__ import annotations

import importlib
from typing import Any

from ..batch.padding import Padding
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    SettingValueError,
    check_int,
    type_name,
)

#: Larger numbers of elements are not exact as floats.
_MAX_BUDGET = 2**50


def import_planner(where: str) -> Any:
    """Import the module `planner`, which needs NumPy.

    Raises:
        ImportError: NumPy is not installed.
    """
    try:
        return importlib.import_module(".planner", __package__)
    except ImportError as error:
        raise ImportError(
            f"{where} NumPy is not installed. Install it: pip install numpy."
        ) from error


def check_arguments(
    where: str,
    *,
    batch_size: int | None,
    max_padded: int | None,
    max_total: int | None,
    max_batch_size: int | None,
    padding: Padding | None,
    shuffle: bool,
    seed: int,
    window: int,
    drop_last: bool,
    skip_oversized: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a `Planner`, and the arguments that a state has.

    The four limits are 0 for None.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an impossible value, or limits exclude each other.
    """
    limits = _check_limits(where, batch_size, max_padded, max_total, max_batch_size)
    check_flags(
        where, shuffle=shuffle, drop_last=drop_last, skip_oversized=skip_oversized
    )
    if padding is not None and not isinstance(padding, Padding):
        raise BatchTypeError(
            f"{where} padding must be a Padding or None, but is {padding!r} "
            f"({type_name(padding)}). Use pyparallel.Padding."
        )
    if padding is not None and max_total is not None:
        raise BatchValueError(
            f"{where} padding must be None with max_total, but is {padding!r}. Remove "
            "it, or set max_padded."
        )
    options = {
        **limits,
        "shuffle": shuffle,
        "seed": check_int(seed, 0, f"{where} seed"),
        "window": check_int(window, 1, f"{where} window"),
        "drop_last": drop_last,
    }
    saved = {
        **options,
        "padding": repr(padding) if padding else None,
        "skip_oversized": skip_oversized,
    }
    return options, saved


def _check_limits(
    where: str,
    batch_size: int | None,
    max_padded: int | None,
    max_total: int | None,
    max_batch_size: int | None,
) -> dict[str, int]:
    if sum(limit is not None for limit in (batch_size, max_padded, max_total)) != 1:
        raise BatchValueError(
            f"{where} one of batch_size, max_padded and max_total must be set, but "
            f"they are {batch_size!r}, {max_padded!r} and {max_total!r}. Set one of "
            "them."
        )
    if max_batch_size is not None and batch_size is not None:
        raise BatchValueError(
            f"{where} max_batch_size must be None with batch_size, but is "
            f"{max_batch_size!r}. Remove it, as batch_size sets the number of samples."
        )
    values = {
        "batch_size": batch_size,
        "max_padded": max_padded,
        "max_total": max_total,
        "max_batch_size": max_batch_size,
    }
    limits = {
        name: 0 if value is None else check_int(value, 1, f"{where} {name}")
        for name, value in values.items()
    }
    # It is no less than the number of samples, and NumPy has no larger integers.
    limits["batch_size"] = min(limits["batch_size"], _MAX_BUDGET)
    for name in ("max_padded", "max_total"):
        if limits[name] > _MAX_BUDGET:
            raise BatchValueError(
                f"{where} {name} must be at most {_MAX_BUDGET}, but is {limits[name]}."
            )
    return limits


def limit_text(arguments: dict[str, Any]) -> str:
    """Return the limit of a batch as an argument: ``"batch_size=4"``."""
    names = ("batch_size", "max_padded", "max_total", "max_batch_size")
    return ", ".join(f"{name}={arguments[name]}" for name in names if arguments[name])


def check_flags(where: str, **flags: Any) -> None:
    """Check that arguments are bools.

    Raises:
        TypeError: one is not a bool.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise BatchTypeError(
                f"{where} {name} must be True or False, but is {value!r} "
                f"({type_name(value)})."
            )


def check_state(
    name: str, state: Any, version: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return a state, if an object with the same arguments has saved it.

    Args:
        name: the name of the class.
        state: the argument of ``load_state_dict``.
        version: the version of the format.
        arguments: the arguments of the object that loads the state.

    Raises:
        ValueError: the state has another format or other arguments.
    """
    where = f"{name}.load_state_dict: the state must"
    if not isinstance(state, dict) or not isinstance(state.get("arguments"), dict):
        found = list(state)[:4] if isinstance(state, dict) else type_name(state)
        raise SettingValueError(
            f"{where} come from {name}.state_dict(), but is {found}. "
            "States of other samplers are not supported."
        )
    if state.get("version") != version:
        raise SettingValueError(
            f"{where} be of version {version}, but is of version "
            f"{state.get('version')!r}. Load it with the version of pyparallel that "
            "saved it."
        )
    for argument, value in arguments.items():
        found = state["arguments"].get(argument)
        if found != value and argument == "checksum":
            raise SettingValueError(
                f"{where} be of a sampler with the same sizes, but the checksums "
                f"of the sizes differ. Use the data set of the saved run."
            )
        if found != value:
            raise SettingValueError(
                f"{where} be of a sampler with {argument}={value!r} like this one, "
                f"but is of one with {argument}={found!r}. Make the sampler with "
                f"{argument}={found!r}."
            )
    return state


def check_numbers(name: str, state: dict[str, Any], **least: int) -> dict[str, int]:
    """Return entries of a state that must be integers.

    Args:
        name: the name of the class.
        state: the argument of ``load_state_dict``.
        least: the least value of each entry.

    Raises:
        ValueError: an entry is missing, or is no such integer.
    """
    for entry, minimum in least.items():
        value = state.get(entry)
        if type(value) is not int or value < minimum:
            raise SettingValueError(
                f"{name}.load_state_dict: the entry {entry!r} of the state must be an "
                f"integer of {minimum} or more, but is {value!r}. Load an undamaged "
                "state."
            )
    return {entry: state[entry] for entry in least}


def check_history(name: str, state: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the numbers of ranks and steps of the earlier parts of an epoch.

    Raises:
        ValueError: the entry is missing or no list of pairs of positive integers.
    """
    history = state.get("history")
    if isinstance(history, list) and all(
        isinstance(part, list)
        and len(part) == 2
        and all(type(number) is int and number > 0 for number in part)
        for part in history
    ):
        return tuple((part[0], part[1]) for part in history)
    raise SettingValueError(
        f"{name}.load_state_dict: the entry 'history' of the state must be a list of "
        f"pairs of positive integers, but is {history!r}. Load an undamaged state."
    )
