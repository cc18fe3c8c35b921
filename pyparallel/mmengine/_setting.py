"""Settings as a config can write them: names of enums, functions and dtypes."""

from __future__ import annotations

import enum
import functools
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from ..core.errors import (
    SettingTypeError,
    SettingValueError,
    UnknownNameError,
    type_name,
)
from ._upstream import upstream

_Enum = TypeVar("_Enum", bound=enum.Enum)


def member(value: Any, of: type[_Enum], where: str) -> _Enum | None:
    """Return a member of an enum that is given by name, as it is, or as None.

    Raises:
        KeyError: no member has this name.
        TypeError: another kind.
    """
    if isinstance(value, str):
        if value not in of.__members__:
            names = ", ".join(of.__members__)
            raise UnknownNameError(f"{where} must be one of {names}, but is {value!r}.")
        return of[value]
    if value is not None and not isinstance(value, of):
        raise SettingTypeError(
            f"{where} must be a {of.__name__}, its name or None, but is "
            f"{type_name(value)}."
        )
    return value


def function(value: Any, where: str) -> Any:
    """Return a function given as it is, by name, or by a dict with more arguments.

    Args:
        value: a callable; a name in mmengine's ``FUNCTIONS``, or a dotted path; a dict
            with either as ``type`` and arguments; None. It stays as it is.
        where: what it is, for the messages.

    Raises:
        TypeError: another kind, or a dict without ``type``.
        ValueError: nothing has this name.
    """
    if value is None or (callable(value) and not isinstance(value, str)):
        return value
    if isinstance(value, str):
        return _named(value, where)
    if isinstance(value, Mapping) and "type" in value:
        arguments = dict(value)
        named = function(arguments.pop("type"), f"{where}['type']")
        return functools.partial(named, **arguments)
    raise SettingTypeError(
        f"{where} must be a function, its name, a dict with 'type' or None, but is "
        f"{value!r} ({type_name(value)})."
    )


def dtypes(value: Any, cls: Any, where: str) -> Any:
    """Return an object of ``cls`` from a dict in which dtypes may be names.

    Raises:
        TypeError: neither a dict, an object of ``cls`` nor None; a key that ``cls``
            does not have; a dtype of another kind.
        ValueError: torch has no dtype of a name.
    """
    if value is None or isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise SettingTypeError(
            f"{where} must be a {cls.__name__}, a dict or None, but is "
            f"{type_name(value)}."
        )
    read = {
        key: _dtype(each, f"{where}[{key!r}]") if key.endswith("_dtype") else each
        for key, each in value.items()
    }
    try:
        return cls(**read)
    except TypeError as error:
        raise SettingTypeError(
            f"{where} must hold arguments of {cls.__name__}, but is {dict(value)!r}: "
            f"{error}."
        ) from error


def by_name(
    values: Iterable[Any] | None, named: Mapping[str, Any], where: str
) -> list[Any] | None:
    """Return a list in which names are replaced by what they name.

    Args:
        values: names, or parameters or modules themselves; None.
        named: of the model.
        where: what it is, for the messages.

    Raises:
        KeyError: the model has nothing of this name.
        TypeError: no list or the like.
    """
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SettingTypeError(f"{where} must be a list, but is {values!r}.")
    listed = list(values)
    for each in listed:
        if isinstance(each, str) and each not in named:
            raise UnknownNameError(f"{where} must be of the model, but has {each!r}.")
        if not isinstance(each, str | torch.nn.Parameter | torch.nn.Module):
            raise SettingTypeError(
                f"{where} must hold names, parameters or modules, but has "
                f"{type_name(each)}."
            )
    return [named[each] if isinstance(each, str) else each for each in listed]


def _named(name: str, where: str) -> Any:
    functions = upstream("FUNCTIONS")
    found = None if functions is None else functions.get(name)
    if found is None:
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            found = None
    if not callable(found):
        raise SettingValueError(
            f"{where} must be the name of a function, but there is none for {name!r}. "
            "Give its dotted path, or register it in mmengine's FUNCTIONS."
        )
    return found


def _dtype(value: Any, where: str) -> torch.dtype | None:
    if isinstance(value, str):
        found = getattr(torch, value, None)
        if not isinstance(found, torch.dtype):
            raise SettingValueError(f"{where} must be a dtype, but is {value!r}.")
        return found
    if value is not None and not isinstance(value, torch.dtype):
        raise SettingTypeError(
            f"{where} must be a torch.dtype, its name or None, but is "
            f"{type_name(value)}."
        )
    return value
