"""scatter to several fake devices, with late copies and reused memory."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import scatter
from pyparallel.core import devices
from pyparallel.transfer import to_device
from tests.support.devices.fake_device import DEVICE, FakeDevice

pytestmark = pytest.mark.one_backend

OTHER = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _every_device_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_with_index", lambda device, where: device)
    monkeypatch.setattr(to_device, "has_streams", lambda device: True)


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> FakeDevice:
    monkeypatch.setattr(to_device, "MixedCopy", partial(MIXED_COPY, api=fake))
    return fake


MIXED_COPY = to_device.MixedCopy


def arrive(fake: FakeDevice) -> None:
    """Let the host wait for everything."""
    for stream in fake.main_streams.values():
        assert fake.record(stream).wait(60)


def test_all_copies_start_before_the_first_wait(monkeypatch):
    with use(monkeypatch, FakeDevice(num_devices=2)) as fake:
        scatter({"x": torch.arange(4)}, [0, 1])
        assert fake.calls == [
            ("copy", DEVICE),
            ("copy", OTHER),
            ("wait", DEVICE),
            ("wait", OTHER),
        ]


trees = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.sampled_from((torch.uint8, torch.float32)), st.integers(0, 3)),
    min_size=1,
)


@settings(max_examples=40, deadline=None)
@given(tree=trees, size=st.integers(1, 9), num=st.integers(1, 5), data=st.data())
def test_any_tree_and_any_options_split_as_on_the_host(tree, size, num, data):
    batch = {
        key: torch.arange(size * width).view(size, width).to(dtype)
        for key, (dtype, width) in tree.items()
    }
    options: dict[str, Any] = {}
    if size >= num and data.draw(st.booleans()):
        cuts = data.draw(st.permutations(range(1, size)))[: num - 1]
        ends = [0, *sorted(cuts), size]
        options["chunk_sizes"] = [b - a for a, b in pairwise(ends)]
    options["max_size"] = data.draw(st.sampled_from((None, 1, 3)))
    options["dtype"] = data.draw(st.sampled_from((None, torch.float16)))
    expected = scatter(batch, ["cpu"] * num, **options)
    with pytest.MonkeyPatch.context() as patch, FakeDevice(num_devices=2) as fake:
        use(patch, fake)
        found = scatter(batch, [i % 2 for i in range(num)], **options)
        arrive(fake)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert {k: (v.dtype, v.tolist()) for k, v in mine.items()} == {
                k: (v.dtype, v.tolist()) for k, v in theirs.items()
            }


class LostDevice(FakeDevice):
    """The second device takes no copy."""

    def copy(self, dst, src, stream):
        if stream.device == OTHER:
            raise RuntimeError("the device is lost")
        super().copy(dst, src, stream)


def test_an_error_of_a_copy_is_raised(monkeypatch):
    with use(monkeypatch, LostDevice(num_devices=2)):
        with pytest.raises(RuntimeError, match="the device is lost"):
            scatter({"x": torch.arange(4)}, [0, 1])
