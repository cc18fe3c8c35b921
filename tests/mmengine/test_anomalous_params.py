"""detect_anomalous_params and is_model_wrapper."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from pyparallel.mmengine import (
    anomalous_params,
    detect_anomalous_params,
    is_model_wrapper,
)
from pyparallel.registry import Registry

pytestmark = pytest.mark.one_backend

#: mmengine's text.
EXPECTED = "{} with shape {} is not in the computational graph \n"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the logged messages."""
    messages: list[str] = []
    monkeypatch.setattr(anomalous_params, "_log", messages.append)
    return messages


def test_nothing_is_run_and_no_hook_is_called(logged: Any) -> None:
    called = []
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    middle = model[0](torch.ones(1, 1))
    middle.register_hook(called.append)
    loss = middle.sum()
    loss.register_hook(called.append)
    model[0].weight.register_post_accumulate_grad_hook(called.append)
    with torch.no_grad():
        assert detect_anomalous_params(loss, model) == ["1.weight", "1.bias"]
    with torch.inference_mode():
        assert detect_anomalous_params(loss, model) == ["1.weight", "1.bias"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            assert detect_anomalous_params(loss, model) == ["1.weight", "1.bias"]
    assert not said
    assert not called and all(each.grad is None for each in model.parameters())
    loss.backward()
    assert len(called) == 3 and model[0].weight.grad is not None


def test_the_size_of_a_graph_has_no_limit(logged: Any) -> None:
    model = nn.Linear(1, 1)
    loss = model.weight.sum()
    for _ in range(100_000):
        loss = loss + 1
    for _ in range(200):  # by every path there would be 2**200 of them
        loss = loss + loss
    assert detect_anomalous_params(loss, model) == ["bias"]
    # A leaf has no graph.
    assert detect_anomalous_params(model.weight, model) == ["weight", "bias"]


def test_the_level_is_error_and_the_logger_has_a_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anomalous_params, "upstream", lambda name: None)
    caplog.set_level(logging.ERROR, "pyparallel.mmengine")
    detect_anomalous_params(torch.zeros(()), nn.Linear(2, 1, bias=False))
    text = EXPECTED.format("weight", "torch.Size([1, 2])")
    assert caplog.record_tuples == [("pyparallel.mmengine", logging.ERROR, text)]


def test_a_dict_of_losses_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        detect_anomalous_params({}, nn.Linear(1, 1))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "detect_anomalous_params: loss must be a tensor, but is dict. Pass the "
        "minimized sum of the losses."
    )


def test_wrappers_are_those_of_the_given_registry_also_if_they_are_compiled() -> None:
    own, child = Registry("own"), nn.DataParallel(nn.Linear(1, 1))
    for wrapper in (child, torch.compile(child, backend="eager")):
        assert is_model_wrapper(wrapper) and not is_model_wrapper(wrapper, own)
    own.register_module(module=nn.DataParallel)
    assert is_model_wrapper(child, own)
    for other in (child.module, 3, None):
        assert not is_model_wrapper(other)
