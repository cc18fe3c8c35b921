"""Errors for unknown names of options, with the name that was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch

from ..core.errors import BatchTypeError

_Class = TypeVar("_Class", bound=type)

#: Names that functions of this and of other libraries use for the same option.
_SYNONYMS = (
    {"divisor", "size_divisor", "pad_size_divisor", "size_divisibility"}
    | {"multiple", "multiple_of", "pad_to_multiple_of"},
    {"value", "padding_value", "pad_value", "fill", "fill_value", "pad_val"},
    {"dims", "pad_dims", "num_dims", "ndim", "ndims", "dim"},
    {"side", "padding_side", "pad_side"},
    {"shape", "size", "pad_shape", "max_length", "target", "target_size"},
    {"sizes", "lengths", "return_sizes", "return_lengths"},
    {"mask", "return_mask", "attention_mask", "masks"},
)


def meant_by(name: str, options: Collection[str]) -> str | None:
    """Return the option that a name probably means, or None."""
    for names in _SYNONYMS:
        if name in names:
            return next((each for each in options if each in names), None)
    return next(iter(difflib.get_close_matches(name, options, 1)), None)


def checked_options(
    cls: _Class,
    advice: Mapping[str, str] | None = None,
    other_names: Mapping[str, str] | None = None,
) -> _Class:
    """Make the constructor of a dataclass name the option that was probably meant.

    Args:
        cls: the class; it is changed.
        advice: what to do instead, by the name of an option of a similar class.
        other_names: options by their other names.

    Raises:
        TypeError: an option is given by both names.
    """
    other_names = other_names or {}
    init: Any = cls.__init__  # type: ignore[misc]
    options = list(inspect.signature(cls).parameters)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in list(kwargs):
            if option := other_names.get(name):
                if option in kwargs:
                    raise BatchTypeError(
                        f"{cls.__name__}: {name} is another name of {option}, but "
                        f"both were given. Remove {name}."
                    )
                kwargs[option] = kwargs.pop(name)
            elif name not in options:
                raise _unknown(cls.__name__, name, options, advice or {})
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def text_of(options: Any) -> str:
    """Return the call of a dataclass with the options that are not the default."""
    shown = [
        f"{each.name}={getattr(options, each.name)!r}"
        for each in sorted(
            dataclasses.fields(options), key=lambda each: each.kw_only is True
        )
        if each.init and getattr(options, each.name) != each.default
    ]
    return f"{type(options).__name__}({', '.join(shown)})"


def check_dtype(where: str, dtype: Any) -> None:
    """Raise unless an option is None or a dtype of floating-point numbers."""
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        raise BatchTypeError(
            f"{where}: dtype must be a floating-point torch.dtype, but is {dtype!r}."
        )


def _unknown(
    where: str, name: str, options: Collection[str], advice: Mapping[str, str]
) -> Exception:
    rule = (
        f"options must be {', '.join(options)}" if options else "there are no options"
    )
    meant, other = meant_by(name, options), meant_by(name, advice)
    if meant is not None:
        todo = f"Did you mean {meant}?"
    elif other is not None:
        todo = advice[other]
    else:
        todo = "Remove it."
    return BatchTypeError(f"{where}: {rule}, but {name} was given. {todo}")
