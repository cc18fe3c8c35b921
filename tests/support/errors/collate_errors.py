"""Batches that collate rejects, and the expected messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel import DataContainer, collate
from tests.support.batch import samples


def stacked(*shapes: tuple[int, ...], **flags: Any) -> list[DataContainer]:
    return [DataContainer(torch.ones(shape), stack=True, **flags) for shape in shapes]


def padded(value: Any, dtype: torch.dtype = torch.float32) -> list[DataContainer]:
    tensors = [torch.ones(3, 4, size, dtype=dtype) for size in (4, 5)]
    return [DataContainer(t, stack=True, padding_value=value) for t in tensors]


def holding(*values: Any) -> list[DataContainer]:
    return [DataContainer(value, stack=True) for value in values]


def nested(depth: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result


def cyclic(container: Any) -> Any:
    if isinstance(container, dict):
        container["self"] = container
    else:
        container.append(container)
    return container


def freed(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    """Return the tensor with these bytes left in its storage."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def quiet_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout a beta
        return torch.ones(4, 5).to_sparse_csr()


class Mute:
    """A value of a class that torch cannot batch."""


HOLD_TENSOR = "must hold a tensor or a numeric array because stack=True, but holds"
HELD = "Convert it with torch.as_tensor, or use stack=False."
TOO_DEEP = (
    " must nest its containers at most 64 deep, but it nests deeper. Look for a "
    "container that contains itself."
)
LEAF = (
    "must be a tensor, a numeric array, a number, a string or a container of these, "
    "but is {}. Wrap the field in a DataContainer with cpu_only=True to keep the "
    "values in a list."
)
RESHAPE = "Reshape the samples to one number of dimensions, or keep a list."


def padding(options: str) -> str:
    """Return the advice for tensors that cannot be stacked without padding."""
    return (
        f"Pad the field with DataContainer(..., stack=True, {options}), or keep a list "
        "with DataContainer(...)."
    )


CHUNK = "collate: samples_per_gpu must be an integer of 1 or more, but is "
SPARSE = (
    "must be a dense tensor, but its layout is torch.sparse_{}. Convert it with "
    "to_dense() before collating."
)
HOLD = "must have a padding_value that torch."
NUMBER = "must have a number as padding_value, but has "

