"""Error and warning classes, and helpers that format their messages.

Every error class derives from the class that mmcv, mmengine or torch raises in the same
situation, so ``except AssertionError`` in existing code keeps working. The first base
states the meaning: ``TypeError`` for a wrong type, ``ValueError`` for a wrong value.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

_Error = TypeVar("_Error", bound=Exception)
_Entered = TypeVar("_Entered")
_P = ParamSpec("_P")


class Error(Exception):
    """Base of every error class of this package.

    The classes also derive from the matching builtin exceptions. Some errors of the
    package are plain builtin exceptions. Errors of user code keep their class.
    """


class BatchValueError(ValueError, AssertionError, RuntimeError, Error):
    """A value or shape that does not match the rest of the batch.

    mmcv 1.x raised a bare ``AssertionError``, or torch raised ``RuntimeError``.
    """


class BatchTypeError(TypeError, AssertionError, RuntimeError, Error):
    """An object of a type that this place of a batch does not support.

    mmcv 1.x raised a bare ``AssertionError`` or ``Exception``, or torch raised
    ``RuntimeError``.
    """


class MissingKeyError(ValueError, KeyError, Error):
    """A sample lacks a key that the first sample has (mmcv 1.x: ``KeyError``)."""

    def __str__(self) -> str:
        """Return the message without the quotes that ``KeyError`` adds."""
        return ValueError.__str__(self)


class EmptyBatchError(ValueError, IndexError, Error):
    """A batch without samples (mmcv 1.x: ``IndexError``)."""


class BatchMemoryError(MemoryError, RuntimeError, Error):
    """A batch that does not fit in memory (torch: ``RuntimeError``)."""


class NoDataError(ValueError, NotImplementedError, Error):
    """A meta tensor that would be copied (torch: ``NotImplementedError``)."""


class SplitError(ValueError, IndexError, RuntimeError, Error):
    """A tensor that cannot be split as requested.

    torch raises ``IndexError`` for a dimension out of range and ``RuntimeError`` for a
    tensor without dimensions.
    """


class SettingValueError(ValueError, AssertionError, Error):
    """A setting with an invalid value (mmengine: a bare ``AssertionError``)."""


class SettingTypeError(TypeError, AssertionError, Error):
    """A setting of the wrong type (mmengine: a bare ``AssertionError``)."""


class LossTypeError(TypeError, AttributeError, Error):
    """A loss that is not a tensor (mmengine: 'float' object has no 'backward')."""


class CountError(RuntimeError, AssertionError, Error):
    """More steps than announced (mmengine: ``AssertionError``, or no error)."""


class ErrorLimitError(RuntimeError, Error):
    """More samples raised an error than ``max_errors`` of a loader allows."""


class UnknownNameError(KeyError, AssertionError, Error):
    """A name that does not exist (mmengine: a bare ``AssertionError``)."""

    def __str__(self) -> str:
        """Return the message without the quotes that ``KeyError`` adds."""
        return AssertionError.__str__(self)


class ModelsDifferError(ValueError, RuntimeError, Error):
    """Models that differ between ranks.

    torch raises ``RuntimeError`` on some ranks, aborts, or does not detect it.
    """


class NoSingleAnswerError(NotImplementedError, AttributeError, Error):
    """An attribute of each wrapper in a group that the group itself does not have.

    mmengine raises ``NotImplementedError`` for some of these attributes. For others it
    raises ``AttributeError``, which ``hasattr`` relies on.
    """


def with_advice(cls: type[_Error], problem: str, advice: str = "") -> _Error:
    """Return an error whose advice a caller may replace; see `problem_of`."""
    error = cls(f"{problem} {advice}" if advice else problem)
    error.__dict__["_problem"] = problem
    return error


def problem_of(error: Exception) -> str | None:
    """Return the message without its advice; None if the advice must stay."""
    problem: str | None = error.__dict__.get("_problem")
    return problem


class Block(Generic[_Entered]):
    """The context manager of a function in `restoring`."""

    def __init__(self, steps: Generator[_Entered, None, None]) -> None:
        self._steps = steps

    def __enter__(self) -> _Entered:
        """Run the function to its ``yield``."""
        return next(self._steps)

    def __exit__(self, *error: object) -> None:
        """Run the rest of the function. It does not see the error of the block."""
        next(self._steps, None)


def restoring(
    function: Callable[_P, Generator[_Entered, None, None]],
) -> Callable[_P, Block[_Entered]]:
    """Return a context manager for blocks that run code of the user.

    The rest of the function runs at each end of the block. `contextlib.contextmanager`
    would set the traceback of an error of the block, which a frozen dataclass refuses
    with an error of its own.
    """

    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> Block[_Entered]:
        return Block(function(*args, **kwargs))

    return make


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, which keeps its class, attributes and traceback.

    Python 3.10 prints no notes. There the note becomes the cause of an error that has
    none.
    """
    with contextlib.suppress(Exception):  # such as of a frozen dataclass
        if hasattr(error, "add_note"):
            error.add_note(note)
            return
        noted: Any = error
        noted.__notes__ = [*getattr(error, "__notes__", ()), note]
        if error.__cause__ is None:
            error.__cause__ = error.__context__ or RuntimeError(note)


