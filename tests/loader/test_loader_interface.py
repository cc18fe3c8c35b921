"""The interface of DataLoader compared with torch's, and locations of warnings."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data

import pyparallel
from pyparallel import DataLoader
from pyparallel.core import errors

OURS = {"ring_slabs", "max_ring_bytes", "sample_seeds", "snapshot_every_n_steps"}
OURS |= {"on_error", "max_errors"}


def test_the_signature_is_torchs_with_types() -> None:
    found = dict(inspect.signature(DataLoader).parameters)
    assert all(p.annotation is not inspect.Parameter.empty for p in found.values())
    ours = {name: found.pop(name) for name in OURS}
    assert {p.kind for p in ours.values()} == {inspect.Parameter.KEYWORD_ONLY}
    expected = inspect.signature(torch.utils.data.DataLoader).parameters
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


def test_every_argument_arrives() -> None:
    generator = torch.Generator()
    given: dict[str, Any] = {
        **{"batch_size": 3, "drop_last": True, "num_workers": 1, "timeout": 7.0},
        **{"collate_fn": list, "worker_init_fn": print, "generator": generator},
        **{"prefetch_factor": 5, "persistent_workers": True, "in_order": False},
        **{"pin_memory": True, "pin_memory_device": "cuda"},
    }
    loader = DataLoader(range(7), shuffle=True, **given)
    assert {name: getattr(loader, name) for name in given} == given
    assert isinstance(loader.sampler, torch.utils.data.RandomSampler)
    batches = [[0], [1]]
    assert DataLoader(range(2), batch_sampler=batches).batch_sampler is batches
    assert DataLoader(range(2), 1, None, [1, 0]).sampler == [1, 0]
    context = DataLoader(
        range(2), num_workers=1, multiprocessing_context="spawn"
    ).multiprocessing_context
    assert context.get_start_method() == "spawn"


def heard(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, str, int]]:
    """Return the warnings of a call: text, file and line."""
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(str(w.message), w.filename, w.lineno) for w in caught]


def test_too_many_workers_are_warned_of_once_at_the_users_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    lines = []

    def run() -> None:
        lines.append(sys._getframe().f_lineno + 1)
        loader = DataLoader(range(2), num_workers=2)
        assert len(list(loader)) == len(list(loader)) == 2

    found = heard(run, monkeypatch)
    found = [each for each in found if "fork" not in each[0]]
    assert len(found) == 1
    text, file, line = found[0]
    assert text.startswith("This DataLoader will create 2 worker processes in total.")
    assert (file, line) == (__file__, lines[0])


SAMPLES = [{"a": 1}, {"a": 2, "b": 3}]


def test_a_warning_of_a_dataset_in_the_process_points_at_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        loader = DataLoader(SAMPLES, 2, collate_fn=pyparallel.collate)
        next(iter(loader))

    (found,) = heard(run, monkeypatch)
    assert found[1:] == (__file__, run.__code__.co_firstlineno + 2)


def test_a_warning_without_a_line_of_the_user_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pre = pyparallel.PreDataLoader(
        DataLoader(SAMPLES, 2, collate_fn=pyparallel.collate)
    )
    (found,) = heard(lambda: list(pre), monkeypatch)
    assert found[0].startswith("[PP101]")


ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
    if value.__module__ == errors.__name__ and not issubclass(value, Warning)
]


def test_all_errors_have_one_base() -> None:
    assert len(ERRORS) > 12
    assert pyparallel.Error.__bases__ == (Exception,)
    for error in ERRORS:
        assert issubclass(error, pyparallel.Error), error
        assert error is pyparallel.Error or len(error.__bases__) > 1
    with pytest.raises(pyparallel.Error, match=r"^collate: "):
        pyparallel.collate([], samples_per_gpu=0)
