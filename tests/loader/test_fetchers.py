"""The collate function and the times of a reader."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from pyparallel import DataLoader, backend
from pyparallel.core.torch_private import data_collate
from pyparallel.loader import fetchers

Point = namedtuple("Point", "x y")
THREAD = {"num_workers": 1, "worker_method": "thread"}


class Marked(torch.Tensor):
    pass


def shape_of(value: Any) -> Any:
    """Return all that two batches must have in common, as plain data."""
    if isinstance(value, torch.Tensor):
        facts = value.dtype, value.layout, value.requires_grad, value.is_conj()
        return type(value), *facts, value.stride(), value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, shape_of(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(each) for each in value]
    return type(value), value


def outcome(collate_fn: Callable[[Any], Any], samples: list[Any]) -> Any:
    try:
        return shape_of(collate_fn(samples))
    except Exception as error:
        return type(error), str(error)


def floats(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).view(shape)


SAMPLES: dict[str, list[Any]] = {
    "tensors": [floats(4), -floats(4)],
    "one tensor": [floats(2, 3)],
    "numbers as tensors": [torch.tensor(3), torch.tensor(4)],
    "empty tensors": [floats(0, 3)] * 2,
    "large tensors": [floats(100, 300)] * 2,
    "other shapes": [floats(4), floats(3)],
    "other dtypes": [floats(4), floats(4).double()],
    "not only tensors": [floats(4), 3],
    "transposed": [floats(4, 2).t()] * 2,
    "gradients": [floats(4).requires_grad_()] * 2,
    "conjugates": [floats(4).cfloat().conj()] * 2,
    "sparse": [floats(4).to_sparse()] * 2,
    "a subclass": [floats(4).as_subclass(Marked)] * 2,
    "parameters": [torch.nn.Parameter(floats(4))] * 2,
    "dicts": [{"a": floats(3), "b": i, "c": f"{i}", "d": floats(i)} for i in (1, 1)],
    "dicts in another order": [{"a": 1, "b": floats(2)}, {"b": floats(2), "a": 3}],
    "dicts with more keys": [{"a": 1}, {"a": 2, "b": 3}],
    "dicts with fewer keys": [{"a": 1, "b": 3}, {"a": 2}],
    "nests": [{"a": {"b": (floats(2), {"c": floats(1)}, "x"), "d": [1, 2]}}] * 3,
    "tuples": [(floats(2), 1, "a", b"a", 0.5, True) for _ in range(3)],
    "empty tuples": [(), ()],
    "tuples of other lengths": [(1, 2), (1,)],
    "tuples and lists": [(1, floats(2)), [2, floats(2)]],
    "named tuples": [Point(floats(2), 1)] * 2,
    "lists": [[floats(2), 1]] * 2,
    "integers": [1, 2**40, -3],
    "large integers": [1, 2**70],
    "floats": [1.5, 2.0],
    "numbers": [1, 2.5],
    "booleans": [True, False],
    "text": ["a", "b"],
    "bytes": [b"a", b"b"],
    "nothing": [None, None],
    "arrays": [np.ones(3), np.zeros(3)],
    "scalars": [np.float32(1), np.float32(2)],
    "no samples": [],
}


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_batch_is_that_of_torchs_default_collate(name: str, in_worker: bool) -> None:
    collate = fetchers.DefaultCollate(in_worker).collate
    assert outcome(collate, SAMPLES[name]) == outcome(default_collate, SAMPLES[name])


def count(batch: Any, *, collate_fn_map: Any = None) -> int:
    return len(batch)


class Counting(TorchFunctionMode):
    """Replaces each batch of tensors by their number."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.stack:
            return len(args[0])
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def function_of(kind: Any) -> Iterator[None]:
    with mock.patch.dict(data_collate.default_collate_fn_map, {kind: count}):
        yield


class Marker(type):
    """A metaclass with a check of its own, as classes of tensordict have."""

    def __instancecheck__(cls, value: Any) -> bool:
        if cls.__name__ == "Broken":
            raise RuntimeError("a check")
        return type(value).__name__ == cls.__name__


CONTEXTS: dict[str, Callable[[], Any]] = {
    "a function for tensors": lambda: function_of(torch.Tensor),
    "a function for tuples": lambda: function_of(tuple),
    "a function for all sequences": lambda: function_of((set, Sequence)),
    "a function for a class that checks": lambda: function_of(Marker("tuple", (), {})),
    "a mode": Counting,
}
OTHERS = {
    "another class": Marked,
    "several": (set, frozenset),
    "a class that checks": Marker("Cloud", (), {}),
}


@pytest.mark.skipif(backend.name == "python", reason="it calls torch's function")
@pytest.mark.parametrize("when", ["before", "between two batches"])
@pytest.mark.parametrize("kind", OTHERS)
def test_functions_for_other_classes_leave_plain_samples_alone(
    kind: str, when: str
) -> None:
    collate = fetchers.DefaultCollate(False).collate
    samples, marked = SAMPLES["dicts"], [{"a": floats(4).as_subclass(Marked)}] * 2
    wanted = outcome(default_collate, samples)
    if when == "between two batches":
        collate(samples)
    with function_of(OTHERS[kind]):
        with mock.patch.object(fetchers, "default_collate", side_effect=KeyError):
            assert outcome(collate, samples) == wanted  # without torch's function
        assert outcome(collate, marked) == outcome(default_collate, marked)
    assert outcome(collate, marked) == outcome(default_collate, marked)


