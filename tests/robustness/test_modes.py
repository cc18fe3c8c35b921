"""Modes of torch that the caller has set do not change a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from pyparallel import Pad, PreDataLoader, Stack, collate, scatter, to_host
from pyparallel.batch import allocation
from tests.support.processes.backends import both, using
from tests.support.processes.entry_points import ENTRY_POINTS, by_rule, tensors_of

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]


class Functions(TorchFunctionMode):
    """Call each function as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Run each operator as it is."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def changed(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast half": lambda: torch.autocast("cpu", torch.float16),
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "default dtype": lambda: changed(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "default device": lambda: changed(torch.set_default_device, "meta", None),
    "device block": lambda: torch.device("meta"),
    "deterministic": lambda: changed(
        torch.set_deterministic_debug_mode, "error", "default"
    ),
    "anomaly": torch.autograd.detect_anomaly,
    "functions": Functions,
    "operators": Operators,
}
#: Shape and dtype of the samples, and whether they require gradients.
KINDS = [
    ((1, 2, 3), torch.float16, False),
    ((1, 2, 3), torch.float16, True),
    ((1, 2, 3), torch.float64, True),
    ((1, 2, 3), torch.int16, False),
    ((1, 90, 90), torch.float16, False),
]


def mixed(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda samples: make([samples[0].float(), *samples[1:]])


COPIES: dict[str, Callable[[Any], Any]] = ENTRY_POINTS | {
    "mixed Stack": mixed(by_rule(x=Stack())),
    "mixed Pad": mixed(by_rule(x=Pad(size_divisor=4, sizes=True))),
    "mixed collate": mixed(collate),
}
CALLS: dict[str, Callable[[Any], Any]] = COPIES | {
    "scatter parts": lambda samples: scatter(samples[0], ["cpu", "cpu"], dim=1),
    "to_host": lambda samples: to_host(list(samples)),
    "prefetch": lambda samples: list(PreDataLoader([samples[0]])),
}


def samples_of(
    shape: tuple[int, ...], dtype: torch.dtype, grad: bool
) -> list[torch.Tensor]:
    make = {"dtype": dtype, "device": "cpu", "requires_grad": grad}
    return [torch.full(shape, i + 1, **make) for i in range(3)]


def difference(found: torch.Tensor, expected: torch.Tensor, mode: str) -> str:
    for name in ("dtype", "device"):
        if getattr(found, name) != getattr(expected, name):
            return f"{name} {getattr(found, name)}"
    if type(found) is not torch.Tensor or not torch.equal(found, expected):
        return f"value {found}"
    grad = expected.requires_grad and mode not in ("no grad", "inference")
    return "" if found.requires_grad is grad else "grad"


@both
@pytest.mark.parametrize("place", ["here", "in a worker"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_mode_of_the_caller_does_not_change_a_batch(
    mode: str, place: str, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = KINDS
    if place == "in a worker":  # a forked process has the modes of its parent
        monkeypatch.setattr(allocation, "in_worker", lambda: True)
        kinds = [kind for kind in KINDS if not kind[2]]
    wrong = []
    for entry, make in CALLS.items():
        for kind in kinds:
            samples = samples_of(*kind)
            with using(backend):
                expected = tensors_of(make(samples))
                with MODES[mode]():
                    found = tensors_of(make(samples))
            pairs = zip(found, expected, strict=True)
            copied = mode if entry in COPIES else ""
            problems = [difference(one, other, copied) for one, other in pairs]
            wrong += [f"{entry}, {kind}: {problem}" for problem in problems if problem]
    assert wrong == []


def test_the_default_device_of_numbers_and_arrays_is_that_of_torch() -> None:
    columns: list[list[Any]] = [[1, 2], [1.5, 2.5], [np.ones(2), np.ones(2)]]
    for make in (collate, by_rule(), default_collate):
        with torch.device("meta"):
            assert [make(column).device.type for column in columns] == ["meta"] * 3
