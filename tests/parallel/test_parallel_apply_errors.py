"""Errors of calls: the raised error and its message."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import pytest

from pyparallel import parallel_apply
from pyparallel.parallel import _device_threads

pytestmark = pytest.mark.one_backend

TWO = ["cpu", "cpu"]
SOON = 30.0


class Odd(Exception):
    """Its constructor cannot be called with its arguments."""

    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


def fail(i: int) -> None:
    raise KeyError(i)


def deeper(i: int) -> None:
    fail(i)


@pytest.mark.parametrize("devices", [TWO, "cpu"], ids=["threads", "here"])
@pytest.mark.parametrize(
    "error",
    [ValueError("no"), Odd(1, two=2), KeyError("k"), SystemExit(3), OSError(2, "x")],
)
def test_the_very_error_is_raised(error: BaseException, devices: Any) -> None:
    text, args = str(error), error.args
    error.__notes__ = []

    def call(i: int) -> None:
        if i == 3:
            raise error

    with pytest.raises(type(error)) as caught:
        parallel_apply(call, range(5), devices)
    assert caught.value is error
    assert str(error) == text and error.args == args
    assert error.__notes__ == ["in item 3 on device cpu"]


@pytest.mark.parametrize("devices", [TWO, "cpu"], ids=["threads", "here"])
def test_the_traceback_leads_to_the_place_and_names_the_item(devices: Any) -> None:
    with pytest.raises(KeyError) as caught:
        parallel_apply(deeper, range(4), devices)
    text = "".join(traceback.format_exception(caught.value))
    assert "in deeper" in text and "in fail" in text
    assert "in item 0 on device cpu" in text


class Old(Exception):
    """An exception of Python 3.10, which has no notes."""

    @property
    def add_note(self) -> None:
        raise AttributeError("add_note")


def test_where_there_are_no_notes_a_cause_names_the_item() -> None:
    error = Old("no")
    _device_threads._add_note(error, "in item 0 on device cpu")
    assert error.__notes__ == ["in item 0 on device cpu"]
    assert repr(error.__cause__) == "RuntimeError('in item 0 on device cpu')"
    other, cause = Old("no"), ValueError("why")
    other.__cause__ = cause
    _device_threads._add_note(other, "in item 1 on device cpu")
    assert other.__cause__ is cause


def test_the_first_error_by_item_is_raised_whichever_comes_first() -> None:
    later_failed = threading.Event()

    def call(i: int) -> None:
        if i == 1:
            assert later_failed.wait(SOON)
            raise ValueError(i)
        if i == 2:
            later_failed.set()
            raise TypeError(i)

    with pytest.raises(ValueError, match="1") as caught:
        parallel_apply(call, range(4), TWO)
    assert caught.value.args == (1,)


def test_running_calls_are_awaited_and_later_calls_are_skipped() -> None:
    failed, other_begun = threading.Event(), threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def call(i: int) -> None:
        begun.append(i)
        if i == 0:
            assert other_begun.wait(SOON)
            failed.set()
            raise ValueError("no")
        if i == 2:
            other_begun.set()
            assert failed.wait(SOON)
        ended.append(i)

    with pytest.raises(ValueError, match="no"):
        parallel_apply(call, range(4), TWO)
    assert 2 in ended and 1 not in begun and len(begun) - len(ended) == 1


def test_torchs_form_names_the_module() -> None:
    def no(x: int) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        parallel_apply([abs, no, no], [1, 2, 3], None, ["cpu"] * 3)
    assert caught.value.__notes__ == ["in item 1 on device cpu"]
