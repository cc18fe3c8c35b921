"""Check that a sampler fits its loader: dataset, argument, and division into ranks.

A sampler does not know its loader. `DataLoader` of this package asks for the check when
it is made. For other loaders, the check finds the loader when it calls ``iter()``.

Note: [loader of a pass]. torch's loaders call ``iter()`` of their sampler when they
make an iterator, so their frames are a few calls above. A loader that gets a wrapper of
the sampler, or that calls ``iter()`` in another place, is not found.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from ..core.errors import BatchTypeError, BatchValueError
from ..core.text import plural

#: The number of calls from ``iter()`` of a loader to that of its sampler is smaller.
_MAX_CALLS = 16


def check_dataset(sampler: Any, loader: Any, num_samples: int) -> None:
    """Check that a loader has a dataset of as many samples as its sampler.

    Args:
        sampler: the sampler.
        loader: its loader. The dataset may have no length.
        num_samples: the number of samples of the sampler.

    Raises:
        ValueError: the numbers differ.
    """
    try:
        found = len(loader.dataset)
    except (TypeError, NotImplementedError, AttributeError):  # it has no length
        return
    if found != num_samples:
        advice = "Make the sampler for this dataset."
        if num_samples < found:
            advice += " To load a part of it, use torch.utils.data.Subset."
        raise BatchValueError(
            f"{type(sampler).__name__}: the sampler must be for the "
            f"{plural(found, 'sample')} of the loader's dataset, but is for "
            f"{num_samples}. {advice}"
        )


def check_batches(sampler: Any, owner: Any) -> None:
    """Check that batches of a batch sampler are not put into batches.

    Args:
        sampler: the batch sampler.
        owner: a ``BatchSampler`` of torch, or a loader.

    Raises:
        TypeError: they would be.
    """
    if isinstance(owner, DataLoader):
        owner = owner.batch_sampler
    if type(owner) is BatchSampler and owner.sampler is sampler:
        name = type(sampler).__name__
        raise BatchTypeError(
            f"{name}: the loader must get the sampler as batch_sampler, because it "
            f"yields batches, but got it as sampler. Use batch_sampler={name}(...) "
            "without batch_size, shuffle and drop_last."
        )


def check_divided_once(sampler: Any, owner: Any) -> None:
    """Check that batches of one rank are not divided between the ranks again.

    Args:
        sampler: a sampler with the attribute ``num_replicas``.
        owner: a batch sampler. That of accelerate (``BatchSamplerShard``) yields each
            ``num_processes``-th batch of another one.

    Raises:
        ValueError: they would be, and most samples would never be used.
    """
    num_processes = getattr(owner, "num_processes", 1)
    if num_processes > 1 < sampler.num_replicas:
        name = type(sampler).__name__
        raise BatchValueError(
            f"{name}: only one of the samplers must divide the samples between ranks, "
            f"but {name} divides them by {sampler.num_replicas}, and "
            f"{type(owner).__name__} divides its batches by {num_processes}. Leave the "
            f"loader out of prepare(), or use {name}(..., num_replicas=1, rank=0)."
        )


def check_loader_of_pass(sampler: Any, *, yields_batches: bool) -> None:
    """Call ``check_loader`` with the loader that calls ``iter()`` of a sampler.

    Args:
        sampler: the sampler. Its ``__iter__`` calls this function.
        yields_batches: it is a batch sampler.

    Raises:
        TypeError: the loader got it as another argument.
        ValueError: the loader has another dataset, or divides the batches again.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MAX_CALLS):
        if frame is None:
            return
        owner = frame.f_locals.get("self")
        if isinstance(owner, BatchSampler):
            if yields_batches:
                check_batches(sampler, owner)
            check_divided_once(sampler, owner)
        if isinstance(owner, DataLoader):
            if any(sampler is part for part in (owner.batch_sampler, owner.sampler)):
                sampler.check_loader(owner)
            return
        frame = frame.f_back


def advice_if_replaced() -> str:
    """Return the advice if Lightning has replaced a sampler by one of its class.

    Its function that makes the new one has a variable ``is_predicting``. There the
    argument of the Trainer makes no difference.
    """
    if sys._getframe(2).f_locals.get("is_predicting"):
        return "Lightning replaces the sampler: give predict() a loader without it."
    return (
        "If Lightning has replaced the sampler, set use_distributed_sampler=False of "
        "its Trainer."
    )
