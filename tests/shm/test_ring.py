"""A ring and serialized batches in one process: layout and sharing of memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import pickle
import resource
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel import backend
from pyparallel.batch import allocation
from pyparallel.shm.messages import Message, SlabLocation, unpack
from pyparallel.shm.ring import FREE, PARENT, Ring
from pyparallel.transfer import debug
from tests.support.loader import loader_sets
from tests.support.loader.ring_workers import WORKER, Worker, whole
from tests.support.processes import process_resources

pytestmark = [pytest.mark.asan, pytest.mark.tsan]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_while_a_batch_is_dropped_does_not_cost_its_slab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = Ring(1, 1 << 16)
    batch = Worker(ring, torch.stack).make([torch.ones(3)]).batch
    release, calls = ring.release, []

    def interrupted(slab: int, holder: int) -> None:
        calls.append(slab)
        if len(calls) == 1:
            if ring.poison_enabled:
                ring.poison(slab)
            raise KeyboardInterrupt
        release(slab, holder)

    monkeypatch.setattr(ring, "release", interrupted)
    with monkeypatch.context() as patch:
        patch.setattr("sys.unraisablehook", lambda _: None)
        del batch
    assert calls == [0, 0]
    assert ring.holders() == [FREE]


def test_a_batch_outlives_its_ring_and_its_message_is_refused_after() -> None:
    ring = Ring(1, 1 << 16)
    worker = Worker(ring, torch.stack)
    batch = worker.make([torch.ones(3)]).batch
    del ring, worker
    gc.collect()
    assert batch.tolist() == [[1, 1, 1]]
    with pytest.raises(RuntimeError) as caught:
        unpack(pickle.dumps(tuple(WITHOUT_RING)))
    assert str(caught.value) == (
        "a batch must be received in the process of its DataLoader while the "
        "DataLoader exists, but its ring is not in this process. Keep the DataLoader, "
        "and iterate over it in the process that created it."
    )


WITHOUT_RING = Message(SlabLocation("none", 0, 2, 8), None, None, b"", {}, [], None)


def test_a_slab_that_is_not_the_workers_is_not_adopted() -> None:
    ring = Ring(1, 1 << 12)
    with pytest.raises(RuntimeError) as caught:
        ring.adopt(0, 7, 64)
    assert str(caught.value) == (
        "slab 0 of the DataLoader's ring must be held by worker 7 when its batch "
        "arrives, but is not. Was the loader's process forked?"
    )


def test_a_slab_uses_at_most_its_stride(monkeypatch: Any) -> None:
    ring = Ring(2, 5 << 20)
    worker = Worker(ring, torch.stack)
    received = worker.make([torch.ones(5 << 20, dtype=torch.uint8)])
    assert received.is_in_ring
    assert ring.committed(0) == (5 << 20) + 4096


def test_a_slab_is_free_when_the_last_view_dies_in_any_thread() -> None:
    ring = Ring(1, 1 << 16)
    batch = Worker(ring, torch.stack).make([torch.arange(6.0)] * 2).batch
    view = batch[1].view(2, 3).t()[1:]
    del batch
    assert ring.holders() == [PARENT]
    array = view.numpy()[..., :1]
    del view
    assert ring.holders() == [PARENT]
    buffers = [memoryview(array)]
    del array
    assert ring.holders() == [PARENT]
    assert buffers[0].tolist() == [[1.0], [2.0]]
    thread = threading.Thread(target=buffers.clear)
    thread.start()
    thread.join(10)
    assert ring.holders() == [FREE]


def full(*args: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_memory_for_a_slab_a_batch_uses_other_memory(monkeypatch: Any) -> None:
    ring = Ring(2, 1 << 20)
    fallocate = os.posix_fallocate
    refused = []

    def only_fresh(fd: int, start: int, nbytes: int) -> None:
        if fd == ring.fd:
            refused.append(nbytes)
            full(fd, start, nbytes)
        fallocate(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", only_fresh)
    received = Worker(ring, pyparallel.collate).make([torch.ones(300_000)])
    assert (received.miss, refused) == (("large", 1_200_000), [])
    received = Worker(ring, pyparallel.collate).make([torch.ones(200_000)])
    assert received.miss == ("memory", 800_000)
    assert refused
    assert received.batch.sum() == 200_000
    assert ring.holders() == [FREE, FREE]


def test_a_batch_is_too_large_for_a_slab_that_other_memory_was_taken_of() -> None:
    ring = Ring(1, 1 << 20)

    def collate_fn(samples: Any) -> Any:
        return pyparallel.collate(samples) * 2

    worker = Worker(ring, collate_fn)
    received = worker.make([torch.ones(200_000)])
    assert received.batch.unique().tolist() == [2]
    assert received.miss is not None
    reason, nbytes = received.miss
    assert (reason, nbytes) == ("large", 1_600_000)
    worker = Worker(Ring(1, nbytes), collate_fn)
    assert worker.make([torch.ones(200_000)]).miss is None


FILES, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
NBYTES, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
#: The call that fails, its error, and the limit that it has met.
LIMITS = [
    (
        *("posix_fallocate", errno.ENOSPC),
        "the system has no memory left (No space left on device). Increase the memory "
        "of the machine or its control group, or use smaller batches.",
    ),
    (
        *("memfd_create", errno.EMFILE),
        f"the process has reached its limit of {FILES} open files. Increase it (ulimit "
        "-n).",
    ),
    (
        *("memfd_create", errno.ENFILE),
        "the system has reached its limit of open files. Increase it (sysctl "
        "fs.file-max).",
    ),
    (
        *("ftruncate", errno.EFBIG),
        f"the size of a file is limited to {NBYTES} bytes. Increase the limit (ulimit "
        "-f).",
    ),
    (
        *("memfd_create", errno.EPERM),
        "the system reports: Operation not permitted. Allow memfd_create.",
    ),
]


@pytest.mark.parametrize(("call", "number", "limit"), LIMITS)
def test_without_any_memory_the_error_names_the_fix(
    monkeypatch: Any, call: str, number: int, limit: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    ring = Ring(2, 1 << 20)
    monkeypatch.setattr(os, "posix_fallocate", refuse)  # also in the ring
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(RuntimeError) as caught:
        Worker(ring, torch.stack).make([torch.ones(16)])
    assert str(caught.value) == (
        f"DataLoader: a batch must get 64 bytes of shared memory, but {limit}"
    )
    del caught
    assert ring.holders() == [FREE, FREE]


def test_a_full_ring_is_a_miss_that_knows_its_size() -> None:
    ring = Ring(1, 1 << 12)
    worker = Worker(ring, torch.stack)
    first = worker.make([torch.ones(3)])
    second = worker.make([torch.ones(5)])
    assert (first.miss, second.miss) == (None, ("full", 64))
    assert second.batch.tolist() == [[1.0] * 5]


class Keeping:
    """Keeps a tensor in the slab, and returns another object."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        if not self.kept:
            big = pyparallel.collate(samples)
            small = allocation.empty((3,), torch.float32, torch.device("cpu")).fill_(7)
            self.kept += [big, small]
            return {"other": torch.ones(2), "small": small}
        return {"other": self.kept[0], "small": self.kept[1]}


