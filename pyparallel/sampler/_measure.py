"""Evaluate a function for the sizes of all samples, and cache them in a file."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    LoaderWarning,
    type_name,
    warn_once,
)
from ._division import Sizes
from .planner import check_mask, check_sizes

SizeOf = Callable[[int], Any]
#: The version of the format of a file.
_VERSION = 1
_WHERE = "SizeBatchSampler:"
#: The errors of a disk that is full or read-only, or has no inode or quota left.
_NO_SPACE = frozenset((errno.ENOSPC, errno.EROFS, errno.EDQUOT))


def measure_sizes(
    size_of: SizeOf, num_samples: int, progress: bool, cache: Path | None
) -> Sizes:
    """Return the sizes of all samples, ``(n, d)``.

    Args:
        size_of: returns the size, or the sizes, of the sample of an index.
        num_samples: the number of samples.
        progress: whether to show a progress bar, if tqdm is installed.
        cache: the file of the sizes. If it does not exist, it is written.

    Raises:
        TypeError: a size is not an integer or a sequence of integers.
        ValueError: a size is impossible, or the file cannot be used.

    Warns:
        LoaderWarning: The file could not be written, for example on a full disk.
    """
    if cache is None:
        return _evaluate(size_of, num_samples, progress)
    if _exists(cache):
        return _read(cache, size_of, num_samples)
    sizes = _evaluate(size_of, num_samples, progress)
    try:
        if not cache.exists():  # another process may have been faster
            _write(cache, sizes)
    except OSError as error:
        warn_once(
            "PP218",
            f"{_WHERE} writing cache={str(cache)!r} failed ({error.strerror}), so the "
            "next run evaluates all sizes again. Free space on the disk, or use "
            "another path.",
            LoaderWarning,
            str(cache),
        )
    return sizes


def _evaluate(size_of: SizeOf, num_samples: int, progress: bool) -> Sizes:
    indices: Any = range(num_samples)
    if progress:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
        except ImportError:  # optional
            pass
        else:
            indices = tqdm(indices, desc="SizeBatchSampler: sizes", leave=False)
    return check_sizes([_evaluate_one(size_of, i) for i in indices])


def _evaluate_one(size_of: SizeOf, index: int) -> Any:
    size = size_of(index)
    check_mask(size, f"{_WHERE} sizes({index})")
    found = np.asarray(size)
    if found.dtype.kind not in "iu" or found.ndim > 1:
        raise BatchTypeError(
            f"{_WHERE} sizes({index}) must be an integer or a sequence of integers, "
            f"but is {size!r} ({type_name(size)}). Return the sizes that differ "
            f"between samples."
        )
    return found.tolist()


def _exists(cache: Path) -> bool:
    """Return True if the file exists. Otherwise check that its folder is writable.

    Raises:
        ValueError: it is not.
    """
    try:
        if cache.exists():
            return True
        # Permissions alone do not show that a file system is read-only.
        with tempfile.TemporaryFile(dir=cache.parent):
            return False
    except OSError as error:
        if error.errno in _NO_SPACE:  # then writing it fails, too, and warns
            return False
        raise BatchValueError(
            f"{_WHERE} cache={str(cache)!r} must be in a writable folder, but creating "
            f"a file in it failed ({error.strerror}). Use another path."
        ) from error


def _write(cache: Path, sizes: Sizes) -> None:
    """Write a file atomically: at any moment it is complete or does not exist."""
    # Each writer has a file of its own, also on a file system that hosts share.
    unfinished = cache.with_name(f".{secrets.token_hex(16)}")
    try:
        with unfinished.open("xb") as file:
            np.savez(file, version=_VERSION, sizes=sizes)
            file.flush()
            os.fsync(file.fileno())  # else a crash may store the name alone
        os.replace(unfinished, cache)
    finally:
        with contextlib.suppress(OSError):  # the error above is the reason
            unfinished.unlink(missing_ok=True)


def _read(cache: Path, size_of: SizeOf, num_samples: int) -> Sizes:
    """Return the sizes of a file, if they belong to these samples.

    Raises:
        ValueError: they do not, or it is no such file.
    """
    where = f"{_WHERE} cache={str(cache)!r} must"
    advice = "Delete the file, or use another path."
    try:
        sizes = _load(cache)
    except Exception as error:  # zipfile and NumPy raise errors of many types
        raise BatchValueError(
            f"{where} be a readable file that this version of SizeBatchSampler has "
            f"written, but is not. {advice}"
        ) from error
    if len(sizes) != num_samples:
        raise BatchValueError(
            f"{where} have the sizes of num_samples={num_samples} samples, but has "
            f"those of {len(sizes)}. {advice}"
        )
    for index in sorted({0, num_samples - 1}) if num_samples else ():
        found = _evaluate_one(size_of, index)
        if np.reshape(found, -1).tolist() != sizes[index].tolist():
            raise BatchValueError(
                f"{where} have the sizes of this data set, but has "
                f"{sizes[index].tolist()} for sample {index}, and sizes({index}) is "
                f"{found}. {advice}"
            )
    return sizes


def _load(cache: Path) -> Sizes:
    """Return the sizes of a file whose checksums and version are correct."""
    with cache.open("rb") as file:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()  # NumPy does not check each byte
        file.seek(0)
        with np.load(file) as arrays:
            version, sizes = arrays["version"].item(), arrays["sizes"]
    if damaged or version != _VERSION:
        raise ValueError(f"damaged: {damaged}, version: {version}")
    return check_sizes(sizes)
