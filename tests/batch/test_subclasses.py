"""A batch of tensor subclasses has the attributes of no sample."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data._utils.collate import default_collate_fn_map

import pyparallel.mmengine
from pyparallel import Collate, DataLoader, List, collate, gather, scatter, to_host
from pyparallel.batch import allocation
from tests.support.processes.backends import both, using
from tests.support.processes.entry_points import ENTRY_POINTS, tensors_of

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]

SHAPE = (1, 2, 3)


class Bare(torch.Tensor):
    """A subclass that only has another name."""


class Named(torch.Tensor):
    """Results of operators have the source of the first argument, as in MONAI."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        first = args[0] if args else None
        first = first[0] if isinstance(first, list | tuple) and first else first
        if isinstance(result, cls):
            result.__dict__.update(getattr(first, "__dict__", {}))
        return result

    def as_subclass(self, cls: Any) -> Any:
        """Keep the source, as fastai's replacement of this method does."""
        result = super().as_subclass(cls)
        result.__dict__.update(vars(self))
        return result


class Wrapper(torch.Tensor):
    """A tensor without memory: Python code runs operators on its ``inner`` tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inside = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        found = func(*inside[0], **inside[1])
        return tree_map_only(torch.Tensor, cls, found)


def named(number: int, cls: Any = Named, grad: bool = False) -> Any:
    leaf = torch.full(SHAPE, float(number), requires_grad=grad)
    tensor = torch.Tensor.as_subclass(leaf, cls)
    tensor.source, tensor.leaf = f"file{number}", leaf
    return tensor


@both
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cls", [Named, Bare])
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_a_batch_is_a_plain_tensor(
    entry: str, cls: type, grad: bool, backend: ModuleType
) -> None:
    make, samples = ENTRY_POINTS[entry], [named(i, cls, grad) for i in range(3)]
    leaves = [sample.leaf for sample in samples]
    with using(backend):
        found, expected = make(samples), make([leaf.detach() for leaf in leaves])
    tensors = tensors_of(found)
    assert {type(each) for each in tensors} == {torch.Tensor}
    assert not any(hasattr(each, "source") for each in tensors)
    assert all(map(torch.equal, tensors, tensors_of(expected)))
    if grad:
        tensors[0].sum().backward()
        assert leaves[0].grad is not None


@both
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_a_worker_makes_plain_tensors_too(
    entry: str, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "in_worker", lambda: True)
    with using(backend):
        found = tensors_of(ENTRY_POINTS[entry]([named(i) for i in range(3)]))
    assert {type(each) for each in found} == {torch.Tensor}


@both
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_operators_in_python_are_called(entry: str, backend: ModuleType) -> None:
    leaves = [torch.full(SHAPE, float(i)) for i in range(3)]
    with using(backend):
        first, *_ = tensors_of(ENTRY_POINTS[entry](list(map(Wrapper, leaves))))
        expected, *_ = tensors_of(ENTRY_POINTS[entry](leaves))
    assert isinstance(first, Wrapper)
    assert torch.equal(first.inner, expected)


@pytest.mark.filterwarnings("ignore:.*PP205")
def test_each_sample_that_stays_alone_keeps_its_attributes() -> None:
    samples = [named(0), named(1)]
    rules = Collate(x=List())
    fields = [{"x": each} for each in samples]
    assert [each.source for each in rules(fields)["x"]] == ["file0", "file1"]
    (batch,) = DataLoader(fields, batch_size=2, num_workers=1, collate_fn=rules)
    assert [each.source for each in batch["x"]] == ["file0", "file1"]
    assert gather([samples[1]], "cpu").source == "file1"
    parts = scatter(batch, "cpu")[0]["x"] + to_host(batch["x"])
    assert [each.source for each in parts] == ["file0", "file1"] * 2


@both
def test_a_registered_function_makes_the_batch(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Child(Named):
        """torch itself would stack the tensors of this class."""

    def join(batch: Any, *, collate_fn_map: Any) -> Any:
        assert Named in collate_fn_map or (Bare, Named) in collate_fn_map
        joined: Any = torch.stack(batch)
        joined.source = [each.source for each in batch]
        return joined

    default = pyparallel.mmengine.default_collate
    for key in (Named, (Bare, Named)):
        monkeypatch.setitem(default_collate_fn_map, key, join)
        for cls in (Named, Child):
            samples = [named(i, cls) for i in range(2)]
            fields = [{"x": each} for each in samples]
            with using(backend):
                for make in (collate, Collate(), default):
                    found = make(fields)["x"]
                    assert found.source == ["file0", "file1"]
                    assert torch.equal(found, torch.stack(samples))
        monkeypatch.delitem(default_collate_fn_map, key)
