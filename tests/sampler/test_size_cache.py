"""The file cache of sizes: evaluated once, atomic, and never for other samples."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyparallel import LoaderWarning, SizeBatchSampler
from pyparallel.sampler import _measure
from tests.support.ranks import sampler_ranks
from tests.support.ranks.distributed_ranks import launch

pytestmark = pytest.mark.one_backend

SIZES = [[1, 10], [2, 9], [3, 8], [4, 7], [5, 6]]
DELETE = "Delete the file, or use another path."
UNUSABLE = (
    "must be a readable file that this version of SizeBatchSampler has written, but "
    f"is not. {DELETE}"
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "sizes.npz"


def sampler_of(
    cache: Any, sizes: list[Any] = SIZES, calls: list[int] | None = None
) -> SizeBatchSampler:
    def size_of(index: int) -> Any:
        if calls is not None:
            calls.append(index)
        return sizes[index]

    return SizeBatchSampler(
        size_of, 2, num_samples=len(sizes), progress=False, cache=cache
    )


def message(cache: Path, problem: str) -> str:
    return f"^{re.escape(f'SizeBatchSampler: cache={str(cache)!r} {problem}')}$"


@pytest.mark.parametrize("sizes", [SIZES, [3, 1, 2], [7], []], ids=len)
def test_sizes_are_evaluated_once(cache: Path, sizes: list[Any]) -> None:
    expected = sampler_of(None, sizes)
    first, second = [], []
    written = sampler_of(str(cache), sizes, first)
    content = cache.read_bytes()
    read = sampler_of(cache, sizes, second)
    assert first == list(range(len(sizes)))
    assert second == sorted({first[0], first[-1]} if first else ())
    batches = list(expected)
    for sampler in (written, read):
        assert (sampler.sizes == expected.sizes).all()
        assert sampler.sizes.dtype == expected.sizes.dtype
        assert list(sampler) == batches
        assert sampler.state_dict() == expected.state_dict()
    assert cache.read_bytes() == content
    assert os.listdir(cache.parent) == [cache.name]
    beside = cache.with_name("new")
    beside.touch()
    assert cache.stat().st_mode == beside.stat().st_mode


def test_a_damaged_file_is_an_error_or_has_the_sizes(cache: Path) -> None:
    sampler_of(cache)
    content = cache.read_bytes()
    payload = content.index(np.array(SIZES, dtype=np.int32).tobytes())
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x11
        cache.write_bytes(damaged)
        try:  # the time of a member, for example, may have any value
            assert sampler_of(cache).sizes.tolist() == SIZES
        except ValueError as error:
            assert re.match(message(cache, UNUSABLE), str(error))
        else:
            assert not payload <= position < payload + 4 * np.size(SIZES)


def change(path: Path, part: bytes, other: bytes) -> None:
    """Damage the header of a large file; NumPy then reads a part of the content."""
    sampler_of(path, SIZES * 1000)
    content = path.read_bytes()
    assert content.count(part) == 1
    path.write_bytes(content.replace(part, other))


def cut(path: Path, length: int) -> None:
    sampler_of(path)
    path.write_bytes(path.read_bytes()[:length])


OTHER_FILES: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("1 10\n2 9\n"),
    "objects": lambda path: np.savez(
        path, version=1, sizes=np.array([SIZES, None], dtype=object)
    ),
    "later version": lambda path: np.savez(path, version=2, sizes=SIZES),
    "floats": lambda path: np.savez(path, version=1, sizes=np.array(SIZES) / 2),
    "folder": lambda path: path.mkdir(),
    "empty": lambda path: cut(path, 0),
    "cut in the content": lambda path: cut(path, 300),
    "cut at the end": lambda path: cut(path, -1),
    "another dtype": lambda path: change(path, b"'<i4'", b"'<i2'"),
    "another shape": lambda path: change(path, b"(5000, 2)", b"(5000, 1)"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_other_files_are_errors(cache: Path, name: str) -> None:
    OTHER_FILES[name](cache)
    calls: list[int] = []
    with pytest.raises(ValueError, match=message(cache, UNUSABLE)):
        sampler_of(cache, SIZES * 1000 if "another" in name else SIZES, calls)
    assert calls == []


#: Sizes of another data set by the problem.
OTHER_SIZES: dict[str, list[Any]] = {
    "must have the sizes of num_samples=4 samples, but has those of 5.": SIZES[:4],
    "must have the sizes of this data set, but has [1, 10] for sample 0, and sizes(0) "
    "is [1, 11].": [[1, 11], *SIZES[1:]],
    "must have the sizes of this data set, but has [5, 6] for sample 4, and sizes(4) "
    "is 5.": [*SIZES[:4], 5],
}


def test_the_file_of_another_data_set_is_an_error(cache: Path) -> None:
    sampler_of(cache)
    content = cache.read_bytes()
    for problem, sizes in OTHER_SIZES.items():
        with pytest.raises(ValueError, match=message(cache, f"{problem} {DELETE}")):
            sampler_of(cache, sizes)
        assert cache.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_an_error_before_sizes_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def refuse(**options: Any) -> Any:  # root may write in any folder
        raise PermissionError(13, "Permission denied", options["dir"])

    reasons = {
        "s" * 256: "File name too long",
        "missing/sizes.npz": "No such file or directory",
        "file/sizes.npz": "Not a directory",
        "folder/sizes.npz": "Permission denied",
    }
    for name, reason in reasons.items():
        if reason == "Permission denied":
            monkeypatch.setattr(_measure.tempfile, "TemporaryFile", refuse)
        calls: list[int] = []
        path = tmp_path / name
        problem = (
            "must be in a writable folder, but creating a file in it failed "
            f"({reason}). Use another path."
        )
        with pytest.raises(ValueError, match=message(path, problem)):
            sampler_of(path, SIZES, calls)
        assert calls == []


def test_a_cache_can_be_read_in_a_folder_that_cannot_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache.with_name("s" * 255)  # the longest name of a file
    sampler_of(cache)
    monkeypatch.setattr(_measure, "_write", None)
    monkeypatch.setattr(_measure.tempfile, "TemporaryFile", None)
    assert sampler_of(cache).sizes.tolist() == SIZES


def test_a_file_is_complete_when_it_appears(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, found = os.fsync, []

    def write_another(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        # A reader finds no file, also if the writer is killed here.
        found.append(cache.exists())
        # Another writer is not disturbed, and is faster.
        other = sampler_of(cache)
        found.append(cache.exists())
        assert other.sizes.tolist() == SIZES
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", write_another)
    assert sampler_of(cache).sizes.tolist() == SIZES
    assert found == [False, True]
    assert sampler_of(cache).sizes.tolist() == SIZES
    assert os.listdir(cache.parent) == [cache.name]


def fail_with(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


#: The step of writing at which a disk fails: the module, its function, the error.
FAILURES: dict[str, tuple[Any, str, int]] = {
    "full before": (_measure.tempfile, "TemporaryFile", errno.ENOSPC),
    "read-only before": (_measure.tempfile, "TemporaryFile", errno.EROFS),
    "no quota before": (_measure.tempfile, "TemporaryFile", errno.EDQUOT),
    "read-only at the start": (Path, "open", errno.EROFS),
    "full": (_measure.np, "savez", errno.ENOSPC),
    "full at the end": (os, "fsync", errno.ENOSPC),
    "damaged": (os, "fsync", errno.EIO),
    "no longer writable": (os, "replace", errno.EACCES),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_write_keeps_the_sizes_and_leaves_no_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, function, number = FAILURES[name]
    monkeypatch.setattr(module, function, fail_with(number))
    if name.endswith("before"):  # such a disk fails in each step
        monkeypatch.setattr(Path, "open", fail_with(number))
    text = (
        f"[PP218] SizeBatchSampler: writing cache={str(cache)!r} failed "
        f"({os.strerror(number)}), so the next run evaluates all sizes again. Free "
        "space on the disk, or use another path."
    )
    calls: list[int] = []
    with pytest.warns(LoaderWarning, match=f"^{re.escape(text)}$"):
        sampler = sampler_of(cache, calls=calls)
    assert sampler.sizes.tolist() == SIZES
    assert calls == list(range(len(SIZES)))
    assert os.listdir(cache.parent) == []


def test_wrong_sizes_leave_no_file(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"^SizeBatchSampler: sizes\[2\] must be "):
        sampler_of(cache, [1, 2, -3])
    assert os.listdir(cache.parent) == []


@pytest.mark.timeout(150)
def test_ranks_that_write_a_cache_at_once_leave_one_complete_file(
    tmp_path: Path,
) -> None:
    results = launch(
        tmp_path, "tests.support.ranks.sampler_ranks", ["caches"], limit=120
    )
    sizes = [list(size) for size in sampler_ranks.SIZES]
    every, files = list(range(len(sampler_ranks.SIZES))), ["sizes.npz"]
    for first, second in results["caches"]:
        assert first == (sizes, every, files)
        assert second == (sizes, [0, len(sampler_ranks.SIZES) - 1], files)
