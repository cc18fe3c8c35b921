"""Compare results with mmengine's."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pyparallel.mmengine._upstream import BaseDataElement


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result, or the exception instead of raising it."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


def same(one: Any, other: Any) -> bool:
    """Compare types, structure, bits and devices."""
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(other)
            and one.device == other.device
            and one.dtype == other.dtype
            and one.shape == other.shape
            and (one.is_meta or one.tolist() == other.tolist() or same_nans(one, other))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict | UserDict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple | deque | UserList):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, BaseDataElement):
        pairs = (dict(one.all_items()), dict(other.all_items()))
        return one is other or (
            set(pairs[0]) == set(pairs[1])
            and all(same(pairs[0][key], pairs[1][key]) for key in pairs[0])
            and one.metainfo_keys() == other.metainfo_keys()
        )
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return one is other or bool(one == other)


def same_nans(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(77), other.nan_to_num(77))
