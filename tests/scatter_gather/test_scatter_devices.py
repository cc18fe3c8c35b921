"""scatter to several fake devices, with late copies and reused memory."""

from __future__ import annotations

import gc
import random
import threading
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_device import DEVICE, FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import scatter
from pyparallel.core import devices
from pyparallel.transfer import to_device

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
            ("start", DEVICE),
            ("copy", DEVICE),
            ("start", OTHER),
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


def test_every_part_is_waited_for_while_memory_is_reused(monkeypatch):
    """The consumer reads every part on its device and drops it."""
    rng = random.Random(7)
    with use(monkeypatch, FakeDevice(num_devices=2)) as fake:
        expected: dict[torch.device, list[bytes]] = {d: [] for d in fake.devices}
        found: dict[torch.device, list[bytes]] = {d: [] for d in fake.devices}
        for step in range(100):
            size = rng.randint(200, 250)
            batch = {"x": (torch.arange(size) + step).to(torch.uint8)}
            want = scatter(batch, ["cpu"] * 4)
            parts = scatter(batch, [0, 1, 0, 1])
            for i, part in enumerate(parts):
                device = fake.devices[i % 2]
                expected[device].append(want[i]["x"].numpy().tobytes())
                fake.read(part["x"], found[device], device)
            del parts, part
        arrive(fake)
        assert found == expected
        for stream in fake.main_streams.values():
            assert fake.pools[stream].num_reused > 50


class OneCopyStream(FakeDevice):
    """The stream of the first device is used for all."""

    def copy_stream(self, device):
        return self.copies


def test_an_error_of_a_copy_is_raised(monkeypatch):
    with use(monkeypatch, OneCopyStream(num_devices=2)):
        with pytest.raises(AssertionError, match="a stream of cuda:0 touches cuda:1"):
            scatter({"x": torch.arange(4)}, [0, 1])


class SecondIsFull(FakeDevice):
    def empty(self, nbytes, device):
        if device == OTHER:
            raise torch.OutOfMemoryError("full")
        return super().empty(nbytes, device)


def test_an_error_on_the_second_device_leaves_nothing_half_done(monkeypatch):
    """The model gets the memory of the first copy, which was never waited for."""
    with use(monkeypatch, SecondIsFull(num_devices=2)) as fake:
        for _ in range(5):
            go = threading.Event()
            fake.copies.queue(go.wait, 30)  # the copy of the first device is late
            with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
                scatter({"x": torch.zeros(200, dtype=torch.uint8)}, [0, 1])
            gc.collect()
            output = fake.empty(128, DEVICE)
            fake.fill(output, 7)
            fake.record(fake.main).wait(0.02)  # a fill that does not wait for the copy
            go.set()
            arrive(fake)
            assert fake.record(fake.copies).wait(30)
            assert output.eq(7).all()
            del output
        assert fake.pools[fake.main].num_reused >= 4
        assert to_device.release_done() == 0


def test_tensors_that_are_not_plain_are_copied_after_all_others_started(monkeypatch):
    order: list[str] = []
    with use(monkeypatch, FakeDevice(num_devices=2)) as fake:
        to = torch.Tensor.to

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            order.append(f"{fake.num_copies} sent")
            return to(tensor, "cpu")

        monkeypatch.setattr(torch.Tensor, "to", record)
        batch = {"x": torch.arange(4), "w": torch.ones(4, requires_grad=True)}
        first, second = scatter(batch, [0, 1])
        assert order == ["2 sent", "2 sent"]
        (first["w"].sum() + 2 * second["w"].sum()).backward()
        assert batch["w"].grad.tolist() == [1, 1, 2, 2]