def test_a_tensor_that_a_worker_keeps_is_not_overwritten() -> None:
    ring = Ring(2, 1 << 20)
    worker = Worker(ring, Keeping())
    samples = [torch.full((70_000,), 5.0)]
    first = worker.make(samples)
    assert first.miss is not None and first.miss.reason == "kept"
    assert ring.holders() == [worker.holder, FREE]
    assert first.batch["small"].tolist() == [7, 7, 7]
    second = worker.make(samples)
    assert second.miss is None
    assert second.batch["other"].unique().tolist() == [5]
    worker.collate_fn = torch.stack
    assert ring.holders()[0] == FREE


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_no_byte_of_an_earlier_batch_can_be_reached(kept: bool, used: bool) -> None:
    ring = Ring(1, 1 << 20)
    secret = torch.full((1 << 18,), 0x5E, dtype=torch.uint8)
    worker = Worker(ring, torch.stack)
    assert whole(worker.make([secret]).batch).count(0x5E) == secret.numel()
    cache = []

    def collate_fn(samples: Any) -> Any:
        cpu = torch.device("cpu")
        made = [allocation.empty((n,), torch.uint8, cpu) for n in (70, 3, 65)]
        for tensor in made:
            tensor.fill_(1)
        if kept:
            cache.append(made[0])
        return [*made[not used :], torch.ones(5, dtype=torch.uint8), torch.tensor(1.0)]

    worker.collate_fn = collate_fn
    received = worker.make(None)
    batch = received.batch
    assert received.is_in_ring is not kept
    assert all(tensor.unique().tolist() == [1] for tensor in batch)
    assert 0x5E not in whole(batch[0])


