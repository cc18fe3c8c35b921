"""The limits of the benchmark copy every byte, and report failures."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.peers

limits = importlib.import_module("benchmarks.limits")

copy = limits.nontemporal_memcpy()
compiled = pytest.mark.skipif(copy is None, reason="needs a C compiler on x86-64")


@compiled
@pytest.mark.parametrize("num", [0, 1, 63, 64, 127, 128, 129, 1000, 4096, 100_003])
@pytest.mark.parametrize("start", [0, 1, 31, 64])
def test_nontemporal_memcpy_writes_these_bytes_and_no_others(
    num: int, start: int
) -> None:
    generator = torch.Generator().manual_seed(num)
    src = torch.randint(0, 256, (num + 7,), dtype=torch.uint8, generator=generator)
    dst = torch.full((num + 256,), 77, dtype=torch.uint8)
    expected = dst.clone()
    expected[start : start + num] = src[7:]
    copy(dst.data_ptr() + start, src.data_ptr() + 7, num)
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, 1000, limits._PART * 3 + 5])
def test_every_byte_is_copied_by_any_number_of_threads(
    threads: int, nbytes: int
) -> None:
    out = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8) | 1
    written = torch.zeros_like(out)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        limits._copier(limits.ctypes.memmove, written, out)()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(written, out)


def test_all_limits_are_limits() -> None:
    found = limits.copies(torch.ones(100))
    assert {each.kind for each in found} == {"limit"}
    for each in found:
        if each.call is not None:
            each.call()


@compiled
def test_it_is_compiled_once(tmp_path: Path) -> None:
    first = limits.compiled(limits._SOURCE, tmp_path)
    written = first.stat().st_mtime_ns
    assert limits.compiled(limits._SOURCE, tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize(("cc", "what"), [("false", "refused"), ("/no/cc", "/no/cc")])
def test_without_a_compiler_the_limits_are_reported_as_missing(
    cc: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CC", cc)
    monkeypatch.setattr(limits, "_BUILD", tmp_path)
    limits.nontemporal_memcpy.cache_clear()
    try:
        assert limits.nontemporal_memcpy() is None
        assert limits.copies(torch.ones(1))[-1].call is None
    finally:
        limits.nontemporal_memcpy.cache_clear()
    said = capsys.readouterr().err
    assert "must be compiled" in said and what in said
