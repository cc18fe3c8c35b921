"""Run bad inputs: check the result, and that global state does not change.

This module does not use ``assert``: the same tables run under ``python -O``.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import operator
import os
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pyparallel import DataContainer, memory
from pyparallel.batch import allocation, stack

#: The limit for one input. Most take a thousandth of it.
SECONDS = 2.0
clock = time.monotonic
_name = operator.attrgetter("__name__")
_ATOMS = (int, float, complex, str, bytes, range, torch.dtype, torch.device, slice)


class Case(NamedTuple):
    """An input, a call, and the expected result.

    Attributes:
        make: returns a new input.
        call: is called with the input.
        expected: `Refused`, or a function that returns the expected result.
        warns: the message of every warning, in order.
    """

    make: Callable[[], Any]
    call: Callable[[Any], Any]
    expected: Any
    warns: tuple[str, ...] = ()


class Refused(NamedTuple):
    """An error of all these classes, with exactly this message."""

    classes: tuple[type[BaseException], ...]
    message: str


def refused(message: str, *classes: type[BaseException]) -> Refused:
    return Refused(classes, message)


def attempt(case: Case) -> None:
    """Run a case; raise AssertionError unless all checks pass."""
    given = case.make()
    gc.disable()  # a collection inside would free objects of earlier cases
    try:
        around, before = surroundings(), picture(given, whole=True)
        begun = clock()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = _outcome(case, given)
        seconds = clock() - begun
        same("the result", *outcome)
        same("the warnings", tuple(str(each.message) for each in caught), case.warns)
        same("the caller's data", picture(given, whole=True), before)
        for what, now in surroundings().items():
            same(f"the surroundings, {what}", now, around[what])
    finally:
        gc.enable()
    if seconds > SECONDS:
        raise AssertionError(f"it took {seconds:.1f} s")


def same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise AssertionError(f"{what}: {found!r:.2000} where {expected!r:.2000} was")


def _outcome(case: Case, given: Any) -> tuple[Any, Any]:
    """Return the result of a case and the expected result, as plain values."""
    try:
        result = case.call(given)
    except BaseException as error:
        if not isinstance(case.expected, Refused):
            raise
        kinds = list(map(_name, case.expected.classes))
        found = [
            each.__name__ for each in case.expected.classes if isinstance(error, each)
        ]
        return (found, str(error)), (kinds, case.expected.message)
    if isinstance(case.expected, Refused):
        return result, case.expected
    return picture(result), picture(case.expected())


def surroundings() -> dict[str, Any]:
    """Return state that no call may change: random states, modes, threads, memory."""
    state = np.random.get_state(legacy=True)
    return {
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "random's": random.getstate(),
        "numpy's": (state[1].tobytes(), *state[2:]),
        "modes": (
            torch.get_default_dtype(),
            torch.empty(0).device,  # in torch 2.8, get_default_device fails for None
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_num_threads(),
        ),
        "recursion": sys.getrecursionlimit(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(each.pid or 0 for each in multiprocessing.active_children()),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "working directory": os.getcwd(),
        "memory of batches": memory.cache_info().in_use,
        "slab": allocation.is_packed_later(),
        "counter": stack.active.counter,
    }


def picture(root: Any, whole: bool = False) -> list[Any]:
    """Return a description of a value: types, bits, and references.

    Args:
        root: any value; it may contain itself, and be deeper than Python's stack.
        whole: include identities, and all memory that tensors refer to.
    """
    seen: dict[int, tuple[int, Any]] = {}  # with the object: ids are reused
    result: list[Any] = []
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, _ATOMS):
            result.append((type(value), repr(value)))
            continue
        if id(value) in seen:
            result.append(("again", seen[id(value)][0]))
            continue
        seen[id(value)] = (len(seen), value)
        shown, inside = _look(value, whole)
        result.append((type(value), id(value) if whole else None, *shown))
        waiting.extend(reversed(inside))
    return result


def _look(value: Any, whole: bool) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the description of one object, and the objects inside it."""
    if isinstance(value, torch.Tensor):
        return _look_at_tensor(value, whole), []
    if isinstance(value, np.ndarray):
        form = (value.dtype.str, value.shape, value.strides, value.flags.writeable)
        if value.dtype == object:
            return form, list(value.flat)
        return (*form, value.tobytes()), []
    if isinstance(value, Mapping):
        return (len(value),), [each for pair in value.items() for each in pair]
    if isinstance(value, list | tuple | set | frozenset):
        return (len(value),), list(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return (frame is not None and frame.f_lasti,), []
    if isinstance(value, type | types.FunctionType):
        return (value.__qualname__,), []
    if isinstance(value, DataContainer) or hasattr(value, "__dict__"):
        return (), [each for pair in vars(value).items() for each in pair]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return (), [getattr(value, name) for name in names]
    return (repr(value),), []


def _look_at_tensor(value: Any, whole: bool) -> tuple[Any, ...]:
    form: tuple[Any, ...] = (value.dtype, str(value.device), str(value.layout))
    form += (value.requires_grad, value.is_conj(), value.is_neg(), value.is_nested)
    parts = _parts(value.detach())
    if parts is not None:
        return (*form, *[_look_at_tensor(part, False) for part in parts])
    form += (tuple(value.shape),)
    if whole:
        form += (value._version, value.stride(), value.storage_offset())
    if value.is_meta:
        return form
    if whole:
        storage = value.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        return (*form, storage.data_ptr(), raw.numpy().tobytes())
    value = value.detach().as_subclass(torch.Tensor)
    value = value.resolve_conj().resolve_neg().contiguous()
    return (*form, value.view(-1).view(torch.uint8).numpy().tobytes())


def _parts(value: Any) -> list[torch.Tensor] | None:
    """Return the dense parts of a tensor; None if the tensor is dense."""
    if value.is_nested:
        return list(value.unbind())
    if value.layout is torch.sparse_coo:
        return [torch.tensor(value.shape), value._indices(), value._values()]
    if value.layout is torch.sparse_csr:
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.is_quantized:
        return [value.int_repr(), value.dequantize()]
    return None
