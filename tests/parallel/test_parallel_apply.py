"""parallel_apply of one callable: items, parts, devices, order and bad input."""

from __future__ import annotations

import threading
from collections import UserList, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyparallel import parallel_apply
from pyparallel.core.errors import BatchTypeError, BatchValueError
from pyparallel.core.thread_state import capture
from pyparallel.parallel.parallel_apply import split_evenly

pytestmark = pytest.mark.one_backend

TWO = ["cpu", "cpu"]
Pair = namedtuple("Pair", "a b")


def double(x: Any) -> Any:
    return x * 2


def threads_of(num_items: int, devices: Any, num_parts: int) -> list[int]:
    """Return the threads that ran the items, when all parts run at the same time."""
    met = threading.Barrier(num_parts)
    seen = threading.local()

    def look(item: int) -> int:
        if not hasattr(seen, "met"):
            seen.met = met.wait(30)
        return threading.get_ident()

    return parallel_apply(look, range(num_items), devices)


@given(st.integers(0, 40), st.integers(1, 12))
def test_parts_are_in_order_and_as_equal_as_can_be(n: int, most: int) -> None:
    parts = split_evenly(list(range(n)), most) if n else []
    assert [item for part in parts for item in part] == list(range(n))
    assert len(parts) == min(n, most)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(st.lists(st.integers()), st.integers(1, 5))
def test_results_are_those_of_a_loop(items: list[int], num_devices: int) -> None:
    found = parallel_apply(double, items, ["cpu"] * num_devices)
    assert found == [double(item) for item in items]


def test_a_part_is_run_by_one_thread_and_a_device_named_twice_is_two() -> None:
    first, *_, last = found = threads_of(5, TWO, 2)
    assert found == [first] * 3 + [last] * 2
    assert first != last and first == threading.get_ident()  # the caller's is one


def test_one_part_runs_in_the_thread_of_its_caller() -> None:
    assert threads_of(3, "cpu", 1) == [threading.get_ident()] * 3
    assert threads_of(1, TWO, 1) == [threading.get_ident()]


def test_the_default_on_the_host_is_torchs_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert len(set(threads_of(9, None, 3))) == 3
    finally:
        torch.set_num_threads(before)


