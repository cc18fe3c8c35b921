"""Warnings: each has a documented code, and appears once with its number."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import pyparallel
import pyparallel.mmcv
from pyparallel.core import errors
from pyparallel.loader.stats import Meter, warn_about_padding
from pyparallel.transfer import to_device
from tests.support.devices.fake_device import DEVICE, FakeDevice
from tests.support.loader.loader_sets import messages
from tests.support.repository.folders import ROOT

TEXT = (ROOT / "docs" / "warnings.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def new_process():
    """Reset the warnings that were already issued."""
    errors._warned.clear()
    to_device.reset_pageable_count()
    yield
    errors._warned.clear()
    to_device.reset_pageable_count()


# ---------------------------------------------------------------------------- codes
def test_every_code_is_documented_and_used_in_one_place():
    sources = [
        p.read_text(encoding="utf-8") for p in (ROOT / "pyparallel").rglob("*.py")
    ]
    given = re.findall(r'"\[?(PP\d{3})\]? ?', "\n".join(sources))
    asked = re.findall(r'has_warned\("(PP\d{3})"', "\n".join(sources))
    for code in asked:
        given.remove(code)
    assert len(given) > 15 and len(set(given)) == len(given)
    documented = re.findall(r"^\| (PP\d{3}) \|", TEXT, re.MULTILINE)
    assert documented == sorted(given)


def test_every_warning_of_the_package_has_a_code():
    for path in (ROOT / "pyparallel").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for call in re.findall(r"warn(?:_once|ings\.warn)?\(\s*(\S.{4})", text):
            known = r'f?"\[?PP|code|_?text|str\(w|f"\[\{'  # str: torch's own warning
            assert re.match(known, call), f"{path}: {call}"


# -------------------------------------------------------------------------- padding
def padded(meter: Meter, batches: int, stacked: int, padding: int) -> None:
    """Count batches as a loader does."""
    for _ in range(batches):
        meter.add(batches=1, stacked_nbytes=stacked, padding_nbytes=padding)
        warn_about_padding(meter, stacked, padding)


PADDING = (
    "[PP211] DataLoader: {} batches are padding, which costs memory and computing "
    "time. Batch samples of similar sizes together: "
    "batch_sampler=SizeBatchSampler(sizes, batch_size). Or leave them ragged: "
    "Concat(), or DataContainer(..., ragged=True)."
)


@pytest.mark.parametrize(
    ("batches", "stacked", "padding"),
    [
        (19, 10_000_000, 9_000_000),  # too few batches
        (200, 49_000, 48_000),  # too few bytes
        (40, 10_000_000, 4_000_000),  # no more than 40 %
        (40, 0, 0),
    ],
)
def test_irrelevant_padding_does_not_warn(batches, stacked, padding):
    padded(Meter(), batches, stacked, padding)  # a warning would be an error


def test_padding_of_some_batches_is_weighed_with_all_others():
    meter = Meter()
    padded(meter, 30, 1_000_000, 0)
    padded(meter, 15, 1_000_000, 900_000)  # 30 % of all
    with pytest.warns(pyparallel.LoaderWarning) as caught:
        padded(meter, 15, 1_000_000, 900_000)
    # 0.9 n > 0.4 (30 + n) from n = 25 on: 22.5 of 55.
    assert messages(caught) == [PADDING.format("41 % of the 55.0 MB stacked in 55")]


def wide(i: int):
    """Return a sample; every second one has a tenth of the bytes of the others."""
    size = (1, 200, 1000) if i % 2 else (1, 20, 1000)
    return {"img": pyparallel.DataContainer(torch.ones(size), stack=True)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_warns_about_padding(num_workers):
    loader = pyparallel.DataLoader(
        [wide(i) for i in range(60)],
        batch_size=2,
        collate_fn=functools.partial(pyparallel.collate, samples_per_gpu=2),
        num_workers=num_workers,
    )
    with pytest.warns(pyparallel.LoaderWarning) as caught:
        assert len(list(map(len, loader))) == 30
    assert messages(caught) == [PADDING.format("45 % of the 32.0 MB stacked in 20")]
    assert loader.stats().padding_fraction == pytest.approx(0.45)


# ---------------------------------------------------------------- pageable memory
PAGEABLE = (
    "[PP212] scatter: {} batches for {} came from pageable memory, so the host copied "
    "them once more. Give pyparallel.DataLoader pin_memory=True."
)


def test_pageable_memory_warns_once_with_its_bytes():
    device = torch.device("cuda", 1)
    with pytest.warns(pyparallel.LoaderWarning) as caught:
        for _ in range(200):
            to_device.warn_about_pageable_memory(16_000_000, device)
    assert messages(caught) == [
        PAGEABLE.format("1.0 GB of large tensors in 63", device)
    ]


@pytest.mark.parametrize(("batches", "nbytes"), [(49, 10**9), (100, 9_999_999)])
def test_little_pageable_memory_does_not_warn(batches, nbytes):
    for _ in range(batches):
        to_device.warn_about_pageable_memory(nbytes, torch.device("cuda"))


def test_only_large_tensors_that_could_be_read_in_place_are_counted(monkeypatch):
    seen = []
    monkeypatch.setattr(
        to_device, "warn_about_pageable_memory", lambda *given: seen.append(given)
    )
    mib = 1 << 20
    small, large = torch.zeros(mib // 4 - 1), torch.zeros(mib)
    strided = torch.zeros(2, mib).t()
    with FakeDevice() as fake:
        pinned = fake.pinned(mib)
        for leaves, nbytes in (
            ([torch.zeros(9), small], None),
            ([small, pinned], None),
            ([strided], None),
            ([large, pinned], 4 * mib),
            ([small, large, large.clone()], 8 * mib),
        ):
            seen.clear()
            to_device.send(leaves, DEVICE, fake).wait()
            assert seen == ([] if nbytes is None else [(nbytes, DEVICE)])


# ----------------------------------------------------------------------- mmcv 1.x
def test_bytes_warn_where_code_for_mmcv_runs():
    samples = [{"id": b"abc", "name": "x"}, {"id": b"de", "name": "y"}]
    expected = {"id": [b"abc", b"de"], "name": ["x", "y"]}
    assert pyparallel.collate(samples) == expected  # and no warning
    with pyparallel.mmcv.installed(), pytest.warns(pyparallel.BatchWarning) as caught:
        assert pyparallel.collate(samples) == expected
        assert pyparallel.collate(samples) == expected
        assert pyparallel.collate([{"key": b"a"}]) == {"key": [b"a"]}
    rest = (
        "pyparallel returns a list of bytes. mmcv returned tensors of their values, "
        "cut to the shortest. If the model needs tensors, create them in the dataset."
    )
    assert messages(caught) == [
        f"[PP102] collate: batch[0]['{key}'] should not be bytes in code for mmcv 1.x, "
        f"but is, in {number} samples. {rest}"
        for key, number in (("id", 2), ("key", 1))
    ]
    errors._warned.clear()
    assert pyparallel.collate(samples) == expected
