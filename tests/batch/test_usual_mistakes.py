"""Usual mistakes with rules and options: each message has advice that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pyparallel
from pyparallel import (
    Collate,
    Concat,
    DataContainer,
    DataLoader,
    List,
    Pad,
    Padding,
    Ragged,
    Stack,
    collate,
)
from tests.support.mmengine.optim_runs import refuses

NAMES = {name: getattr(pyparallel, name) for name in pyparallel.__all__}
SAMPLES = [{"a": torch.ones(2)}, {"a": torch.zeros(2)}]


def advised(error: BaseException) -> Any:
    """Return the value of the code that an error advises."""
    text = str(error)
    code = text[text.rindex("Use ") :].removeprefix("Use ").removesuffix(".")
    return eval(code.partition(", which")[0].replace("(...)", "()"), NAMES)


@pytest.mark.parametrize(
    "given",
    [List(), Stack(), Concat(), Pad(), Pad(size_divisor=4, mask=True), List, Stack, Pad,
     Concat, Collate, Padding(size_divisor=4), {"a": Pad()}],
    ids=repr,
)  # fmt: skip
def test_a_rule_is_no_collate_fn_and_the_advice_works(given: Any) -> None:
    with pytest.raises(TypeError) as caught:
        DataLoader(SAMPLES, batch_size=2, collate_fn=given)
    start = "DataLoader: collate_fn must be a function of the samples, such as a "
    assert str(caught.value).startswith(start)
    (batch,) = DataLoader(SAMPLES, batch_size=2, collate_fn=advised(caught.value))
    assert len(batch["a"]) == 2


def test_a_value_that_is_no_function_is_no_collate_fn() -> None:
    with refuses(
        "DataLoader: collate_fn must be a function of the samples, such as a Collate, "
        "but is 3 (int). Use Collate(...) or a function.",
        TypeError,
    ):
        DataLoader(SAMPLES, collate_fn=3)  # type: ignore[arg-type]
    function: Callable[[Any], Any] = lambda samples: len(samples)  # noqa: E731
    assert list(DataLoader(SAMPLES, batch_size=2, collate_fn=function)) == [2]


@pytest.mark.parametrize("rule", [List(), Pad(size_divisor=4)], ids=repr)
def test_a_rule_that_another_loader_calls_says_so(rule: Any) -> None:
    loader = torch.utils.data.DataLoader(SAMPLES, batch_size=2, collate_fn=rule)
    with pytest.raises(TypeError, match="must be a rule of Collate, but was") as caught:
        next(iter(loader))
    fixed = torch.utils.data.DataLoader(
        SAMPLES, batch_size=2, collate_fn=advised(caught.value)
    )
    assert len(next(iter(fixed))["a"]) == 2


ROWS = torch.arange(8.0).view(2, 4)
EMPTY: dict[str, Any] = {
    "list": [],
    "tensor": torch.tensor([]),
    "array": np.array([]),
    "objects": np.array([], dtype=object),
    "rows of objects": np.empty((0, 4), dtype=object),
    "rows": torch.empty(0, 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1, 0)])
@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_value_has_zero_rows(
    empty: str, order: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows = ROWS.to(dtype)
    none = torch.empty(0, 4, dtype=dtype) if empty == "rows" else EMPTY[empty]
    values = [(rows, none)[i] for i in order]
    expected = Ragged.from_tensors([(rows, rows[:0])[i] for i in order])
    assert Collate(a=Concat())([{"a": each} for each in values])["a"] == expected
    if isinstance(none, torch.Tensor):
        assert Ragged.from_tensors(values) == expected
        held = [DataContainer(each, ragged=True) for each in values]
        assert collate(held, len(held)).data == [expected]


@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        (Pad(), "Return torch.empty(0, 4) for no rows, or use Concat() or List()."),
        (Stack(), "Use Concat() or List()."),
        (None, "Use Concat() or List()."),
    ],
)
def test_an_empty_tensor_has_another_shape_for_other_rules(
    rule: Any, advice: str
) -> None:
    fix = Collate() if rule is None else Collate(a=rule)
    with pytest.raises(ValueError) as caught:
        fix([{"a": ROWS}, {"a": torch.tensor([])}])
    assert str(caught.value).endswith(advice)
    followed = Collate(a=Concat())([{"a": ROWS}, {"a": torch.tensor([])}])
    assert followed["a"].offsets.tolist() == [0, 2, 2]
    padded = Collate(a=Pad())([{"a": ROWS}, {"a": torch.empty(0, 4)}])["a"]
    assert padded.shape == (2, 2, 4)


def test_empty_values_beside_different_rows_are_an_error() -> None:
    values = [torch.tensor([]), torch.ones(2, 4), torch.ones(2, 3)]
    with pytest.raises(ValueError, match="outside dimension 0"):
        Collate(a=Concat())([{"a": each} for each in values])


MEANT: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (Pad, {"pad_size_divisor": 32}, {"size_divisor": 32}),
    (Pad, {"pad_to_multiple_of": 8}, {"size_divisor": 8}),
    (Pad, {"padding_value": 1}, {"value": 1}),
    (Pad, {"pad_dims": 1}, {"dims": 1}),
    (Pad, {"padding_side": "left"}, {"side": "left"}),
    (Pad, {"return_mask": True}, {"mask": True}),
    (Pad, {"bucket": [(2, 2)]}, {"buckets": [(2, 2)]}),
    (Padding, {"divisor": 32}, {"size_divisor": 32}),
    (Padding, {"size_divisors": 32}, {"size_divisor": 32}),
    (Padding, {"padding_side": "left"}, {"side": "left"}),
    (Padding, {"masks": True}, {"mask": True}),
]


@pytest.mark.parametrize(("cls", "given", "meant"), MEANT)
def test_a_near_name_of_an_option_is_advised(cls: Any, given: Any, meant: Any) -> None:
    with pytest.raises(TypeError) as caught:
        cls(**given)
    (name,), (option,) = given, meant
    text = str(caught.value)
    assert text.startswith(f"{cls.__name__}: options must be ")
    assert text.endswith(f", but {name} was given. Did you mean {option}?")
    cls(**meant)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Stack(dim=0),  # type: ignore[call-arg]
            "Stack: options must be dtype, but dim was given. Use Pad(dims=...).",
        ),
        (
            lambda: Concat(size_divisor=2),  # type: ignore[call-arg]
            "Concat: options must be dim, index_of, but size_divisor was given. Use "
            "Pad(size_divisor=...).",
        ),
        (
            lambda: Concat(dtype=torch.float16),  # type: ignore[call-arg]
            "Concat: options must be dim, index_of, but dtype was given. Convert the "
            "samples, or use scatter(dtype=...).",
        ),
        (
            lambda: List(dtype=torch.float16),  # type: ignore[call-arg]
            "List: there are no options, but dtype was given. Convert the samples, or "
            "use scatter(dtype=...).",
        ),
        (
            lambda: List(copy=True),  # type: ignore[call-arg]
            "List: there are no options, but copy was given. Remove it.",
        ),
        (
            lambda: Padding(value=1),  # type: ignore[call-arg]
            "Padding: options must be size_divisor, shape, buckets, side, sizes, mask, "
            "dtype, but value was given. Give padding_value to DataContainer or "
            "pad_stack, or use Pad(value).",
        ),
    ],
)
def test_an_option_of_another_class_is_named(call: Any, message: str) -> None:
    with refuses(message, TypeError):
        call()


def test_collate_names_what_was_meant() -> None:
    with pytest.raises(
        TypeError, match=r"Did you mean default=Pad\(size_divisor=4\)\?$"
    ):
        Collate(size_divisor=4)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"Did you mean default=List\(\)\?$"):
        Collate(defualt=List())(SAMPLES)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (["a", "b"], "a list of strings"),
        (("a", "b"), "a tuple of strings"),
        ([["a"], ["b", "c"]], "a list of lists of strings"),
        ("text", "str"),
        ([[1, 2], [3]], "list"),
    ],
)
@pytest.mark.parametrize("rule", [Pad(), Stack(), Concat()])
def test_the_message_says_of_what_a_list_is(value: Any, found: str, rule: Any) -> None:
    with pytest.raises(TypeError, match=f"but is {found}[.]"):
        Collate(a=rule)([{"a": value}, {"a": value}])
    kept = Collate(a=List())([{"a": value}, {"a": value}])  # the advice
    assert kept["a"][1] is value
