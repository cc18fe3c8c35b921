"""OptimWrapperDict: operations on all wrappers, and those that need one wrapper."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import optim_runs as runs
import pytest
import torch
from optim_runs import Recorded, refuses

from pyparallel.mmengine import AmpOptimWrapper, OptimWrapper, OptimWrapperDict

pytestmark = [pytest.mark.also_peers, pytest.mark.one_backend]


def make() -> tuple[OptimWrapperDict, OptimWrapper, OptimWrapper]:
    one = OptimWrapper(runs.optimizer(Recorded(1), groups=2))
    other = AmpOptimWrapper(optimizer=runs.optimizer(Recorded(2), "adam"))
    return OptimWrapperDict(generator=one, critic=other), one, other


def test_it_is_read_like_a_dict() -> None:
    wrappers, one, other = make()
    assert isinstance(wrappers, OptimWrapper)
    assert list(wrappers) == list(wrappers.keys()) == ["generator", "critic"]
    assert list(wrappers.values()) == [one, other]
    assert (
        dict(wrappers) == dict(wrappers.items()) == {"generator": one, "critic": other}
    )
    assert (len(wrappers), "critic" in wrappers, "other" in wrappers) == (
        2,
        True,
        False,
    )
    assert wrappers["critic"] is other


def test_rates_momenta_groups_and_settings_are_by_name() -> None:
    wrappers, one, other = make()
    assert wrappers.get_lr() == {
        "generator.base_lr": [0.1],
        "generator.lr": [0.03, 0.1],
        "critic.lr": [0.1],
    }
    assert wrappers.get_momentum() == {
        "generator.momentum": [0.9, 0.9],
        "critic.momentum": [0.9],
    }
    assert {name: len(groups) for name, groups in wrappers.param_groups.items()} == {
        "generator": 3,
        "critic": 1,
    }
    assert wrappers.defaults == {"generator": one.defaults, "critic": other.defaults}
    nested = OptimWrapperDict(gan=wrappers)
    assert nested.get_lr()["gan.critic.lr"] == [0.1]


def test_gradients_of_all_are_cleared() -> None:
    wrappers, one, other = make()
    for wrapper in (one, other):
        for parameter in wrapper.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    wrappers.zero_grad(set_to_none=False)
    with_grad = [*one._parameters_with_grad(), *other._parameters_with_grad()]
    grads = [each.grad for each in with_grad]
    assert len(grads) == 6 and not any(grad.any() for grad in grads)
    wrappers.zero_grad()
    assert not one._parameters_with_grad() and not other._parameters_with_grad()


def test_each_wrapper_counts_and_steps_by_itself() -> None:
    wrappers, one, other = make()
    wrappers.initialize_count_status(Recorded(), 3, 8)
    assert (one.inner_count, other.inner_count) == (0, 0)
    generator = Recorded(1)
    wrapper = OptimWrapper(runs.optimizer(generator), 2)
    OptimWrapperDict(a=wrapper, b=one)["a"].initialize_count_status(generator, 0, 3)
    assert runs.wrapped(generator, wrapper, runs.batches(3)) == [2, 3]
    assert (wrapper.inner_count, one.inner_count) == (3, 0)


def test_the_state_is_saved_and_loaded_by_name() -> None:
    wrappers, one, _ = make()
    one.param_groups[-1]["lr"] = 5.0
    state = wrappers.state_dict()
    assert list(state) == ["generator", "critic"]
    assert "loss_scaler" in state["critic"]
    kept = copy.deepcopy(state)
    again, _, _ = make()
    again.load_state_dict(state)
    assert again.get_lr()["generator.base_lr"] == [5.0]
    assert runs.same_state(again.state_dict(), kept) and runs.same_state(state, kept)


def test_a_checkpoint_of_the_state_is_read_without_running_code(tmp_path: Path) -> None:
    wrappers, _, _ = make()
    torch.save(wrappers.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert runs.same_state(state, wrappers.state_dict())


def test_a_state_of_an_unknown_name_is_an_error_before_loading() -> None:
    wrappers, one, _ = make()
    state = {"generator": wrappers["generator"].state_dict(), "style": {}}
    one.param_groups[-1]["lr"] = 5.0
    message = (
        "OptimWrapperDict.load_state_dict: state_dict must be one of 'generator', "
        "'critic', but is 'style'."
    )
    with refuses(message, KeyError, AssertionError):
        wrappers.load_state_dict(state)
    assert wrappers.get_lr()["generator.base_lr"] == [5.0]


def test_a_wrapper_without_a_state_warns() -> None:
    wrappers, _, other = make()
    message = (
        r"\[PP303\] OptimWrapperDict.load_state_dict: state_dict must have a state for "
        "every wrapper, but has none for 'generator'. These wrappers keep "
        "their present state. Load a complete state."
    )
    with pytest.warns(UserWarning, match=f"^{message}$"):
        wrappers.load_state_dict({"critic": other.state_dict()})


def test_an_unknown_name_is_refused() -> None:
    message = (
        "OptimWrapperDict: key must be one of 'generator', 'critic', but is 'style'."
    )
    with refuses(message, KeyError, AssertionError):
        make()[0]["style"]


@pytest.mark.parametrize("value", [None, runs.optimizer(Recorded())])
def test_only_wrappers_are_taken(value: Any) -> None:
    found = "None" if value is None else "torch.optim.sgd.SGD"
    message = f"OptimWrapperDict: critic must be an OptimWrapper, but is {found}."
    with refuses(message, TypeError, AssertionError):
        OptimWrapperDict(generator=make()[1], critic=value)


FOR_ONE: dict[str, Any] = {
    "update_params": lambda wrappers: wrappers.update_params(torch.ones(())),
    "backward": lambda wrappers: wrappers.backward(torch.ones(())),
    "scale_loss": lambda wrappers: wrappers.scale_loss(torch.ones(())),
    "step": lambda wrappers: wrappers.step(),
    "optim_context": lambda wrappers: wrappers.optim_context(Recorded()),
    "should_update": lambda wrappers: wrappers.should_update(),
    "should_sync": lambda wrappers: wrappers.should_sync(),
    "end_group": lambda wrappers: wrappers.end_group(),
    "inner_count": lambda wrappers: wrappers.inner_count,
}


@pytest.mark.parametrize("name", FOR_ONE)
def test_calls_for_one_wrapper_are_refused(name: str) -> None:
    message = (
        f"OptimWrapperDict: {name} must be used on one wrapper, but was used on 2 "
        f"together. Write wrappers['generator'].{name}."
    )
    with refuses(message, NotImplementedError, AttributeError):
        FOR_ONE[name](make()[0])


def test_every_method_of_a_wrapper_is_answered_or_refused() -> None:
    """None is left to fail for want of an optimizer."""
    public = {name for name in dir(OptimWrapper) if not name.startswith("_")}
    missing = {name for name in public if name not in vars(OptimWrapperDict)}
    assert not missing