#: Name: (batch or call, class that mmcv or torch raised, class by meaning, message)
CASES: dict[str, tuple[Any, type, type, str]] = {
    "fewer dims": (stacked((3, 4, 4), (1, 3, 4, 4)), AssertionError, ValueError,
        "batch[1] must match batch[0] in its number of dimensions, but has shape (1, "
        f"3, 4, 4) where (3, 4, 4) was expected. {RESHAPE}"),
    "more dims": (stacked((1, 3, 4, 4), (3, 4, 4)), AssertionError, ValueError,
        "batch[1] must match batch[0] in its number of dimensions, but has shape (3, "
        f"4, 4) where (1, 3, 4, 4) was expected. {RESHAPE}"),
    "channels": (stacked((3, 4, 4), (1, 4, 4)), AssertionError, ValueError,
        "batch[1] must match batch[0] outside its last 2 dimensions, but has shape (1, "
        "4, 4) where (3, 4, 4) was expected. Make the samples equal in dimension 0, or "
        "pad it too with pad_dims=3, padding=Padding()."),
    "rows with one padded dim": (stacked((3, 4), (2, 4), pad_dims=1), AssertionError,
        ValueError,
        "batch[1] must match batch[0] outside its last dimension, but has shape (2, 4) "
        "where (3, 4) was expected. Make the samples equal in dimension 0, or pad it "
        "too with pad_dims=2, padding=Padding()."),
    "pad_dims equal to ndim": (stacked((4, 4), (4, 4)), AssertionError, ValueError,
        "batch[0] must have more than pad_dims=2 dimensions, but has shape (4, 4). Set "
        "pad_dims=2 and padding=Padding()."),
    "pad_dims above ndim": (stacked((4, 4), (4, 4), pad_dims=3), AssertionError,
        ValueError,
        "batch[0] must have more than pad_dims=3 dimensions, but has shape (4, 4). Set "
        "pad_dims=2 and padding=Padding()."),
    "a scalar to pad": (stacked((), (), pad_dims=1), AssertionError, ValueError,
        "batch[0] must have more than pad_dims=1 dimensions, but has shape (). Set "
        "pad_dims=None."),
    "shapes differ without pad_dims": (
        stacked((3, 4), (3, 5), pad_dims=None), RuntimeError, ValueError,
        "batch[1] must match batch[0], but has shape (3, 5) where (3, 4) was expected. "
        + padding("pad_dims=1"),
    ),
    "plain tensors differ": ([{"a": [torch.ones(2)]}, {"a": [torch.ones(3)]}],
        RuntimeError, ValueError,
        "batch[1]['a'][0] must match batch[0]['a'][0], but has shape (3,) where (2,) "
        f"was expected. {padding('pad_dims=1, padding=Padding()')}"),
    "sparse": ([torch.ones(2), torch.ones(2).to_sparse()], RuntimeError, TypeError,
        f"batch[1] {SPARSE.format('coo')}"),
    "sparse in a container": (holding(torch.ones(1, 2, 3).to_sparse()), RuntimeError,
        TypeError, f"batch[0] {SPARSE.format('coo')}"),
    "sparse rows": ([quiet_csr()], RuntimeError, TypeError,
        f"batch[0] {SPARSE.format('csr')}"),
    "meta beside cpu": (
        holding(torch.ones(1, 2, 3), torch.ones(1, 2, 3, device="meta")),
        RuntimeError, ValueError,
        "batch[1] must be on cpu like batch[0], but is on meta.",
    ),
    "dtypes without promotion": (
        [{"x": torch.ones(2).to(t)} for t in (torch.uint16, torch.int32)],
        RuntimeError, TypeError,
        "batch[1]['x'] must have a dtype that torch promotes together with "
        "torch.uint16, but has torch.int32. Convert the samples to one dtype.",
    ),
    "nan into uint8": (padded(float("nan"), torch.uint8), RuntimeError, ValueError,
        f"batch[0] {HOLD}uint8 can hold, but has nan."),
    "300 into uint8": (padded(300, torch.uint8), RuntimeError, ValueError,
        f"batch[0] {HOLD}uint8 can hold, but has 300."),
    "-1 into uint8": (padded(-1, torch.uint8), RuntimeError, ValueError,
        f"batch[0] {HOLD}uint8 can hold, but has -1."),
    "inf into int32": (padded(float("inf"), torch.int32), RuntimeError, ValueError,
        f"batch[0] {HOLD}int32 can hold, but has inf."),
    "2**63 into int64": (padded(2**63, torch.int64), ValueError, ValueError,
        f"batch[0] {HOLD}int64 can hold, but has {2**63}."),
    "2**64 into uint64": (padded(2.0**64, torch.uint64), ValueError, ValueError,
        f"batch[0] {HOLD}uint64 can hold, but has {2.0**64}."),
    "a huge integer": (padded(10**400), ValueError, ValueError,
        "batch[0] must have a padding_value that a double can hold, but has a larger "
        "integer."),
    "complex padding": (padded(1j), TypeError, TypeError,
        f"batch[0] {NUMBER}1j (complex)."),
    "complex padding from numpy": (padded(np.complex64(1j)), TypeError, TypeError,
        f"batch[0] {NUMBER}np.complex64(1j) (numpy.complex64)."),
    "a string as padding": (padded("0"), TypeError, TypeError,
        f"batch[0] {NUMBER}'0' (str)."),
    "a list as padding": (padded([0, 0]), TypeError, TypeError,
        f"batch[0] {NUMBER}[0, 0] (list)."),
    "thin samples, a vast union": (
        holding(
            torch.empty(1).expand(1, 2**40, 1), torch.empty(1).expand(1, 1, 2**40)
        ),
        RuntimeError, ValueError,
        "batch[0] and the samples stacked with it must need less than 2**63 elements, "
        f"but the padded shape is (2, 1, {2**40}, {2**40}).",
    ),
    "many expanded elements": (
        holding(*[torch.empty(1).expand(2**31, 2**15, 2**15)] * 4),
        RuntimeError, ValueError,
        "batch[0] and the samples stacked with it must need less than 2**63 elements, "
        f"but the padded shape is (4, {2**31}, 32768, 32768).",
    ),
    "no samples": ([], IndexError, ValueError,
        "collate: batch must have at least one sample, but is empty."),
    "None as batch": (None, TypeError, TypeError,
        "collate: batch must be a sequence of samples, but is None."),
    "a generator as batch": ((i for i in range(2)), TypeError, TypeError,
        "collate: batch must be a sequence of samples, but is generator."),
    "a dict as batch": ({"a": 1}, TypeError, TypeError,
        "collate: batch must be a sequence of samples, but is dict."),
    "a tensor as batch": (torch.ones(2), TypeError, TypeError,
        "collate: batch must be a sequence of samples, but is torch.Tensor."),
    "a string as batch": ("ab", TypeError, TypeError,
        "collate: batch must be a sequence of samples, but is str."),
    "no samples per gpu": (lambda: collate([1], 0), ValueError, ValueError,
        f"{CHUNK}0."),
    "negative samples per gpu": (lambda: collate([1], -1), ValueError, ValueError,
        f"{CHUNK}-1."),
    "fractional samples per gpu": (
        lambda: collate([1], 1.5), TypeError, TypeError,  # type: ignore[arg-type]
        f"{CHUNK}1.5 (float).",
    ),
    "None after a container": ([{"a": DataContainer(1)}, {"a": None}], TypeError,
        TypeError,
        "batch[1]['a'] must be a DataContainer like batch[0]['a'], but is None."),
    "None first": ([None, torch.ones(2)], TypeError, TypeError,
        f"batch[0] {LEAF.format('None')}"),
    "None after a number": ([1, 2, None], RuntimeError, TypeError,
        f"batch[2] {LEAF.format('None')}"),
    "an object": ([Mute()], TypeError, TypeError,
        f"batch[0] {LEAF.format('tests.support.errors.collate_errors.Mute')}"),
    "a number after a tensor": ([torch.ones(2), 1], TypeError, TypeError,
        "batch[1] must be a tensor like batch[0], but is int."),
    "bytes after a string": (["a", b"a"], TypeError, TypeError,
        "batch[1] must be str like batch[0], but is bytes."),
    "a string after a number": ([{"n": 1}, {"n": "1"}], TypeError, TypeError,
        "batch[1]['n'] must be int like batch[0]['n'], but is str."),
    "a string after a list": ([[1, 2], "ab"], TypeError, TypeError,
        "batch[1] must be a sequence like batch[0], but is str."),
    "a list after a dict": ([{"a": 1}, [1]], TypeError, TypeError,
        "batch[1] must be a mapping like batch[0], but is list."),
    "another dataclass": ([samples.Frozen(1, 2), samples.Slotted(1, 2)], TypeError,
        TypeError,
        "batch[1] must be a tests.support.batch.samples.Frozen like batch[0], but is "
        "tests.support.batch.samples.Slotted."),
    "a missing key": ([{"a": 1, "b": 2}, {"a": 1}], KeyError, ValueError,
        "batch[1] must have the keys of batch[0], but lacks 'b'. Give every sample the "
        "same keys."),
    "another key": ([{"s": {"a": 1}}, {"s": {"b": 1}}], KeyError, ValueError,
        "batch[1]['s'] must have the keys of batch[0]['s'], but lacks 'a'. Give every "
        "sample the same keys."),
    "ragged lists": ([[1, 2], [3]], ValueError, ValueError,
        "batch[1] must have 2 items like batch[0], but has 1. Wrap the field in a "
        "DataContainer to keep lists of any length."),
    "a list in itself": ([cyclic([])], ValueError, ValueError,
        f"batch[0][0][0][0]...{TOO_DEEP}"),
    "a dict in itself": ([cyclic({})], ValueError, ValueError,
        f"batch[0]['self']['self']['self']...{TOO_DEEP}"),
    "ten thousand lists": ([nested(10000)], ValueError, ValueError,
        f"batch[0][0][0][0]...{TOO_DEEP}"),
    "an array of objects to stack": (holding(torch.ones(1, 2, 3), np.array([None])),
        AssertionError, TypeError, f"batch[1] {HOLD_TENSOR} numpy.ndarray. {HELD}"),
    "None to stack": ([{"m": dc} for dc in holding(None)], AssertionError, TypeError,
        f"batch[0]['m'] {HOLD_TENSOR} None. {HELD}"),
    "a list of tensors to stack": (holding([torch.ones(2)]), AssertionError, TypeError,
        f"batch[0] {HOLD_TENSOR} list. {HELD}"),
    "a container to stack": (holding(*holding(torch.ones(1, 2, 3))), AssertionError,
        TypeError, f"batch[0] {HOLD_TENSOR} pyparallel.DataContainer. {HELD}"),
    "an object array": ([np.array([None, 1], object)], TypeError, TypeError,
        f"batch[0] {LEAF.format('numpy.ndarray of dtype object')}"),
    "a structured array": (
        [np.zeros(2, "i4,f4")], TypeError, TypeError,
        "batch[0] "
        + LEAF.format("numpy.ndarray of dtype [('f0', '<i4'), ('f1', '<f4')]"),
    ),
    "arrays differ": ([np.ones(2), np.ones(3)], RuntimeError, ValueError,
        "batch[1] must match batch[0], but has shape (3,) where (2,) was expected. "
        f"{padding('pad_dims=1, padding=Padding()')}"),
    "an integer of 65 bits": ([1, 2**64], ValueError, ValueError,
        f"batch[1] must be a number that a tensor can hold, but is {2**64}."),
    "freed memory": ([torch.ones(2, 3), freed(torch.ones(2, 3))], ValueError,
        ValueError,
        "batch[1] must lie within its storage, but needs 24 bytes where 0 are left. "
        "Collate it before its storage is resized."),
    "freed memory to stack": (holding(freed(torch.ones(2, 3, 4).transpose(0, 1))),
        ValueError, ValueError,
        "batch[0] must lie within its storage, but needs 96 bytes where 0 are left. "
        "Collate it before its storage is resized."),
    "freed memory to promote": (
        holding(torch.ones(1, 2, 3).double(), freed(torch.ones(1, 2, 3))),
        ValueError, ValueError,
        "batch[1] must lie within its storage, but needs 24 bytes where 0 are left. "
        "Collate it before its storage is resized.",
    ),
}  # fmt: skip


def raised(case: str) -> BaseException:
    batch, _, meaning, _ = CASES[case]
    call: Callable[[], Any] = batch if callable(batch) else lambda: collate(batch, 8)
    with pytest.raises(meaning) as caught:
        call()
    return caught.value