class AllAtOnce:
    """Returns all samples of a batch in one object."""

    def __init__(self, container: Callable[[torch.Tensor], Any]) -> None:
        self.container = container

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> Any:
        return self.container(floats(8, 3)[indices])


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, THREAD])
@pytest.mark.parametrize("container", [list, tuple, deque, torch.clone, np.asarray])
def test_samples_may_come_in_any_sequence(
    container: Callable[[torch.Tensor], Any], options: dict[str, Any]
) -> None:
    [batch] = DataLoader(AllAtOnce(container), 4, **options)
    assert type(batch) is torch.Tensor and torch.equal(batch, floats(4, 3))


def test_a_registered_class_whose_check_fails_is_left_to_torch() -> None:
    collate = fetchers.DefaultCollate(False).collate
    with function_of(Marker("Broken", (), {})):
        for samples in SAMPLES.values():
            assert outcome(collate, samples) == outcome(default_collate, samples)


@pytest.mark.parametrize("when", ["before iter()", "after iter()"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_functions_and_modes_of_the_user_make_batches(name: str, when: str) -> None:
    context = CONTEXTS[name]()
    is_tensor = name in ("a function for tensors", "a mode")
    sample: Any = floats(4) if is_tensor else (floats(4),)
    loader = DataLoader([sample] * 4, 2)
    with contextlib.ExitStack() as stack:
        if when == "before iter()":
            stack.enter_context(context)
        batches = iter(loader)
        if when == "after iter()":
            stack.enter_context(context)
        assert [*batches] == [2, 2]


def test_dual_numbers_keep_their_tangents() -> None:
    with torch.autograd.forward_ad.dual_level() as forward_ad:
        del forward_ad
        sample = torch.autograd.forward_ad.make_dual(floats(4), floats(4))
        (batch,) = DataLoader([sample] * 2, 2)
        tangent = torch.autograd.forward_ad.unpack_dual(batch).tangent
        assert tangent is not None and torch.equal(tangent, floats(4).expand(2, 4))


#: The wall and CPU seconds of the two parts of a batch.
SHORT, LONG = (10e-6, 10e-6, 10e-6, 5e-6), (2e-3, 1e-3, 2e-3, 1e-3)


@pytest.mark.parametrize(
    ("batches", "pause", "pause_cpu", "most_readings"),
    [
        ([SHORT] * 1000, 0.0, 0.0, 6),
        ([SHORT] * 100, 1e-3, 1e-3, 18),
        ([SHORT] * 100, 2e-3, 0.0, 36),
        ([LONG] * 10, 0.0, 0.0, 30),
        ([LONG] * 10, 2e-3, 2e-3, 30),
        (([SHORT] * 9 + [LONG]) * 20, 0.0, 0.0, 80),
        (([SHORT] * 9 + [LONG]) * 20, 2e-3, 0.0, 140),
    ],
)
def test_few_readings_of_the_cpu_clock_measure_all_batches(
    batches: list[tuple[float, ...]],
    pause: float,
    pause_cpu: float,
    most_readings: int,
) -> None:
    wall, cpu, readings = [100.0], [10.0], itertools.count()

    def cpu_clock() -> float:
        next(readings)
        return cpu[0]

    def work(seconds: float, cpu_seconds: float) -> None:
        wall[0] += seconds
        cpu[0] += cpu_seconds

    times, found = fetchers.Times(cpu_clock), []
    with mock.patch.object(fetchers.time, "perf_counter", lambda: wall[0]):
        for fetch, fetch_cpu, collate, collate_cpu in batches:
            times.begin()
            work(fetch, fetch_cpu)
            times.end_part()
            work(collate, collate_cpu)
            times.end_part()
            found.append(times.end()[:6])
            work(pause, pause_cpu)
    sums = [sum(column) for column in zip(*found, strict=True)]
    fetch, fetch_cpu, collate, collate_cpu = map(sum, zip(*batches, strict=True))
    made = [fetch, collate, 0, fetch_cpu, collate_cpu, 0]
    assert sums == pytest.approx(made, rel=0.1)
    assert next(readings) <= most_readings


def test_cpu_time_of_other_threads_in_a_pause_is_not_that_of_a_long_batch() -> None:
    clock = mock.Mock(side_effect=[0.0, 1e-5, 2e-5, 0.01])
    times = fetchers.Times(clock)
    ends = [0.0, 1e-5, 2e-5, 5e-3, 6e-3, 7e-3]  # a short batch, then a long one
    found = []
    with mock.patch.object(fetchers.time, "perf_counter", side_effect=ends):
        for _ in range(2):
            times.begin()
            times.end_part()
            times.end_part()
            found.append(times.end()[3:6])
    assert sum(found[1]) == pytest.approx(2e-3)
