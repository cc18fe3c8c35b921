"""Optimizer wrappers compared with mmengine's: values, counts, states and errors.

Runs where mmengine is installed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import mmengine as ours
from pyparallel.mmengine import _upstream
from tests.support.mmengine import optim_runs as runs
from tests.support.mmengine.optim_runs import Recorded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mmengine uses torch.jit
    try:
        from mmengine import optim as theirs
        from mmengine.logging import MessageHub
        from mmengine.optim.optimizer import amp_optimizer_wrapper
    except ImportError as error:
        pytest.skip(f"needs mmengine: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not _upstream.available, reason=_upstream.reason),
    pytest.mark.filterwarnings("ignore::pyparallel.mmengine.OptimWarning"),
]
BOTH = (ours, theirs)


@pytest.fixture(scope="module", autouse=True)
def amp_on_the_cpu() -> Iterator[None]:
    """Let the class of mmengine work where it refuses, by torch's scaler for CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amp_optimizer_wrapper, "is_cuda_available", lambda: True)
        scaler = functools.partial(torch.amp.GradScaler, "cpu")
        patch.setattr(amp_optimizer_wrapper, "GradScaler", scaler)
        yield


def make(library: Any, amp: bool, kind: str, groups: int, **kwargs: Any) -> Any:
    model = Recorded()
    optimizer = runs.optimizer(model, kind, groups)
    cls = library.AmpOptimWrapper if amp else library.OptimWrapper
    if amp:
        kwargs = {"loss_scale": {"init_scale": 64.0, "growth_interval": 2}, **kwargs}
    return model, cls(optimizer=optimizer, **copy.deepcopy(kwargs))


def counts(wrapper: Any) -> Any:
    return (
        wrapper.inner_count,
        wrapper._inner_count,
        wrapper._max_counts,
        wrapper._accumulative_counts,
        wrapper.should_update(),
        wrapper.should_sync(),
    )


def micro_step(model: Recorded, wrapper: Any, batch: torch.Tensor, bad: bool) -> None:
    with wrapper.optim_context(model):
        loss = model(batch)
    wrapper.update_params(loss * float("inf") if bad else loss)


SETTINGS = {
    "amp": st.booleans(),
    "kind": st.sampled_from(["sgd", "adam"]),
    "groups": st.sampled_from([1, 2]),
    "every": st.integers(1, 4),
    "clip": st.sampled_from(runs.CLIPS),
}


@settings(max_examples=120, deadline=None)
@given(data=st.data(), **SETTINGS)
def test_random_trainings_have_equal_bits_counts_and_states(
    data: Any, amp: bool, kind: str, groups: int, every: int, clip: Any
) -> None:
    kwargs = {"accumulative_counts": every, "clip_grad": clip}
    pair = [make(library, amp, kind, groups, **kwargs) for library in BOTH]
    acts = st.sampled_from(["step"] * 6 + ["count", "rate", "exchange"] + ["bad"] * amp)
    batches = iter(runs.batches(12))
    for act in data.draw(st.lists(acts, max_size=12)):
        if act == "count":
            done = data.draw(st.integers(0, 4))
            most = data.draw(st.just(-1) | st.integers(done, done + 8))
            for model, wrapper in pair:
                wrapper.initialize_count_status(model, done, most)
        elif act == "rate":
            for _, wrapper in pair:
                wrapper.param_groups[-1]["lr"] *= 0.5
        elif act == "exchange":
            states = [copy.deepcopy(wrapper.state_dict()) for _, wrapper in pair]
            for (_, wrapper), state in zip(pair, reversed(states), strict=True):
                wrapper.load_state_dict(state)
        elif pair[0][1].inner_count != pair[0][1]._max_counts:  # mmengine divides more
            batch = next(batches)
            for model, wrapper in pair:
                micro_step(model, wrapper, batch, act == "bad")
        (model, wrapper), (their_model, their_wrapper) = pair
        assert runs.same_bits(model, their_model)
        assert model.synced == their_model.synced
        assert counts(wrapper) == counts(their_wrapper)
        assert runs.same_state(wrapper.state_dict(), their_wrapper.state_dict())
        assert wrapper.get_lr() == their_wrapper.get_lr()
        assert wrapper.get_momentum() == their_wrapper.get_momentum()
        assert runs.same_state(wrapper.param_groups, their_wrapper.param_groups)


