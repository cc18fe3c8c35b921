"""The native engine, with the host as its device."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import backend
from pyparallel.backend import _python
from pyparallel.transfer import device as device_module
from pyparallel.transfer import layout, to_device
from tests.support.batch.raw_bytes import bytes_of
from tests.support.devices.host_device import COPIES, CPU, MAIN, HostDevice, HostStream
from tests.support.processes.backends import check, native, needs_native
from tests.support.processes.gil import others_run_during

pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.asan,
    pytest.mark.tsan,
    needs_native,
]

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16]
DTYPES += [torch.float32, torch.int32, torch.int64, torch.float64, torch.complex128]


@pytest.fixture(autouse=True)
def by_the_engine(monkeypatch):
    """Let copies of either backend use the native operators; leave nothing behind."""
    names = ("send", "plan_slab", "SlabPlan", "views", "plan_copy")
    for name in names:
        monkeypatch.setattr(backend, name, getattr(native, name))
    yield
    assert to_device.drain(30), "something is kept for ever"


def some_leaves(rng: random.Random, num: int, largest: int = 40) -> list[torch.Tensor]:
    return [
        (torch.rand(rng.randint(0, 9), rng.randint(1, largest)) * 100).to(dtype)
        for dtype in rng.choices(DTYPES, k=num)
    ]


def send_batch(leaves, stream=COPIES, leaf_nbytes=1 << 20, mean_nbytes=8192):
    copy = native.plan_copy(leaves, stream, leaf_nbytes, mean_nbytes)
    copy.start(True, True)
    return copy


@contextlib.contextmanager
def pinned(*tensors):
    """Let the host's engine read the storages of these tensors in place."""
    runtime = native.Runtime("cpu")
    storages = [each.untyped_storage() for each in tensors]
    places = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    del storages, tensors
    for place in places:
        runtime.pin(*place)
    yield
    for first, _ in places:
        runtime.unpin(first)


def test_memory_is_pinned_from_its_first_byte_to_its_last():
    memory = torch.arange(192, dtype=torch.uint8)
    with pinned(memory[64:128].clone()):
        assert send_batch([memory], mean_nbytes=1).num_in_place == 0
    runtime, first = native.Runtime("cpu"), memory.data_ptr() + 64
    runtime.pin(first, 64)
    parts = [memory[:64], memory[64:], memory[127:], memory[128:]]
    found = [send_batch([part], mean_nbytes=1).num_in_place for part in parts]
    runtime.unpin(first)
    assert found == [0, 1, 1, 0]


@pytest.mark.parametrize("seed", range(12))
def test_two_calls_make_the_copy_of_all_steps(seed):
    rng = random.Random(seed)
    leaves = [torch.ones(3), *some_leaves(rng, rng.choice([0, 1, 40, 300]))]
    leaves += [leaf.T for leaf in rng.choices(leaves, k=3) if leaf.dim() == 2]
    expected = list(map(bytes_of, leaves))
    sent = send_batch(leaves)
    formats = [(x.dtype, x.shape) for x in leaves]
    for leaf in leaves:
        leaf.zero_()
    held = list(map(weakref.ref, leaves))
    del leaf, leaves
    gc.collect()
    assert not any(each() for each in held), "the copy keeps its leaves"
    assert sent.sources is None and sent.reading is None and sent.num_in_place == 0
    for copies in (sent.wait(), sent.wait()):
        assert list(map(bytes_of, copies)) == expected
        assert [(x.dtype, x.shape) for x in copies] == formats
        assert len({native.memory_of(x).data_ptr() for x in copies if x.numel()}) == 1


