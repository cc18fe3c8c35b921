"""The part of ``_C.pyi`` that sends batches to devices.

Native only, but for `pinned_info` and `bound_pinned`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._C import SlabPlan

class RecordedEvent:
    """The end of all work that was queued on a stream before the event.

    No method ends a graph capture in another thread. The methods that call the driver
    release the GIL. They raise RuntimeError in a process that was forked after the
    first event.
    """

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait.

        Return False for ever if the device took no event after copies of `send`.
        """

    def wait(self, stream: Any) -> None:
        """Make ``stream``, as `send` takes it, wait; the host does not.

        Raises:
            RuntimeError: ``stream`` is under graph capture, and is not the stream of
                the event.
        """

    def synchronize(self) -> None:
        """Block the host until that work is done."""

    def check(self) -> None:
        """Raise the error that stopped the copies of `send` half way, if one did."""

class Fence:
    """The end of all work on the streams that were current in a thread."""

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait.

        While a graph is captured on one of the streams, the result is False.
        """

class Runtime:
    """Pins memory and records events for one device type, without the GIL.

    No method opens a context on a device that the process does not use, ends a graph
    capture, or leaves an error behind for the next call of its thread.

    Args:
        device_type: one of `transfers`.

    Raises:
        NotImplementedError: it is another type.
    """

    def __init__(self, device_type: str) -> None: ...
    def pin(self, address: int, nbytes: int) -> int:
        """Pin memory for all devices of the type.

        Returns:
            0, or the code of the error if the system refuses.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def record(self, stream: Any) -> RecordedEvent:
        """Record an event on ``stream``, which must not be under graph capture."""

    def fence(self) -> Fence:
        """Return a fence behind the current streams of this thread.

        There is one such stream on each device that the process uses.
        """

def send(
    slab: Tensor,
    leaves: Sequence[Tensor],
    plan: SlabPlan | None,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    stream: Any,
    home: Any,
    chunk_nbytes: int = 4194304,
    lands_at_once: bool = False,
) -> RecordedEvent:
    """Queue copies of CPU tensors to a device.

    The leaves are packed, as `pack` does it, into page-locked memory in chunks, while
    the device copies the chunk before: one copy for each chunk. They may be changed and
    dropped when this returns. The GIL is released. The host waits for the device only
    at the limit of page-locked memory (`bound_pinned`), and then for copies on
    ``stream`` alone.

    Args:
        slab: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)`` on the device of
            ``stream``.
        leaves: as for `pack`.
        plan: where they go, or None: then nothing is packed.
        targets: contiguous tensors on that device.
        sources: for each target a contiguous CPU tensor of as many bytes. The device
            reads it in place: it should be page-locked, and must be neither changed nor
            dropped until the copies are done.
        stream: of the copies: a ``torch.Stream``, or any object that has its
            ``stream_id``, ``device_index`` and ``device_type``.
        home: the stream, of the same device, on which slab and targets were allocated.
        chunk_nbytes: between 1 and 4 MiB, the default: enough for eight threads to
            pack, and for a copy to take twenty times as long as to queue it.
        lands_at_once: ``home`` is made to wait as soon as this returns. Then fewer than
            8 copies in place are queued on ``home`` itself, if it is idle and nothing
            is packed: events and waits would cost more than they save.

    Raises:
        RuntimeError: one of the streams is under graph capture, or the process was
            forked. Whatever is raised here, no copy has been queued; errors after the
            first are in the result (`RecordedEvent.check`).
        NotImplementedError: the device of ``stream`` is not in `transfers`.

    Stream: the copies wait for what was queued on ``home`` when this was called.
    """

def pinned_info() -> tuple[int, int, int, int]:
    """Return bytes in use, bytes idle, their limit, and how often the host waited.

    They are of the page-locked blocks that `send` packs into, of all devices. In use
    are those that are written, read by copies, or lost because a failed device may read
    them for ever. All but the limit are 0 in a forked process, and in pure Python.
    """

def bound_pinned(limit: int) -> None:
    """Let the blocks of every device type take at most ``limit`` bytes.

    Idle blocks above it are freed now, others when they have been read. A stream that
    has no block gets one of up to 4 MiB all the same, so that it never waits for
    another stream: with n streams of copies ``limit`` may be exceeded by n - 1 blocks.

    Args:
        limit: 4 MiB or more. Before the first call it is 1 GiB, or an eighth of the
            machine's memory if that is less.
    """

def transfers() -> tuple[str, ...]:
    """Return the device types that `send` can send to.

    The CPU is one, on which all is done at once: for tests.
    """
