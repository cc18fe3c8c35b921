"""The plan of a slab in pure Python: a frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from . import _checks
from ._checks import ALIGNMENT

_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """See ``_C.pyi``."""

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    nbytes: int

    def __post_init__(self) -> None:
        """Check the numbers, so that nobody has to do it again."""
        starts = _checks.ints(self.offsets, "SlabPlan: offsets")
        sizes = _checks.items(self.shapes, "SlabPlan: shapes", "a sequence of shapes")
        types = _checks.items(self.dtypes, "SlabPlan: dtypes", "a sequence of dtypes")
        if not len(starts) == len(sizes) == len(types):
            found = f"have {len(starts)}, {len(sizes)} and {len(types)}"
            where = "SlabPlan: offsets, shapes and dtypes"
            raise _checks.error(where, "have the same length", found)
        for i, (dtype, shape) in enumerate(zip(types, sizes, strict=True)):
            _checks.require(
                f"SlabPlan: dtypes[{i}]", torch.dtype, "a torch.dtype", dtype
            )
            sizes[i] = tuple(_checks.ints(shape, f"SlabPlan: shapes[{i}]"))
        nbytes = _checks.integer(self.nbytes, "SlabPlan: nbytes")
        _checks.check_plan(starts, sizes, types, nbytes)
        _set(self, tuple(starts), tuple(sizes), tuple(types), nbytes)


def plan_slab(leaves: Sequence[Tensor]) -> SlabPlan:
    """See ``_C.pyi``."""
    tensors = _checks.tensors(leaves, "plan_slab: leaves")
    offsets = []
    end = 0
    for i, leaf in enumerate(tensors):
        _checks.check_plain(leaf, ("plan_slab: leaves", i))
        offsets.append(end)
        end += -(-prod(leaf.shape) * leaf.itemsize // ALIGNMENT) * ALIGNMENT
        if end >= _LIMIT:
            rule = "have fewer than 2**63 bytes together"
            raise _checks.error("plan_slab: leaves", rule, f"leaves[{i}] goes beyond")
    shapes = tuple([tuple(leaf.shape) for leaf in tensors])
    plan = object.__new__(SlabPlan)  # these numbers are good
    _set(plan, tuple(offsets), shapes, tuple([leaf.dtype for leaf in tensors]), end)
    return plan


def _set(plan: SlabPlan, *values: object) -> None:
    for name, value in zip(SlabPlan.__slots__, values, strict=True):
        object.__setattr__(plan, name, value)
