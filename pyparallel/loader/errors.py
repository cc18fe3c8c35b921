"""Errors on their way from a worker to the loop.

torch raises the class of an error with one text, and a ``RuntimeError`` if the class
does not accept one text. In the second case, this package raises the original error.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from multiprocessing.reduction import ForkingPickler
from types import MemberDescriptorType
from typing import Any

from ..core.errors import add_note
from ..core.torch_private import ExceptionWrapper, in_worker_thread
from ..workers import deaths
from ..workers.interface import WorkerDied, Workers
from .tracebacks import format_indices, hide_frames, message_of, rank_text

#: The first line of a traceback.
_HEADER = "Traceback (most recent call last):\n"
#: The most batches that a message lists.
_MAX_SHOWN = 8
#: The advice for a worker that does not begin, by its start method.
_START_ADVICE = {
    "fork": "It may wait for a lock that a thread held during fork: use "
    'multiprocessing_context="forkserver", or start the workers before the threads.',
    "thread": "Look for a call in worker_init_fn or in the iter() of the dataset that "
    "blocks.",
}
#: The attributes of builtin errors that are no part of their text, and small.
_BUILTIN_ATTRIBUTES = {"errno", "name", "path"}
#: The start of `dead_worker_error`.
_DEATH = "DataLoader: a worker must live"


class RemoteTraceback(Exception):
    """The traceback of a worker: the cause of an error that was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Caught(ExceptionWrapper):
    """An exception as torch sends it, with its class and its traceback as a text.

    A ``RuntimeError`` with the name of the class takes its place if the class is
    unknown to the receiver, or does not accept one text.
    """

    def __reduce__(self) -> Any:
        try:
            kind = bytes(ForkingPickler.dumps(self.exc_type))
        except Exception:  # such as a class that a function defines
            kind = b""
        return _receive, (kind, self.exc_type.__qualname__, self.exc_msg, self.where)

    def reraise(self) -> None:
        """Raise the exception."""
        if _accepts_text(self.exc_type):
            super().reraise()  # type: ignore[no-untyped-call]  # torch's
        name = self.exc_type.__name__
        raise RuntimeError(f"Caught {name} {self.where}.\nOriginal {self.exc_msg}")


def _receive(kind: bytes, name: str, text: str, where: str) -> Caught:
    found = Caught.__new__(Caught)
    try:
        found.exc_type = pickle.loads(kind)
    except Exception:
        reason = "cannot be imported here" if kind else "does not pickle"
        found.exc_type = RuntimeError
        text = f"{name}, which {reason}, was raised.\n{text}"
    found.exc_msg, found.where = text, where
    return found


def wrap_exception(where: str, location: str = "") -> Caught:
    """Return the current exception in a form that pickles.

    Args:
        where: the process in which it was raised, as in torch's text.
        location: the samples that raised it.
    """
    kind, error, trace = sys.exc_info()
    if error is not None:
        hide_frames(error)
        trace = error.__traceback__
    where += rank_text() + (location and f", {location}")
    caught: Any = Caught  # torch's constructor has no types
    try:
        wrapper: Caught = caught((kind, error, trace), where)
    except Exception:  # of a __getattr__ of the class
        wrapper = caught((kind, None, None), where)
        text = f"{wrapper.exc_type.__qualname__}: {message_of(error)}\n"
        wrapper.exc_msg = "".join(traceback.format_tb(trace)) + text
    if _HEADER not in wrapper.exc_msg:  # all frames were this package's
        wrapper.exc_msg = _HEADER + wrapper.exc_msg
    return wrapper


def worker_text(worker: int) -> str:
    """Return the place of an error in a worker; for processes in torch's words."""
    kind = "thread" if in_worker_thread() else "process"
    return f"in DataLoader worker {kind} {worker}"


def early_end(what: str, error: BaseException, where: str) -> RuntimeError:
    """Return the error for code that must not raise ``StopIteration``."""
    return RuntimeError(
        f"DataLoader: only the sampler ends an epoch, but {what} raised "
        f"{type(error).__name__} {where}. Raise another error there."
    )


def pack_error(error: BaseException, where: str, location: str = "") -> bytes:
    """Return the error that is being handled, in a form that always pickles."""
    if isinstance(error, StopIteration):  # others are RuntimeErrors here
        try:
            raise early_end("the pickling of a batch", error, where) from error
        except RuntimeError as found:
            return pack_error(found, where, location)
    wrapper = wrap_exception(where, location)
    original = None if _accepts_text(type(error)) else _pickle_error(error)
    return bytes(ForkingPickler.dumps((wrapper, original, _attributes(error))))


def raise_error(data: bytes) -> None:
    """Raise an error of a worker."""
    wrapper, original, attributes = pickle.loads(data)
    found = None if original is None else _unpickle_error(original)
    if found is not None:
        _restore(found, attributes)
        text = f"Caught {type(found).__name__} {wrapper.where}."
        add_note(found, text)
        raise found from RemoteTraceback(f"{text}\nOriginal {wrapper.exc_msg}")
    try:
        wrapper.reraise()
    except BaseException as error:
        _restore(error, attributes)
        raise


