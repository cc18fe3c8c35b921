"""parallel_apply of a callable and of modules: items, results, gradients and errors."""

from __future__ import annotations

import importlib
import threading
import traceback
from collections import UserList, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyparallel import parallel_apply
from pyparallel.core.errors import BatchTypeError, BatchValueError, add_note
from tests.support.processes.backends import check

pytestmark = pytest.mark.one_backend

torch_on_host = importlib.import_module("benchmarks.torch_on_host")

TWO = ["cpu", "cpu"]
SOON = 30.0
Pair = namedtuple("Pair", "a b")


def double(x: Any) -> Any:
    return x * 2


def threads_of(num_items: int, devices: Any, num_parts: int) -> list[int]:
    """Return the threads that ran the items, when all parts run at the same time."""
    met = threading.Barrier(num_parts)
    seen = threading.local()

    def look(item: int) -> int:
        if not hasattr(seen, "met"):
            seen.met = met.wait(SOON)
        return threading.get_ident()

    return parallel_apply(look, range(num_items), devices)


@settings(deadline=None)
@given(st.lists(st.integers()), st.integers(1, 5))
def test_results_are_those_of_a_loop(items: list[int], num_devices: int) -> None:
    found = parallel_apply(double, items, ["cpu"] * num_devices)
    assert found == [double(item) for item in items]


def test_each_part_has_one_thread_and_the_first_part_that_of_the_caller() -> None:
    me = threading.get_ident()
    first, *_, last = found = threads_of(5, TWO, 2)
    assert found == [first] * 3 + [last] * 2
    assert first != last and first == me
    assert threads_of(3, "cpu", 1) == [me] * 3 and threads_of(1, TWO, 1) == [me]
    meet = threading.Barrier(3).wait  # torch's form: a thread for each module
    assert len({*parallel_apply([lambda x: (meet(SOON), x)[1]] * 3, [1, 2, 3])}) == 3


def test_jobs_on_the_host_share_the_threads_of_their_caller() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        assert len(set(threads_of(9, None, 6))) == 6  # the default on the host
        for num_devices, expected in ((1, 6), (2, 3), (3, 2), (7, 1)):
            devices = ["cpu"] * num_devices
            found = parallel_apply(lambda i: torch.get_num_threads(), range(9), devices)
            assert found == [expected] * 9
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


def test_sequences_devices_and_arguments_may_be_given_in_any_form() -> None:
    for inputs in ([1, 2, 3], (1, 2, 3), range(1, 4), UserList([1, 2, 3])):
        assert parallel_apply(double, inputs, TWO) == [2, 4, 6]
    host = [-1, "cpu", torch.device("cpu", 0)]
    assert parallel_apply(fn=double, inputs=[1, 2, 3], devices=host, dim=0) == [2, 4, 6]
    modules = [double, double]
    assert parallel_apply(modules=modules, inputs=[1, 2], devices=TWO) == [2, 4]
    for nothing in ([], (), torch.empty(0, 3), range(0)):
        assert parallel_apply(double, nothing, TWO) == []
    assert parallel_apply([], []) == []


def test_a_tuple_is_a_list_of_arguments_and_nothing_else_is() -> None:
    items = [(1, 2), [1, 2], Pair(1, 2), "ab", {"a": 1}, None, ()]
    found = parallel_apply(lambda *args: args, items, TWO)
    assert found == [items[0], *((each,) for each in items[1:-1]), ()]
    assert type(found[2][0]) is Pair


def test_keyword_arguments_reach_every_call_and_results_are_the_very_objects() -> None:
    made = [np.arange(3), None, object(), {"a": [torch.ones(1)]}, "text"]
    options = {"add": torch.ones(2), "name": "n"}
    found = parallel_apply(
        lambda i, **kwargs: (made[i], kwargs), range(5), ["cpu"] * 3, "cpu", 0, options
    )
    assert [result[0] for result in found] == made
    assert all(a is b for (a, _), b in zip(found, made, strict=True))
    assert all(kwargs == options for _, kwargs in found)


def never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("it ran")


