"""Messages arrive whole, in order and with their descriptors, or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from multiprocessing import connection
from typing import Any

import pytest

from pyparallel.workers import descriptors
from pyparallel.workers._channel import Channel, pair
from pyparallel.workers.processes import ProcessWorkers
from tests.support.loader.worker_programs import (
    Program,
    fork_child,
    memory,
    num_open,
    text_of,
)

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(60)]

#: Sizes of head and tail: empty, small, joined, apart, above the buffer of the reader.
SIZES = [(1, 0), (0, 1), (3, 5), (1, 1 << 14), (1 << 14, 1), (9, 1 << 16), (70_000, 0)]
SIZES += [(1 << 16, 1 << 16), (20, (1 << 16) - 41), (20, (1 << 16) - 40), (5, 3 << 20)]


def channels() -> tuple[Channel, Channel]:
    """Return two ends that never wait."""
    ours, theirs = pair()
    theirs.setblocking(False)
    return Channel(ours), Channel(theirs)


def message(number: int, sizes: tuple[int, int]) -> tuple[bytes, bytes]:
    return tuple(bytes([65 + number % 26]) * size for size in sizes)  # type: ignore


def transfer(sender: Channel, receiver: Channel) -> list[Any]:
    """Flush and receive until nothing is left."""
    found: list[Any] = []
    while True:
        sender.flush()
        arrived = receiver.receive()
        if arrived is not None:
            found.append(arrived)
        elif not sender.has_unsent:
            return found


def test_messages_of_all_sizes_arrive_in_order() -> None:
    ours, theirs = channels()
    for shift in range(len(SIZES)):
        order = SIZES[shift:] + SIZES[:shift]
        sent = [message(i, sizes) for i, sizes in enumerate(order)]
        memory_of_caller = [bytearray(tail) for _, tail in sent]
        for (head, _), tail in zip(sent, memory_of_caller, strict=True):
            ours.send(head, tail)
            tail[:] = bytes(len(tail))  # the caller may change it at once
        found = transfer(ours, theirs)
        assert [(bytes(h), bytes(t), tuple(d)) for h, t, d in found] == [
            (*each, ()) for each in sent
        ]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("kind", ["small", "large", "descriptors"])
def test_a_closed_end_is_an_error_and_no_signal(kind: str) -> None:
    ours, theirs = channels()
    theirs.close()
    sent = [os.dup(0)] if kind == "descriptors" else []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        with pytest.raises(BrokenPipeError):
            ours.send(b"head", bytes(70_000 if kind == "large" else 5), sent)
        assert signal.sigtimedwait([signal.SIGPIPE], 0) is None
    finally:
        signal.sigtimedwait([signal.SIGPIPE], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ours.close()


@pytest.mark.parametrize("sizes", [(3, 5), (9, 70_000)])
def test_a_message_that_arrives_byte_by_byte_is_complete(sizes: Any) -> None:
    ours, theirs = channels()
    head, tail = message(0, sizes)
    ours.send(head, tail)
    writer, reader = socket.socketpair()
    reader.setblocking(False)
    channel = Channel(reader)
    frames = b""
    while len(frames) < 20 + sum(sizes):
        ours.flush()
        frames += theirs._socket.recv(1 << 20)
    for byte in frames[:40]:
        assert channel.receive() is None
        writer.send(bytes([byte]))
    writer.sendall(frames[40:])
    assert channel.receive() == (head, tail, ())
    writer.close()
    for each in (ours, theirs, channel):
        each.close()


def test_both_directions_hold_more_than_all_buffers() -> None:
    one, two = channels()
    sent = [message(i, (9, 3 << 20)) for i in range(6)]
    for each in sent:
        one.send(*each)
        two.send(*each)
    found: dict[str, list[Any]] = {"one": [], "two": []}
    while min(map(len, found.values())) < len(sent):
        for name, end in (("one", one), ("two", two)):
            end.flush()
            if (arrived := end.receive()) is not None:
                found[name].append(tuple(map(bytes, arrived[:2])))
    assert found == {"one": sent, "two": sent}
    one.close()
    two.close()


@pytest.mark.parametrize("nbytes", [0, 100_000])
@pytest.mark.parametrize("count", [1, 2, 253, 254, 300])
def test_descriptors_belong_to_their_message(count: int, nbytes: int) -> None:
    before = num_open()
    ours, theirs = channels()
    for number, many in enumerate((0, count, 0, 1)):
        texts = [f"{number}.{i}" for i in range(many)]
        ours.send(b"h", bytes(nbytes), [memory(text) for text in texts])
    found = transfer(ours, theirs)
    assert not ours._unsent, "the sender has closed its own"
    texts = [[text_of(fd) for fd in fds] for _, _, fds in found]
    assert texts == [[], [f"1.{i}" for i in range(count)], [], ["3.0"]]
    ours.close()
    theirs.close()
    assert num_open() == before


@pytest.mark.parametrize("step", ["unsent", "sent", "half arrived", "not detached"])
def test_descriptors_are_closed_with_their_channel(step: str) -> None:
    before = num_open()
    ours, theirs = channels()
    if step == "unsent":
        ours.send(b"h", bytes(4 << 20))
    rest = bytes(4 << 20 if step == "half arrived" else 0)
    ours.send(b"h", rest, [memory("x"), memory("y")])
    if step == "half arrived":
        assert theirs.receive() is None and len(theirs._arrived) == 2
    if step == "not detached":
        _, _, fds = theirs.receive() or ((),) * 3
        with descriptors.arriving(fds):
            pass
    ours.close()
    theirs.close()
    assert num_open() == before


def test_a_process_without_free_descriptors_gets_an_error() -> None:
    ours, theirs = channels()
    ours.send(b"h", b"", [memory(str(i)) for i in range(20)])
    before = num_open()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 9, hard))
    try:
        with pytest.raises(OSError) as caught:
            theirs.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE
    ours.close()
    theirs.close()
    assert num_open() == before - 2


def test_received_descriptors_do_not_reach_other_programs() -> None:
    ours, theirs = channels()
    ours.send(b"h", b"", [memory("x")])
    _, _, (fd,) = theirs.receive() or ((),) * 3
    assert not os.get_inheritable(fd)
    os.close(fd)
    ours.close()
    theirs.close()


def test_what_arrived_before_the_end_is_received() -> None:
    ours, theirs = channels()
    for i in range(3):
        ours.send(b"h", b"%d" % i)
    ours._socket.send(b"\0" * 7)  # half a message
    theirs.send(b"never read")
    ours.close()
    assert [theirs.receive()[1] for _ in range(3)] == [b"0", b"1", b"2"]  # type: ignore
    for _ in range(2):
        with pytest.raises(EOFError):
            theirs.receive()
    with pytest.raises(OSError):
        theirs.send(b"h")
    theirs.close()


@pytest.mark.parametrize("thread", [False, True])
def test_every_fork_closes_all_ends(thread: bool) -> None:
    ours, theirs = pair()
    child = fork_child(thread)
    channel = Channel(ours)
    theirs.close()
    ours.setblocking(True)
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_a_fork_beside_a_close_closes_no_other_file() -> None:
    """Another thread may open files and fork whenever a call that closes returns."""
    codes: list[int] = []

    def at_return(frame: Any, event: str, function: Any) -> None:
        if event != "c_return" or function.__name__ != "close":
            return
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
        pid = os.fork()
        if not pid:
            os._exit(sum(not is_open(fd) for fd in files))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        descriptors.close(files)

    sys.setprofile(at_return)
    try:
        ProcessWorkers(multiprocessing.get_context("fork"), Program(), 2).close()
    finally:
        sys.setprofile(None)
    assert len(codes) > 10 and not any(codes), codes


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_objects_travel_with_their_descriptors() -> None:
    before = num_open()
    reader, writer = os.pipe()
    sent = connection.Connection(writer, readable=False)
    data, fds = descriptors.dump(["x", sent, {"again": sent}])
    with pytest.raises(TypeError):
        descriptors.dump([sent, threading.Lock()])
    sent.close()
    name, one, rest = descriptors.load(data, fds)
    one.send_bytes(b"abc")
    assert os.read(reader, 99)[-3:] == b"abc"
    assert name == "x" and rest["again"] is one
    one.close()
    os.close(reader)
    assert num_open() == before
