"""The tensors of one target that go in the packed copy, and those that do not."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_allocations import with_allocations

from pyparallel import backend
from pyparallel.batch.stack import int64_tensor
from pyparallel.scatter_gather import move
from pyparallel.transfer import to_device

META = torch.device("meta")  # takes tensors, and has no streams of its own


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """Collect the leaves of copies to a device with streams, without copying."""
    copies: list[list[torch.Tensor]] = []

    def send(leaves: list[torch.Tensor], device: torch.device, *_: Any) -> Any:
        plan = backend.plan_slab(leaves)
        copies.append(list(leaves))
        slab = torch.empty(plan.nbytes, dtype=torch.uint8)
        return SimpleNamespace(wait=lambda: backend.views(slab, plan))

    monkeypatch.setattr(to_device, "send", send)
    module = SimpleNamespace(Stream=object)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return copies


def ids(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(id, tensors))


def test_a_stream_is_used_for_the_target_that_it_is_of(
    sent: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, send = [], to_device.send
    monkeypatch.setattr(
        to_device, "send", lambda *args: (streams.append(args[-1]), send(*args))[1]
    )
    ours, theirs = (SimpleNamespace(device=torch.device(n)) for n in ("meta", "cuda:1"))
    plain, odd = torch.ones(2), torch.ones(2, dtype=torch.complex64).conj()
    for stream in (ours, theirs, None):
        move.move([plain], [plain], META, None, stream)
    assert streams == [ours, None, None]
    move.move([plain, odd], [plain, odd], META, None, ours)
    assert streams[3:] == [ours, ours], "the second time without the odd one"


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.ones(2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.ones(2).as_subclass(type("Named", (torch.Tensor,), {})),
        torch.ones(2, device="meta"),
    ],
    ids=["conjugated", "negated", "sparse", "gradient", "subclass", "elsewhere"],
)
def test_a_tensor_that_is_not_plain_is_copied_alone(
    sent: list[list[torch.Tensor]], odd: torch.Tensor
) -> None:
    first, last = torch.ones(3), torch.ones(4)
    tensors = [first, odd, last]
    moved = move.move(tensors, tensors, META, None)
    assert [ids(queued) for queued in sent] == [ids([first, last])]
    assert [tensor.device.type for tensor in moved] == ["cpu", "meta", "cpu"]
    assert [tensor.shape for tensor in moved] == [(3,), (2,), (4,)]


def test_sources_that_torch_reads_in_place_are_kept_alive() -> None:
    done: list[bool] = []
    api: Any = SimpleNamespace(
        is_pinned=lambda tensor: True,
        fence=lambda device: SimpleNamespace(is_done=lambda: bool(done)),
    )
    odd = torch.ones(2, requires_grad=True)
    source = weakref.ref(odd)
    to_device.MixedCopy([odd], META, api).wait()
    del odd
    assert to_device.release_done() == 1 and source() is not None
    done.append(True)
    assert to_device.release_done() == 0 and source() is None


@pytest.mark.parametrize("values", [[[3, 4], [5, 6], [7, 8]], [3, 4, 5, 6, 7, 8], ()])
def test_integers_for_a_device_are_packed_and_others_are_written_in_place(
    sent: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, values: Any
) -> None:
    shape = (len(values) // 2 if values and values[0] == 3 else len(values), 2)
    here, allocated = with_allocations(
        lambda: int64_tensor(values, shape, torch.device("cpu"))
    )
    assert allocated == [here.untyped_storage().data_ptr()] and sent == []
    assert here.dtype is torch.int64 and here.shape == shape
    assert here.flatten().tolist() == torch.tensor(values).flatten().tolist()
    start = to_device.start_copy
    monkeypatch.setattr(
        to_device, "start_copy", lambda tensors, _: start(tensors, META)
    )
    there = int64_tensor(values, shape, torch.device("cuda", 0))
    ((packed,),) = sent
    assert torch.equal(packed, here) and there.shape == shape
