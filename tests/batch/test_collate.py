"""collate: the result for each kind of field."""

from __future__ import annotations

import types
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from pyparallel import DataContainer, collate
from tests.support.batch import oracle, samples

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]


def stack_of(*tensors: torch.Tensor, **flags: Any) -> list[DataContainer]:
    return [DataContainer(tensor, stack=True, **flags) for tensor in tensors]


def one_chunk(*tensors: torch.Tensor, **flags: Any) -> torch.Tensor:
    return collate(stack_of(*tensors, **flags), len(tensors)).data[0]


def test_each_sample_is_padded_with_its_own_value() -> None:
    values = [1, -0.0, float("nan"), float("-inf")]
    batch = [
        DataContainer(torch.zeros(1, i), True, value, pad_dims=1)
        for i, value in enumerate(values)
    ]
    got = collate([*batch, DataContainer(torch.zeros(1, 4), True, pad_dims=1)], 5)
    padding = [row[0, i:].tolist() for i, row in enumerate(got.data[0])]
    expected = "[[1.0, 1.0, 1.0, 1.0], [-0.0, -0.0, -0.0], [nan, nan], [-inf], []]"
    assert repr(padding) == expected


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_values_are_converted_as_pad_converts_them(dtype: torch.dtype) -> None:
    tensors = [samples.random_tensor((1, 2, n), dtype, n) for n in (3, 5)]
    for value in (*samples.PADDING, None, np.float32(2), torch.tensor(3.0)):
        try:
            padded = oracle.by_torch(tensors, 1, [value, 0])[0]
        except RuntimeError:
            with pytest.raises(ValueError, match="can hold"):
                one_chunk(*tensors, padding_value=value)
            continue
        got = one_chunk(*tensors, padding_value=value)
        oracle.assert_same_tensor(got, torch.stack([padded, tensors[1]]))


def test_a_dtype_that_torch_cannot_fill_is_refused() -> None:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this torch has no float4")
    tensors = [torch.zeros(1, n, dtype=torch.uint8).view(dtype) for n in (2, 3)]
    with pytest.raises(ValueError) as caught:
        one_chunk(*tensors, pad_dims=1)
    assert str(caught.value) == (
        f"batch[0] must have a padding_value that {dtype} can hold, but has 0."
    )


@pytest.mark.parametrize("flags", [{}, {"pad_dims": None}, {"pad_dims": 1}])
def test_one_sample_is_copied_not_aliased(flags: dict[str, Any]) -> None:
    tensor = torch.ones(1, 2, 3)
    for got in (one_chunk(tensor, **flags), collate([tensor])):
        got.zero_()
    assert tensor.sum() == 6


