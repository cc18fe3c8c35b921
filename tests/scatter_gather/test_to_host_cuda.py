"""to_host on a GPU: values, the single copy, streams, and the packing kernel."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pyparallel import DataContainer as DC
from pyparallel import backend, start_to_host, to_host
from pyparallel.transfer import to_device
from pyparallel.transfer.pinned_results import host_slabs
from tests.support.batch.raw_bytes import DTYPES, bytes_of
from tests.support.batch.samples import as_it_lies
from tests.support.devices import fake_cuda
from tests.support.processes.backends import native, needs_native, using
from tests.support.processes.python_steps import steps

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings(r"ignore:\[PP213\]"),  # once for a process
]

BOTH = pytest.mark.parametrize(
    "fetch", [to_host, lambda batch: start_to_host(batch).get()], ids=["wait", "start"]
)
CUDA = torch.autograd.DeviceType.CUDA


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def keep_busy(cycles: int = 20_000_000) -> None:
    torch.cuda._sleep(cycles)


def of_bytes(nbytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor on the host of random bits; a bool is 0 or 1."""
    made = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    size = (nbytes // dtype.itemsize * dtype.itemsize,)
    bits = torch.randint(0, high, size, generator=made).to(torch.uint8)
    return bits.view(dtype) if bits.numel() else torch.empty(0, dtype=dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.is_cpu
    return bytes_of(found) == bytes_of(expected)


def device_events(call: Any) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in found.events() if event.device_type == CUDA]
    names = [event.name for event in on_device if not event.is_user_annotation]
    if not names:
        pytest.xfail("the profiler sees no device events on this machine")
    return names


# to_host


@BOTH
def test_values_of_all_dtypes_and_layouts_arrive(fetch):
    plain = [of_bytes(7 * (i + 5), dtype, i) for i, dtype in enumerate(DTYPES)]
    strange = [
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.ones(1, 3).expand(5, 3),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(10)[::3],
        torch.arange(9, dtype=torch.uint8)[3:],
    ]
    found = fetch([as_it_lies(x, device()) for x in plain + strange])
    assert all(map(same, found, plain + strange))
    assert len({backend.memory_of(x).data_ptr() for x in found if x.numel()}) == 1
    assert all(x.is_pinned() for x in found if x.numel())


def test_a_slab_of_results_is_not_reused_while_a_copy_reads_one_of_them():
    leaves = [torch.full((1000,), 7, device=device()) for _ in range(3)]
    last = to_host(leaves)[-1]
    nbytes = backend.memory_of(last).nbytes
    slab = last.data_ptr() - last.nbytes // 64 * 64
    keep_busy(2_000_000_000)
    sent = last.to(device(), non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    del last
    others = [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(3)]
    assert not done.query(), "the copy was done before it was looked at"
    for other in others:
        assert not other.data_ptr() <= slab < other.data_ptr() + nbytes
    assert sent.eq(7).all()


@BOTH
def test_small_tensors_arrive_in_one_copy(fetch):
    batch = {str(i): torch.full((3, i % 4 + 1), i, device=device()) for i in range(500)}
    names = device_events(lambda: fetch(batch))
    copies = [name for name in names if "Memcpy" in name]
    assert len(copies) == 1 and "DtoH" in copies[0] and "Pinned" in copies[0]
    if backend.name == "native":
        num_launches = 1 if int(backend.built_for["cuda"].split(".")[0]) >= 13 else 3
        assert len(names) in (2, 1 + num_launches), names


@BOTH
@needs_native
def test_no_python_code_runs_for_each_tensor(fetch):
    def batch(num: int) -> list[dict[str, Any]]:
        return [{"x": torch.ones(i % 4, device=device()), "n": i} for i in range(num)]

    def fewest(tree: Any) -> int:  # some calls also check the slabs of earlier ones
        return min(steps(lambda: fetch(tree)) for _ in range(4))

    few, many = batch(8), batch(80)
    with using(native):
        fetch(many)  # imports and caches
        assert to_device.drain(30)
        assert fewest(few) == fewest(many)


@BOTH
def test_results_are_those_of_the_call_while_the_device_is_busy(fetch):
    handles, num_steps = [], 60 if fake_cuda.active else 200
    for step in range(num_steps):
        there = [
            torch.full((1000 + i,), float(step + i), device=device()) for i in range(8)
        ]
        there.append(torch.full((1 << 18,), float(step), device=device()))
        keep_busy(100_000)
        handles.append(start_to_host(there) if fetch is not to_host else fetch(there))
        for tensor in there:
            tensor.fill_(-1)
        del there, tensor
        if len(handles) > 3 or step == num_steps - 1:
            for back, old in enumerate(reversed(handles)):
                found = old if fetch is to_host else old.get()
                first = float(step - back)
                means = [float(x.min() + x.max()) / 2 for x in found]
                assert means == [first + i for i in range(8)] + [first]
            handles.clear()


def warm(call: Any) -> None:
    """Let all be loaded and allocated, for which the first call may wait."""
    call()
    torch.cuda.synchronize()


@BOTH
def test_a_side_stream_is_waited_for_and_no_other_one(fetch):
    side, other = torch.cuda.Stream(), torch.cuda.Stream()

    def fetch_on_side() -> torch.Tensor:
        with torch.cuda.stream(side):
            keep_busy()
            return fetch([torch.ones(1000, device=device()) + 1])[0]

    warm(fetch_on_side)
    with torch.cuda.stream(other):
        keep_busy(2_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
    assert bool((fetch_on_side() == 2).all())
    assert not busy.query(), "a call waited for the whole device"
    torch.cuda.synchronize()


def test_starting_does_not_wait_and_get_does():
    there = torch.ones(1000, device=device())
    warm(lambda: start_to_host([there + 1]).get())
    keep_busy(2_000_000_000)
    handle = start_to_host([there + 1])
    assert not handle.is_done(), "starting waited for the device"
    read: list[Any] = []
    thread = threading.Thread(target=lambda: read.append(handle.get()))
    thread.start()
    found = handle.get()
    thread.join(60)
    assert handle.is_done() and read[0] is found
    assert bool((found[0] == 2).all())


def test_the_step_continues_while_results_are_copied(monkeypatch):
    """The copy is not on the current stream: what follows does not wait for it."""
    # By default the limit is a share of the machine's memory, which may be less.
    monkeypatch.setattr(host_slabs, "limit", host_slabs.in_use() + (1 << 30))
    large = torch.ones(1 << 27, device=device())
    warm(lambda: start_to_host([large]).get())
    handle = start_to_host([large])
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not handle.is_done(), "the current stream waited for the copy"
    handle.get()


@pytest.mark.two_gpus
@BOTH
def test_tensors_of_two_devices_arrive_in_two_copies(fetch):
    batch = [torch.full((3,), i, device=f"cuda:{i % 2}") for i in range(6)]
    assert [x.tolist() for x in fetch(batch)] == [[i] * 3 for i in range(6)]
    names = device_events(lambda: fetch(batch))
    assert sum("DtoH" in name for name in names) == 2


# pack


def check_pack(leaves: list[torch.Tensor], there: list[torch.Tensor]) -> None:
    plan = backend.plan_slab(leaves)
    expected = torch.full((plan.nbytes,), 1, dtype=torch.uint8)
    backend.pack(expected, leaves, plan)
    slab = torch.full((plan.nbytes,), 2, dtype=torch.uint8, device=device())
    backend.pack(slab, there, plan)
    assert slab.cpu().equal(expected)


@pytest.mark.kernel
@pytest.mark.parametrize("shift", range(17))
def test_leaves_of_every_address_are_packed(shift):
    sizes = [0, 1, 15, 16, 17, 63, 64, 65, 511, 2047, 2048, 2049, 70_000, 1_000_003]
    leaves = [of_bytes(n, torch.uint8, n) for n in sizes]
    memory = [torch.zeros(n + shift, dtype=torch.uint8, device=device()) for n in sizes]
    there = [each[shift:] for each in memory]
    for each, leaf in zip(there, leaves, strict=True):
        each.copy_(leaf)
    check_pack(leaves, there)


@pytest.mark.kernel
@pytest.mark.parametrize("num", [1, 168, 169, 1362, 1363, 5000])
def test_any_number_of_leaves_is_packed(num):
    leaves = [of_bytes(i % 150, torch.uint8, i) for i in range(num)]
    check_pack(leaves, [leaf.to(device()) for leaf in leaves])


@pytest.mark.kernel
def test_wide_gaps_become_zero():
    leaf = torch.full((70,), 9, dtype=torch.uint8)
    plan = backend.SlabPlan((640, 70_400), ((70,), (70,)), (torch.uint8,) * 2, 140_800)
    slab = torch.full((plan.nbytes,), 2, dtype=torch.uint8, device=device())
    backend.pack(slab, [leaf.to(device())] * 2, plan)
    expected = torch.zeros(plan.nbytes, dtype=torch.uint8)
    expected[640:710] = expected[70_400:70_470] = 9
    assert slab.cpu().equal(expected)


def test_a_slab_beside_words_and_leaves_elsewhere_are_refused():
    leaf = torch.ones(4, dtype=torch.uint8)
    plan = backend.plan_slab([leaf])
    slab = torch.zeros(128, dtype=torch.uint8, device=device())
    with pytest.raises(ValueError) as caught:
        backend.pack(slab[:64], [leaf], plan)
    assert str(caught.value) == (
        f"pack: leaves[0] must be on the device of dst, {device()}, but is on cpu. "
        "Move it first."
    )
    if backend.name == "native":
        with pytest.raises(ValueError) as caught:
            backend.pack(slab[8:72], [leaf.to(device())], plan)
        assert str(caught.value) == (
            "pack: dst must start at a multiple of 16 bytes, but starts at byte 8 of "
            "its storage."
        )
    assert not slab.any()


@pytest.mark.kernel
def test_pack_runs_on_the_current_stream():
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy()
        leaf = torch.ones(1000, device=device()) + 1
        plan = backend.plan_slab([leaf])
        slab = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device())
        backend.pack(slab, [leaf], plan)
        total = slab.view(torch.float32).sum()
    side.synchronize()
    assert total.item() == 2000


@BOTH
def test_tensors_that_are_not_plain_arrive_too(fetch):
    conj = torch.tensor([1 + 2j], device=device()).conj()
    weight = torch.nn.Parameter(torch.ones(2, device=device()))
    meta = DC([weight], cpu_only=True)
    batch = {
        "sparse": torch.eye(3, device=device()).to_sparse(),
        "conj": conj,
        "weight": weight,
        "host": (host := torch.ones(2)),
        "dc": DC([torch.ones(2, device=device())]),
        "meta": meta,
    }
    found = fetch(batch)
    assert found["sparse"].is_cpu and found["sparse"].to_dense().equal(torch.eye(3))
    assert found["conj"].tolist() == [1 - 2j]
    assert found["weight"].tolist() == [1, 1] and not found["weight"].requires_grad
    assert found["host"] is host
    assert found["dc"].data[0].is_cpu and found["meta"].data[0] is weight


def test_large_tensors_are_copied_from_where_they_are():
    sizes = [3, 1 << 20, 5, 1 << 21]
    batch = [torch.full((n,), i, device=device()) for i, n in enumerate(sizes)]
    batch = [each.to(torch.uint8) for each in batch]
    names = device_events(lambda: to_host(batch))
    assert sum("DtoH" in name for name in names) == 3
    for i, (found, n) in enumerate(zip(to_host(batch), sizes, strict=True)):
        assert found.shape == (n,) and bool((found == i).all())


def test_a_handle_may_be_dropped_at_any_time():
    for step in range(50):
        there = torch.full((5_000_000,), step, dtype=torch.uint8, device=device())
        handle = start_to_host([there])
        del handle, there
        mine = torch.full((5_000_000,), 7, dtype=torch.uint8).pin_memory()
        other = torch.full((5_000_000,), 9, dtype=torch.uint8, device=device())
        assert bool((mine == 7).all()) and bool((other == 9).all())
        del mine, other
    torch.cuda.synchronize()
    assert to_device.release_done() == 0


@BOTH
def test_it_refuses_to_run_while_a_graph_is_recorded(fetch):
    source = torch.ones(3, device=device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = source + 1
        with pytest.raises(RuntimeError, match="must not be under graph capture"):
            fetch([out])
    graph.replay()
    assert fetch([out])[0].tolist() == [2, 2, 2]


@BOTH
def test_results_beyond_the_limit_are_as_right_and_not_pinned(
    fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 3 << 20
    monkeypatch.setattr(host_slabs, "limit", host_slabs.in_use() + 2 * nbytes)
    kept = []
    for seed in range(4):
        expected = of_bytes(nbytes, torch.uint8, seed)
        there = expected.to(device())
        keep_busy()
        kept.append(fetch({"x": there})["x"])
        del there
        assert same(kept[-1], expected)
    assert [x.is_pinned() for x in kept] == [True, True, False, False]
    del kept[0]
    assert fetch({"x": torch.ones(9, device=device())})["x"].is_pinned()
