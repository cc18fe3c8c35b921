"""Behaviour that only a GPU can show: values, streams, the single copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pyparallel import DataContainer as DC
from pyparallel import MMDataParallel, collate, scatter
from pyparallel.transfer import to_device

pytestmark = pytest.mark.cuda

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16]
DTYPES += [torch.float32, torch.int32, torch.int64, torch.float64, torch.complex128]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def leaves(num: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [
        torch.randint(0, 2, (i % 7, i % 5 + 1)).to(DTYPES[i % len(DTYPES)])
        for i in range(num)
    ]


def keep_busy(cycles: int = 20_000_000) -> None:
    torch.cuda._sleep(cycles)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.is_cuda
    return torch.equal(found.cpu(), expected)


# scatter


def test_values_of_all_dtypes_and_layouts_arrive():
    strange = [
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.ones(1, 3).expand(5, 3),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(10)[::3],
        torch.ones(2, dtype=torch.complex64).conj(),
        nn.Parameter(torch.ones(3)),
        torch.ones(2).to(device()),
    ]
    batch = {"x": leaves(60), "strange": strange, "sparse": torch.eye(3).to_sparse()}
    (part,) = scatter(batch, [0])
    assert all(
        map(
            same,
            part["x"] + part["strange"],
            batch["x"] + strange[:-1] + [torch.ones(2)],
        )
    )
    assert same(part["sparse"].to_dense(), torch.eye(3))


def test_a_collated_batch_arrives_and_metadata_stays_on_the_host():
    samples = [
        {
            "img": DC(torch.rand(3, 20 + i, 30 - i), stack=True),
            "boxes": DC(torch.rand(i, 4)),
            "meta": DC({"i": i}, cpu_only=True),
        }
        for i in range(5)
    ]
    batch = collate(samples, 5)
    (part,) = scatter(batch, ["cuda"])
    assert same(part["img"], batch["img"].data[0])
    assert all(map(same, part["boxes"], batch["boxes"].data[0]))
    assert part["meta"] == [{"i": i} for i in range(5)]


def test_one_device_may_stand_for_two():
    first, second = scatter({"x": torch.arange(5)}, [0, 0])
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1, 2], [3, 4])
    parts = scatter(DC([torch.ones(3), torch.zeros(2)], stack=True), [0, 0])
    assert [part.tolist() for part in parts] == [[1, 1, 1], [0, 0]]


def test_dtype_and_max_size_apply_on_the_way():
    (part,) = scatter({"x": torch.arange(6.0)}, [0], max_size=4, dtype=torch.float16)
    assert same(part["x"], torch.arange(4, dtype=torch.float16))


def test_small_leaves_are_sent_in_one_copy():
    batch = {str(i): torch.full((3, i % 4 + 1), float(i)) for i in range(500)}
    for _ in range(2):  # the first profile of a process may begin too late
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            scatter(batch, [0])
            torch.cuda.synchronize()
    seen = [
        e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not seen:
        pytest.skip("the profiler sees no device here: where CUPTI may not be used")
    copies = [e.name for e in seen if e.name.startswith("Memcpy")]
    assert copies == ["Memcpy HtoD (Pinned -> Device)"]


def test_gradients_flow_back_from_the_device():
    source = torch.arange(5.0, requires_grad=True)
    first, second = scatter({"x": source}, [0, 0])
    (first["x"].sum() + 2 * second["x"].sum()).backward()
    assert source.grad.tolist() == [1, 1, 1, 2, 2]
    with torch.no_grad():
        (part,) = scatter({"x": source}, [0])
    assert not part["x"].requires_grad


def test_a_train_step_runs_on_the_device():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def train_step(self, data, optimizer):
            loss = sum(self.fc(x).sum() for x in data["x"])
            return {"loss": loss, "optimizer": optimizer, "metas": data["metas"]}

    model = MMDataParallel(Model().cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = collate(
        [{"x": DC(torch.ones(n, 4)), "metas": DC(n, cpu_only=True)} for n in (1, 2)], 2
    )
    out = model.train_step(data, optimizer)
    out["loss"].backward()
    assert out["optimizer"] is optimizer
    assert out["metas"] == [1, 2]
    assert model.module.fc.weight.grad.tolist() == [[3, 3, 3, 3]]


@pytest.mark.two_gpus
def test_targets_need_not_be_the_current_device():
    first, second = scatter({"x": torch.arange(5)}, [1, 0])
    assert (first["x"].get_device(), second["x"].get_device()) == (1, 0)
    with torch.cuda.device(1):
        (part,) = scatter({"x": torch.arange(5)}, [0])
    assert part["x"].tolist() == [0, 1, 2, 3, 4]


# Streams


def test_values_are_right_while_memory_is_reused_and_the_device_is_busy():
    totals, expected = [], []
    for step in range(300):
        batch = [torch.full((1000 + i,), float(step)) for i in range(8)]
        expected.append(sum(x.sum().item() for x in batch))
        copied = to_device.send(batch, device()).wait()
        keep_busy(200_000)
        totals.append(torch.stack([x.sum() for x in copied]).sum())
    assert torch.stack(totals).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("home", ["default", "side"])
def test_a_consumer_on_another_stream_waits_and_may_drop_at_once(home):
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    sent_on = torch.cuda.default_stream() if home == "default" else other
    totals = []
    for step in range(100):
        with torch.cuda.stream(sent_on):
            queued = to_device.send([torch.full((50_000,), float(step))], device())
        with torch.cuda.stream(side):
            (tensor,) = queued.wait()
            keep_busy(500_000)
            totals.append(tensor.double().sum())
        del queued, tensor
    side.synchronize()
    assert [total.item() for total in totals] == [
        50_000.0 * step for step in range(100)
    ]


def test_memory_of_a_copy_without_a_wait_is_safe_to_reuse():
    for _ in range(50):
        queued = to_device.send([torch.zeros(5_000_000, dtype=torch.uint8)], device())
        del queued
        output = torch.full((5_000_000,), 7, dtype=torch.uint8, device=device())
        assert bool((output == 7).all())
        del output


def test_large_pinned_leaves_are_read_in_place():
    for step in range(20):
        large = torch.full((1 << 20,), float(step)).pin_memory()
        batch = [torch.tensor(step), large, torch.tensor([step])]
        queued = to_device.send(batch, device())
        assert set(queued._direct) == {1}
        assert all(map(same, queued.wait(), batch))


@pytest.fixture
def registered():
    """Pinned memory outside torch's host allocator."""
    memory = torch.empty(1 << 22, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
    yield memory
    torch.cuda.synchronize()
    assert to_device.drain(10)
    assert cudart.cudaHostUnregister(memory.data_ptr()) == 0


def test_a_batch_in_one_registered_storage_is_read_in_place_and_kept_alive(registered):
    second, first = registered[1 << 20 :].view(torch.float32), registered[: 1 << 20]
    for step in range(10):
        first.fill_(step)
        second.fill_(step)
        keep_busy(200_000_000)
        queued = to_device.send([second, first], device())
        assert list(queued._order) == [1, 0] and not queued._direct
        assert to_device.release_done() == 1, "given up before the copy"
        assert all(map(same, queued.wait(), [second, first]))
        assert to_device.release_done() == 0


def test_a_thread_sends_to_the_memory_of_its_consumer():
    home = torch.cuda.Stream()
    for step in range(50):
        queued = to_device.send(
            [torch.full((50_000,), float(step))], device(), home=home
        )
        assert torch.cuda.current_stream() != home
        with torch.cuda.stream(home):
            (tensor,) = queued.wait()
            keep_busy(500_000)
            total = tensor.double().sum()
        del queued, tensor
        home.synchronize()
        assert total.item() == 50_000.0 * step


def test_the_host_does_not_wait():
    batch = [torch.ones(1000)]
    # Pinning may wait for the device, so the memory is allocated before.
    copies = [to_device.send(batch, device()) for _ in range(3)]
    assert all(same(queued.wait()[0], batch[0]) for queued in copies)
    del copies
    torch.cuda.synchronize()
    keep_busy(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    (copied,) = to_device.send(batch, device()).wait()
    assert not busy.query(), "the host waited for the device"
    assert same(copied, batch[0])