def format_path(root: str, keys: Iterable[Any]) -> str:
    """Return ``root`` indexed by ``keys``, as Python code.

    Args:
        root: the name of the outermost object.
        keys: indices and keys. A `Field` is an attribute of a dataclass or namedtuple.

    Example:
        >>> format_path("batch[1]", ["img", 0, Field("boxes")])
        "batch[1]['img'][0].boxes"
    """
    return root + "".join(
        f".{key}" if isinstance(key, Field) else f"[{key!r}]" for key in keys
    )


class Field(str):
    """A path component that is an attribute, not an index."""

    __slots__ = ()


def type_name(value: object) -> str:
    """Return the type of ``value`` for messages: ``"torch.Tensor"``, ``"None"``."""
    if value is None:
        return "None"
    cls = type(value)
    module = cls.__module__
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"


def check_int(value: Any, least: int, where: str, rule: str = "an integer") -> int:
    """Return ``value`` as an integer of ``least`` or more.

    Args:
        value: any object with ``__index__``.
        least: the smallest valid value.
        where: the name of the value in messages: ``"collate: samples_per_gpu"``.
        rule: the valid types in messages, before "of ... or more".

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is less than ``least``.
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


def plain_number(value: Any) -> Any:
    """Return a scalar of NumPy or torch as a number of Python, others unchanged.

    Arithmetic with such a scalar overflows, and ``json`` and torch reject some of them.
    """
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_scalar else value


def check_whole(value: Any, least: int, where: str) -> int:
    """Return `check_int` of a value that may also be a float such as 2.0."""
    is_whole = isinstance(value, float) and value.is_integer()
    return check_int(int(value) if is_whole else value, least, where)


class BatchWarning(UserWarning):
    """A property of a batch that mmcv 1.x silently accepted."""


class LoaderWarning(UserWarning):
    """A loader works, but not optimally; the message has the numbers."""


class OptimWarning(UserWarning):
    """An optimizer wrapper works, but its gradients may be unexpected."""


#: Packages whose frames are skipped to find the user's line, also in workers.
_INTERNAL = {"pyparallel", "torch", "threading", "multiprocessing"}


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line of user code on the stack."""
    level, frame = 2, sys._getframe(1)
    while not _is_user_code(frame):
        if frame.f_back is None:  # a thread without user code
            level = 2
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def called_by_user(level: int) -> bool:
    """Return True if the frame ``level`` calls above the caller is user code."""
    return _is_user_code(sys._getframe(level + 1))


def _is_user_code(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _INTERNAL


_warned: set[str] = set()


def has_warned(code: str, place: str = "") -> bool:
    """Return True if `warn_once` has issued this warning."""
    return f"{code} {place}" in _warned


def warn_once(
    code: str,
    message: str,
    category: type[UserWarning] = BatchWarning,
    place: str = "",
) -> None:
    """Issue a warning once in this process for each ``code`` and ``place``.

    Args:
        code: ``PP`` and three digits; `docs/warnings.md` lists all of them.
        message: the problem with its values, and the fix.
        category: the class of the warning.
        place: distinguishes several warnings of one code.
    """
    if not has_warned(code, place):
        _warned.add(f"{code} {place}")
        warn(f"[{code}] {message}", category)
