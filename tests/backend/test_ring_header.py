"""The header of a ring in both backends: against a model, and in real processes."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from pyparallel.backend import _python_ring
from tests.support.processes.backends import both, native, needs_native, reference

LINE = 64
PARENT = 1
PAYLOAD = 4096  # bytes of a slot

pytestmark = [pytest.mark.one_backend, pytest.mark.asan, pytest.mark.tsan]


def blank(num_slots):
    return torch.full((LINE * (1 + num_slots),), 0xEE, dtype=torch.uint8)


@contextlib.contextmanager
def memory_file(nbytes):
    fd = os.memfd_create("ring")
    try:
        os.truncate(fd, nbytes)
        yield fd
    finally:
        os.close(fd)


def formatted(backend, num_slots):
    header = blank(num_slots)
    backend.ring_format(header, num_slots)
    return header


@needs_native
@pytest.mark.parametrize("maker", [reference, native], ids=["reference", "native"])
def test_the_other_backend_claims_nothing_and_may_do_the_rest(maker):
    other = native if maker is reference else reference
    header = formatted(maker, 3)
    with memory_file(1) as fd:
        assert other.ring_claim(header, 7, fd) == -1
        assert other.ring_holders(header) == [0, 0, 0]
        assert [maker.ring_claim(header, 7, fd) for _ in range(3)] == [0, 1, 2]
        assert other.ring_pass(header, 1, 7, PARENT) is True
        assert other.ring_pass(header, 1, 7, PARENT) is False
        assert other.ring_reclaim(header, 7) == [0, 2]
        assert maker.ring_claim(header, 8, fd) == 0


# ------------------------------------------------------------------ several processes


def share(fd, num_slots):
    """Return the header and the slots of the ring in a file."""
    nbytes = LINE * (1 + num_slots)
    shared = mmap.mmap(fd, nbytes + num_slots * PAYLOAD)
    memory = torch.frombuffer(shared, dtype=torch.uint8)
    return memory[:nbytes], memory[nbytes:].view(num_slots, PAYLOAD)


def claim_in_time(backend, header, holder, fd):
    deadline = time.monotonic() + 60
    while (slot := backend.ring_claim(header, holder, fd)) < 0:
        assert time.monotonic() < deadline
        time.sleep(1e-4)
    return slot


def produce(backend, fd, num_slots, holder, count, hangs):
    """Fill slots and pass them to the parent; if ``hangs``, keep the last two."""
    header, slots = share(fd, num_slots)
    for done in range(count):
        slot = claim_in_time(backend, header, holder, fd)
        slots[slot] = holder
        if not hangs or done < count - 2:
            assert slots[slot].eq(holder).all()
            assert backend.ring_pass(header, slot, holder, PARENT)
    while hangs:
        time.sleep(1)


def consume(backend, header, slots, counts):
    for slot, holder in enumerate(backend.ring_holders(header)):
        if holder == PARENT:
            found = slots[slot].tolist()
            assert len(set(found)) == 1, "a slot of two holders"
            counts[found[0]] = counts.get(found[0], 0) + 1
            slots[slot] = 0
            assert backend.ring_pass(header, slot, PARENT, 0)


def written(slots, holders, holder):
    """Return how many slots a holder has, and has filled with its number."""
    held = [slot for slot, by in enumerate(holders) if by == holder]
    return sum(bool(slots[slot].eq(holder).all()) for slot in held)


@both
def test_processes_share_a_ring_and_one_is_killed(backend):
    context = multiprocessing.get_context("fork")
    num_slots, count, kept = 4, 60, 11
    with memory_file(LINE * (1 + num_slots) + num_slots * PAYLOAD) as fd:
        header, slots = share(fd, num_slots)
        backend.ring_format(header, num_slots)
        jobs = [(2, count, False), (3, count, False), (4, kept, True)]
        workers = [
            context.Process(target=produce, args=(backend, fd, num_slots, *job))
            for job in jobs
        ]
        for worker in workers:
            worker.start()
        counts: dict[int, int] = {}
        deadline = time.monotonic() + 120
        wanted = {2: count, 3: count, 4: kept - 2}

        # Killed when both slots that it keeps are written.
        while counts != wanted or written(slots, backend.ring_holders(header), 4) < 2:
            assert time.monotonic() < deadline, counts
            consume(backend, header, slots, counts)
        os.kill(workers[2].pid, signal.SIGKILL)
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0, -signal.SIGKILL]
        lost = backend.ring_reclaim(header, 4)
        assert len(lost) == 2 and slots[lost].eq(4).all()
        assert backend.ring_holders(header) == [0] * num_slots
        claimed = [backend.ring_claim(header, 9, fd) for _ in range(num_slots + 1)]
        assert claimed == [*range(num_slots), -1]
        del header, slots


@both
def test_threads_get_slots_of_their_own(backend):
    num_slots = 64
    header = formatted(backend, num_slots)
    found: list[list[int]] = [[] for _ in range(4)]
    with memory_file(1) as fd:

        def work(holder):
            while (slot := backend.ring_claim(header, holder, fd)) >= 0:
                found[holder - 1].append(slot)

        threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(slot for each in found for slot in each) == list(range(num_slots))
    assert all(each == sorted(each) for each in found)
    for slot, holder in enumerate(backend.ring_holders(header)):
        assert slot in found[holder - 1]


# ---------------------------------------------------------- locks, in pure Python only


def hold_lock(fd, ready):
    fcntl.lockf(fd, fcntl.LOCK_EX)
    ready.set()
    time.sleep(60)


@pytest.fixture
def locked():
    """Yield a file that another process has locked, and that process."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    with memory_file(1) as fd:
        process = context.Process(target=hold_lock, args=(fd, ready), daemon=True)
        process.start()
        assert ready.wait(30)
        yield SimpleNamespace(fd=fd, process=process)
        process.kill()
        process.join()


def test_a_claim_does_not_wait_for_a_stopped_process(locked, monkeypatch):
    monkeypatch.setattr(_python_ring, "_LOCK_SECONDS", 0.05)
    header = formatted(reference, 2)
    os.kill(locked.process.pid, signal.SIGSTOP)
    assert reference.ring_claim(header, 3, locked.fd) == -1
    assert reference.ring_holders(header) == [0, 0]


def test_the_lock_of_a_killed_process_is_free(locked, monkeypatch):
    monkeypatch.setattr(_python_ring, "_LOCK_SECONDS", 60)  # the killer may be late
    header = formatted(reference, 2)
    killer = threading.Timer(0.2, os.kill, (locked.process.pid, signal.SIGKILL))
    killer.start()
    assert reference.ring_claim(header, 3, locked.fd) == 0
    killer.join()


def test_a_child_that_was_forked_in_a_claim_can_claim():
    header = formatted(reference, 2)
    with memory_file(1) as fd, _python_ring._mutex:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if reference.ring_claim(header, 3, fd) == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_that_cannot_be_locked_is_an_error():
    header = formatted(reference, 2)
    with pytest.raises(OSError):
        reference.ring_claim(header, 3, os.sysconf("SC_OPEN_MAX") - 1)
    assert reference.ring_holders(header) == [0, 0]
