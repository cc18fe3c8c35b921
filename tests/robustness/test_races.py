"""Copies detect tensors that other threads changed after the plan.

The moment is made certain: the tensors change when the operator is called. What happens
while it copies, `make test-asan` looks for (docs/reliability.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel import backend

pytestmark = [pytest.mark.asan, pytest.mark.tsan]


def resized(tensor: torch.Tensor) -> None:
    tensor.resize_(2, 3)


def set_anew(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((9, 5), 7.0))


def shrunk(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(12)


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def turned(tensor: torch.Tensor) -> None:
    tensor.t_()


def of_another_dtype(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(4, 5, dtype=torch.float64)


CHANGES = (resized, set_anew, shrunk, freed, turned, of_another_dtype)
changes = pytest.mark.parametrize("change", CHANGES)
ERRORS = (ValueError, TypeError, RuntimeError)


def late(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[], None]
) -> list[str]:
    """Let something happen after the plan was made, before an operator runs."""
    real, called = getattr(backend, name), []

    def first(*args: Any) -> Any:
        called.append(name)
        change()
        return real(*args)

    monkeypatch.setattr(backend, name, first)
    return called


@changes
def test_a_packed_leaf_that_changed_is_refused_and_nothing_is_written(
    change: Callable[[torch.Tensor], None],
) -> None:
    leaves = [torch.full((4, 5), float(i)) for i in range(3)]
    plan = backend.plan_slab(leaves)
    slab = torch.full((plan.nbytes,), 99, dtype=torch.uint8)
    change(leaves[1])
    with pytest.raises(ERRORS, match=r"leaves\[1\]|storage"):
        backend.pack(slab, leaves, plan)
    if backend.name == "native":
        assert slab.eq(99).all()


@changes
def test_a_padded_sample_that_changed_is_refused_or_does_not_reach_beyond(
    change: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [torch.full((4 + i, 5), float(i)) for i in range(3)]
    called = late(monkeypatch, "pad_copy", lambda: change(samples[1]))
    try:
        batch: Any = pyparallel.pad_stack(samples)
    except ERRORS as error:
        assert str(error)
    else:  # what of that moment's sample fits
        part = samples[1][:6, :5]
        assert batch.shape == (3, 6, 5)
        assert batch[1, : len(part), : part.shape[1]].equal(part)
        assert batch[0, :4].eq(0).all() and batch[2].eq(2).all()
    assert called == ["pad_copy"]


@changes
def test_an_image_that_changed_is_refused(
    change: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [torch.full((3, 4 + i, 5), float(i)) for i in range(3)]
    pre = pyparallel.ImagePreprocessor()
    part = images[1]
    called = late(
        monkeypatch, "image_batch", lambda: change(part.set_(part[0].clone()))
    )
    with pytest.raises(ERRORS, match=r".+"):
        pre(images)
    assert called == ["image_batch"]
