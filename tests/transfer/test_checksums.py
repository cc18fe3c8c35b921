"""Checksums of bytes: the documented values, and different ones for other bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.transfer import device as checksums

pytestmark = pytest.mark.one_backend


def expected_sums(data: bytes, row: int) -> list[int]:
    """Sum words with the weights that the documentation gives: slowly."""
    mask, sums = 0xFFFFFFFF, []
    data += bytes(-len(data) % row)
    for start in range(0, len(data), row):
        total = 0
        for i in range(row // 4):
            word = data[start + 4 * i : start + 4 * i + 4]
            h = (i + 1) * 0x9E3779B1 & mask
            h = (h ^ h >> 15) * 0x85EBCA6B & mask
            weight = (h ^ h >> 13) & 0xFFFFF | 1
            total += int.from_bytes(word, "little", signed=True) * weight
        sums.append(total)
    return sums


@given(
    st.binary(max_size=600),
    st.integers(0, 9),
    st.sampled_from([64, 128, 4096]),
    st.sampled_from([64, 4096, 1 << 24]),
)
def test_checksums_are_those_of_the_bytes(data, offset, row, chunk):
    held = torch.frombuffer(bytearray(offset) + data + b"x", dtype=torch.uint8)
    before = checksums._CHECKSUM_CHUNK
    checksums._CHECKSUM_CHUNK = max(chunk, row)
    try:
        found = checksums.row_sums(held[offset : offset + len(data)], row)
    finally:
        checksums._CHECKSUM_CHUNK = before
    assert found.tolist() == expected_sums(data, row)
