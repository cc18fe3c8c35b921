"""PYPARALLEL_DEBUG=1: what changes too early is named, what is freed is overwritten."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import DEVICE, FakeDevice, HastyHostPool, LentMemory, memory
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import _cargo, _debug, _probe, _slab

ROOT = Path(__file__).resolve().parents[1]
POISON = b"\xdb"


class FakeProbe:
    """Sums and fills by address, as a device does, in their turn."""

    def sums(self, block: torch.Tensor, row: int, stream: Any) -> torch.Tensor:
        found = torch.empty(-(-block.numel() // row), dtype=torch.int64)
        where = memory(block.data_ptr(), block.numel())
        stream.queue(lambda: found.copy_(_probe.row_sums(torch.from_numpy(where), row)))
        return found

    def fill(self, block: torch.Tensor, value: int, stream: Any) -> None:
        stream.queue(memory(block.data_ptr(), block.numel()).fill, value)


class Device(FakeDevice):
    probe = FakeProbe()


class Hasty(HastyHostPool):
    probe = FakeProbe()


class Lent(LentMemory):
    probe = FakeProbe()


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYPARALLEL_DEBUG", "1")
    _debug.reset()
    assert _debug.enabled
    yield
    monkeypatch.undo()
    _debug.reset()


def passed(device: FakeDevice) -> None:
    """Wait for all that is queued, the checks too."""
    device.wait(device.copies, device.record(device.main))
    assert device.record(device.copies).wait(30)
    device.wait(device.main, device.record(device.side))
    assert device.record(device.main).wait(30)


def held_back(device: FakeDevice) -> threading.Event:
    """Let the copies wait until the event is set."""
    gate = threading.Event()
    device.wait(device.copies, gate)
    return gate


def stale(tensor: torch.Tensor) -> Any:
    return memory(tensor.data_ptr(), tensor.nbytes)


# ------------------------------------------------------------------ what was sent


def test_a_leaf_that_changes_before_its_copy_is_named(monkeypatch):
    monkeypatch.setattr(_cargo, "DIRECT_NBYTES", 256)
    with Device() as device:
        large = device.pinned(10_240).fill_(1).view(torch.float32).view(20, 128)
        gate = held_back(device)
        flight = _slab.send([torch.ones(3), large, torch.ones(2)], DEVICE, device)
        large[16, 5] = 2
        gate.set()
        passed(device)
        with pytest.raises(RuntimeError) as caught:
            flight.land()
        assert str(caught.value) == (
            "leaf 1 of 3 (torch.float32, shape (20, 128)) must not change before its "
            "copy to cuda:0 is done, but its bytes from 8192 on arrived other than "
            "they were sent. It is page-locked, so the device reads it in place: "
            "synchronize with the device before you write to it, or send a clone."
        )
        assert [x.tolist() for x in flight.land()[::2]] == [[1] * 3, [1] * 2]  # once


def in_a_ring(device: Lent, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors in one page-locked storage, 64 bytes of others between them."""
    sizes = [4 * torch.Size(shape).numel() for shape in shapes]
    whole = device.ring.take(sum(sizes) + 64 * len(sizes)).fill_(7)
    made, first = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        made.append(whole[first : first + size].view(torch.float32).view(shape))
        first += size + 64
    return made


@pytest.mark.parametrize("when", ["send", "land", "drain"])
def test_a_leaf_of_a_span_is_named_by_whatever_comes_next(monkeypatch, when):
    with Lent() as device:
        monkeypatch.setattr(_slab, "torch_device", device)
        other = _slab.send([torch.zeros(1)], DEVICE, device)
        leaves = in_a_ring(device, (64, 64), (32, 128), (64, 64))[::-1]
        gate = held_back(device)
        flight = _slab.send(leaves, DEVICE, device)
        leaves[1][0, 0] = 2
        gate.set()
        passed(device)
        calls = {
            "send": lambda: _slab.send([torch.zeros(1)], DEVICE, device),
            "land": other.land,
            "drain": lambda: _slab.drain(30),
        }
        with pytest.raises(
            RuntimeError,
            match=r"^leaf 1 of 3 \(torch.float32, shape \(32, 128\)\) must not change "
            r"before its copy to cuda:0 is done, but its bytes from 0 on",
        ):
            calls[when]()
        assert len(flight.land()) == 3


