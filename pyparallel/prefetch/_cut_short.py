"""An epoch that the dataset has ended, and not its sampler."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from ..core.torch_private import DatasetKind

# Where torch calls the dataset, in the process and for a worker.
_CALLS_OF_DATASET = (("fetch", "fetch.py"), ("reraise", "_utils.py"))


def cut_short(end: StopIteration, loader: Any, num_batches: int) -> RuntimeError | None:
    """Return an error if the dataset, not the sampler, ended the epoch.

    Where samples are looked up by index, ``StopIteration`` from the dataset or
    ``collate_fn`` is a mistake there; torch takes it for the end of the epoch.
    """
    if not isinstance(loader, DataLoader) or (
        getattr(loader, "_dataset_kind", None) != DatasetKind.Map
    ):
        return None
    if not _came_through_dataset(end.__traceback__):
        return None
    try:
        length = f"{len(loader)}"
    except TypeError:  # the sampler does not know
        length = "an unknown number of"
    return RuntimeError(
        "PreDataLoader: an epoch must end when its sampler does, but the dataset or "
        f"collate_fn raised StopIteration after {num_batches} of {length} batches. "
        "Raise another error there."
    )


def _came_through_dataset(step: TracebackType | None) -> bool:
    while step is not None:
        code = step.tb_frame.f_code
        for name, file in _CALLS_OF_DATASET:
            if code.co_name == name and code.co_filename.endswith(file):
                return True
        step = step.tb_next
    return False