def test_our_wrappers_are_instances_of_mmengine() -> None:
    for name in ("OptimWrapper", "AmpOptimWrapper", "OptimWrapperDict"):
        assert issubclass(getattr(ours, name), getattr(theirs, name))
    one, other = (make(library, False, "sgd", 1)[1] for library in BOTH)
    for library in BOTH:
        assert dict(library.OptimWrapperDict(a=one, b=other)) == {"a": one, "b": other}


def test_no_method_is_inherited_from_mmengine() -> None:
    """Whatever works without mmengine works by the same code with it."""
    for name in ("OptimWrapper", "AmpOptimWrapper", "OptimWrapperDict"):
        cls, their_cls = getattr(ours, name), getattr(theirs, name)
        for method, _ in inspect.getmembers(their_cls):
            if not method.startswith("__"):
                owner = next(base for base in cls.__mro__ if method in vars(base))
                known = owner.__module__.startswith("pyparallel.")
                assert known or method in ("_abc_impl", "valid_dtypes"), (name, method)


def test_our_attributes_have_their_names() -> None:
    for amp in (False, True):
        one, other = (make(library, amp, "sgd", 2)[1] for library in BOTH)
        assert set(vars(other)) - set(vars(one)) == set()


def test_the_norm_is_logged_under_the_name_of_mmengine() -> None:
    logged = []
    for number, library in enumerate(BOTH):
        hub = MessageHub.get_instance(f"differential {number}")
        model, wrapper = make(library, False, "sgd", 1, clip_grad={"max_norm": 0.1})
        wrapper.message_hub = hub
        for batch in runs.batches(3):
            micro_step(model, wrapper, batch, False)
        logged.append(list(hub.get_scalar("train/grad_norm").data[0]))
    assert logged[0] == logged[1] and len(logged[0]) == 3
    assert isinstance(make(ours, False, "sgd", 1)[1].message_hub, MessageHub)


@pytest.mark.parametrize("groups", [1, 2])
def test_schedulers_of_mmengine_work_with_our_wrappers(groups: int) -> None:
    pair = [make(library, False, "sgd", groups) for library in BOTH]
    seen: list[list[Any]] = [[], []]
    for (model, wrapper), rates in zip(pair, seen, strict=True):
        schedules = [
            theirs.LinearLR(wrapper, start_factor=0.1, begin=0, end=2),
            theirs.MultiStepLR(wrapper, milestones=[3], gamma=0.5),
        ]
        for batch in runs.batches(5):
            micro_step(model, wrapper, batch, False)
            for schedule in schedules:
                schedule.step()
            rates.append(wrapper.get_lr())
    assert seen[0] == seen[1]
    assert runs.same_bits(pair[0][0], pair[1][0])


def pair_of_dicts() -> tuple[Any, Any]:
    made = []
    for library in BOTH:
        one = make(library, False, "sgd", 2)[1]
        other = make(library, True, "adam", 1)[1]
        made.append(library.OptimWrapperDict(a=one, b=other))
    return made[0], made[1]


def test_dicts_of_wrappers_answer_the_same() -> None:
    mine, right = pair_of_dicts()
    for method in ("get_lr", "get_momentum"):
        assert getattr(mine, method)() == getattr(right, method)()
    assert list(mine.param_groups) == list(right.param_groups)
    assert (len(mine), "a" in mine, "c" in mine) == (len(right), "a" in right, False)
    state, their_state = mine.state_dict(), right.state_dict()
    assert runs.same_state(state, their_state)
    mine.load_state_dict(copy.deepcopy(their_state))
    right.load_state_dict(copy.deepcopy(state))
    assert runs.same_state(mine.state_dict(), right.state_dict())


def test_their_wrappers_in_our_dict_leave_a_loaded_state_whole() -> None:
    right = make(theirs, True, "sgd", 2)[1]
    mixed = ours.OptimWrapperDict(a=right)
    state = mixed.state_dict()
    mixed.load_state_dict(state)
    assert list(state["a"]) == [
        *("state", "param_groups", "base_param_settings", "loss_scaler")
    ]