def test_gradients_flow_and_no_grad_stops_them() -> None:
    leaf = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    other = torch.ones(1, 3, dtype=torch.float64)
    scale = torch.arange(6.0, dtype=torch.float64).view(2, 1, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return one_chunk(x, other, pad_dims=1) * scale * x.sum()

    assert torch.autograd.gradcheck(loss, leaf)
    with torch.no_grad():
        assert not one_chunk(leaf, other, pad_dims=1).requires_grad
        assert not collate([leaf]).requires_grad


@pytest.mark.parametrize("other", [(1, 2), (1, 3)], ids=["equal", "ragged"])
def test_tangents_of_forward_mode_flow_through(other: tuple[int, ...]) -> None:
    with forward_ad.dual_level():
        tangent = torch.tensor([[3.0, 4.0]])
        dual = forward_ad.make_dual(torch.ones(1, 2), tangent)
        column = [dual, torch.ones(other)]
        containers = [DataContainer(x, stack=True, pad_dims=1) for x in column]
        batches = [collate(containers, 2).data[0]]
        batches += [collate(column)] if other == (1, 2) else []
        for batch in batches:
            found = forward_ad.unpack_dual(batch).tangent
            assert found is not None
            assert found[0, :, :2].tolist() == tangent.tolist()


def test_conjugated_negated_and_zero_tensors_are_resolved() -> None:
    z = torch.tensor([[1 + 2j, 3 - 4j]])
    lazy = [z.conj(), torch._efficientzerotensor((1, 3), dtype=z.dtype)]
    for first in lazy:
        got = one_chunk(first, torch.ones(1, 4) + 0j, pad_dims=1)
        assert torch.equal(got[0, :, : first.shape[1]], first.clone().resolve_conj())
    negated = z.conj().imag
    assert negated.is_neg()
    assert one_chunk(negated, pad_dims=1).tolist() == [[[-2.0, 4.0]]]


def test_quantized_tensors_are_stacked_by_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them deprecated
        tensors = [
            torch.quantize_per_tensor(torch.ones(1, n), 0.5, 0, torch.quint8)
            for n in (2, 3)
        ]
        got = one_chunk(*tensors, pad_dims=1, padding_value=0.5)
    assert got.is_quantized
    assert got.dequantize().tolist() == [[[1, 1, 0.5]], [[1, 1, 1]]]


def test_a_default_device_does_not_matter() -> None:
    tensors = [torch.ones(1, n) for n in (2, 3)]
    with torch.device("meta"):
        got = one_chunk(*tensors, pad_dims=1, padding_value=0.123)
    assert (got.device.type, got[0, 0, 2].item()) == ("cpu", pytest.approx(0.123))


def test_numbers_become_tensors_as_default_collate_makes_them() -> None:
    columns: list[list[Any]] = [[1, 2], [1.5, 2], [True, False], [1, 2.5], [2.5, True]]
    columns += [[np.float32(1), np.float32(2)], [np.int8(1), np.int8(2)]]
    for column in columns:
        expected = torch.utils.data.default_collate(column)
        oracle.assert_same_tensor(collate(column), expected)


def test_text_becomes_a_list() -> None:
    assert collate(["ab", np.str_("c"), ""]) == ["ab", "c", ""]
    assert collate([b"ab", b""]) == [b"ab", b""]
    assert collate([{"name": "x"}, {"name": "y"}]) == {"name": ["x", "y"]}


def test_mappings_keep_type_and_order() -> None:
    rows = [{"b": i, "a": str(i)} for i in range(2)]
    for cls in (dict, OrderedDict, UserDict, types.MappingProxyType):
        got = collate([cls(row) for row in rows])
        assert (type(got), list(got), got["a"]) == (cls, ["b", "a"], ["0", "1"])
    factory = collate([defaultdict(int, row) for row in rows])
    assert (type(factory), factory.default_factory) == (defaultdict, int)


class Picky(UserDict[str, Any]):
    """A mapping that cannot be made from a dict."""

    def __init__(self, left: Any, right: Any) -> None:
        super().__init__(left=left, right=right)


def test_a_mapping_that_refuses_a_dict_becomes_one() -> None:
    assert collate([Picky("a", "b")] * 2) == {"left": ["a"] * 2, "right": ["b"] * 2}


def test_a_mapping_that_makes_up_missing_keys_may_lack_them() -> None:
    assert collate([Counter(a=3), Counter()])["a"].tolist() == [3, 0]


class Strict(dict[str, Any]):
    """A dict with its own error for a missing key."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"no {key}")


@pytest.mark.parametrize("more", [{}, {"b": 2}], ids=["one key", "two keys"])
def test_a_mapping_that_refuses_a_missing_key_is_named(more: dict[str, Any]) -> None:
    with pytest.raises(KeyError) as caught:
        collate([Strict(a=1, **more), Strict(more)])
    assert str(caught.value) == (
        "batch[1] must have the keys of batch[0], but lacks 'a'. Give every sample the "
        "same keys."
    )


class Boxes(list[Any]):
    """A list with a name."""


def test_sequences_become_lists_and_namedtuples_keep_their_type() -> None:
    size = torch.Size([1, 2])
    for row in ([1, 2], (1, 2), Boxes([1, 2]), deque([1, 2]), range(1, 3), size):
        got = collate([row, row])
        assert type(got) is list
        assert [column.tolist() for column in got] == [[1, 1], [2, 2]]
    pair = collate([samples.Pair(1, "a"), samples.Pair(2, "b")])
    assert (type(pair), pair.left.tolist()) == (samples.Pair, [1, 2])
    assert pair.right == ["a", "b"]


def test_numpy_arrays_are_stacked_and_never_written(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    frozen = base.copy()
    frozen.flags.writeable = False
    fields = np.zeros((3, 4), "i1,f4")
    fields["f1"] = base
    base.tofile(tmp_path / "map")
    mapped = np.memmap(tmp_path / "map", np.float32, "r", shape=(3, 4))
    arrays = [base, frozen, base[::-1, ::-1], base.astype(">f4"), fields["f1"], mapped]
    for array in arrays:
        before = array.tobytes()
        got = collate([array, array])
        assert (got.dtype, got.tolist()) == (torch.float32, [array.tolist()] * 2)
        got.zero_()
        assert array.tobytes() == before
    assert collate([np.array(1.5), np.array(2)]).tolist() == [1.5, 2]
    assert collate([np.array(1.5)]).dtype is torch.float64


class Doubled(DataContainer):
    """A container with its own idea of its data."""

    @property
    def data(self) -> Any:
        return self._data * 2


def test_a_subclass_may_have_its_own_idea_of_its_data() -> None:
    for flags in ({}, {"stack": True}, {"ragged": True}, {"cpu_only": True}):
        mixed = [Doubled(torch.ones(1, 2, 2), **flags), *stack_of(torch.ones(1, 2, 2))]
        (chunk,) = collate(mixed, 2).data
        values = chunk.values if flags.get("ragged") else chunk
        assert [values[0].mean(), values[1].mean()] == [2, 1]
