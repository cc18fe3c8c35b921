"""The part of the contract of ``_C.pyi`` that is about memory and who holds it."""

from collections.abc import Sequence

import torch
from torch import Tensor

def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous tensor on the CPU.

    The native one takes 1 MiB and more from a cache of blocks that earlier tensors
    gave back (`cache_info`), at a multiple of 2 MiB from that size on.

    Args:
        shape: of the tensor.
        dtype: of the tensor.

    Raises:
        RuntimeError: a negative size, or no memory.
    """

def cache_info() -> tuple[int, int, int, int, int]:
    """Return bytes in use, bytes cached, their limit, and blocks found and not found.

    Zeros in pure Python, which has no cache.
    """

def bound_cache(limit: int, idle_seconds: float) -> None:
    """Keep at most ``limit`` bytes, each block for at most ``idle_seconds``."""

def clear_cache() -> int:
    """Give all cached bytes back to the system; return how many they were."""

def ring_format(header: Tensor, num_slots: int) -> None:
    """Make memory, before anybody else sees it, the header of a ring of free slots.

    A ring is memory in equal slots that processes share; its header says who holds
    which. Line 0, of 64 bytes, says what the memory is and which backend formatted it;
    line 1 + i is slot i. Its first 8 bytes are its holder: 0 is nobody, other numbers
    are never used again for somebody else. The other 56 belong to the holder, and no
    operator touches them after this one, which makes them zero.

    Nobody waits for another process, which may be killed at any instruction.

    Args:
        header: contiguous ``torch.uint8`` tensor ``(64 * (1 + num_slots),)`` on the
            CPU, at a multiple of 64 bytes. The other operators on rings want the same,
            formatted by either backend.
        num_slots: between 1 and 65536.
    """

def ring_claim(header: Tensor, holder: int, fd: int) -> int:
    """Take the first free slot; return its index, or -1 if there is none.

    What the last holder wrote into the slot is visible. -1 too if the other backend
    formatted the header, or pure Python runs where the system has no POSIX record
    locks: the caller uses ordinary memory.

    Args:
        header: of a ring.
        holder: who claims, 1 or more.
        fd: file descriptor of the shared memory, open for writing; native: ignored.

    Raises:
        OSError: pure Python only; ``fd`` cannot be locked.
    """

def ring_pass(header: Tensor, slot: int, holder: int, to: int) -> bool:
    """Give a slot to somebody else, or to nobody.

    Return False, having changed nothing, if the slot is not held by ``holder``. What
    ``holder`` wrote is visible to whom the slot is given. In pure Python only
    ``holder`` itself may call this, and whoever knows that it is dead.

    Args:
        header: of a ring.
        slot: index of the slot.
        holder: who has it now, 1 or more.
        to: who has it then; 0 makes it free.
    """

def ring_reclaim(header: Tensor, holder: int) -> list[int]:
    """Make every slot of ``holder`` free, which is dead; return which they were."""

def ring_holders(header: Tensor) -> list[int]:
    """Return the holder of every slot, each as it was at some moment of this call."""