def raise_thread_error(error: BaseException, worker: int, location: str) -> None:
    """Raise an error of a thread: the same object, with its traceback."""
    where = f"in worker thread {worker}{location and ', '}{location}"
    add_note(error, f"DataLoader{rank_text()}: {where}.")
    raise error


def _accepts_text(cls: Any) -> bool:
    """Return True if torch can make an error of the class with its own text."""
    try:
        if getattr(cls, "message", None):
            cls(message="")
        else:
            cls("")
    except BaseException:  # of the user's class
        return False
    return True


def _attributes(error: BaseException) -> dict[str, bytes | None]:
    """Return the attributes that a new error with the same text lacks, pickled.

    None: the attribute does not pickle.
    """
    names = [name for name in vars(error) if name != "__notes__"]
    for cls in type(error).__mro__:
        names += [
            name
            for name, value in vars(cls).items()
            if isinstance(value, MemberDescriptorType)
            and (cls.__module__ != "builtins" or name in _BUILTIN_ATTRIBUTES)
        ]
    packed = {}
    for name in names:
        with contextlib.suppress(Exception):  # it is not set
            packed[name] = _dump(getattr(error, name))
    return packed


def _restore(error: BaseException, attributes: dict[str, bytes | None]) -> None:
    for name, data in attributes.items():
        with contextlib.suppress(Exception):
            # A delegating __getattr__ fails without the object that it asks.
            value = _own(error, name) if data is None else pickle.loads(data)
            # An assignment would call __setattr__, which a frozen dataclass refuses.
            BaseException.__setattr__(error, name, value)


def _own(error: BaseException, name: str) -> Any:
    """Return an attribute that the constructor has set, or None."""
    try:
        return BaseException.__getattribute__(error, name)
    except AttributeError:
        return None


def _dump(value: Any) -> bytes | None:
    """Return a pickle, None if that or its unpickling raises an error."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _pickle_error(error: BaseException) -> bytes | None:
    """Return a pickle of an error, or of its class, arguments and attributes."""
    return _dump(error) or _dump(_Parts(error))


class _Parts:
    """Pickles an error that does not pickle, or whose constructor refuses its args."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        error = self._error
        args = tuple(map(_part, error.args))
        return _join, (type(error), args, _attributes(error))


def _part(value: Any) -> Any:
    """Return an argument of an error, or a replacement that pickles."""
    if _dump(value) is not None:
        return value
    if isinstance(value, BaseException):  # of a group
        return _Parts(value)
    if type(value) in (list, tuple):
        return [*map(_part, value)]
    return format_indices(value)


def _join(cls: Any, args: Any, attributes: dict[str, bytes | None]) -> BaseException:
    error: BaseException = cls.__new__(cls, *args)
    BaseException.__setattr__(error, "args", args)
    _restore(error, attributes)
    return error


def _unpickle_error(data: bytes) -> BaseException | None:
    try:
        found = pickle.loads(data)
    except Exception:  # such as of a class that is unknown here
        return None
    return found if isinstance(found, BaseException) else None


def dead_worker_error(dead: WorkerDied, pending: list[Any]) -> RuntimeError:
    """Return the error for a dead worker.

    ``pending``: the indices of each of its batches that did not arrive, if known.
    """
    shown = ", ".join(map(format_indices, pending[:_MAX_SHOWN]))
    if shown:
        more = ", ..." if len(pending) > _MAX_SHOWN else ""
        shown = f" Indices of its pending batches: {shown}{more}."
    return RuntimeError(
        f"{_DEATH} to the end of its epoch, but worker "
        f"{dead.worker} (pid {dead.pid}{rank_text(', {}')}) died "
        f"({deaths.exit_text(dead.code)}).{shown} {deaths.advice(dead.code)}"
    )


def late_text(pool: Workers, worker: int, pending: list[Any], start_method: str) -> str:
    """Return the state of a worker whose batch is late, and advice.

    ``pending`` are as in `dead_worker_error`.
    """
    batch = "its batch"
    if pending:
        batch = f"the batch of indices {format_indices(pending[0])}"
    text = f"worker {worker} ({pool.name(worker)}{rank_text(', {}')})"
    if pool.has_begun(worker):
        text = (
            f"{text} has not finished {batch}. Increase timeout, or look for a call in "
            "the dataset that blocks."
        )
        return text if pool.packs else f"{text} Its stack:\n{pool.stack(worker)}"
    stack = pool.stack(worker)
    advice = _START_ADVICE.get(
        start_method,
        f"With {start_method} it first imports the main module and unpickles the "
        "dataset. Look for a slow import, or for a call in worker_init_fn that blocks.",
    )
    return f"{text} is alive but has not begun {batch}. {advice}" + (
        f" The stack of the worker:\n{stack}" if stack else ""
    )


def is_torch_report(error: BaseException) -> bool:
    """Return True for torch's report of a dead worker."""
    return isinstance(error, RuntimeError) and message_of(error).startswith(
        "DataLoader worker (pid"
    )


def is_death_report(error: BaseException) -> bool:
    """Return True for torch's or this package's report of a dead worker."""
    return is_torch_report(error) or (
        isinstance(error, RuntimeError) and message_of(error).startswith(_DEATH)
    )
