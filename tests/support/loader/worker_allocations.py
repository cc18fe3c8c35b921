"""Allocations of a worker for a batch, recorded in the worker itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyparallel.batch import allocation


def with_allocations(make: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return the result of ``make``, and the addresses of the memory it allocated."""
    allocated: list[int] = []
    empty = allocation.empty

    def recording(*args: Any) -> torch.Tensor:
        made = empty(*args)
        allocated.append(made.untyped_storage().data_ptr())
        return made

    allocation.empty = recording
    try:
        return make(), allocated
    finally:
        allocation.empty = empty
