"""Error classes and the one way in which messages name a place in a batch.

Every class is also the class that mmcv, mmengine or torch raised at that place, so that
``except AssertionError`` in old code keeps working. The builtin bases come first in
the order of meaning: ``TypeError`` for the wrong kind, ``ValueError`` for the wrong
value.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any


class Error(Exception):
    """The base of every error class of this package.

    Each of them also has the builtin bases that fit. Some errors are plain builtin
    ones, and errors of user code keep their class.
    """


class BatchValueError(ValueError, AssertionError, RuntimeError, Error):
    """A value or a shape that the rest of the batch does not allow.

    mmcv 1.x raised a bare ``AssertionError`` or left torch to raise ``RuntimeError``.
    """


class BatchTypeError(TypeError, AssertionError, RuntimeError, Error):
    """An object of a kind that cannot stand at this place of a batch.

    mmcv 1.x raised a bare ``AssertionError`` or ``Exception``, or left torch to raise
    ``RuntimeError``.
    """


class MissingKeyError(ValueError, KeyError, Error):
    """A sample lacks a key that the first sample has (mmcv 1.x: ``KeyError``)."""

    def __str__(self) -> str:
        """Return the message as it is; ``KeyError`` would quote it."""
        return ValueError.__str__(self)


class EmptyBatchError(ValueError, IndexError, Error):
    """A batch without samples (mmcv 1.x: ``IndexError``)."""


class BatchMemoryError(MemoryError, RuntimeError, Error):
    """A batch that the memory does not hold (torch: ``RuntimeError``)."""


class SplitError(ValueError, IndexError, RuntimeError, Error):
    """A tensor that cannot be split as asked.

    torch raised ``IndexError`` for a dimension out of range and ``RuntimeError`` for a
    tensor without dimensions.
    """


class SettingValueError(ValueError, AssertionError, Error):
    """A setting that is not allowed (mmengine: a bare ``AssertionError``)."""


class SettingTypeError(TypeError, AssertionError, Error):
    """A setting of the wrong kind (mmengine: a bare ``AssertionError``)."""


class LossTypeError(TypeError, AttributeError, Error):
    """A loss that is no tensor (mmengine: 'float' object has no 'backward')."""


class CountError(RuntimeError, AssertionError, Error):
    """More steps than were announced (mmengine: ``AssertionError``, or silence)."""


class UnknownNameError(KeyError, AssertionError, Error):
    """A name that is not there (mmengine: a bare ``AssertionError``)."""

    def __str__(self) -> str:
        """Return the message as it is; ``KeyError`` would quote it."""
        return AssertionError.__str__(self)


class ModelsDifferError(ValueError, RuntimeError, Error):
    """Models that differ between ranks.

    torch raised ``RuntimeError`` on some of the ranks, was aborted, or said nothing.
    """


class NoSingleAnswerError(NotImplementedError, AttributeError, Error):
    """What each of several wrappers has, and all of them together have not.

    mmengine raised ``NotImplementedError`` for some and ``AttributeError`` for others,
    which ``hasattr`` relies on.
    """


def format_path(root: str, keys: Iterable[Any]) -> str:
    """Return ``root`` indexed by ``keys`` as the user would type it.

    Attribute names (fields of dataclasses and namedtuples) are given as ``Field``.

    Example:
        >>> format_path("batch[1]", ["img", 0, Field("boxes")])
        "batch[1]['img'][0].boxes"
    """
    return root + "".join(
        f".{key}" if isinstance(key, Field) else f"[{key!r}]" for key in keys
    )


class Field(str):
    """A step of a path that is an attribute, not an index."""

    __slots__ = ()


def type_name(value: object) -> str:
    """Return the type of ``value`` as messages show it: ``torch.Tensor``, ``None``."""
    if value is None:
        return "None"
    cls = type(value)
    module = cls.__module__
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"


def check_int(value: Any, least: int, where: str, rule: str = "an integer") -> int:
    """Return an integer of ``least`` or more.

    Args:
        value: anything with ``__index__``.
        least: the smallest that is allowed.
        where: what the value is, for the message: ``"collate: samples_per_gpu"``.
        rule: what else is allowed, before "of ... or more".

    Raises:
        TypeError: it is no integer.
        ValueError: it is too small.
    """
    if type(value) is int and value >= least:
        return value
    text = f"{where} must be {rule} of {least} or more, but is"
    try:
        number = operator.index(value)
    except TypeError:
        raise BatchTypeError(f"{text} {value!r} ({type_name(value)}).") from None
    if number < least:
        raise BatchValueError(f"{text} {value!r}.")
    return number


class BatchWarning(UserWarning):
    """Something in a batch that mmcv 1.x let pass in silence."""


class LoaderWarning(UserWarning):
    """A loader works, but not as well as it could; the message has the number."""


class OptimWarning(UserWarning):
    """An optimizer wrapper works, but its gradients are not what one may expect."""


#: The packages between a line of the user and a warning, also in workers and threads.
_BETWEEN = {"pyparallel", "torch", "threading", "multiprocessing"}


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the stack that is the user's."""
    level, frame = 2, sys._getframe(1)
    while not _is_users(frame):
        if frame.f_back is None:  # a thread that no line of the user has started
            level = 2
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def called_by_user(level: int) -> bool:
    """Return True if the caller of this many functions above is a line of the user."""
    return _is_users(sys._getframe(level + 1))


def _is_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN


_warned: set[str] = set()


def has_warned(code: str, place: str = "") -> bool:
    """Tell whether `warn_once` would say nothing."""
    return f"{code} {place}" in _warned


def warn_once(
    code: str,
    message: str,
    category: type[UserWarning] = BatchWarning,
    place: str = "",
) -> None:
    """Warn the first time that this process meets ``code`` at ``place``.

    Args:
        code: ``PP`` and three digits; `docs/warnings.md` has all of them.
        message: what should hold, what was found, and what to do.
        category: of the warning.
        place: tells apart what one code may stand for.
    """
    if not has_warned(code, place):
        _warned.add(f"{code} {place}")
        warn(f"[{code}] {message}", category)
