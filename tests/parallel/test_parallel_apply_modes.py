"""Threads have the caller's modes in a call; afterwards both have their own."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from pyparallel import parallel_apply

pytestmark = pytest.mark.one_backend

DEVICES = ["cpu", "cpu", "cpu"]
#: Modes that a function cannot observe.
SAME = ("none", "grad in no grad", "host block in a device block")
setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="none")


def look(_: Any = None) -> dict[str, Any]:
    """Return the state of the thread that a function can observe."""
    made = torch.ones(2, 2)
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {t: torch.is_autocast_enabled(t) for t in ("cpu", "cuda", "xpu")},
        "dtypes": {
            t: torch.get_autocast_dtype(t)
            for t in ("cpu", "cuda", "xpu")
            if t == "cpu" or torch.is_autocast_enabled(t)
        },
        "cache": torch.is_autocast_cache_enabled(),
        "default dtype": made.dtype,
        "default device": made.device,
        "computed": (made @ made).dtype,
        "context": setting.get(),
    }


@contextmanager
def changed(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def other_autocast(name: str, dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Switch autocast on for a type whose devices this machine may lack."""
    before, enable = torch.get_autocast_dtype(name), torch.set_autocast_enabled
    set_dtype = partial(torch.set_autocast_dtype, name)
    return [
        lambda: changed(partial(enable, name), True, False),
        lambda: changed(set_dtype, dtype, before),
    ]


MODES = {
    "none": [],
    "no grad": [torch.no_grad],
    "grad in no grad": [torch.no_grad, torch.enable_grad],
    "inference": [torch.inference_mode],
    "grad in inference": [torch.inference_mode, torch.enable_grad],
    "autocast": [lambda: torch.autocast("cpu", torch.bfloat16)],
    "autocast off inside": [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, enabled=False),
    ],
    "autocast half, no cache": [
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)
    ],
    "autocast of two others": [
        *other_autocast("cuda", torch.bfloat16),
        *other_autocast("xpu", torch.float16),
    ],
    "default dtype": [
        lambda: changed(torch.set_default_dtype, torch.float64, torch.float32)
    ],
    "default device": [lambda: changed(torch.set_default_device, "meta", None)],
    "device block": [lambda: torch.device("meta")],
    "host block in a device block": [
        lambda: torch.device("meta"),
        lambda: torch.device("cpu"),
    ],
    "context variable": [lambda: changed(setting.set, "mine", "none")],
    "many": [
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: changed(setting.set, "mine", "none"),
    ],
}


@pytest.mark.parametrize("devices", [DEVICES, ["cpu"]], ids=["threads", "here"])
@pytest.mark.parametrize("mode", MODES)
def test_the_modes_of_the_caller_apply_in_its_calls_only(
    mode: str, devices: list[str]
) -> None:
    outside = look()
    with ExitStack() as stack:
        for enter in MODES[mode]:
            stack.enter_context(enter())
        here = look()
        assert (here == outside) == (mode in SAME), "the test would see nothing"
        assert parallel_apply(look, range(6), devices) == [here] * 6
        assert look() == here
    assert parallel_apply(look, range(6), devices) == [outside] * 6


@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        *[(mode, DEVICES) for mode in ("none", "autocast", "device block")],
        # Not of a device block: in one thread torch itself cannot undo that.
        *[(mode, ["cpu"]) for mode in ("none", "autocast")],
    ],
)
@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_changes_of_a_call_are_not_seen_by_others(
    mode: str, devices: list[str], fails: bool
) -> None:
    def spoil(_: Any) -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_cache_enabled(False)
        torch.set_default_device("meta")
        setting.set("spoilt")
        assert not fails

    before = look()
    with ExitStack() as stack:
        for enter in MODES[mode]:
            stack.enter_context(enter())
        here = look()
        with pytest.raises(AssertionError) if fails else nullcontext():
            parallel_apply(spoil, range(len(devices)), devices)
        assert parallel_apply(look, range(6), devices) == [here] * 6
        assert {**look(), "default device": 0} == {**here, "default device": 0}
    torch.set_default_device(None)
    assert look() == before
    assert parallel_apply(look, range(6), devices) == [before] * 6


def test_casts_that_the_caller_has_cached_survive() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        first = (torch.ones(4, 4) @ weight).grad_fn
        parallel_apply(look, range(3), DEVICES)
        second = (torch.ones(4, 4) @ weight).grad_fn

    def cast_of(node: Any) -> Any:
        (found,) = [n for n, _ in node.next_functions if n is not None]
        return found

    assert cast_of(first) is cast_of(second)