WRONG_TYPES: dict[str, Any] = {
    "the first argument must be a callable, or a sequence of modules, but is of type "
    "int.": lambda: parallel_apply(5, []),
    "the first argument must be a callable, or a sequence of modules, but is of type "
    "str.": lambda: parallel_apply("ab", []),
    "modules[1] must be a module or another callable, but is of type int.": (
        lambda: parallel_apply([never, 3], [1, 2])
    ),
    "the arguments with several modules must be inputs, kwargs_tup, devices, but one "
    "is output_device.": lambda: parallel_apply([never], [1], output_device=0),
    "the arguments with one callable must be inputs, devices, output_device, dim, "
    "module_kwargs, but one is kwargs_tup.": (
        lambda: parallel_apply(never, [1], kwargs_tup=[{}])
    ),
    "inputs must be a tensor or a sequence of items, but is of type dict. Make a list "
    "of them.": lambda: parallel_apply(never, {"a": 1}),
    "inputs must be a tensor or a sequence of items, but is of type str. Make a list "
    "of them.": lambda: parallel_apply(never, "ab"),
    "dim must be an integer, but is True (bool).": (
        lambda: parallel_apply(never, torch.ones(2), dim=True)
    ),
    "devices must be a device, an index or a list of them, but is of type float.": (
        lambda: parallel_apply(never, [1], 1.5)
    ),
    "a device must be an index, a string or a torch.device, but is 1.5 (float).": (
        lambda: parallel_apply(never, [1], ["cpu", 1.5])
    ),
    "module_kwargs must be keyword arguments by name, but is {1: 2}.": (
        lambda: parallel_apply(never, [1], module_kwargs={1: 2})
    ),
    "inputs must be a sequence with one entry for each module, but is of type int.": (
        lambda: parallel_apply([never, never], 7)
    ),
    "kwargs_tup[0] must be keyword arguments by name, but is {2: 3}.": (
        lambda: parallel_apply([never], [1], [{2: 3}])
    ),
}
WRONG_VALUES: dict[str, Any] = {
    "dim must be a dimension of inputs, but is 0 for shape ().": (
        lambda: parallel_apply(never, torch.tensor(1))
    ),
    "dim must be a dimension of inputs, but is -3 for shape (2, 3).": (
        lambda: parallel_apply(never, torch.ones(2, 3), dim=-3)
    ),
    "devices must name at least one, but is empty.": (
        lambda: parallel_apply(never, [1], [])
    ),
    "a device must be -1 or name a device, but is 'nowhere'.": (
        lambda: parallel_apply(never, [1], "nowhere")
    ),
    "inputs must have one entry for each of 2 modules, but has 1.": (
        lambda: parallel_apply([never] * 2, [1])
    ),
    "kwargs_tup must have one entry for each of 2 modules, but has 1.": (
        lambda: parallel_apply([never] * 2, [1, 2], [{}])
    ),
    "devices must have one entry for each of 2 modules, but has 1.": (
        lambda: parallel_apply([never] * 2, [1, 2], None, ["cpu"])
    ),
}


@pytest.mark.parametrize("message", [*WRONG_TYPES, *WRONG_VALUES])
def test_bad_input_is_refused_before_anything_runs(message: str) -> None:
    error = BatchTypeError if message in WRONG_TYPES else BatchValueError
    call = (WRONG_TYPES | WRONG_VALUES)[message]
    check(call, (), error, f"parallel_apply: {message}")


def test_a_device_that_is_not_there_is_refused() -> None:
    absent = f"cuda:{torch.accelerator.device_count()}"
    for devices, output in ((["cpu", absent], None), (TWO, absent)):
        with pytest.raises(RuntimeError, match="must be a device of this machine, but"):
            parallel_apply(never, [1, 2], devices, output_device=output)


