"""OptimWrapper and OptimWrapperDict against plain torch: steps, clipping, state."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyparallel.mmengine import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from tests.support.mmengine import optim_runs as runs
from tests.support.mmengine.optim_runs import Recorded, refuses

pytestmark = [pytest.mark.also_peers, pytest.mark.one_backend]


def make(groups: int = 1, **kwargs: Any) -> tuple[Recorded, OptimWrapper]:
    model = Recorded()
    return model, OptimWrapper(runs.optimizer(model, groups=groups), **kwargs)


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 5),
    number=st.integers(0, 11),
    announced=st.booleans(),
    groups=st.sampled_from([1, 2]),
    kind=st.sampled_from(["sgd", "adam"]),
    clip=st.sampled_from(runs.CLIPS),
)
def test_a_step_is_that_of_plain_torch_to_the_bit(
    every: int, number: int, announced: bool, groups: int, kind: str, clip: Any
) -> None:
    data = runs.batches(number)
    expected, model = Recorded(), Recorded()
    cut = runs.cut(number, every, announced)
    plain = runs.optimizer(expected, kind, groups)
    runs.plain(expected, plain, data, cut, clip)

    ours = runs.optimizer(model, kind, groups)
    wrapper = OptimWrapper(ours, every, copy.deepcopy(clip))
    if announced:
        wrapper.initialize_count_status(model, 0, number)
    steps = runs.wrapped(model, wrapper, data)

    assert runs.same_bits(model, expected)
    assert runs.same_state(ours.state_dict(), plain.state_dict())
    assert steps == [group[-1] + 1 for group in cut]
    assert [i + 1 for i, synced in enumerate(model.synced) if synced] == steps
    assert wrapper.inner_count == number


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    announced=st.booleans(),
)
def test_a_group_can_be_ended_before_its_last_micro_step(
    every: int, sizes: list[int], announced: bool
) -> None:
    """Epochs of ``sizes`` batches; each epoch completes its last group."""
    total = sum(sizes)
    data = runs.batches(total, torch.float64)
    cut, start = [], 0
    for size in sizes:
        cut += [[start + i for i in group] for group in runs.cut(size, every, True)]
        start += size
    expected = Recorded(dtype=torch.float64)
    runs.plain(expected, runs.optimizer(expected), data, cut)

    model = Recorded(dtype=torch.float64)
    wrapper = OptimWrapper(runs.optimizer(model), every)
    if announced:
        wrapper.initialize_count_status(model, 0, total)
    steps, start = [], 0
    for size in sizes:
        for index in range(size):
            if index == size - 1:
                wrapper.end_group()
                wrapper.end_group()  # said twice is said once
            done = runs.wrapped(model, wrapper, [data[start + index]])
            steps += [start + index + each for each in done]
        start += size
    assert steps == [group[-1] + 1 for group in cut]
    assert [i + 1 for i, synced in enumerate(model.synced) if synced] == steps
    for mine, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-13)


def test_new_counts_reset_the_end_of_a_group() -> None:
    model, wrapper = make(accumulative_counts=3)
    wrapper.end_group()
    assert runs.wrapped(model, wrapper, runs.batches(2)) == [1]
    wrapper.initialize_count_status(model, 0, -1)
    assert runs.wrapped(model, wrapper, runs.batches(4)) == [3]


def test_more_micro_steps_than_announced_are_an_error_before_the_backward() -> None:
    for number in (6, 8):
        model, wrapper = make(accumulative_counts=3)
        wrapper.initialize_count_status(model, 0, number)
        *first, extra = runs.batches(number + 1)
        runs.wrapped(model, wrapper, first)
        message = (
            f"OptimWrapper: there must be at most {number} micro-steps "
            f"(max_counts), but this is number {number + 1}. Pass the number of the "
            "whole run to initialize_count_status."
        )
        with refuses(message, RuntimeError, AssertionError):
            wrapper.update_params(model(extra))
        with refuses(message, RuntimeError, AssertionError):
            wrapper.end_group()
        assert wrapper.inner_count == number
        assert all(parameter.grad is None for parameter in model.parameters())


def test_resuming_within_a_group_warns() -> None:
    model, wrapper = make(accumulative_counts=3)
    message = (
        r"\[PP301\] OptimWrapper.initialize_count_status: init_counts must be a "
        "multiple of 3 to lose no gradient, but is 4. The next update lacks 1 of its 3 "
        "micro-steps. Resume at a multiple of 3."
    )
    with pytest.warns(UserWarning, match=f"^{message}$"):
        wrapper.initialize_count_status(model, 4, 9)
    assert runs.wrapped(model, wrapper, runs.batches(5)) == [2, 5]


def test_batch_norm_under_accumulation_warns_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    OptimWrapper(wrapper.optimizer).initialize_count_status(model, 0, 4)  # no news
    message = (
        r"\[PP302\] OptimWrapper: 2 micro-steps give the gradient of one large batch, "
        "but 1 "
        r"BatchNorm layers \(first: '1.0'\) take their statistics from each small one. "
        "Use another normalization layer, or accumulative_counts=1."
    )
    with pytest.warns(UserWarning, match=f"^{message}$"):
        wrapper.initialize_count_status(model, 0, 4)
    wrapper.initialize_count_status(model, 0, 4)


def test_the_norm_before_clipping_is_stored_or_none_without_gradients() -> None:
    model, wrapper = make(clip_grad={"max_norm": 1e-3})
    wrapper.step()
    assert wrapper.grad_norm is None
    model(runs.batches(1)[0]).backward()
    grads = torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )
    expected = grads.square().sum().sqrt()
    wrapper.step()
    assert wrapper.grad_norm is not None
    torch.testing.assert_close(wrapper.grad_norm, expected)
    assert wrapper.grad_norm.item() > 1e-3


def test_frozen_parameters_are_not_clipped_along() -> None:
    model, wrapper = make(clip_grad={"max_norm": 1.0})
    frozen = next(model.parameters())
    frozen.grad = torch.full_like(frozen, 1e6)
    frozen.requires_grad_(False)
    wrapper.update_params(model(runs.batches(1)[0]), zero_kwargs={"set_to_none": False})
    assert wrapper.grad_norm is not None and wrapper.grad_norm < 1e3


def test_arguments_reach_the_optimizer() -> None:
    model, wrapper = make()
    calls: list[Any] = []
    wrapper.optimizer.step = lambda **kw: calls.append(kw)  # type: ignore[assignment]
    wrapper.optimizer.zero_grad = lambda **kw: calls.append(kw)  # type: ignore[assignment]
    loss = model(runs.batches(1)[0])
    wrapper.update_params(loss, {"closure": None}, {"set_to_none": False})
    wrapper.zero_grad(set_to_none=True)
    assert calls == [{"closure": None}, {"set_to_none": False}, {"set_to_none": True}]


def test_arguments_of_callers_are_not_changed() -> None:
    clip = {"type": "norm", "max_norm": 1.0}
    _, wrapper = make(groups=2, clip_grad=clip)
    assert clip == {"type": "norm", "max_norm": 1.0}
    state = wrapper.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(2):  # nor do schedules change a state that was taken or loaded
        wrapper.param_groups[-1]["lr"] = 7.0
        assert runs.same_state(state, kept)
        wrapper.load_state_dict(state)
        assert wrapper.get_lr()["base_lr"] == [0.1]


@pytest.mark.parametrize(
    "cls",
    [
        functools.partial(torch.optim.SGD, momentum=0.9),
        functools.partial(torch.optim.AdamW, amsgrad=True),
        functools.partial(torch.optim.Adagrad, foreach=True),
        functools.partial(torch.optim.LBFGS, max_iter=2),
    ],
)
@pytest.mark.parametrize("wrap", [OptimWrapper, lambda o: AmpOptimWrapper(optimizer=o)])
def test_one_state_starts_several_runs(cls: Any, wrap: Any) -> None:
    model = torch.nn.Linear(2, 1)
    inputs = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def train(wrapper: Any) -> None:
        def closure() -> Any:
            wrapper.optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            if isinstance(wrapper.optimizer, torch.optim.LBFGS):
                wrapper.optimizer.step(closure)
            else:
                wrapper.update_params(model(inputs).square().mean())

    first = wrap(cls(model.parameters(), lr=0.1))
    train(first)
    saved = copy.deepcopy((model.state_dict(), first.state_dict()))
    kept, ends = copy.deepcopy(saved), []
    for _ in range(2):
        model.load_state_dict(saved[0])
        again = wrap(cls(model.parameters(), lr=0.1))
        again.load_state_dict(saved[1])
        train(again)
        ends.append(model.weight.detach().clone())
        assert runs.same_state(saved[1], kept[1])
    assert torch.equal(*ends)


COUNTS = "accumulative_counts must be an integer of 1 or more, but is"
ARGUMENTS = "clip_grad must have arguments besides type, but is"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"accumulative_counts": 0}, ValueError, f"{COUNTS} 0."),
    ({"accumulative_counts": 1.5}, TypeError, f"{COUNTS} 1.5 (float)."),
    ({"clip_grad": 1.0}, TypeError,
     "clip_grad must be a dict or None, but is 1.0 (float). Write dict(max_norm=...)."),
    ({"clip_grad": {}}, ValueError, f"{ARGUMENTS} {{}}. Give at least max_norm."),
    ({"clip_grad": {"type": "value"}}, ValueError,
     f"{ARGUMENTS} {{'type': 'value'}}. Give at least clip_value."),
    ({"clip_grad": {"type": "l2", "max_norm": 1}}, ValueError,
     "clip_grad['type'] must be 'norm' or 'value', but is 'l2'."),
    ({"clip_grad": {"max": 1}}, TypeError,
     "clip_grad must hold arguments of clip_grad_norm_, but is {'max': 1}: missing a "
     "required argument: 'max_norm'."),
    ({"optimizer": []}, TypeError,
     "optimizer must be a torch optimizer, but is list."),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "cls", "message"), REFUSED)
def test_settings_that_are_refused(kwargs: Any, cls: Any, message: str) -> None:
    with refuses(f"OptimWrapper: {message}", cls, AssertionError):
        OptimWrapper(**{"optimizer": runs.optimizer(Recorded()), **kwargs})


@pytest.mark.parametrize(("total", "expected"), [(5.0, [2, 4, 5]), (-4, [2, 4])])
def test_counts_may_be_whole_floats_and_a_negative_total_is_unknown(
    total: Any, expected: list[int]
) -> None:
    zero: Any = 0.0
    _, wrapper = make(accumulative_counts=2.0)
    wrapper.initialize_count_status(None, zero, total)
    steps = []
    for number in range(1, 6):
        wrapper.backward(wrapper.scale_loss(torch.ones((), requires_grad=True)))
        if wrapper.should_update():
            steps.append(number)
    assert steps == expected


STATUS = "initialize_count_status"
REFUSED_CALLS: list[tuple[str, tuple[Any, ...], tuple[type[Exception], ...], str]] = [
    ("update_params", (0,), (TypeError, AttributeError),
     ": loss must be a tensor, but is 0 (int). Return a tensor from the model, with "
     "'loss' in its key."),
    (STATUS, (None, -1, 4), (ValueError,),
     f".{STATUS}: init_counts must be an integer of 0 or more, but is -1."),
    (STATUS, (None, 2, None), (TypeError,),
     f".{STATUS}: max_counts must be an integer of 0 or more, but is None (None)."),
]  # fmt: skip


@pytest.mark.parametrize(("method", "arguments", "classes", "message"), REFUSED_CALLS)
def test_calls_that_are_refused_leave_the_counts(
    method: str, arguments: Any, classes: Any, message: str
) -> None:
    _, wrapper = make(accumulative_counts=2)
    with refuses(f"OptimWrapper{message}", *classes):
        getattr(wrapper, method)(*arguments)
    assert wrapper.inner_count == 0


def test_wrappers_show_their_settings() -> None:
    _, wrapper = make(accumulative_counts=2, clip_grad={"max_norm": 1})
    shown = "OptimWrapper(accumulative_counts=2, clip_grad={'max_norm': 1}, optimizer="
    assert repr(wrapper) == f"{shown}{wrapper.optimizer!r})"
    assert repr(OptimWrapperDict(a=wrapper)) == f"OptimWrapperDict(a={wrapper!r})"


def make_dict() -> tuple[OptimWrapperDict, OptimWrapper, OptimWrapper]:
    one = OptimWrapper(runs.optimizer(Recorded(1), groups=2))
    other = AmpOptimWrapper(optimizer=runs.optimizer(Recorded(2), "adam"))
    return OptimWrapperDict(generator=one, critic=other), one, other


def test_it_is_read_like_a_dict() -> None:
    wrappers, one, other = make_dict()
    assert isinstance(wrappers, OptimWrapper) and wrappers["critic"] is other
    both = {"generator": one, "critic": other}
    assert dict(wrappers) == dict(wrappers.items()) == both
    assert list(wrappers.values()) == [one, other] and len(wrappers) == 2
    assert "critic" in wrappers and "other" not in wrappers
    assert wrappers.defaults == {"generator": one.defaults, "critic": other.defaults}
    groups = {name: len(each) for name, each in wrappers.param_groups.items()}
    assert groups == {"generator": 3, "critic": 1}
    momenta = {"generator.momentum": [0.9, 0.9], "critic.momentum": [0.9]}
    assert wrappers.get_momentum() == momenta
    assert OptimWrapperDict(gan=wrappers).get_lr() == {
        "gan.generator.base_lr": [0.1],
        "gan.generator.lr": [0.03, 0.1],
        "gan.critic.lr": [0.1],
    }


def test_gradients_of_all_are_cleared() -> None:
    wrappers, one, other = make_dict()
    groups = [*one.optimizer.param_groups, *other.optimizer.param_groups]
    parameters = [each for group in groups for each in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    wrappers.zero_grad(set_to_none=False)
    assert not any(parameter.grad.any() for parameter in parameters)
    wrappers.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)


def test_each_wrapper_counts_and_steps_by_itself() -> None:
    wrappers, one, other = make_dict()
    wrappers.initialize_count_status(Recorded(), cur_iter=3, max_iters=8)
    assert (one.inner_count, other.inner_count) == (0, 0)
    generator = Recorded(1)
    wrapper = OptimWrapper(runs.optimizer(generator), 2)
    OptimWrapperDict(a=wrapper, b=one)["a"].initialize_count_status(generator, 0, 3)
    assert runs.wrapped(generator, wrapper, runs.batches(3)) == [2, 3]
    assert (wrapper.inner_count, one.inner_count) == (3, 0)


def test_the_state_is_saved_and_loaded_by_name() -> None:
    wrappers, one, _ = make_dict()
    one.param_groups[-1]["lr"] = 5.0
    state = wrappers.state_dict()
    assert list(state) == ["generator", "critic"]
    assert "loss_scaler" in state["critic"]
    kept = copy.deepcopy(state)
    again, _, _ = make_dict()
    again.load_state_dict(state)
    assert again.get_lr()["generator.base_lr"] == [5.0]
    assert runs.same_state(again.state_dict(), kept) and runs.same_state(state, kept)


def test_a_state_that_does_not_fit_leaves_all_wrappers() -> None:
    def trained(number: int) -> OptimWrapperDict:
        wrappers, _, other = make_dict()
        for wrapper in wrappers.values():
            for parameter in wrapper._parameters():
                parameter.grad = torch.full_like(parameter, number)
            wrapper.optimizer.step()
            wrapper.param_groups[-1]["lr"] = number
        other.loss_scaler.load_state_dict(
            {**other.loss_scaler.state_dict(), "scale": 2.0**number}
        )
        last = OptimWrapper(runs.optimizer(Recorded(), groups=number))
        return OptimWrapperDict(gan=wrappers, last=last)

    wrappers = trained(1)
    before = copy.deepcopy(wrappers.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        wrappers.load_state_dict(trained(2).state_dict())
    assert runs.same_state(wrappers.state_dict(), before)


def test_unknown_names_are_refused_before_anything_is_loaded() -> None:
    wrappers, one, _ = make_dict()
    state = {"generator": one.state_dict(), "style": {}}
    one.param_groups[-1]["lr"] = 5.0
    for where, call in (
        (".load_state_dict: state_dict", lambda: wrappers.load_state_dict(state)),
        (": key", lambda: wrappers["style"]),
    ):
        message = f"{where} must be one of 'generator', 'critic', but is 'style'."
        with refuses(f"OptimWrapperDict{message}", KeyError, AssertionError):
            call()
    assert wrappers.get_lr()["generator.base_lr"] == [5.0]


def test_a_wrapper_without_a_state_warns() -> None:
    wrappers, _, other = make_dict()
    message = (
        r"\[PP303\] OptimWrapperDict.load_state_dict: state_dict must have a state for "
        "every wrapper, but has none for 'generator'. These wrappers keep "
        "their present state. Load a complete state."
    )
    with pytest.warns(UserWarning, match=f"^{message}$"):
        wrappers.load_state_dict({"critic": other.state_dict()})


@pytest.mark.parametrize("value", [None, runs.optimizer(Recorded())])
def test_only_wrappers_are_taken(value: Any) -> None:
    found = "None" if value is None else "torch.optim.sgd.SGD"
    message = f"OptimWrapperDict: critic must be an OptimWrapper, but is {found}."
    with refuses(message, TypeError, AssertionError):
        OptimWrapperDict(generator=make_dict()[1], critic=value)


LOSS = torch.ones(())
FOR_ONE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("update_params", "backward", "scale_loss"), (LOSS,)),
    "optim_context": (Recorded(),),
    **dict.fromkeys(("step", "should_update", "should_sync", "end_group"), ()),
    "inner_count": (),  # a property
}


@pytest.mark.parametrize("name", FOR_ONE)
def test_calls_for_one_wrapper_are_refused(name: str) -> None:
    message = (
        f"OptimWrapperDict: {name} must be used on one wrapper, but was used on 2 "
        f"together. Write wrappers['generator'].{name}."
    )
    with refuses(message, NotImplementedError, AttributeError):
        getattr(make_dict()[0], name)(*FOR_ONE[name])


def test_every_method_of_a_wrapper_is_answered_or_refused() -> None:
    """None is left to fail for want of an optimizer."""
    public = {name for name in dir(OptimWrapper) if not name.startswith("_")}
    missing = {name for name in public if name not in vars(OptimWrapperDict)}
    assert not missing