@pytest.mark.parametrize("seed", range(40))
def test_two_calls_read_and_pack_what_the_steps_do(seed):
    """`plan_transfer` decides the same about any leaves."""
    rng = random.Random(seed)
    memory = torch.arange(1 << 14).remainder(251).to(torch.uint8)
    leaves, end = [], 64 * rng.randint(0, 2)
    for _ in range(rng.randint(0, 6)):
        nbytes = rng.choice([0, 3, 64, 200, 300, 1000])
        leaves.append(memory[end : end + nbytes].view(-1, 1))
        gap = rng.choice([0, 0, 0, 0, 8, 64, 640, -64])
        end = max(0, -(-(end + nbytes) // 64) * 64 + gap)
    if rng.random() < 0.4:
        leaves += some_leaves(rng, 2)
    if rng.random() < 0.2:
        leaves.append(torch.rand(40, 30).T)
    rng.shuffle(leaves)
    owners = [memory] * rng.choice([0, 1, 1])
    owners += [each for each in leaves if each.nbytes and rng.random() < 0.3]
    device = HostDevice()
    for each in owners:
        device.lock(each)
    with pytest.MonkeyPatch.context() as patch, pinned(*owners):
        patch.setattr(layout, "DIRECT_NBYTES", 256)
        patch.setattr(layout, "SPAN_NBYTES", 100)
        plan = layout.plan_transfer(leaves, device.is_pinned)
        sent = send_batch(leaves, leaf_nbytes=256, mean_nbytes=100)
    assert sent.num_in_place == len(plan.direct) + (plan.span is not None)
    assert sent.pageable_nbytes == plan.pageable_nbytes
    assert (sent.reading is not None) == (sent.num_in_place > 0)
    copies = sent.wait()
    assert list(map(bytes_of, copies)) == list(map(bytes_of, leaves))
    assert [(x.dtype, x.shape) for x in copies] == [(x.dtype, x.shape) for x in leaves]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_leaves_are_cast_and_others_keep_their_bytes(dtype):
    """Chunks end within leaves of more than 4 MiB. A pinned leaf is sent as it is."""
    kept = {dtype, torch.float16, torch.bfloat16} - {torch.float32, torch.float64}
    rng = random.Random(3)
    leaves = [
        x for x in some_leaves(rng, 60) if x.dtype is dtype or x.dtype not in kept
    ]
    leaves += [torch.rand(3, 700, 1000), torch.rand(1300, 1000, dtype=torch.float64)]
    leaves += [torch.rand(300, 40).T, torch.rand(5, 1).expand(5, 6), torch.tensor(0.1)]
    leaves += [torch.ones(0, 3), torch.rand(900, 700), torch.ones(1 << 21).bool()]
    pinned_leaf = leaves[-2]
    with pinned(pinned_leaf):
        copy = native.plan_copy(leaves, COPIES, 1 << 20, 1 << 30, dtype)
        copy.start(True, True)
    assert copy.num_in_place == 1
    for leaf, sent in zip(leaves, copy.wait(), strict=True):
        if leaf.is_floating_point() and leaf is not pinned_leaf:
            leaf = leaf.to(dtype)
        assert sent.dtype is leaf.dtype and torch.equal(sent, leaf)


def test_a_pinned_span_is_sent_as_it_is():
    memory = torch.rand(1 << 12)
    leaves = [memory[:2000], memory[2000 // 16 * 16 :].view(-1, 16)]
    with pinned(memory):
        copy = native.plan_copy(leaves, COPIES, 1 << 20, 1, torch.float16)
        copy.start(True, True)
    assert copy.num_in_place == 1
    for leaf, sent in zip(leaves, copy.wait(), strict=True):
        assert sent.dtype is torch.float32 and torch.equal(sent, leaf)
    assert native.plan_copy([memory.half()], COPIES, 1, 1, torch.float32) is None


def test_sources_live_while_they_are_held():
    leaf = torch.zeros(512, dtype=torch.uint8)
    with pinned(leaf):
        freed = weakref.ref(leaf.untyped_storage())
        copy = native.plan_copy([leaf], COPIES, 256, 256)
        held = copy.sources
        copy.start(True, True)
        assert copy.sources is None and copy.reading.is_done()
        leaf.set_()
        gc.collect()
        assert freed() is not None
        del held
        gc.collect()
        assert freed() is None


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(4, requires_grad=True),
        torch.ones(4).to_sparse(),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4, device="meta"),
        torch.ones(4).as_subclass(type("Own", (torch.Tensor,), {})),
    ],
)
def test_other_leaves_are_not_planned(leaf):
    for leaves in ([leaf], [torch.ones(3), leaf]):
        assert native.plan_copy(leaves, COPIES, 1 << 20, 8192) is None


def test_leaves_without_bytes_and_without_history_are_sent():
    for leaves in ([], [torch.ones(0), torch.ones(3, 0)]):
        shapes = [x.shape for x in send_batch(leaves).wait()]
        assert shapes == [x.shape for x in leaves]
    with torch.no_grad():
        assert send_batch([torch.ones(4, requires_grad=True)]).wait()[0].eq(1).all()


def test_a_copy_is_started_once_and_before_the_wait():
    copy = native.plan_copy([torch.ones(3)], COPIES, 1 << 20, 8192)
    message = "BatchCopy.wait: start must be called before, but was not."
    check(copy.wait, (), RuntimeError, message)
    copy.start(True, True)
    message = "BatchCopy.start: must be called once, but was called twice."
    check(copy.start, (True, True), RuntimeError, message)


def test_a_copy_with_a_structure_returns_the_containers():
    batch = {"b": [torch.ones(3), "x", ()], "a": (torch.zeros(2).t(), None), "c": {}}
    leaf_types = {torch.Tensor, str, type(None)}
    leaves, structure, _ = native.flatten(batch, leaf_types, 1)
    copy = native.plan_copy(leaves, COPIES, 1 << 20, 8192, structure=structure)
    freed = weakref.ref(leaves[0])
    leaves.clear()
    copy.start(True, True)
    for _ in range(2):
        found = copy.wait()
        assert repr(found) == repr(batch) and list(found) == list(batch)
        assert found["b"][0] is not batch["b"][0] and found["b"][1] is batch["b"][1]
    batch.clear()
    assert freed() is None, "the copy keeps the memory of packed tensors"


def test_a_structure_fits_its_leaves():
    leaves, structure, _ = native.flatten([torch.ones(1), "x"], {torch.Tensor, str})
    arguments = (COPIES, 1 << 20, 8192, None)
    assert native.plan_copy(["x", 1], *arguments, structure) is None, "no tensor"
    odd = [leaves[0], torch.ones(1).as_subclass(type("Own", (torch.Tensor,), {}))]
    assert native.plan_copy(odd, *arguments, structure) is None
    copy = native.plan_copy(leaves[:1], *arguments, structure)
    copy.start(True, True)
    message = "unflatten: leaves must have 2 entries, as the structure, but has 1."
    check(copy.wait, (), ValueError, message)
    message = "plan_copy: structure must be a Structure or None, but is of type list."
    check(native.plan_copy, (leaves, *arguments, []), TypeError, message)
    message = "plan_copy: leaves[1] must be a torch.Tensor, but is of type str."
    check(native.plan_copy, (leaves, *arguments), TypeError, message)


def test_the_plan_names_a_leaf_whose_memory_was_freed():
    leaf = torch.ones(4)
    leaf.untyped_storage().resize_(0)
    message = (
        "send: leaves[1] must lie within its storage, but needs 16 bytes where 0 are "
        "left. Copy it before its storage is released."
    )
    check(send_batch, ([torch.ones(1), leaf],), ValueError, message)


@pytest.mark.parametrize("stream", [None, COPIES])
@pytest.mark.parametrize("seed", range(6))
def test_one_call_packs_leaves_for_the_host(seed, stream):
    rng = random.Random(seed)
    leaves = [torch.ones(3), *some_leaves(rng, rng.choice([0, 1, 40, 300]))]
    leaves += [leaf.T for leaf in rng.choices(leaves, k=3) if leaf.dim() == 2]
    leaves.append(torch.nn.Parameter(torch.ones(2)))
    expected = [bytes_of(leaf.detach()) for leaf in leaves]
    job = native.prepare_return(leaves, 1 << 20)
    assert job.plan == native.plan_slab(leaves)
    host = torch.full((job.plan.nbytes,), 3, dtype=torch.uint8)
    event = job.run(host, stream)
    for leaf in leaves:
        leaf.detach().zero_()
    held = list(map(weakref.ref, leaves))
    del leaf, leaves
    gc.collect()
    assert not any(each() for each in held), "the job keeps its leaves"
    event.check()
    event.synchronize()
    assert event.is_done()
    copies = native.views(host, job.plan)
    assert list(map(bytes_of, copies)) == expected
    assert not any(copy.requires_grad for copy in copies)


@pytest.mark.parametrize(
    ("leaves", "most"),
    [
        ([], None),
        ([torch.ones(0), torch.ones(3, 0)], None),
        ([torch.ones(4), torch.ones(4).to_sparse()], None),
        ([torch.ones(4, dtype=torch.complex64).conj()], None),
        ([torch.ones(4, device="meta")], None),
        ([torch.ones(4), torch.ones(4, device="meta")], None),
        ([torch.ones(4).as_subclass(type("Own", (torch.Tensor,), {}))], None),
        ([torch.ones(1), torch.ones(4)], 16),
    ],
)
def test_other_leaves_are_not_packed_by_one_call(leaves, most):
    assert native.prepare_return(leaves, most) is None


def test_one_call_packs_leaves_below_the_limit_and_those_that_are_not_contiguous():
    assert native.prepare_return([torch.ones(4), torch.ones(8)[::2]], 17) is not None
    assert native.prepare_return([torch.ones(8)[::2]], 16) is not None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (torch.empty(128, dtype=torch.uint8), None),
            ValueError,
            "ReturnJob.run: host must have 64 bytes, as planned, but has 128.",
        ),
        (
            (torch.empty(64, dtype=torch.uint8, device="meta"), None),
            TypeError,
            "ReturnJob.run: host must be a plain strided tensor, but is on the meta "
            "device. Give it data first.",
        ),
        (
            (5, None),
            TypeError,
            "ReturnJob.run: host must be a torch.Tensor, but is of type int.",
        ),
        (
            (torch.empty(64, dtype=torch.uint8), 5),
            TypeError,
            "ReturnJob.run: stream must be a torch.Stream, but is of type int.",
        ),
    ],
)
def test_a_job_names_wrong_arguments_and_may_then_run(arguments, error, message):
    job = native.prepare_return([torch.ones(2)], None)
    check(job.run, arguments, error, message)
    host = torch.empty(64, dtype=torch.uint8)
    job.run(host, None).check()
    assert [x.tolist() for x in native.views(host, job.plan)] == [[1, 1]]
    second = "ReturnJob.run: the job must be new, but has run. Prepare another one."
    check(job.run, (host, None), ValueError, second)


