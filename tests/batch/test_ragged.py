"""Ragged: joined without padding, and split again."""

from __future__ import annotations

import random
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, Padded, Padding, Ragged, collate, pad_stack
from tests.support.batch import oracle, samples
from tests.support.errors.collate_errors import freed, quiet_csr
from tests.support.processes.backends import both, using

POINTS = [torch.ones(2, 3), torch.zeros(0, 3), torch.full((1, 3), 2.0)]


def test_samples_are_joined_and_found_again_bit_by_bit() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        dtype = samples.DTYPES[seed % len(samples.DTYPES)]
        rest = [rng.randint(0, 3) for _ in range(seed % 3)]
        lengths = [rng.randint(0, 4) for _ in range(rng.randint(1, 5))]
        made = [
            samples.random_tensor((n, *rest), dtype, i) for i, n in enumerate(lengths)
        ]
        column = [samples.lay_out(x, rng.choice(samples.LAYOUTS)) for x in made]
        ragged = Ragged.from_tensors(column)
        assert ragged.values.is_contiguous()
        assert ragged.num_samples == len(column)
        assert ragged.lengths().tolist() == lengths
        assert (ragged.offsets.dtype, ragged.offsets[0].item()) == (torch.int64, 0)
        for view, sample in zip(ragged.unbind(), column, strict=True):
            oracle.assert_same_tensor(view, sample)
            owner = ragged.values.untyped_storage().data_ptr()
            assert view.untyped_storage().data_ptr() == owner
        for start in range(len(column)):
            part, expected = ragged.part(start, start + 2), column[start : start + 2]
            assert part.offsets[0] == 0
            for view, sample in zip(part.unbind(), expected, strict=True):
                oracle.assert_same_tensor(view, sample)
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        oracle.assert_same_tensor(ragged.cu_seqlens, cu_seqlens)
        assert ragged.max_seqlen == max(lengths)
        assert ragged.position_ids.dtype is torch.int64
        assert ragged.position_ids.tolist() == [i for n in lengths for i in range(n)]


@both
@pytest.mark.parametrize("side", ["right", "left", "center"])
def test_padding_a_ragged_equals_padding_its_samples(
    backend: ModuleType, side: str
) -> None:
    for i, dtype in enumerate(samples.DTYPES):
        column = [samples.random_tensor((n, 2), dtype, n) for n in (2, 0, i % 4)]
        options: dict[str, Any] = {"side": side, "size_divisor": 1 + i % 3}
        lengths = [torch.empty(len(sample)) for sample in column]
        with using(backend):
            padding = Padding(**options, mask=True, sizes=True)
            got = Ragged.from_tensors(column).to_padded(1, padding)
            options["size_divisor"] = (options["size_divisor"], 1)
            options["side"] = (side, "right")
            whole = pad_stack(column, pad_dims=2, padding_value=1, **options)
            alone = pad_stack(
                lengths, side=side, size_divisor=1 + i % 3, sizes=True, mask=True
            )
        assert type(got) is Padded
        oracle.assert_same_tensor(got.data, whole)
        assert torch.equal(got.sizes, alone.sizes)
        assert torch.equal(got.mask, alone.mask)


