"""Errors of scatter: complete messages, and the classes that old code catches."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from pyparallel import DataContainer as DC
from pyparallel import StaticBatches, scatter
from pyparallel.mmcv._functions import Scatter

pytestmark = pytest.mark.asan

CPU2 = ["cpu", "cpu"]
ONE = torch.ones(1)


def check(error, message, *args, **kwargs):
    """Scatter must raise all of these classes, with this very message."""
    classes = error if isinstance(error, tuple) else (error,)
    with pytest.raises(classes[0], match=f"^{re.escape(message)}$") as caught:
        scatter(*args, **kwargs)
    assert all(isinstance(caught.value, each) for each in classes)


ELSEWHERE = SimpleNamespace(device=torch.device("cuda", 1))
LOOP: list[Any] = [ONE]
LOOP.append(LOOP)
UNEQUAL = {"a": DC([[ONE] * 2, [ONE]]), "b": DC([[ONE], [ONE] * 2])}
IN_A_CHUNK = (
    "inputs[0]['x'].data[0][1][0] must be a tensor or a list of tensors, but is"
)
#: The classes, the message, the batch, the targets, and the options.
REFUSED: list[tuple[Any, str, Any, Any, dict[str, Any]]] = [
    *(
        (TypeError, "scatter: a target must be an index, a string or a torch.device, "
         f"but is {bad!r} ({kind}).", ONE, [bad], {})
        for bad, kind in ((1.5, "float"), (True, "bool"), (None, "None"))
    ),
    (TypeError, "scatter: stream must be a torch.Stream, but is of type int.", ONE,
     CPU2, {"stream": 3}),
    (ValueError, "scatter: stream must be of a target (the host), but is of cuda:1.",
     ONE, -1, {"stream": ELSEWHERE}),
    (ValueError, "scatter: max_size must be 1 or more, but has 0.", ONE, CPU2,
     {"max_size": 0}),
    *(
        (TypeError, "scatter: dtype must be a floating-point torch.dtype, but is "
         f"{bad!r}.", ONE, [-1], {"dtype": bad})
        for bad in (torch.int32, "float16", float)
    ),
    ((ValueError, RuntimeError),
     "inputs['a'][1] must have size 6 along dimension 0, that of sum(chunk_sizes) "
     "(2, 4), but has shape (5, 1).",
     {"a": [torch.ones(6), torch.ones(5, 1)]}, CPU2, {"chunk_sizes": [2, 4]}),
    (ValueError, "inputs['a'] must hold sum(chunk_sizes)=6 samples, but holds 3.",
     {"a": DC([[ONE, ONE, ONE]])}, CPU2, {"chunk_sizes": [2, 4]}),
    (ValueError,
     "inputs must have chunks of one padded shape to be split again, but has (3,), "
     "(4,). Collate with samples_per_gpu equal to the batch size.",
     DC([torch.ones(2, 4), torch.ones(2, 3)], stack=True), CPU2,
     {"chunk_sizes": [1, 3]}),
    ((ValueError, AssertionError, RuntimeError),
     "inputs['b'] must have the same number of chunks as inputs['a'], but has 2 where "
     "3 was expected.",
     {"a": torch.ones(5), "b": torch.ones(2)}, ["cpu"] * 4, {}),
    (ValueError,
     "inputs['x'] must have size 6 along dimension 0, that of the containers' chunks "
     "(4, 2), but has shape (5,).",
     {"img": DC([torch.ones(4), torch.ones(2)], stack=True), "x": torch.ones(5)}, CPU2,
     {}),
    (ValueError,
     "inputs['b'] must have the chunk sizes of inputs['a'] so that the tensors beside "
     "them can be split, but has (1, 2) where (2, 1) was expected.",
     {**UNEQUAL, "x": torch.ones(3)}, CPU2, {}),
    *(
        ((TypeError, AssertionError), f"{IN_A_CHUNK} {kind}. Use DataContainer(..., "
         "cpu_only=True) for data that stay on the host.",
         [{"x": DC([[ONE, [bad]]])}], [-1], {})
        for bad, kind in ((None, "None"), ("s", "str"), ((ONE,), "tuple"),
                          (np.ones(2), "numpy.ndarray"))
    ),
    (ValueError,
     "inputs['x'].data must nest its containers at most 64 deep, but it nests deeper. "
     "Look for a container that contains itself.", {"x": DC([LOOP])}, [-1], {}),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1][:60])
def test_scatter_refuses(case):
    error, message, batch, targets, options = case
    check(error, message, batch, targets, **options)


def test_more_chunks_than_targets():
    message = (
        "inputs['x'] must have at most one chunk for each target (1), but has 2. "
        "Collate with a larger samples_per_gpu, or name more targets."
    )
    check((ValueError, AssertionError), message, {"x": DC([[ONE], [ONE]])}, [-1])
    check(ValueError, message, {"x": DC([["m"], ["n"]], cpu_only=True)}, [-1])


def test_containers_with_different_numbers_of_chunks():
    message = (
        "inputs['b'] must have the same number of chunks as inputs['a'], but has 1 "
        "where 2 was expected."
    )
    check(ValueError, message, {"a": DC([[ONE], [ONE]]), "b": DC([[ONE]])}, CPU2)


def test_an_empty_container():
    message = "inputs['x'] must hold at least one chunk, but is empty."
    for empty in (DC([]), DC([], cpu_only=True), DC((), stack=True)):
        check(ValueError, message, {"x": empty, "y": 1}, [-1])


def test_a_packed_sequence_is_not_split_but_refused():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    message = (
        "inputs['x'][1] must be padded to be split, but is a PackedSequence. Use "
        "pad_packed_sequence, or give it to one target."
    )
    check(TypeError, message, {"x": [ONE, packed]}, CPU2)
    (part,) = scatter({"x": [ONE, packed]}, [-1])
    assert part["x"][1].data is packed.data


def test_the_old_function_calls_strangers_unknown():
    message = (
        "Unknown type dict: a chunk of a DataContainer must be made of tensors and "
        "lists. Use DataContainer(..., cpu_only=True) for other values."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        Scatter.forward([-1], [{"a": 1}])


def test_freed_memory_is_named_before_a_static_slab_changes():
    static = StaticBatches()
    (first,) = scatter([torch.ones(6)], "cpu", out=static)
    rest = torch.ones(8)[2:]
    rest.untyped_storage().resize_(16)
    message = (
        "inputs[0] must lie within its storage, but needs 32 bytes where 16 are left. "
        "Use it before its storage is resized."
    )
    check(ValueError, message, [rest], "cpu", out=static)
    assert first[0].tolist() == [1] * 6
