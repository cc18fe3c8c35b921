"""The bytes of small batches: `encode` and `decode` of both backends."""

from __future__ import annotations

import pickle
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batch import samples
from tests.support.loader.loader_sets import Tagged, same
from tests.support.processes.backends import (
    both,
    check,
    native,
    needs_native,
    reference,
)

pytestmark = [pytest.mark.asan, pytest.mark.one_backend]
LIMIT = 1000


def dense(dtype: torch.dtype) -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(), (0, 3), (3,), (2, 1, 4)]
    return [samples.random_tensor(shape, dtype, seed=1) for shape in shapes]


@both
@pytest.mark.parametrize("dtype", samples.DTYPES)
def test_tensors_of_every_dtype_arrive_in_memory_of_their_own(
    backend: ModuleType, dtype: torch.dtype
) -> None:
    tensors = dense(dtype)
    message, nbytes = backend.encode(tensors, LIMIT)
    assert nbytes == sum(tensor.nbytes for tensor in tensors)
    buffer = bytearray(message)
    arrived = backend.decode(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert same(arrived, tensors)
    for tensor in arrived:
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.untyped_storage().resizable()


@needs_native
@pytest.mark.parametrize("dtype", samples.DTYPES)
def test_both_backends_write_and_read_the_same_bytes(dtype: torch.dtype) -> None:
    assert native is not None
    message = native.encode(dense(dtype), LIMIT)
    assert message == reference.encode(dense(dtype), LIMIT)
    assert same(reference.decode(message[0]), native.decode(message[0]))


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


OTHERS: dict[str, Any] = {
    "sparse": torch.eye(3).to_sparse(),
    "a gradient": torch.ones(2, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "a subclass": torch.ones(2).as_subclass(Tagged),
    "permuted": torch.ones(2, 3).t(),
    "strided": torch.ones(3, 3)[:, 1:],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "conjugated": torch.tensor([1j]).conj(),
    "negated": torch.tensor([1j]).conj().imag,
    "quantized": quantized(),
    "on the meta device": torch.ones(3, device="meta"),
    "too large": torch.ones(LIMIT // 4 + 1),
    "an object": object(),
    "a type": torch.float32,
}


@both
@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_to_pickle(backend: ModuleType, name: str) -> None:
    assert backend.encode([torch.ones(2), OTHERS[name]], LIMIT) is None


@both
def test_the_limit_counts_the_bytes_of_all_tensors(backend: ModuleType) -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.int8)]
    assert backend.encode(tensors, 13) is None
    assert backend.encode(tensors, 14)[1] == 14
    freed = torch.ones(3)
    freed.untyped_storage().resize_(4)
    assert backend.encode([freed], LIMIT) is None


def chain(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def cycle() -> Any:
    found: list[Any] = [1]
    found.append(found)
    return found


ROW, PAIR = [1], (torch.ones(1),)


@needs_native
@pytest.mark.parametrize(
    "tree",
    [
        *({1.5: 1}, {(1,): 1}, {None: 1}, {1, 2}, [2**63], ["\ud800"], [1j]),
        *([ROW, ROW], [PAIR, PAIR], {"x": ROW, "y": [ROW]}, [PAIR[0], *PAIR]),
        *(chain(201), cycle(), samples.Pair(1, 2), torch.Size([1]), bytearray(1)),
    ],
)
def test_nests_of_other_kinds_are_left_to_pickle(tree: Any) -> None:
    assert native is not None
    assert native.encode(tree, LIMIT) is None


values = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.binary()),
    *(st.floats(allow_nan=False), st.text(), st.just(())),
    st.lists(st.integers(0, 9), max_size=4).map(torch.tensor),
)
keys = st.text() | st.integers(-9, 9)
nests = st.recursive(
    values,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner)
    ),
)


def kinds(tree: Any) -> Any:
    """Return the types of a nest and the order of its keys."""
    if isinstance(tree, dict):
        return [(type(key), key, kinds(value)) for key, value in tree.items()]
    items = [*map(kinds, tree)] if isinstance(tree, list | tuple) else []
    return type(tree), items


@needs_native
@given(nests)
def test_a_nest_arrives_as_from_pickle(tree: Any) -> None:
    assert native is not None
    message, _ = native.encode(pickle.loads(pickle.dumps(tree)), 1 << 20)
    assert message[:1] != pickle.PROTO
    arrived = native.decode(message)
    assert same(arrived, tree) and kinds(arrived) == kinds(tree)


@both
@given(st.data())
def test_damaged_bytes_are_refused(backend: ModuleType, data: Any) -> None:
    message, _ = backend.encode([torch.ones(2, 3), torch.ones(1)], LIMIT)
    damaged = bytearray(message)
    place = data.draw(st.integers(0, len(message) - 1))
    if data.draw(st.booleans()):
        del damaged[place:]
    damaged[place : place + 1] = data.draw(st.binary(max_size=8))
    try:
        backend.decode(damaged)
    except (ValueError, RuntimeError, MemoryError):  # other bytes are another batch
        pass


DAMAGED = [b"", b"N" * 2, b"l\1\0\0\0", b"l\0\0\0\0N", b"?", b"x\xff\0"]
DAMAGED += [b"l\1\0\0\0x\6\1" + b"\xff" * 8, b"l\1\0\0\0x\6\1" + b"\x7f" * 8]


@both
@pytest.mark.parametrize("message", DAMAGED)
def test_errors_are_equal(backend: ModuleType, message: bytes) -> None:
    text = "decode: message must be bytes of encode, but is damaged."
    check(backend.decode, (message,), ValueError, text)
    text = "decode: message must be a bytes-like object, but is of type int."
    check(backend.decode, (3,), TypeError, text)
    text = "encode: limit must be an int, but is of type str."
    check(backend.encode, ([], "1"), TypeError, text)
