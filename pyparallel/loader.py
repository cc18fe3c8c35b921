"""DataLoader: torch's, whose workers write a batch where its reader finds it."""

from __future__ import annotations

from typing import Any

import torch.utils.data
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's ``DataLoader``."""

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return _InProcess(self)
        self.check_worker_number_rationality()
        return _WithWorkers(self)


class _InProcess(_SingleProcessDataLoaderIter):
    """The iterator of a loader without workers."""


class _WithWorkers(_MultiProcessingDataLoaderIter):
    """The iterator of a loader with workers."""