def test_what_lies_between_the_leaves_of_a_span_may_change():
    with Lent() as device:
        leaves = in_a_ring(device, (64, 64), (64, 64))
        gap = memory(leaves[0].data_ptr() + leaves[0].nbytes, 64)
        gate = held_back(device)
        flight = _slab.send(leaves, DEVICE, device)
        gap[:] = 0
        gate.set()
        passed(device)
        flight.land()
        assert device.num_copies == 1 and _slab.drain(30) and not _debug._unchecked


def test_a_leaf_may_change_when_its_copy_is_done(monkeypatch):
    monkeypatch.setattr(_cargo, "DIRECT_NBYTES", 256)
    with Device() as device:
        large = device.pinned(1024).fill_(1)
        flight = _slab.send([large, torch.ones(3)], DEVICE, device)
        passed(device)
        large.fill_(9)  # long before anybody looks
        (landed, _) = flight.land()
        passed(device)
        assert bytes(stale(landed)) == b"\1" * 1024 and not _debug._unchecked


def test_a_leaf_that_is_packed_may_change_at_once():
    with Device() as device:
        leaves = [torch.ones(300), torch.ones(5)]
        gate = held_back(device)
        flight = _slab.send(leaves, DEVICE, device)
        for leaf in leaves:
            leaf.fill_(9)
        gate.set()
        passed(device)
        flight.land()
        assert not _debug._unchecked


class Trampling(Device):
    """Somebody writes one byte of staging memory before it is copied."""

    def copy(self, dst, src, stream):
        src[64 * 2 + 66] += 1
        super().copy(dst, src, stream)


def test_a_write_to_staging_memory_is_named():
    with Trampling() as device:
        leaves = [torch.ones(3), torch.empty(0), torch.ones(9), torch.ones(40)]
        flight = _slab.send(leaves, DEVICE, device)
        passed(device)
        with pytest.raises(RuntimeError) as caught:
            flight.land()
    assert str(caught.value) == (
        "the staging memory of leaf 3 of 4 (torch.float32, shape (40,)) must not change "
        "before its copy to cuda:0 is done, but its bytes from 64 on arrived other than "
        "they were sent. Nobody but pyparallel has this memory: look for what writes "
        "beyond the edges of its own."
    )


def test_staging_memory_that_is_reused_too_early_is_found():
    with Hasty() as device:
        with pytest.raises(RuntimeError, match=r"^the staging memory of leaf \d of 2 "):
            for step in range(200):
                leaves = [torch.full((100,), step), torch.full((9,), step)]
                _slab.send(leaves, DEVICE, device).land()


# ------------------------------------------------------------- what was given back


def send(device: FakeDevice, *values: int) -> list[torch.Tensor]:
    leaves = [torch.full((100,), value, dtype=torch.uint8) for value in values]
    return _slab.send(leaves, DEVICE, device).land()


def test_memory_that_is_handed_out_again_holds_poison():
    with Device() as device:
        tensors = send(device, 1, 2)
        passed(device)
        found = [stale(tensor) for tensor in tensors]
        assert [bytes(x[:1]) for x in found] == [b"\1", b"\2"]
        del tensors
        _debug.check()
        again = device.empty(256, DEVICE)
        passed(device)
        assert again.data_ptr() == found[0].ctypes.data
        assert [bytes(x) for x in found] == [POISON * 100] * 2
        assert bytes(stale(again)) == POISON * 256