def test_an_error_in_a_collate_function_frees_its_slab() -> None:
    ring = Ring(1, 1 << 20)

    def collate_fn(samples: Any) -> Any:
        made = pyparallel.collate(samples)
        raise KeyError(made.shape)

    with pytest.raises(KeyError):
        Worker(ring, collate_fn).make([torch.ones(100_000)])
    gc.collect()
    assert ring.holders() == [FREE]


def test_reclaimed_slabs_are_poisoned_before_anybody_can_claim_them(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(debug, "poison_enabled", True)
    ring = Ring(2, 1 << 12)
    slab = ring.claim(WORKER)
    assert slab is not None
    memory = slab.take(64)
    assert memory is not None
    memory.fill_(3)
    reclaim, seen = backend.ring_reclaim, []

    def look(header: torch.Tensor, holder: int) -> list[int]:
        seen.append(memory.unique().tolist())
        return reclaim(header, holder)

    monkeypatch.setattr(backend, "ring_reclaim", look)
    ring.reclaim(WORKER)
    assert seen == [[0xDB]]
    assert ring.holders() == [FREE, FREE]
    assert ring.claim(WORKER + 1) is not None


def test_a_program_that_is_started_inherits_no_ring() -> None:
    ring = Ring(1, 1 << 12)
    command = ["ls", "-l", "/proc/self/fd"]
    done = subprocess.run(command, capture_output=True, text=True, close_fds=False)
    assert done.returncode == 0 and "memfd:" not in done.stdout
    assert process_resources.memfds() and ring.fd >= 0


@pytest.mark.parametrize("refused", ["ftruncate", "posix_fallocate"])
def test_a_ring_that_gets_no_memory_leaves_nothing(
    monkeypatch: Any, refused: str
) -> None:
    gc.collect()
    before = loader_sets.num_fds()
    monkeypatch.setattr(os, refused, full)
    with pytest.raises(OSError, match="No space left"):
        Ring(4, 1 << 20)
    gc.collect()
    assert loader_sets.num_fds() == before


# PYPARALLEL_DEBUG=poison detects writes outside a batch's own memory.


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "poison_enabled", True)


