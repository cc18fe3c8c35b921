"""What batches cost more than they must, or are not as in mmcv: told once, in numbers.

Each is asked only where a batch is suspect, and costs nothing once it has been told.
"""

from __future__ import annotations

import torch

from ._errors import BatchWarning, LoaderWarning, has_warned, warn_once
from ._stats import MUCH_PADDING, Meter, nbytes_text

#: Nothing is said of a loader's padding before it has seen so many batches and bytes.
_PADDED_BATCHES, _PADDED_NBYTES = 20, 10_000_000
#: Nothing is said of pageable memory before so much of it went to devices.
_PAGEABLE_BATCHES, _PAGEABLE_NBYTES = 50, 1_000_000_000


class _Seen:
    """What this process has seen of each kind so far."""

    for_mmcv = False
    pageable_batches = pageable_nbytes = 0


_seen = _Seen()


def forget() -> None:
    """Begin to count anew, as a new process does."""
    _seen.pageable_batches = _seen.pageable_nbytes = 0


def set_for_mmcv(value: bool) -> None:
    """Tell whether the names of mmcv 1.x are ours, so that its code runs here."""
    _seen.for_mmcv = value


def of_padding(meter: Meter, stacked_nbytes: int, padding_nbytes: int) -> None:
    """Warn if much of all that a loader has stacked is padding.

    Args:
        meter: of the loader, with this batch in it.
        stacked_nbytes: of this batch.
        padding_nbytes: of this batch.
    """
    if padding_nbytes <= MUCH_PADDING * stacked_nbytes or has_warned("PP211"):
        return
    batches, stacked, padding = meter.padding()
    if batches < _PADDED_BATCHES or stacked < _PADDED_NBYTES:
        return
    if padding <= MUCH_PADDING * stacked:
        return
    warn_once(
        "PP211",
        f"DataLoader: at most {100 * MUCH_PADDING:.0f} % of the stacked bytes should "
        f"be padding, but {100 * padding / stacked:.0f} % of {nbytes_text(stacked)} in "
        f"{batches} batches are. Batch samples of like sizes together, or leave them "
        "ragged: DataContainer(..., ragged=True).",
        LoaderWarning,
    )


def of_pageable(nbytes: int, device: torch.device) -> None:
    """Warn if batches come to a device from memory that is not page-locked.

    Args:
        nbytes: of the tensors of one batch that would have been read in place.
        device: where they went.
    """
    if has_warned("PP212"):
        return
    # Threads may lose one another's counts, which makes the warning come later.
    _seen.pageable_batches += 1
    _seen.pageable_nbytes += nbytes
    batches, total = _seen.pageable_batches, _seen.pageable_nbytes
    if batches < _PAGEABLE_BATCHES or total < _PAGEABLE_NBYTES:
        return
    warn_once(
        "PP212",
        f"scatter: large tensors for {device} should lie in page-locked memory, but "
        f"{nbytes_text(total)} of {batches} batches did not, and were copied once more "
        "on the host. Give pyparallel.DataLoader pin_memory=True.",
        LoaderWarning,
    )


def of_results(in_use: int, nbytes: int, limit: int) -> None:
    """Warn that results come to ordinary memory.

    Args:
        in_use: bytes of the page-locked results that are alive.
        nbytes: of those that come besides.
        limit: what both together exceed.
    """
    warn_once(
        "PP213",
        f"to_host: results that are alive should fit in {nbytes_text(limit)} of "
        f"page-locked memory, but {nbytes_text(in_use)} are alive and "
        f"{nbytes_text(nbytes)} come. clone() what you keep, or raise "
        "memory.set_pinned_limit. Until then such results come to ordinary memory, and "
        "the host waits for each copy.",
        LoaderWarning,
    )


def of_bytes(where: str, num_samples: int) -> None:
    """Warn if code for mmcv 1.x batches bytes, of which it had made tensors."""
    if _seen.for_mmcv:
        warn_once(
            "PP102",
            f"collate: {where} should not be bytes in code for mmcv 1.x, but is, in "
            f"{num_samples} samples: here they become a list, there they became "
            "tensors of their values, cut to the shortest. If the model needs tensors, "
            "make them in the dataset.",
            BatchWarning,
            where,
        )
