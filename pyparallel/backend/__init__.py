"""The operators of the compiled or the pure Python backend, chosen at import.

``PYPARALLEL_BACKEND`` is ``auto`` (the default), ``native`` or ``python``. With
``auto``, pure Python runs without a warning if there is no extension. If the extension
does not fit the installed torch, or fails to load, pure Python runs and a
``RuntimeWarning`` gives the reason. With ``native``, each of these is an
``ImportError``.

Attributes:
    name: ``"native"`` or ``"python"``.
    reason: the reason for the choice, in a sentence.
    load_error: the exception from loading the extension, or None.
    built_for: the build record of the extension; empty without an extension.
    ALIGNMENT: the slots of a slab start at multiples of this number of bytes.
    devices: the device types of tensors that the operators support.
    transfers: the device types that ``send`` copies to; empty in pure Python.

All other names are the operators and classes of the backend. ``_C.pyi`` is their
contract.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch  # also loads the libraries that the extension needs

from . import _python
from ._checks import ALIGNMENT as ALIGNMENT
from .build_record import REBUILD, find, list_other_pythons, mismatch

if TYPE_CHECKING:
    from ._C import *  # noqa: F403  # the stub has all operators

_VALUES = ("auto", "native", "python")
_OPERATORS = tuple(_python.__all__)
_CONTRACT = (*_OPERATORS, "devices", "transfers", "build_info")


class Choice(NamedTuple):
    """The backend, the reason for it, and the error that rules out the other one."""

    name: str
    reason: str
    module: Any = None  # the loaded extension; None for pure Python
    load_error: Exception | None = None
    warns: bool = False


def choose(
    requested: str,
    record: dict[str, Any] | None,
    torch_version: str,
    cuda_version: str | None,
    load: Callable[[], Any],
    others: Sequence[str] = (),
) -> Choice:
    """Choose the backend.

    Args:
        requested: the value of ``PYPARALLEL_BACKEND``.
        record: the build record; None without an extension.
        torch_version: the version of the running torch.
        cuda_version: the CUDA version of the running torch; None for a CPU build.
        load: imports the extension; called only if the record fits.
        others: the files of extensions for other Python versions.

    Raises:
        ValueError: ``requested`` is not one of the three values.
        ImportError: ``requested`` is ``native`` and the extension cannot be used.
    """
    if requested not in _VALUES:
        raise ValueError(
            "PYPARALLEL_BACKEND must be auto, native or python, but is "
            f"{requested!r}. Unset it for auto."
        )
    if requested == "python":
        return Choice("python", "PYPARALLEL_BACKEND=python asks for it.")
    choice = _try_native(record, torch_version, cuda_version, load, others)
    if requested == "native" and choice.name != "native":
        raise ImportError(
            f"PYPARALLEL_BACKEND=native must use the extension, but: {choice.reason}"
        ) from choice.load_error
    return choice


def _try_native(
    record: dict[str, Any] | None,
    torch_version: str,
    cuda_version: str | None,
    load: Callable[[], Any],
    others: Sequence[str],
) -> Choice:
    if record is None:
        absent = "No extension is installed"
        if others:
            absent += f" for this Python, only {', '.join(others)}"
        reason = f"{absent}. To build one in the source folder: {REBUILD}"
        return Choice("python", reason)
    refusal = mismatch(record, torch_version, cuda_version)
    if refusal is not None:
        return Choice("python", refusal, warns=True)
    try:
        module = load()
    except Exception as error:
        reason = (
            "pyparallel's extension must load, but loading it raised "
            f"{type(error).__name__}: {error}. "
            f"Rebuild it in the source folder: {REBUILD}"
        )
        return Choice("python", reason, load_error=error, warns=True)
    missing = [each for each in _CONTRACT if not hasattr(module, each)]
    if missing:
        reason = (
            f"pyparallel's extension must define {', '.join(_CONTRACT)}, but lacks "
            f"{', '.join(missing)}. Rebuild it in the source folder: {REBUILD}"
        )
        return Choice("python", reason, warns=True)
    return Choice(
        "native", f"The extension was built for torch {record['torch']}.", module
    )


def _load() -> Any:
    return importlib.import_module("._C", __name__)


_folder = Path(__file__).parent
_found = find(_folder)
built_for: dict[str, Any] = _found.record if _found else {}
name: str
reason: str
load_error: Exception | None
#: Pure Python uses torch's operators, which support every device.
devices: tuple[str, ...]
transfers: tuple[str, ...]


def use(requested: str) -> None:
    """Use another backend from now on, as a worker that uses that of its parent.

    Args:
        requested: a value of ``PYPARALLEL_BACKEND``.

    Raises:
        ValueError: ``requested`` is not one of the three values.
        ImportError: ``requested`` is ``native`` and the extension cannot be used.
    """
    choice = choose(
        requested,
        _found.record if _found else None,
        torch.__version__,
        torch.version.cuda,
        _load,
        list_other_pythons(_folder),
    )
    if choice.warns:
        text = f"[PP001] {choice.reason}\nUntil then, pure Python runs."
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    module = choice.module
    globals().update(
        {each: getattr(module or _python, each) for each in _OPERATORS},
        name=choice.name,
        reason=choice.reason,
        load_error=choice.load_error,
        devices=tuple(module.devices()) if module else ("cpu", "cuda"),
        transfers=tuple(module.transfers()) if module else (),
    )


use(os.environ.get("PYPARALLEL_BACKEND") or "auto")