class Two(nn.Module):
    """A module of two inputs, with a keyword and a nest as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Any, y: Any = 0.0, *, scale: float = 1.0) -> dict[str, Any]:
        return {"out": self.linear(x) * scale + y, "meta": [scale]}


def equal(a: Any, b: Any) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(x["meta"] == y["meta"] and x.keys() == y.keys() for x, y in pairs) and (
        all(torch.equal(x["out"], y["out"]) for x, y in pairs)
    )


X = torch.randn(3, 4, 3)
FORMS: dict[str, Any] = {
    "a tensor of inputs": (X, None),
    "lists of arguments": ([[x, 1.0] for x in X], None),
    "mixed": ([X[0], (X[1], 2.0), [X[2]]], None),
    "keywords": (list(X), [{"scale": 2.0}, {}, {"scale": 0.5}]),
}


@pytest.mark.parametrize("devices", [None, ["cpu"] * 3], ids=["found", "named"])
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_torch_equals_torch(form: str, devices: Any) -> None:
    inputs, kwargs = FORMS[form]
    modules = [Two() for _ in range(3)]
    expected = torch_on_host.parallel_apply(modules, inputs, kwargs, ["cpu"] * 3)
    for made in (modules, tuple(modules), nn.ModuleList(modules)):
        assert equal(parallel_apply(made, inputs, kwargs, devices), expected)
    methods = [module.forward for module in modules]
    options = [each or None for each in kwargs or [{}] * 3]  # None for no keywords
    named = parallel_apply(methods, inputs, kwargs_tup=options, devices=devices)
    assert equal(named, expected)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("devices", [TWO, ["cpu"] * 3, "cpu"], ids=str)
def test_gradients_flow_to_the_module(devices: Any) -> None:
    module, oracle = network(), network()
    batch = torch.randn(7, 3)
    torch.cat(parallel_apply(module, batch, devices)).square().sum().backward()
    oracle(batch).square().sum().backward()
    for mine, other in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_every_part_has_a_replica_of_its_own_and_one_part_the_module() -> None:
    class Which(nn.Module):
        def forward(self, x: Any) -> int:
            self.seen = x
            return id(self)

    module = Which()
    found = parallel_apply(module, range(4), TWO)
    assert found[0] == found[1] != found[2] == found[3]
    assert not hasattr(module, "seen")
    assert parallel_apply(module, [8], "cpu") == [id(module)]
    assert module.seen == 8
    assert {*parallel_apply(lambda x: module(x), range(4), TWO)} == {id(module)}


# ------------------------------------------------------------------ errors of calls
class Odd(Exception):
    """Its constructor cannot be called with its arguments."""

    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


@pytest.mark.parametrize("devices", [TWO, "cpu"], ids=["threads", "here"])
@pytest.mark.parametrize("error", [Odd(1, two=2), KeyError("k"), SystemExit(3)])
def test_the_very_error_is_raised(error: BaseException, devices: Any) -> None:
    text, args = str(error), error.args
    error.__notes__ = []

    def deeper(i: int) -> None:
        if i == 3:
            raise error

    with pytest.raises(type(error)) as caught:
        parallel_apply(lambda i: deeper(i), range(5), devices)
    assert caught.value is error
    assert str(error) == text and error.args == args
    assert error.__notes__ == ["in item 3 on device cpu"]
    assert "in deeper" in "".join(traceback.format_exception(error))


class Old(Exception):
    """An exception of Python 3.10, which has no notes."""

    @property
    def add_note(self) -> None:
        raise AttributeError("add_note")


def test_where_there_are_no_notes_a_cause_names_the_item() -> None:
    error = Old("no")
    add_note(error, "in item 0 on device cpu")
    assert error.__notes__ == ["in item 0 on device cpu"]
    assert repr(error.__cause__) == "RuntimeError('in item 0 on device cpu')"
    other, cause = Old("no"), ValueError("why")
    other.__cause__ = cause
    add_note(other, "in item 1 on device cpu")
    assert other.__cause__ is cause


def test_the_first_error_by_item_is_raised_whichever_comes_first() -> None:
    later_failed, begun = threading.Event(), []

    def call(i: int) -> None:
        begun.append(i)
        if i == 1:
            assert later_failed.wait(SOON)
            raise ValueError(i)
        if i == 2:
            later_failed.set()
            raise TypeError(i)

    with pytest.raises(ValueError, match="1") as caught:
        parallel_apply(call, range(4), TWO)
    assert caught.value.args == (1,), "the caller waits for calls that run"
    assert sorted(begun) == [0, 1, 2], "no call begins after an error"


def test_torchs_form_names_the_module() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        parallel_apply([abs, (1).__truediv__, (2).__truediv__], [1, 0, 0], None)
    assert caught.value.__notes__ == ["in item 1 on device cpu"]
