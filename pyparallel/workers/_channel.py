"""Messages over one end of a socket pair.

A message is three numbers and two byte strings, ``head`` and ``tail``, with any number
of descriptors. Bytes and descriptors both arrive in the order in which they were sent.
So the descriptors of a message are the first ones that have not been taken.

Note: [end of file]. The end of a process is known by the end of its file, which comes
when no process holds a copy of its end. A fork copies all ends of the process. So each
child of any fork closes them, but for those that it was started with. Another thread
may fork while an end is closed. So the object of an end forgets its number before that,
or the child would close a new end with this number.

The garbage collector clears weak references to a cycle before it calls the finalizers
that close the ends, and another thread may fork meanwhile. So ends that are open have
strong references here, and their owner closes each of them.
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
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any, TypeVar

from ..core.process import on_fork
from ..core.standard_streams import moved
from . import descriptors as fds

#: The numbers of bytes of head and tail, and the number of descriptors.
_HEADER = struct.Struct("=QQI")
_BUFFER_NBYTES = 1 << 16
#: Up to this size, joining the parts of a message is cheaper than sending them apart.
_SMALL_NBYTES = 1 << 14
#: The most descriptors that Linux takes with one call.
_MAX_DESCRIPTORS = 253
_CONTROL_NBYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
#: New descriptors must not reach other programs. Only Linux has the flag. Flags of
#: `enum` would be slower than integers.
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)
#: A worker that has died must not end a program that has set SIGPIPE to its default.
_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
#: The wait of a sender until the system delivers some of the descriptors on their way.
_FULL_SECONDS = 0.01

#: A message that has arrived: head, tail and descriptors.
Message = tuple[bytes | memoryview, bytes | memoryview, Sequence[int]]


class Channel:
    """One end. Without a socket that blocks, `send` and `receive` never wait."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self.fd = end, end.fileno()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._arrived: deque[int] = deque()  # descriptors
        self._view = memoryview(b"")
        self._start = self._end = 0  # the bytes of the view that were not taken
        self._renew_view(0)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are left that the socket did not accept."""
        return bool(self._unsent)

    def send(
        self,
        head: bytes,
        tail: bytes | bytearray | memoryview = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a message. Keep bytes that do not fit into the socket for `flush`.

        The descriptors are closed as soon as they are sent, and by `close`.

        Raises:
            OSError: the other end is closed.
        """
        parts = [_HEADER.pack(len(head), len(tail), len(descriptors)), head, tail]
        if descriptors or len(tail) <= _SMALL_NBYTES:
            parts = [b"".join(parts)]
            if not descriptors and not self._unsent:  # one call is enough for most
                rest = parts[0][self._write(parts[0]) :]
                if not rest:
                    return
                parts = [rest]
        # Copies, because the caller may change its memory.
        views = [memoryview(bytes(part)) for part in parts if part]
        for first in range(0, len(descriptors), _MAX_DESCRIPTORS):
            # Each group travels with one more byte.
            group = descriptors[first : first + _MAX_DESCRIPTORS]
            self._unsent.append((views[0][:1], group))
            views[0] = views[0][1:]
        self._unsent.extend((view, ()) for view in views)
        self.flush()

    def flush(self) -> None:
        """Send bytes that are left, as far as the socket accepts them."""
        while self._unsent:
            data, group = self._unsent[0]
            sent = self._write(data, group)
            if not sent:
                if self._socket.getblocking():
                    continue
                return
            self._unsent.popleft()
            if sent < len(data):
                self._unsent.appendleft((data[sent:], ()))
            fds.close(group)

    def _write(
        self, data: bytes | bytearray | memoryview, group: Sequence[int] = ()
    ) -> int:
        """Send bytes with descriptors. Return how many the socket accepted."""
        try:
            if not group:
                return self._socket.send(data, _NO_SIGNAL)
            numbers = array.array("i", group)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
            return self._socket.sendmsg([data], rights, _NO_SIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            time.sleep(_FULL_SECONDS)
            return 0

    def receive(self) -> Message | None:
        """Return the next message, None if it has not arrived yet.

        Raises:
            EOFError: the other end is closed. Half a message is dropped.
            OSError: this process cannot open the descriptors of the message.
        """
        while True:
            have, need = self._end - self._start, _HEADER.size
            if have >= need:
                sizes = _HEADER.unpack_from(self._view, self._start)
                need += sizes[0] + sizes[1]
                if have >= need:
                    return self._take(*sizes)
            if need > len(self._view) - self._start:
                self._renew_view(need)
            try:
                self._read()
            except BlockingIOError:
                return None
            except ConnectionResetError:
                raise EOFError from None

    def _renew_view(self, nbytes: int) -> None:
        """Move the bytes that were not taken to memory for at least this number."""
        rest = self._view[self._start : self._end]
        self._view = memoryview(bytearray(max(nbytes, _BUFFER_NBYTES)))
        self._start, self._end = 0, len(rest)
        self._view[: self._end] = rest

    def _read(self) -> None:
        views = [self._view[self._end :]]
        count, control, flags, _ = self._socket.recvmsg_into(
            views, _CONTROL_NBYTES, _CLOEXEC
        )
        for _, _, data in control:
            arrived = array.array("i")
            arrived.frombytes(data[: len(data) - len(data) % arrived.itemsize])
            for fd in map(moved, arrived):
                self._arrived.append(fd)
                if not _CLOEXEC:
                    os.set_inheritable(fd, False)
        if flags & _TRUNCATED:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not count:
            raise EOFError
        self._end += count

    def _take(self, num_head: int, num_tail: int, num_descriptors: int) -> Message:
        """Return the next message, whose bytes have all arrived."""
        first = self._start + _HEADER.size
        last = first + num_head
        self._start = last + num_tail
        head, tail = self._view[first:last], self._view[last : self._start]
        descriptors: Sequence[int] = ()
        if num_descriptors:
            descriptors = tuple(self._arrived.popleft() for _ in range(num_descriptors))
        if len(self._view) > _BUFFER_NBYTES:  # it is of this message alone
            self._renew_view(0)
            return head, tail, descriptors
        if self._start == self._end:
            self._start = self._end = 0
        return bytes(head), bytes(tail), descriptors

    def close(self) -> None:
        """Close the socket, and all descriptors that were not sent or not taken."""
        self._socket.close()
        while self._unsent:
            fds.close(self._unsent.popleft()[1])
        fds.close(self._arrived)
        self._arrived.clear()


_T = TypeVar("_T", bound=Any)

#: All ends of this process that a fork must close: see Note [end of file].
_ends: set[Any] = set()
#: Of each thread: `ends`, which the process needs that this thread is forking.
_kept = threading.local()


def close_in_children(end: _T) -> _T:
    """Close an end, of a socket or a pipe, in each process that this process forks."""
    _ends.difference_update([each for each in list(_ends) if not _is_open(each)])
    _ends.add(end)
    return end


def _is_open(end: Any) -> bool:
    return not getattr(end, "closed", False) and end.fileno() >= 0


@contextlib.contextmanager
def kept(*ends: Any) -> Iterator[None]:
    """Keep these ends open in a process that this thread forks in the block."""
    _kept.ends = ends
    try:
        yield
    finally:
        _kept.ends = ()


class PipeEnd(connection.Connection):
    """An end of a pipe. `close` forgets its number first: see Note [end of file]."""

    _handle: int | None

    def close(self) -> None:
        """Close this end; later calls do nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __reduce__(self) -> Any:
        """Send the descriptor with the message."""
        return connection.reduce_connection(self)  # type: ignore[attr-defined]  # untyped


def pipe() -> tuple[PipeEnd, PipeEnd]:
    """Return the reading and the writing end of a pipe."""
    reader, writer = os.pipe()
    ends = PipeEnd(reader, writable=False), PipeEnd(writer, readable=False)
    return close_in_children(ends[0]), close_in_children(ends[1])


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends. The first one does not block."""
    ours, theirs = map(close_in_children, socket.socketpair())
    ours.setblocking(False)
    return ours, theirs


def _close_in_child() -> None:
    keep = getattr(_kept, "ends", ())
    _kept.ends = ()
    for end in list(_ends):
        if end not in keep:
            end.close()
    _ends.clear()
    _ends.update(keep)


on_fork(_close_in_child)