def stale(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor, which keeps nothing alive."""
    return (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())


@pytest.mark.usefixtures("poisoned")
def test_a_write_to_a_free_slab_is_found_when_it_is_claimed() -> None:
    ring = Ring(2, 1 << 16)
    worker = Worker(ring, torch.stack)
    batch = worker.make([torch.ones(4)]).batch
    memory = stale(batch)
    assert bytes(memory) == torch.ones(4).numpy().tobytes()
    del batch
    assert bytes(memory) == b"\xdb" * 16
    memory[5] = 0
    with pytest.raises(RuntimeError) as caught:
        worker.make([torch.ones(4)])
    assert str(caught.value) == (
        "slab 0 of the DataLoader's ring must not change while it is free, but "
        "it was written. Look for code that uses the memory of a batch after its last "
        "tensor was freed."
    )


def placed(*sizes: int) -> list[torch.Tensor]:
    """Return tensors that are created in the slab."""
    return [allocation.empty((n,), torch.uint8, torch.device("cpu")) for n in sizes]


def only_placed(samples: Any) -> Any:
    return placed(64, 3, 65)


def packed(samples: Any) -> Any:
    """Return tensors that are copied into the slab."""
    return [torch.ones(3), torch.zeros(0), torch.ones(2, dtype=torch.uint8)]


def mixed(samples: Any) -> Any:
    """Return a tensor in the slab, beside memory there that is unused, and copies."""
    kept, _, later = placed(7, 100, 130)
    pixels = torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return [pixels, later, torch.ones(1030).numpy(), kept]


def slab_of(batch: Any) -> tuple[int, int, dict[int, int]]:
    """Return the first byte of a slab, its size, and its tensors with their sizes."""
    leaves = [torch.as_tensor(each) for each in batch]
    slab = backend.memory_of(leaves[0])
    return slab.data_ptr(), slab.nbytes, {e.data_ptr(): e.nbytes for e in leaves}


def beyond(first: int, nbytes: int, tensors: dict[int, int]) -> dict[int, str]:
    """Return the ends of all ranges of a slab without tensors, with descriptions."""
    found = {-64: "before them", -1: "before them"}
    found |= {nbytes: "after them", nbytes + 63: "after them"}
    end = 0
    for start, size in [*sorted(tensors.items()), (first + nbytes, 0)]:
        if end < start - first:
            where = f"{end} to {start - first - 1}, behind the end of a tensor,"
            found |= {end: where, start - first - 1: where}
        end = max(end, start - first + size)
    return {first + byte: where for byte, where in found.items()}


def outside(where: str, nbytes: int) -> str:
    return (
        "slab 0 of the DataLoader's ring must be written within the tensors of its "
        f"{nbytes} bytes, but bytes {where} were written. Look for code that writes "
        "out of the bounds of a tensor."
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("collate_fn", [torch.stack, only_placed, packed, mixed])
def test_a_write_of_the_parent_to_any_byte_outside_of_the_tensors_is_found(
    collate_fn: Any,
) -> None:
    samples = [torch.arange(20.0)]

    def make(worker: Worker) -> Any:
        batch = worker.make(samples).batch
        return [batch] if isinstance(batch, torch.Tensor) else batch

    first, nbytes, tensors = slab_of(make(Worker(Ring(1, 1 << 16), collate_fn)))
    places = beyond(first, nbytes, tensors)
    assert len(places) >= 4 + 2
    for byte, where in places.items():
        worker = Worker(Ring(1, 1 << 16), collate_fn)
        batch = make(worker)
        at, *_ = slab_of(batch)
        ctypes.c_uint8.from_address(at + byte - first).value = byte % 2
        for tensor in batch:
            tensor[...] = 7  # allowed
        del batch, tensor
        with pytest.raises(RuntimeError) as caught:
            worker.make(samples)
        assert str(caught.value) == outside(where, nbytes)


#: Bytes from the start of a tensor of 20,001 numbers, and the place.
WORKER_WRITES = [
    (-3, "before them"),
    (80_004, "80004 to 80063, behind the end of a tensor,"),
    (80_063, "80004 to 80063, behind the end of a tensor,"),
    (80_064 + 64 + 63, "after them"),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("when", ["collating", "sent"])
@pytest.mark.parametrize(("offset", "where"), WORKER_WRITES)
def test_a_write_of_a_worker_outside_of_the_tensors_is_found(
    offset: int, where: str, when: str
) -> None:
    ring, addresses = Ring(2, 1 << 20), []

    def write() -> None:
        ctypes.c_uint8.from_address(addresses.pop()).value = 0

    def collate_fn(samples: Any) -> Any:
        batch = pyparallel.collate(samples)
        addresses.append(batch.data_ptr() + offset)
        if when == "collating":
            write()
        return batch, torch.ones(16)

    def late(*args: Any) -> torch.Tensor:
        write()
        return adopt(*args)

    adopt = ring.adopt
    if when == "sent":
        ring.adopt = late  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        Worker(ring, collate_fn).make([torch.ones(20_001)])
    assert str(caught.value) == outside(where, 80_064 + 64)
    del caught
    gc.collect()
    assert ring.holders() == [FREE, FREE]


DAMAGED = """
import pyparallel, torch
from pyparallel.backend import memory_of
from pyparallel.loader import epoch

epoch.INLINE_NBYTES = 0

def run(batch):
    memory_of(batch)[-1] = 0  # the tensor ends before

for batch in pyparallel.DataLoader(range(1), num_workers=1):
    run(batch)
del batch
"""


def test_a_write_to_the_last_batch_of_a_program_is_printed() -> None:
    command = [sys.executable, "-W", "ignore", "-c", DAMAGED]
    done = subprocess.run(
        command,
        env={**os.environ, "PYPARALLEL_DEBUG": "poison"},
        capture_output=True,
        text=True,
    )
    assert outside("8 to 63, behind the end of a tensor,", 64) in done.stderr


@pytest.mark.usefixtures("poisoned")
def test_the_gaps_of_a_batch_that_leaves_the_ring_are_zeros() -> None:
    kept = []

    def collate_fn(samples: Any) -> Any:
        kept.extend(placed(70, 3))
        return [*kept, torch.ones(3)]

    received = Worker(Ring(1, 1 << 16), collate_fn).make(None)
    assert not received.is_in_ring
    batch = received.batch
    first, nbytes, tensors = slab_of(batch)
    shown = whole(batch[0])
    places = [byte - first for byte in beyond(first, nbytes, tensors)]
    assert {shown[place] for place in places if 0 <= place < nbytes} == {0}