def grad(tensor: torch.Tensor) -> Any:
    """Return a graph that holds a tensor for its backward pass."""
    return (torch.ones(100, requires_grad=True) * tensor).sum()


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: x[0],
        lambda x: x[50:].view(-1, 2),
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        lambda x: memoryview(x.numpy()),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        grad,
    ],
    ids=["itself", "element", "view", "array", "storage", "buffer", "dlpack", "graph"],
)
def test_what_is_still_held_is_never_overwritten(hold):
    with Device() as device:
        tensors = send(device, 1, 2)
        passed(device)
        where = [stale(tensor) for tensor in tensors]
        held = hold(tensors[1])
        del tensors
        for _ in range(3):
            _debug.check()
        passed(device)
        assert [bytes(x) for x in where] == [b"\1" * 100, b"\2" * 100]
        del held
        gc.collect()
        _debug.check()
        passed(device)
        assert [bytes(x) for x in where] == [POISON * 100] * 2


def test_a_flight_that_may_land_again_is_not_overwritten():
    with Device() as device:
        flight = _slab.send([torch.ones(9, dtype=torch.uint8)], DEVICE, device)
        flight.land()
        _debug.check()
        (tensor,) = flight.land()
        passed(device)
        assert tensor.tolist() == [1] * 9


def test_poison_comes_behind_reads_on_the_streams_of_the_landing():
    found: list[bytes] = []
    with Device(copy_delay=0, compute_delay=2e-3) as device:
        for step in range(40):
            leaves = [torch.full((100,), step, dtype=torch.uint8)]
            flight = _slab.send(leaves, DEVICE, device)
            with device.using(device.side if step % 2 else device.main):
                (tensor,) = flight.land()
                device.read(tensor, found)
            del flight, tensor
            _debug.check()
        passed(device)
        passed(device)
    assert sorted(found) == [bytes([step]) * 100 for step in range(40)]


def test_a_flight_that_never_lands_is_overwritten_behind_its_copy():
    with Device(copy_delay=5e-3, compute_delay=0) as device:
        flight = _slab.send([torch.zeros(100, dtype=torch.uint8)], DEVICE, device)
        where = stale(flight._slab)
        del flight
        _debug.check()
        passed(device)
        assert bytes(where[:100]) == POISON * 100


def test_nothing_grows_in_many_flights():
    with Device(copy_delay=0, compute_delay=0) as device:
        found: list[bytes] = []
        for step in range(200):
            for tensor in send(device, step % 100, 5):
                device.read(tensor, found)
        del tensor
        passed(device)
        assert found == [bytes([v]) * 100 for s in range(200) for v in (s % 100, 5)]
        _debug.check()
        assert not _debug._unchecked and not _debug._watched
        assert len(device.pools[device.main].blocks) <= 3
        held = [send(device, 1) for _ in range(_debug.MOST_WATCHED + 10)]
        _debug.check()
        assert len(_debug._watched) == _debug.MOST_WATCHED and len(held) == 74
        passed(device)


def test_nothing_is_looked_at_where_nothing_can_be_or_nobody_asked(monkeypatch):
    with FakeDevice() as device:  # without a probe
        send(device, 1)
        assert not _debug._unchecked and not _debug._watched
    monkeypatch.setenv("PYPARALLEL_DEBUG", "0")
    _debug.reset()
    with Device() as device:
        tensors = send(device, 1)
        assert not _debug._unchecked and not _debug._watched
        passed(device)
        assert tensors[0].tolist() == [1] * 100


class Unable(FakeProbe):
    def sums(self, block: torch.Tensor, row: int, stream: Any) -> torch.Tensor:
        raise MemoryError


def test_a_check_that_fails_gives_no_memory_away_early(monkeypatch):
    monkeypatch.setattr(Device, "probe", Unable())
    with Device(copy_delay=5e-3, compute_delay=0) as device:
        with pytest.raises(MemoryError):
            send(device, 1)
        output = device.empty(100, DEVICE)
        device.fill(output, 7)
        passed(device)
        assert device.pools[device.main].num_reused == 1
        assert output.tolist() == [7] * 100


