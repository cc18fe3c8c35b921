"""Receive the batches of workers: own the ring, count batches, warn of missed slabs."""

from __future__ import annotations

from ..core.errors import LoaderWarning, warn_once
from ..shm import memfd
from ..shm.messages import RingMiss
from ..shm.ring import Ring, largest_slab, total_nbytes
from .preflight import Machine
from .reader import Answer
from .stats import PADDING, STACKED, Meter, warn_about_padding

#: Slabs in addition to one for each requested batch: a training loop and a
#: `PreDataLoader` hold this number of batches at a time.
_SPARE_SLABS = 6
#: The available memory to assume if the system does not report it.
_ASSUMED_NBYTES = 1 << 30
#: The number of lines in the header of a ring.
_MAX_SLABS = 65536
#: More bytes than the memory of any machine, and fewer than an address space.
_MAX_BYTES = 1 << 44


class BatchReceiver:
    """Receives batches of workers. Owns the ring, which outlives epochs, and the meter.

    It does not refer to the loader, so that no cycle keeps a dropped loader alive. The
    arguments are those of the loader.
    """

    def __init__(self, ring_slabs: int | None, max_ring_bytes: int | None) -> None:
        self.meter = Meter()
        self.ring: Ring | None = None
        self.is_new = True
        #: The process of each iterator whose workers are threads that run.
        self.threads: dict[int, int] = {}
        self._ring_slabs, self._max_ring_bytes = ring_slabs, max_ring_bytes

    def ring_for(self, num_workers: int, prefetch_factor: int) -> Ring | None:
        """Return the ring, None if the system or the limits allow none."""
        # A forked process creates its own ring.
        if self.ring is None or not self.ring.created_here:
            num_slabs = self._ring_slabs
            if num_slabs is None:
                num_slabs = num_workers * prefetch_factor + _SPARE_SLABS
            self.ring = self._new_ring(min(num_slabs, _MAX_SLABS))
        return self.ring

    def _new_ring(self, num_slabs: int) -> Ring | None:
        limit = self._max_ring_bytes
        if limit is None:
            left = Machine().memory_left()
            limit = (left[0] if left else _ASSUMED_NBYTES) // 2
        limit = min(limit, _MAX_BYTES)
        if not memfd.is_supported() or not limit or not num_slabs:
            return None
        slab_nbytes = largest_slab(num_slabs, limit)
        if not slab_nbytes:
            warn_once(
                "PP206",
                f"DataLoader: a ring of {num_slabs} slabs needs at least "
                f"{total_nbytes(num_slabs, 1)} bytes, but the limit is {limit}. Every "
                "batch is allocated outside the ring, which is slower. Increase "
                "max_ring_bytes, or decrease ring_slabs (0 disables the ring).",
                LoaderWarning,
            )
            return None
        try:
            return Ring(num_slabs, slab_nbytes)
        except OSError as error:
            warn_once(
                "PP207",
                "DataLoader: the ring could not be allocated, because "
                f"{memfd.limit_text(error)}. Every batch is allocated outside the "
                "ring, which is slower.",
                LoaderWarning,
            )
            return None

    def check(self, answer: Answer) -> None:
        """Count a batch that missed the ring. Warn of that, and of much padding."""
        figures = answer.figures
        if figures[PADDING]:
            warn_about_padding(self.meter, figures[STACKED], figures[PADDING])
        if (miss := answer.miss) is None:
            return
        self.meter.misses[miss.reason] += 1
        # Workers that started while the ring had no memory do not use it.
        if miss.reason != "off" and self.ring is not None:
            _warn_about_miss(miss, self.ring)


def _warn_about_miss(miss: RingMiss, ring: Ring) -> None:
    """Warn once for each reason why a batch missed the ring, and say what to change."""
    nbytes = miss.nbytes
    outside = "this batch was allocated outside the ring, which is slower"
    texts = {
        "full": (
            "PP201",
            f"all {ring.num_slabs} ring slabs are in use, so {outside}. Increase "
            "ring_slabs, or release batches sooner.",
        ),
        "large": (
            "PP202",
            f"a batch of {nbytes} bytes does not fit into a ring slab of "
            f"{ring.slab_nbytes} bytes (max_ring_bytes / ring_slabs, in whole pages), "
            f"so {outside}. Increase max_ring_bytes to "
            f"{total_nbytes(ring.num_slabs, nbytes)}.",
        ),
        "memory": (
            "PP203",
            f"the system has no memory for a ring slab of {nbytes} bytes, so "
            f"{outside}. Decrease max_ring_bytes, or free memory.",
        ),
        "kept": (
            "PP204",
            "the worker keeps a tensor of a batch that is in a ring slab, so the batch "
            "was copied out of the ring, which is slower. Clone tensors that "
            "collate_fn keeps.",
        ),
        "unsupported": (
            "PP205",
            "some tensors of a batch are sparse, nested or on a device, so torch sends "
            "them outside the ring, which is slower. Convert them in collate_fn.",
        ),
    }
    code, text = texts[miss.reason]
    warn_once(code, f"DataLoader: {text}", LoaderWarning)