@pytest.mark.slow
def test_the_compiler_keeps_these_arguments_in_one_graph() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def arguments(ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        return ragged.cu_seqlens, ragged.position_ids

    cu_seqlens, position_ids = arguments(Ragged.from_tensors(POINTS))
    assert cu_seqlens.tolist() == [0, 2, 2, 3]
    assert position_ids.tolist() == [0, 1, 0]


def test_a_ragged_without_samples_has_no_positions() -> None:
    empty = Ragged(torch.empty(0, 3), torch.tensor([0]))
    assert (empty.max_seqlen, empty.cu_seqlens.tolist()) == (0, [0])
    assert empty.position_ids.tolist() == []


def test_offsets_that_int32_cannot_hold_are_an_error() -> None:
    most = 2**31 - 1
    fits = Ragged(torch.ones(1).expand(most), torch.tensor([0, most]))
    assert fits.cu_seqlens.tolist() == [0, most]
    large = Ragged(torch.ones(1).expand(2**31), torch.tensor([0, 2**31]))
    with pytest.raises(ValueError) as caught:
        _ = large.cu_seqlens
    assert str(caught.value) == (
        "Ragged.cu_seqlens: values must have less than 2**31 rows, but has 2147483648. "
        "Use smaller batches, or offsets."
    )


def test_gradients_flow_to_the_samples_and_back() -> None:
    leaves = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    ragged = Ragged.from_tensors(leaves)
    padded = ragged.to_padded(7, Padding(side="left"))
    (padded * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[1, 2], [4]]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_nested_tensor_shares_the_memory_in_both_directions(
    requires_grad: bool,
) -> None:
    ragged = Ragged.from_tensors([x.requires_grad_(requires_grad) for x in fresh()])
    nested = ragged.to_nested()
    assert (nested.layout, nested.shape[0]) == (torch.jagged, 3)
    assert all(map(torch.equal, nested.unbind(), POINTS))
    again = Ragged.from_nested(nested)
    assert again.values.data_ptr() == ragged.values.data_ptr()
    assert torch.equal(again.offsets, ragged.offsets)
    assert again.values.requires_grad is requires_grad


def fresh() -> list[torch.Tensor]:
    return [sample.clone() for sample in POINTS]


def test_other_nested_tensors_are_copied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        strided = torch.nested.nested_tensor(POINTS)
        holes = torch.nested.narrow(
            torch.arange(12.0).view(3, 4),
            1,
            torch.tensor([0, 1, 2]),
            torch.tensor([2, 3, 1]),
            layout=torch.jagged,
        )
    assert all(map(torch.equal, Ragged.from_nested(strided).unbind(), POINTS))
    got = Ragged.from_nested(holes)
    assert [view.tolist() for view in got.unbind()] == [[0, 1], [5, 6, 7], [10]]


SHAPES = (
    "must match {0} outside dimension 0, but has shape (2, 4) where (2, 3) was "
    "expected. Transpose the samples so that they differ in dimension 0, or pad them."
)
REFUSED: list[tuple[list[Any], type[Exception], str]] = [
    ([torch.ones(2, 3), torch.ones(2, 4)], ValueError, f"{{1}} {SHAPES}"),
    ([torch.ones(2), torch.tensor(1.0)], ValueError,
     "{1} must have at least 1 dimension to be ragged, but has shape (). Call "
     "reshape(1) on it."),
    ([torch.ones(2, 2), quiet_csr()], TypeError,
     "{1} must be a dense tensor, but its layout is torch.sparse_csr. Convert it with "
     "to_dense() before collating."),
    ([torch.ones(2), torch.ones(2, device="meta")], ValueError,
     "{1} must be on cpu like {0}, but is on meta."),
    ([torch.ones(2, 3), freed(torch.ones(2, 3))], ValueError,
     "{1} must lie within its storage, but needs 24 bytes where 0 are left. Collate it "
     "before its storage is resized."),
]  # fmt: skip


@pytest.mark.parametrize("column, cls, message", REFUSED)
def test_samples_that_cannot_be_joined_are_named(
    column: list[Any], cls: type[Exception], message: str
) -> None:
    with pytest.raises(cls) as caught:
        Ragged.from_tensors(column)
    assert str(caught.value) == message.format("samples[0]", "samples[1]")
    batch = [{"points": DataContainer(x, ragged=True)} for x in [column[0], *column]]
    with pytest.raises(cls) as collated:
        collate(batch, 3)
    names = ("batch[0]['points']", "batch[2]['points']")
    assert str(collated.value) == message.format(*names)
    assert isinstance(collated.value, AssertionError)


UNSIGNED = [torch.ones(2).to(dtype) for dtype in (torch.uint16, torch.int32)]
CALLS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: Ragged.from_tensors(torch.ones(2)),  # type: ignore[arg-type]
        TypeError,
        "Ragged.from_tensors: samples must be a sequence of tensors, but is "
        "torch.Tensor.",
    ),
    (lambda: Ragged.from_tensors([]), ValueError,
     "Ragged.from_tensors: samples must have at least one tensor, but is empty."),
    (
        lambda: Ragged.from_tensors([torch.ones(1), 5]),  # type: ignore[list-item]
        TypeError,
        "Ragged.from_tensors: samples[1] must be a tensor, but is int. Convert it with "
        "torch.as_tensor.",
    ),
    (lambda: Ragged.from_nested(torch.ones(1)), TypeError,
     "Ragged.from_nested: nested must be a nested tensor, but is torch.Tensor. Use "
     "Ragged.from_tensors for a list."),
    (lambda: Ragged(torch.ones(0), torch.zeros(1, dtype=torch.int64)).to_padded(),
     ValueError,
     "Ragged.to_padded: there must be at least one sample, but there are 0."),
    (lambda: Ragged.from_tensors(POINTS).to_padded(0, Padding(shape=(4, 4))),
     ValueError,
     "Ragged.to_padded: padding must give shape for 1 padded dimension, but gives (4, "
     "4). Give 1 of them."),
    (
        lambda: Ragged.from_tensors(POINTS).to_padded(padding=32),  # type: ignore[arg-type]
        TypeError,
        "Ragged.to_padded: padding must be a Padding, but is 32 (int).",
    ),
    (lambda: Ragged.from_tensors(UNSIGNED), TypeError,
     "samples[1] must have a dtype that torch promotes together with torch.uint16, but "
     "has torch.int32. Convert the samples to one dtype."),
    (lambda: Ragged.from_tensors(POINTS).to_padded(0, Padding(shape=(1,))), ValueError,
     "samples[0] must be at most (1,), the shape of the padding, in the padded "
     "dimensions, but is (2,) there. Resize it before collating, or allow a larger "
     "shape."),
    (lambda: collate([DataContainer([1], ragged=True)]), TypeError,
     "batch[0] must hold a tensor or a numeric array because ragged=True, but holds "
     "list. Convert it with torch.as_tensor, or use ragged=False."),
]  # fmt: skip


@pytest.mark.parametrize("call, cls, message", CALLS)
def test_wrong_calls_are_refused(call: Any, cls: type[Exception], message: str) -> None:
    with pytest.raises(cls) as caught:
        call()
    assert str(caught.value) == message
