"""Errors of scatter: complete messages, and the classes that old code catches."""

from __future__ import annotations

import re
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyparallel import DataContainer as DC
from pyparallel import scatter, scatter_kwargs
from pyparallel.mmcv._functions import Scatter

pytestmark = pytest.mark.asan

CPU2 = ["cpu", "cpu"]
META = "Use DataContainer(..., cpu_only=True) for data that stay on the host."
ONE = torch.ones(1)
Pair = namedtuple("Pair", "a b")


@dataclass
class Sample:
    img: object


def check(error, message, *args, **kwargs):
    """Scatter must raise all of these classes, with this very message."""
    classes = error if isinstance(error, tuple) else (error,)
    with pytest.raises(classes[0], match=f"^{re.escape(message)}$") as caught:
        scatter(*args, **kwargs)
    assert all(isinstance(caught.value, each) for each in classes)
    return caught.value


# Targets


@pytest.mark.parametrize("bad", [1.5, True, None, b"cpu", torch.float32])
def test_a_target_of_the_wrong_kind(bad):
    kinds = {
        float: "float", bool: "bool", type(None): "None", bytes: "bytes",
        torch.dtype: "torch.dtype",
    }  # fmt: skip
    message = (
        "scatter: a target must be an index, a string or a torch.device, but is "
        f"{bad!r} ({kinds[type(bad)]})."
    )
    check(TypeError, message, ONE, [bad])


def test_an_invalid_stream_or_one_of_no_target_is_refused():
    message = "scatter: stream must be a torch.Stream, but is of type int."
    check(TypeError, message, ONE, CPU2, stream=3)
    elsewhere = SimpleNamespace(device=torch.device("cuda", 1))
    message = "scatter: stream must be of a target (cpu, cpu), but is of cuda:1."
    check(ValueError, message, ONE, CPU2, stream=elsewhere)
    message = "scatter: stream must be of a target (the host), but is of cuda:1."
    check(ValueError, message, ONE, -1, stream=elsewhere)


# Options


def test_max_size_is_positive():
    message = "scatter: max_size must be 1 or more, but has 0."
    check(ValueError, message, torch.ones(5), CPU2, max_size=0)


@pytest.mark.parametrize("bad", [torch.int32, "float16", torch.bool, float])
def test_dtype_is_a_floating_point_dtype(bad):
    message = f"scatter: dtype must be a floating-point torch.dtype, but is {bad!r}."
    check(TypeError, message, ONE, [-1], dtype=bad)


def test_chunk_sizes_sum_to_the_size_of_every_tensor():
    message = (
        "inputs['a'][1] must have size 6 along dimension 0, that of sum(chunk_sizes) "
        "(2, 4), but has shape (5, 1)."
    )
    batch = {"a": [torch.ones(6), torch.ones(5, 1)]}
    check((ValueError, RuntimeError), message, batch, CPU2, chunk_sizes=[2, 4])


def test_chunk_sizes_sum_to_the_samples_of_every_container():
    message = "inputs['a'] must hold sum(chunk_sizes)=6 samples, but holds 3."
    batch = {"a": DC([[ONE, ONE, ONE]])}
    check(ValueError, message, batch, CPU2, chunk_sizes=[2, 4])


def test_chunks_of_different_padding_cannot_be_divided_again():
    message = (
        "inputs must have chunks of one padded shape to be split again, but has (3,), "
        "(4,). Collate with samples_per_gpu equal to the batch size."
    )
    data = [torch.ones(2, 4), torch.ones(2, 3)]
    check(ValueError, message, DC(data, stack=True), CPU2, chunk_sizes=[1, 3])


# Tensors


def test_tensors_with_different_numbers_of_parts():
    message = (
        "inputs['b'] must have the same number of chunks as inputs['a'], but has 2 "
        "where 3 was expected."
    )
    batch = {"a": torch.ones(5), "b": torch.ones(2)}
    check((ValueError, AssertionError, RuntimeError), message, batch, ["cpu"] * 4)


def test_a_tensor_that_its_containers_do_not_fit():
    message = (
        "inputs['x'] must have size 6 along dimension 0, that of the containers' "
        "chunks (4, 2), but has shape (5,)."
    )
    batch = {"img": DC([torch.ones(4), torch.ones(2)], stack=True), "x": torch.ones(5)}
    check(ValueError, message, batch, CPU2)


# DataContainers


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


def test_containers_with_different_chunks_next_to_a_tensor_are_refused():
    message = (
        "inputs['b'] must have the chunk sizes of inputs['a'] so that the tensors "
        "beside them can be split, but has (1, 2) where (2, 1) was expected."
    )
    a, b = DC([[ONE] * 2, [ONE]]), DC([[ONE], [ONE] * 2])
    check(ValueError, message, {"a": a, "b": b, "x": torch.ones(3)}, CPU2)
    assert len(scatter({"a": a, "b": b}, CPU2)) == 2


def test_an_empty_container():
    message = "inputs['x'] must hold at least one chunk, but is empty."
    for empty in (DC([]), DC([], cpu_only=True), DC((), stack=True)):
        check(ValueError, message, {"x": empty, "y": 1}, [-1])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"a": ONE}, "dict"),
        (None, "None"),
        ("s", "str"),
        (np.ones(2), "numpy.ndarray"),
        ((ONE,), "tuple"),
    ],
)
def test_a_chunk_with_anything_but_tensors_names_the_place(value, kind):
    message = (
        "inputs[0]['x'].data[0][1][0] must be a tensor or a list of tensors, but is "
        f"{kind}. {META}"
    )
    check((TypeError, AssertionError), message, [{"x": DC([[ONE, [value]]])}], [-1])


# Names of places, nesting, keywords


def test_places_are_written_as_the_user_would_index_them():
    bad = DC([])
    rest = " must hold at least one chunk, but is empty."
    check(ValueError, "inputs" + rest, bad, [-1])
    check(ValueError, "inputs.b" + rest, Pair(1, bad), [-1])
    check(ValueError, "inputs['s'].img[1]" + rest, {"s": Sample([1, bad])}, [-1])
    for args, kwargs, place in (
        ((1, bad), {}, "inputs[1]"),
        ((1,), {"img": [bad]}, "kwargs['img'][0]"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(place + rest)}$"):
            scatter_kwargs(args, kwargs, [-1])


def test_a_chunk_that_contains_itself_is_refused():
    inner: list = [ONE]
    inner.append(inner)
    message = (
        "inputs['x'].data must nest its containers at most 64 deep, but it nests "
        "deeper. Look for a container that contains itself."
    )
    check(ValueError, message, {"x": DC([inner])}, [-1])


def test_the_old_function_calls_strangers_unknown():
    message = (
        "Unknown type dict: a chunk of a DataContainer must be made of tensors and "
        "lists. Use DataContainer(..., cpu_only=True) for other values."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        Scatter.forward([-1], [{"a": 1}])
