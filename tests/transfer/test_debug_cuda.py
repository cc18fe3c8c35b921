"""PYPARALLEL_DEBUG=1 on a GPU: torch's allocators and streams with the same checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyparallel.transfer import debug, to_device
from pyparallel.transfer import device as checksums

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
LARGE = 1 << 20  # float32: 4 MiB, copied alone if they are pinned


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYPARALLEL_DEBUG", "1")
    debug.reset()
    yield
    torch.cuda.synchronize()
    monkeypatch.undo()
    debug.reset()


def busy() -> None:
    """Keep the current stream busy: copies wait for earlier work."""
    torch.cuda._sleep(1_000_000_000)


def test_a_pinned_leaf_that_changes_before_its_copy_is_named() -> None:
    leaves = [torch.ones(5), torch.ones(LARGE, pin_memory=True)]
    to_device.send(leaves, DEVICE).wait()  # first calls may wait
    torch.cuda.synchronize()
    with torch.cuda.stream(to_device.torch_device.copy_stream(DEVICE)):
        busy()
    queued = to_device.send(leaves, DEVICE)
    leaves[1][LARGE // 2] = 2
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError) as caught:
        queued.wait()
    assert str(caught.value) == (
        f"leaf 1 of 2 (torch.float32, shape ({LARGE},)) must not change before its "
        f"copy to cuda:0 is done, but its bytes from {2 * LARGE} on differ on the "
        "device. It is pinned, so the device reads it in place: synchronize with the "
        "device before you write to it, or send a clone."
    )
    assert queued.wait()[0].tolist() == [1] * 5


class Raw:
    """Memory of the device that nothing keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


@pytest.mark.parametrize("aside", [False, True])
def test_dropped_memory_is_overwritten_and_live_memory_is_not(aside: bool) -> None:
    stream = torch.cuda.Stream() if aside else torch.cuda.current_stream()
    queued = to_device.send([torch.ones(LARGE), torch.ones(LARGE)], DEVICE)
    with torch.cuda.stream(stream):
        tensors = queued.wait()
        stale: Any = torch.as_tensor(Raw(tensors[0]), device=DEVICE)
        busy()
        total = tensors[0].sum()  # before the memory is overwritten
    held = tensors[1][7:8]
    del queued, tensors
    debug.check()
    torch.cuda.synchronize()
    assert float(held) == 1 and not bool((stale == debug.POISON).any())
    del held
    debug.check()
    torch.cuda.synchronize()
    assert float(total) == LARGE and bool((stale == debug.POISON).all())
    assert not debug._watched


@pytest.mark.parametrize("nbytes", [0, 1, 64, 5000, (1 << 24) + 77])
@pytest.mark.parametrize("row", [64, 4096])
def test_the_device_sums_as_the_host_does(nbytes: int, row: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    stream = torch.cuda.Stream()
    on_device = data.to(DEVICE)
    torch.cuda.synchronize()
    found = checksums.TorchProbe().sums(on_device, row, stream)
    stream.synchronize()
    assert found.is_pinned() or nbytes == 0  # no memory is pinned
    assert torch.equal(found, checksums.row_sums(data, row))


def test_leaves_may_change_when_their_copies_are_done_and_packed_ones_at_once() -> None:
    leaves = [torch.ones(5), torch.ones(LARGE, pin_memory=True)]
    busy()
    queued = to_device.send(leaves, DEVICE)
    leaves[0].fill_(2)
    torch.cuda.synchronize()
    leaves[1].fill_(2)
    for tensor in queued.wait():
        assert bool((tensor == 1).all())
    debug.check()
    assert not debug._unchecked


def test_many_batches_arrive_as_they_were_sent() -> None:
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    sums = []
    for step in range(50):
        leaves = [torch.full((1000 + step,), step), torch.full((LARGE // 4,), step)]
        queued = to_device.send(leaves, DEVICE)
        with torch.cuda.stream(streams[step % 2]):
            sums += [tensor.sum() for tensor in queued.wait()]
    torch.cuda.synchronize()
    debug.check()
    assert not debug._unchecked
    expected = [n * s for s in range(50) for n in (1000 + s, LARGE // 4)]
    assert [int(value) for value in sums] == expected