# ---------------------------------------------------------------------- checksums


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
    before = _probe._CHUNK
    _probe._CHUNK = max(chunk, row)
    try:
        found = _probe.row_sums(held[offset : offset + len(data)], row)
    finally:
        _probe._CHUNK = before
    assert found.tolist() == expected_sums(data, row)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksums_of_different_bytes_differ(data, draw):
    place = draw.draw(st.integers(0, len(data) - 1))
    other = bytearray(data)
    other[place] ^= draw.draw(st.integers(1, 255))
    sums = [
        _probe.row_sums(torch.frombuffer(bytearray(x), dtype=torch.uint8), 64)
        for x in (data, other)
    ]
    assert (sums[0] != sums[1]).nonzero().tolist() == [[place // 64]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_checksums_see_signs_and_places(dtype):
    values = torch.randn(64, dtype=torch.float64).to(dtype)
    others = [-values, values.flip(0), values.roll(1), values.clone().fill_(2)]
    zeros = torch.zeros_like(values)
    for a, b in [*((values, other) for other in others), (zeros, zeros + 2)]:
        sums = [_probe.row_sums(x.view(torch.uint8), 64) for x in (a, b)]
        assert bool((sums[0] != sums[1]).all())


# -------------------------------------------------------------------- the variable


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("value", "on"), [("", False), ("0", False), ("1", True), ("yes", True)]
)
def test_the_environment_says_so_once_at_import(value, on):
    code = "from pyparallel import _debug, _ring_memory as r; import os\n"
    code += "os.environ['PYPARALLEL_DEBUG'] = '1'\nprint(_debug.enabled, r.poisons())"
    done = run(code, PYPARALLEL_DEBUG=value, PYPARALLEL_POISON="0")
    assert (done.stdout, done.stderr) == (f"{on} {on}\n", "")


LAST = """
import torch
from test_debug import DEVICE, Trampling, _slab
device = Trampling()
flight = _slab.send([torch.ones(100)], DEVICE, device)
"""


def test_the_last_batch_is_looked_at_when_the_interpreter_ends():
    done = run(LAST, PYPARALLEL_DEBUG="1")
    assert "RuntimeError: the staging memory of leaf 0 of 1 (torch.float32" in (
        done.stderr
    )
    assert done.returncode == 0


FORK = """
import os, torch
from test_debug import DEVICE, Device, _debug, _slab, held_back
device = Device()
gate = held_back(device)
tensors = _slab.send([torch.ones(100)], DEVICE, device).land()
if os.fork() == 0:
    print(len(_debug._unchecked), len(_debug._watched), flush=True)
    os._exit(0)
os.wait()
gate.set()
assert _debug._unchecked and _debug._watched
"""


def test_a_forked_process_looks_at_nothing_of_its_parent():
    done = run(FORK, PYPARALLEL_DEBUG="1", PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (done.stdout, done.stderr, done.returncode) == ("0 0\n", "", 0)


CACHED = """
import ctypes, torch, pyparallel
batch = pyparallel.collate([torch.ones(600_000), torch.ones(600_001)][:1] * 2)
where = (ctypes.c_uint8 * batch.nbytes).from_address(batch.data_ptr())
assert pyparallel.memory.cache_info().in_use >= batch.nbytes
del batch
print(set(where))
"""


def test_recycled_memory_of_the_host_holds_poison():
    from pyparallel import _backend

    if _backend.name != "native":
        pytest.skip("pure Python recycles nothing")
    assert run(CACHED, PYPARALLEL_DEBUG="1").stdout == "{219}\n"
    assert "219" not in run(CACHED, PYPARALLEL_DEBUG="0").stdout


def test_the_report_says_that_it_is_on():
    done = subprocess.run(
        [sys.executable, "-m", "pyparallel"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYPARALLEL_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.search(r"^debug mode +on, by PYPARALLEL_DEBUG$", done.stdout, re.M)
