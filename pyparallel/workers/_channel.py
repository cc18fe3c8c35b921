"""Messages over one end of a socket pair.

A message is three numbers and two byte strings, ``head`` and ``tail``, with any number
of descriptors. Bytes and descriptors both arrive in the order in which they were sent.
So the descriptors of a message are the first ones that have not been taken.

Note: [end of file]. The end of a process is known by the end of its file, which comes
when no process holds a copy of its end. A fork copies all ends of the process. So each
child of any fork closes them, but for those that it was started with.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from . import descriptors as fds

#: The numbers of bytes of head and tail, and the number of descriptors.
_HEADER = struct.Struct("=QQI")
_BUFFER_NBYTES = 1 << 16
#: Up to this size, joining the parts of a message is cheaper than sending them apart.
_SMALL_NBYTES = 1 << 14
#: The most descriptors that Linux takes with one call.
_MAX_DESCRIPTORS = 253
_CONTROL_NBYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
#: New descriptors must not reach other programs. Only Linux has the flag.
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
#: The wait of a sender until the system delivers some of the descriptors on their way.
_FULL_SECONDS = 0.01

#: A message that has arrived: head, tail and descriptors.
Message = tuple[bytes | bytearray, bytes | bytearray, Sequence[int]]


class Channel:
    """One end. Without a socket that blocks, `send` and `receive` never wait."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # the unread bytes of the buffer
        # A message that exceeds the buffer: its parts, and the bytes that have arrived.
        self._large: tuple[bytearray, bytearray, int] | None = None
        self._num_large = 0
        self._arrived: deque[int] = deque()  # descriptors
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()

    def fileno(self) -> int:
        """Return the descriptor of the socket, -1 after `close`."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are left that the socket did not accept."""
        return bool(self._unsent)

    # ------------------------------------------------------------- writing

    def send(
        self,
        head: bytes | bytearray,
        tail: bytes | bytearray | memoryview = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a message. Keep bytes that do not fit into the socket for `flush`.

        Args:
            head: the first byte string.
            tail: the second one.
            descriptors: closed as soon as they are sent, and by `close`.

        Raises:
            OSError: the other end is closed.
        """
        header = _HEADER.pack(len(head), len(tail), len(descriptors))
        if len(head) + len(tail) <= _SMALL_NBYTES:
            parts: list[Any] = [b"".join((header, head, tail))]
        else:
            parts = [header, head, tail]
        if descriptors or self._unsent:
            self._queue(parts, descriptors)
            self.flush()
            return
        sent, size = 0, sum(map(len, parts))
        with contextlib.suppress(BlockingIOError):
            # A socket that blocks accepts a part as well, after a signal.
            sent = self._socket.sendmsg(parts)
        if sent < size:
            for part in parts:
                if sent < len(part):
                    # A copy, because the caller may change its memory.
                    self._unsent.append((memoryview(bytes(part))[sent:], ()))
                sent = max(0, sent - len(part))
            self.flush()

    def _queue(self, parts: list[Any], descriptors: Sequence[int]) -> None:
        """Queue a message. Each group of its descriptors travels with one more byte."""
        data = memoryview(b"".join(parts))
        start = 0
        for first in range(0, len(descriptors), _MAX_DESCRIPTORS):
            group = descriptors[first : first + _MAX_DESCRIPTORS]
            start += 1
            self._unsent.append((data[start - 1 : start], group))
        self._unsent.append((data[start:], ()))

    def flush(self) -> None:
        """Send bytes that are left, as far as the socket accepts them."""
        while self._unsent:
            data, group = self._unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", group))]
            try:
                sent = self._socket.sendmsg([data], rights if group else [])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(_FULL_SECONDS)
                if self._socket.getblocking():
                    continue
                return
            self._unsent.popleft()
            if sent < len(data):
                self._unsent.appendleft((data[sent:], ()))
            fds.close(group)

    # ------------------------------------------------------------- reading

    def receive(self) -> Message | None:
        """Return the next message, None if it has not arrived yet.

        Raises:
            EOFError: the other end is closed. Half a message is dropped.
            OSError: this process cannot open the descriptors of the message.
        """
        while (message := self._take()) is None:
            try:
                self._read()
            except BlockingIOError:
                return None
            except ConnectionResetError:
                raise EOFError from None
        return message

    def _read(self) -> None:
        if self._large is None:
            if self._start == self._end:
                self._start = self._end = 0
            views = [self._view[self._end :]]
        else:
            head, tail, _ = self._large
            left = self._num_large - len(head)
            views = [memoryview(head)[self._num_large :], memoryview(tail)]
            if left >= 0:
                views = [memoryview(tail)[left:]]
        count, control, flags, _ = self._socket.recvmsg_into(
            views, _CONTROL_NBYTES, _CLOEXEC
        )
        if control:
            self._keep(control)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not count:
            raise EOFError
        if self._large is None:
            self._end += count
        else:
            self._num_large += count

    def _keep(self, control: list[Any]) -> None:
        for _, _, data in control:
            arrived = array.array("i")
            arrived.frombytes(data[: len(data) - len(data) % arrived.itemsize])
            self._arrived.extend(arrived)
            if not _CLOEXEC:
                for fd in arrived:
                    os.set_inheritable(fd, False)

    def _take(self) -> Message | None:
        """Return the next message if all of its bytes have arrived."""
        if self._large is not None:
            head, tail, num_descriptors = self._large
            if self._num_large < len(head) + len(tail):
                return None
            self._large = None
            return head, tail, self._descriptors(num_descriptors)
        start, have = self._start, self._end - self._start
        if have >= _HEADER.size:
            num_head, num_tail, num_descriptors = _HEADER.unpack_from(
                self._buffer, start
            )
            size = _HEADER.size + num_head + num_tail
            if have >= size:
                first = start + _HEADER.size
                last = first + num_head
                self._start = start + size
                return (
                    bytes(self._view[first:last]),
                    bytes(self._view[last : self._start]),
                    self._descriptors(num_descriptors) if num_descriptors else (),
                )
            if size > _BUFFER_NBYTES:
                self._begin_large(num_head, num_tail, num_descriptors)
                return None
        if start and self._end == _BUFFER_NBYTES:  # make room for the rest
            self._buffer[:have] = self._buffer[start:]
            self._start, self._end = 0, have
        return None

    def _begin_large(self, num_head: int, num_tail: int, num_descriptors: int) -> None:
        """Move the part of a message that has arrived to memory of its own."""
        head, tail = bytearray(num_head), bytearray(num_tail)
        arrived = self._view[self._start + _HEADER.size : self._end]
        head[: len(arrived)] = arrived[:num_head]
        rest = arrived[num_head:]
        tail[: len(rest)] = rest
        self._large = head, tail, num_descriptors
        self._num_large, self._start, self._end = len(arrived), 0, 0

    def _descriptors(self, count: int) -> Sequence[int]:
        return tuple(self._arrived.popleft() for _ in range(count))

    def close(self) -> None:
        """Close the socket, and all descriptors that were not sent or not taken."""
        self._socket.close()
        while self._unsent:
            fds.close(self._unsent.popleft()[1])
        fds.close(self._arrived)
        self._arrived.clear()


# ------------------------------------------------------------- forks

_T = TypeVar("_T", bound=Any)

#: All ends of this process that a fork must close: see Note [end of file].
_ends: weakref.WeakSet[Any] = weakref.WeakSet()


class _Kept(threading.local):
    """The ends that a process needs which this thread is forking."""

    ends: Sequence[Any] = ()


_kept = _Kept()


def close_in_children(end: _T) -> _T:
    """Close an end, of a socket or a pipe, in each process that this process forks."""
    _ends.add(end)
    return end


@contextlib.contextmanager
def kept(*ends: Any) -> Iterator[None]:
    """Keep these ends open in a process that this thread forks in the block."""
    _kept.ends = ends
    try:
        yield
    finally:
        _kept.ends = ()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends. The first one does not block."""
    ours, theirs = map(close_in_children, socket.socketpair())
    ours.setblocking(False)
    return ours, theirs


def _close_in_child() -> None:
    keep, _kept.ends = _kept.ends, ()
    for end in list(_ends):
        if end not in keep:
            end.close()
    _ends.clear()
    _ends.update(keep)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
