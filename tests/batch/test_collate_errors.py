"""Errors of collate: complete messages, and the classes that old code catches."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import BatchWarning, DataContainer, Padding, collate
from pyparallel.core import errors
from tests.support.errors.collate_errors import CASES, RESHAPE, raised

pytestmark = pytest.mark.asan


@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "_"))
def test_errors_of_mmcv_are_errors_with_the_place_and_both_values(case: str) -> None:
    _, old, _, message = CASES[case]
    error = raised(case)
    assert str(error) == message
    assert isinstance(error, old)


def test_extra_keys_are_dropped_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    batch = [{"a": 1}, {"a": 2, "b": 3}]
    with pytest.warns(BatchWarning) as caught:
        assert collate(batch)["a"].tolist() == [1, 2]
        assert list(collate(batch)) == ["a"]
    assert [str(warning.message) for warning in caught] == [
        "[PP101] batch[1] should have the keys of batch[0], but also has 'b'. The "
        "batch does not contain these keys, as in mmcv. Give every sample the same "
        "keys."
    ]


def test_samples_that_no_padding_makes_equal_stay_a_list() -> None:
    samples = [
        DataContainer(torch.ones(n, 1, 1, 1, 1), stack=True, pad_dims=None)
        for n in (1, 2)
    ]
    with pytest.raises(ValueError) as caught:
        collate(samples, 2)
    assert str(caught.value) == (
        "batch[1] must match batch[0], but has shape (2, 1, 1, 1, 1) where "
        "(1, 1, 1, 1, 1) was expected. Keep a list with DataContainer(...)."
    )


shapes_of = st.lists(st.lists(st.integers(1, 3), max_size=5).map(tuple), min_size=2)
pad_dims_of = st.sampled_from([None, 1, 2, 3])


@given(shapes_of, pad_dims_of, st.booleans())
def test_advice_that_is_applied_leads_to_a_batch(shapes, pad_dims, padded) -> None:
    options: Any = {"stack": True, "pad_dims": pad_dims}
    if padded and pad_dims is not None:
        options["padding"] = Padding()
    for _ in range(2 + max(map(len, shapes))):  # one dimension made equal by each
        try:
            samples = [DataContainer(torch.ones(each), **options) for each in shapes]
            (chunk,) = collate(samples, 99).data
            break
        except ValueError as error:
            advice = str(error).split(". ", 1)[1]
        if equal := re.match(r"Make the samples equal in dimension (\d)", advice):
            dim = int(equal[1])
            shapes = [(*shape[:dim], 1, *shape[dim + 1 :]) for shape in shapes]
        elif advice.startswith(("Set ", "Pad ")):
            if number := re.search(r"pad_dims=(\d|None)", advice):
                options["pad_dims"] = ast.literal_eval(number[1])
            if "padding=Padding()" in advice:
                options["padding"] = Padding()
        else:
            keeps_a_list = (RESHAPE, "Keep a list with DataContainer(...).")
            assert advice in (*keeps_a_list, "Add a dimension, or do not pad.")
            options = {}
    assert len(chunk) == len(shapes)
