"""The main function of a worker process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from ..core.signals import restore_handlers
from ..core.versions import VERSION
from . import deaths, descriptors
from ._channel import Channel, close_in_children
from .interface import PackedProgram

#: Tails of messages without a head. They report how far a worker has come: it has the
#: program, it has started the program, it failed to do so (followed by a traceback), it
#: ends after its next answer.
LOADED, READY, FAILED, LAST = b"l", b"r", b"f", b"e"


def work(
    end: socket.socket,
    life: Connection,
    worker: int,
    stacks: deaths.Stacks,
    program: PackedProgram | None,
) -> None:
    """Answer tasks until the parent closes the channel.

    Args:
        end: of the channel.
        life: the reading end of a pipe whose other end only the parent holds.
        worker: the number of the worker.
        stacks: entered by this process.
        program: None: it is the first message.
    """
    # A fork has the descriptor through which asyncio learns of signals of the parent.
    signal.set_wakeup_fd(-1)
    restore_handlers()
    # A terminal sends Ctrl-C to all of its processes. The parent decides what ends. A
    # signal that is ignored, instead, would be ignored by programs of the data set.
    signal.signal(signal.SIGINT, _do_nothing)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _use_batch_policy()
    _end_with_parent(life)
    deaths.enter(stacks)
    close_in_children(end).setblocking(True)
    channel = Channel(end)
    with contextlib.suppress(_Closed):
        program = _prepare(channel, worker, program)
        while program is not None and _answer(channel, program):
            pass


def _use_batch_policy() -> None:
    """Let the scheduler of Linux interrupt no other process for this one.

    It does so for a process that has slept. A worker sleeps before each small task, and
    would interrupt the loop that sends the task. A policy that the user has set stays.
    """
    with contextlib.suppress(AttributeError, OSError):  # another system; not allowed
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _do_nothing(number: int, frame: Any) -> None:
    pass


class _Closed(BaseException):
    """The parent has closed the channel."""


def _receive(channel: Channel) -> Any:
    try:
        return channel.receive()
    except EOFError:
        raise _Closed from None


def _send(channel: Channel, *message: Any) -> None:
    try:
        channel.send(*message)
    except ConnectionError:
        raise _Closed from None


def _prepare(
    channel: Channel, worker: int, program: PackedProgram | None
) -> PackedProgram | None:
    """Return the program after its start. Send an error, and return None."""
    try:
        if program is None:
            version, *pickled = _receive(channel)
            _check_version(bytes(version).decode())
            program = descriptors.load(*pickled)
        _send(channel, b"", LOADED)
        program.start(worker)
    except Exception:
        text = traceback.format_exc().encode(errors="replace")
        _send(channel, b"", FAILED + text)
        return None
    _send(channel, b"", READY)
    return program


def _check_version(version: str) -> None:
    """Raise an error if the parent has another version of this package."""
    if version != VERSION:
        folder = os.path.dirname(os.path.dirname(__file__))
        raise RuntimeError(
            f"DataLoader: workers must have version {version} of pyparallel like their "
            f"parent, but have {VERSION}, from {folder}. Look for a fork server that "
            "started earlier, or for another PYTHONPATH."
        )


def _answer(channel: Channel, program: PackedProgram) -> bool:
    """Answer the next task. Return False if the worker ends after that."""
    _, *task = _receive(channel)
    try:
        loaded = descriptors.load(*task)
    except Exception as error:
        answer = program.failed(error)
    else:
        answer = program.answer(loaded)
    if answer.ends:
        _send(channel, b"", LAST)
    _send(channel, *answer[:3])
    return not answer.ends


def _end_with_parent(life: Connection) -> None:
    """Let the system kill this process when its parent has ended, also inside a task.

    The parent holds the other end of a pipe. The system signals its end, whatever the
    start method is, and also if the thread that started this process has ended. A
    handler would wait for the end of a native call, so the signal is SIGKILL.
    """
    if sys.platform != "linux":
        return
    import fcntl

    # Signals belong to an opened file. The processes share `life`, so open it again.
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(f"/proc/self/fd/{life.fileno()}", flags)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    ended = select.poll()
    ended.register(life, select.POLLIN)
    if ended.poll(0):
        os._exit(1)