def arrive(leaves, device, **options) -> list[bytes]:
    copied = to_device.send(leaves, CPU, device, **options).wait()
    assert [(x.dtype, x.shape) for x in copied] == [(x.dtype, x.shape) for x in leaves]
    return list(map(bytes_of, copied))


# ---------------------------------------------------------------------------- copies


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num=st.integers(0, 30),
    chunk=st.sampled_from([64, 100, 4096, 4 << 20]),
)
def test_leaves_of_every_dtype_and_layout_arrive(seed, num, chunk):
    rng = random.Random(seed)
    leaves = some_leaves(rng, num)
    leaves += [leaf.t() for leaf in some_leaves(rng, 2)]
    leaves += [torch.arange(20)[::3], torch.tensor(1.5), torch.ones(1, 3).expand(4, 3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "send", partial(native.send, chunk_nbytes=chunk))
        assert arrive(leaves, HostDevice()) == list(map(bytes_of, leaves))


def test_packed_leaves_are_free_when_send_returns():
    leaves = [torch.full((1000,), 3.0), torch.ones(10, 10).t()]
    expected = list(map(bytes_of, leaves))
    queued = to_device.send(leaves, CPU, HostDevice())
    dead = [weakref.ref(leaf) for leaf in leaves]
    leaves[0].fill_(9)
    del leaves
    assert [ref() for ref in dead] == [None, None]
    assert list(map(bytes_of, queued.wait())) == expected


class Late:
    """Copies that are done when the test says so."""

    def __init__(self, sent, ready: threading.Event) -> None:
        self.sent, self.is_done = sent, ready.is_set

    def __getattr__(self, name):
        return getattr(self.sent, name)


def test_sources_read_in_place_live_until_the_copy_is_done(monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NBYTES", 256)
    ready = threading.Event()
    send = native.send
    monkeypatch.setattr(backend, "send", lambda *args, **_: Late(send(*args), ready))
    device = HostDevice()
    large = device.lock(torch.zeros(512))
    freed = weakref.ref(large.untyped_storage())
    queued = to_device.send([large], CPU, device)
    del large
    queued.wait()
    gc.collect()
    assert to_device.release_done() == 1 and freed() is not None
    ready.set()
    assert to_device.release_done() == 0 and freed() is None


def test_a_wait_on_another_stream_is_recorded_and_a_stream_may_be_given():
    waits = []

    class Watched:
        def wait(self, stream):
            waits.append(stream)

        def is_done(self):
            return True

        def check(self):
            pass

    calls = []

    def send(*args, **_):
        calls.append(args[5:])
        return Watched()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "send", send)
        device = HostDevice()
        queued = to_device.send([torch.ones(3)], CPU, device)
        queued.wait()
        assert calls == [(COPIES,)] and waits == [MAIN] and device.kept == [MAIN]
        other = HostStream(7)
        queued = to_device.send([torch.ones(3)], CPU, device, stream=other)
        assert calls[1:] == [(other,)] and device.current is MAIN
        device.current = other
        queued.wait()
        assert waits == [MAIN, other] and device.kept == [MAIN], "it owns the memory"


class Planned:
    """A compiled copy whose reading is done when the test says so."""

    ready: threading.Event

    def __init__(self, *args, **options) -> None:
        self.copy = native.plan_copy(*args, **options)

    @property
    def reading(self):
        return self.copy.reading and Late(self.copy.reading, self.ready)

    def __getattr__(self, name):
        return getattr(self.copy, name)


@pytest.fixture
def planned(monkeypatch):
    """Let torch's interface of devices use the host's engine, and such copies."""
    monkeypatch.setattr(Planned, "ready", threading.Event(), raising=False)
    monkeypatch.setattr(to_device.torch_device, "_engines", ("cpu",))
    monkeypatch.setattr(backend, "plan_copy", Planned)


@pytest.mark.parametrize(
    ("nbytes", "is_pinned"), [(1 << 20, True), (8 << 10, True), (1 << 20, False)]
)
def test_memory_that_a_compiled_copy_reads_is_kept(nbytes, is_pinned, planned):
    leaf = torch.ones(nbytes, dtype=torch.uint8)
    freed = weakref.ref(leaf.untyped_storage())
    with pinned(leaf) if is_pinned else contextlib.nullcontext():
        queued = to_device.send([leaf], CPU, stream=COPIES)
    assert queued.wait()[0].eq(1).all()
    leaf.set_()
    gc.collect()
    assert to_device.release_done() == is_pinned and (freed() is not None) == is_pinned
    Planned.ready.set()
    assert to_device.release_done() == 0 and freed() is None


def test_a_compiled_copy_that_was_refused_keeps_nothing(planned, monkeypatch):
    def refuse(copy, *args):
        raise RuntimeError("refused")

    monkeypatch.setattr(Planned, "start", refuse, raising=False)
    leaf = torch.ones(1 << 20, dtype=torch.uint8)
    with pinned(leaf), pytest.raises(RuntimeError, match=r"^refused$"):
        to_device.send([leaf], CPU, stream=COPIES)
    assert to_device.release_done() == 0


def test_an_error_between_copies_is_raised_and_sources_are_kept_alive(monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NBYTES", 256)
    ready = threading.Event()

    class Broken:
        is_done = staticmethod(ready.is_set)

        def check(self):
            raise RuntimeError("no more")

    monkeypatch.setattr(backend, "send", lambda *args, **_: Broken())
    device = HostDevice()
    large = device.lock(torch.zeros(512))
    with pytest.raises(RuntimeError, match=r"^no more$"):
        to_device.send([large], CPU, device)
    assert to_device.release_done() == 1
    ready.set()
    assert to_device.release_done() == 0


def test_an_error_before_the_first_copy_keeps_nothing_alive(monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NBYTES", 256)

    def refuse(*args, **_):
        raise RuntimeError("refused")

    monkeypatch.setattr(backend, "send", refuse)
    device = HostDevice()
    with pytest.raises(RuntimeError, match=r"^refused$"):
        to_device.send([device.lock(torch.zeros(512))], CPU, device)
    assert to_device.release_done() == 0


def test_large_transfers_release_the_gil():
    leaves = [torch.zeros(64 << 20, dtype=torch.uint8)]
    plan = native.plan_slab(leaves)
    slab = torch.empty(plan.nbytes, dtype=torch.uint8)
    send = partial(native.send, slab, leaves, plan, [], [], COPIES)
    assert others_run_during(send)


# ------------------------------------------------------------------------- the choice


def test_pure_python_has_no_engine():
    check(
        _python.send,
        (),
        NotImplementedError,
        "send must be native, but pure Python runs. Copy by torch's operators.",
    )
    assert "cpu" in native.transfers()
    if backend.name == "python":
        assert backend.transfers == ()
    assert not device_module.TorchDevice().has_engine(torch.device("cuda"))
    assert device_module.TorchDevice(["cuda"]).has_engine(torch.device("cuda", 1))


def test_a_forked_child_is_refused_by_its_parents_engine():
    leaf = torch.ones(3)
    plan = native.plan_slab([leaf])
    slab = torch.zeros(plan.nbytes, dtype=torch.uint8)
    send = partial(native.send, slab, [leaf], plan, [], [], COPIES)
    sent = send()
    rule = "send: copies must be queued by the process that queued the first one, "
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        num = 0
        for call in (send, sent.is_done, lambda: sent.wait(MAIN)):
            try:
                call()
            except RuntimeError as error:
                num += str(error).startswith(rule)
        del sent
        os._exit(0 if num == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sent.is_done()