def test_jobs_on_the_host_share_the_threads_of_their_caller() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        for num_devices in (1, 2, 3, 7):
            devices = ["cpu"] * num_devices
            found = parallel_apply(lambda i: torch.get_num_threads(), range(9), devices)
            assert found == [max(1, 6 // num_devices)] * 9
            assert torch.get_num_threads() == 6
        started: list[int] = []
        other = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert started == [6], (
            "threads that others start have the number of the process"
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_items_of_a_tensor_keep_their_dimension(dim: int) -> None:
    batch = torch.arange(24).reshape(2, 3, 4)
    found = parallel_apply(double, batch, TWO, dim=dim)
    assert len(found) == batch.shape[dim]
    assert all(item.shape[dim] == 1 and item.dim() == 3 for item in found)
    assert torch.equal(torch.cat(found, dim), batch * 2)


def test_eight_images_through_a_small_network() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    images = torch.randn(8, 3, 32, 32)
    whole = network(images)
    found = torch.cat(parallel_apply(network, images, TWO))
    assert found.shape == (8, 10)
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize(
    "inputs", [[1, 2, 3], (1, 2, 3), range(1, 4), UserList([1, 2, 3])]
)
def test_any_sequence_is_taken_item_by_item(inputs: Any) -> None:
    assert parallel_apply(double, inputs, TWO) == [2, 4, 6]


def test_a_tuple_is_a_list_of_arguments_and_nothing_else_is() -> None:
    items = [(1, 2), [1, 2], Pair(1, 2), "ab", {"a": 1}, None, ()]
    found = parallel_apply(lambda *args: args, items, TWO)
    assert found == [
        (1, 2),
        ([1, 2],),
        (Pair(1, 2),),
        ("ab",),
        ({"a": 1},),
        (None,),
        (),
    ]
    assert type(found[2][0]) is Pair


def test_module_kwargs_are_passed_to_every_call() -> None:
    def call(item: int, *, add: torch.Tensor, name: str) -> Any:
        return item + add, name

    add = torch.ones(2)
    found = parallel_apply(
        call, [1, 2, 3], TWO, module_kwargs={"add": add, "name": "n"}
    )
    for item, (tensor, name) in zip([1, 2, 3], found, strict=True):
        assert torch.equal(tensor, torch.ones(2) * (item + 1)) and name == "n"


def test_results_may_be_anything_and_are_the_very_objects() -> None:
    made = [np.arange(3), None, object(), {"a": [torch.ones(1)]}, "text"]
    found = parallel_apply(
        lambda i: made[i], range(5), ["cpu"] * 3, output_device="cpu"
    )
    assert all(a is b for a, b in zip(found, made, strict=True))


@pytest.mark.parametrize("inputs", [[], (), torch.empty(0, 3), range(0)])
def test_no_items_no_results(inputs: Any) -> None:
    assert parallel_apply(double, inputs, TWO) == []
    assert parallel_apply([], []) == []


def test_arguments_can_be_named() -> None:
    assert parallel_apply(fn=double, inputs=[1], devices=TWO, dim=0) == [2]
    modules = [double, double]
    assert parallel_apply(modules=modules, inputs=[1, 2], devices=TWO) == [2, 4]


def never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("it ran")


REFUSED = [
    (
        (5, []),
        {},
        BatchTypeError,
        "parallel_apply: the first argument must be a callable, or a sequence of "
        "modules, but is of type int.",
    ),
    (
        ("ab", []),
        {},
        BatchTypeError,
        "parallel_apply: the first argument must be a callable, or a sequence of "
        "modules, but is of type str.",
    ),
    (
        ([never, 3], [1, 2]),
        {},
        BatchTypeError,
        "parallel_apply: modules[1] must be a module or another callable, but is of "
        "type int.",
    ),
    (
        ([never], [1]),
        {"output_device": 0},
        BatchTypeError,
        "parallel_apply: the arguments with several modules must be inputs, "
        "kwargs_tup, devices, but one is output_device.",
    ),
    (
        (never, [1]),
        {"kwargs_tup": [{}]},
        BatchTypeError,
        "parallel_apply: the arguments with one callable must be inputs, devices, "
        "output_device, dim, module_kwargs, but one is kwargs_tup.",
    ),
    (
        (never, {"a": 1}),
        {},
        BatchTypeError,
        "parallel_apply: inputs must be a tensor or a sequence of items, but is of "
        "type dict. Make a list of them.",
    ),
    (
        (never, "ab"),
        {},
        BatchTypeError,
        "parallel_apply: inputs must be a tensor or a sequence of items, but is of "
        "type str. Make a list of them.",
    ),
    (
        (never, torch.tensor(1)),
        {},
        BatchValueError,
        "parallel_apply: dim must be a dimension of inputs, but is 0 for shape ().",
    ),
    (
        (never, torch.ones(2, 3)),
        {"dim": -3},
        BatchValueError,
        "parallel_apply: dim must be a dimension of inputs, but is -3 for shape "
        "(2, 3).",
    ),
    (
        (never, torch.ones(2)),
        {"dim": True},
        BatchTypeError,
        "parallel_apply: dim must be an integer, but is True (bool).",
    ),
    (
        (never, [1], []),
        {},
        BatchValueError,
        "parallel_apply: devices must name at least one, but is empty.",
    ),
    (
        (never, [1], 1.5),
        {},
        BatchTypeError,
        "parallel_apply: devices must be a device, an index or a list of them, but is "
        "of type float.",
    ),
    (
        (never, [1], ["cpu", 1.5]),
        {},
        BatchTypeError,
        "parallel_apply: a device must be an index, a string or a torch.device, but is "
        "1.5 (float).",
    ),
    (
        (never, [1], "nowhere"),
        {},
        BatchValueError,
        "parallel_apply: a device must be -1 or name a device, but is 'nowhere'.",
    ),
    (
        (never, [1]),
        {"module_kwargs": {1: 2}},
        BatchTypeError,
        "parallel_apply: module_kwargs must be keyword arguments by name, but is "
        "{1: 2}.",
    ),
    (
        ([never, never], [1]),
        {},
        BatchValueError,
        "parallel_apply: inputs must have one entry for each of 2 modules, but has 1.",
    ),
    (
        ([never, never], [1, 2], [{}]),
        {},
        BatchValueError,
        "parallel_apply: kwargs_tup must have one entry for each of 2 modules, but has "
        "1.",
    ),
    (
        ([never, never], [1, 2], None, ["cpu"]),
        {},
        BatchValueError,
        "parallel_apply: devices must have one entry for each of 2 modules, but has 1.",
    ),
    (
        ([never, never], 7),
        {},
        BatchTypeError,
        "parallel_apply: inputs must be a sequence with one entry for each module, but "
        "is of type int.",
    ),
    (
        ([never], [1], [{2: 3}]),
        {},
        BatchTypeError,
        "parallel_apply: kwargs_tup[0] must be keyword arguments by name, but is "
        "{2: 3}.",
    ),
]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"), REFUSED, ids=[case[-1] for case in REFUSED]
)
def test_bad_input_is_refused_before_anything_runs(
    args: Any, kwargs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        parallel_apply(*args, **kwargs)
    assert type(caught.value) is error and str(caught.value) == message


def test_a_device_that_is_not_there_is_refused() -> None:
    index = torch.accelerator.device_count()
    with pytest.raises(
        RuntimeError, match="must be a device of this machine, but torch"
    ):
        parallel_apply(never, [1, 2], ["cpu", f"cuda:{index}"])
    with pytest.raises(
        RuntimeError, match="must be a device of this machine, but torch"
    ):
        parallel_apply(never, [1, 2], TWO, output_device=f"cuda:{index}")


def test_the_host_has_many_names() -> None:
    found = parallel_apply(double, [1, 2, 3], [-1, "cpu", torch.device("cpu", 0)])
    assert found == [2, 4, 6]


def test_a_captured_state_is_a_value() -> None:
    assert capture() == capture()
