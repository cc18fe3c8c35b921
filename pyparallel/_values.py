"""Columns of plain values: tensors, arrays and numbers of every sample, batched."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate

from . import _stack
from ._columns import Path, check_kind, name_of
from ._errors import BatchTypeError, BatchValueError
from ._unbatchable import unbatchable

#: The dtypes that default_collate gives to numbers; None: by what stands in the column.
NUMBERS = {bool: None, int: None, float: torch.float64}


def batch_tensors(column: list[torch.Tensor], path: Path) -> torch.Tensor:
    """Return the tensors at ``path`` of every sample, stacked; none may be padded."""
    stacked = _stack.stack_equal(column)
    if stacked is not None:
        return stacked
    check_kind(column, torch.Tensor, "a tensor", path)
    return _stack.stack(column, None, [0] * len(column), lambda i: name_of(path, i))


def batch_values(column: list[Any], path: Path) -> Any:
    """Batch numbers and numpy arrays by torch's ``default_collate``."""
    try:
        if type(column[0]) in NUMBERS:
            return torch.tensor(column, dtype=NUMBERS[type(column[0])])
        if _stack.is_array(column[0]):
            return batch_tensors([_stack.as_tensor(item) for item in column], path)
        return default_collate(column)
    except (BatchTypeError, BatchValueError):
        raise
    except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
        raise unbatchable(column, path) from error
