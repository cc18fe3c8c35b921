"""BaseModel: the steps, the losses and the device of its preprocessor."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel.mmengine import (
    BaseDataPreprocessor,
    BaseModel,
    ImgDataPreprocessor,
    OptimWrapper,
    base_model,
)
from tests.support.mmengine.models import batch, toy_model
from tests.support.processes import forkserver

pytestmark = [pytest.mark.also_peers, pytest.mark.one_backend]

ToyModel = toy_model(BaseModel)


@pytest.fixture
def no_mmengine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build configs without mmengine."""
    monkeypatch.setattr(base_model, "upstream", lambda name: None)


def message(call: Any, *args: Any, **kwargs: Any) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:
        call(*args, **kwargs)
    return type(caught.value), str(caught.value)


class Only(BaseModel):
    """A model that returns a given value."""

    def __init__(self, result: Any = None, preprocessor: Any = None) -> None:
        super().__init__(preprocessor)
        self.result = result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return self.result


def steps_of(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.01))


def test_steps_call_the_preprocessor_with_their_training_flag() -> None:
    calls = []

    class Watching(BaseDataPreprocessor):
        def forward(self, data: Any, training: bool = False) -> Any:
            calls.append(training)
            return super().forward(data, training)

    model = ToyModel(Watching())
    model.train_step(batch(), steps_of(model))
    predicted = model.val_step(batch())
    assert calls == [True, False]
    torch.testing.assert_close(model.test_step(batch()), predicted, rtol=0, atol=0)
    assert predicted.shape == (3, 1)
    assert len(model(**batch())) == 2  # mode="tensor"


@pytest.mark.parametrize("data", [{"a": 1}, UserDict(a=1), [1, 2], (1, 2)])
def test_a_batch_becomes_the_arguments_of_forward(data: Any) -> None:
    model = Only()
    model.val_step(data)
    args, named = ((1, 2), {}) if isinstance(data, list | tuple) else ((), {"a": 1})
    assert model.seen == (args, {**named, "mode": "predict"})


def test_values_that_cannot_be_arguments_are_refused() -> None:
    assert message(Only().val_step, "text")[1] == (
        "Only: data_preprocessor must return a dict, a list or a tuple of arguments, "
        "but returned str."
    )


def test_a_step_takes_only_an_optimizer_wrapper() -> None:
    model = ToyModel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, found in ((sgd, "torch.optim.sgd.SGD"), (None, "None")):
        assert message(model.train_step, batch(), given)[1] == (
            f"{type(model).__name__}.train_step: optim_wrapper must be an "
            f"OptimWrapper, but is {found}. Write OptimWrapper(optimizer)."
        )
    model.train_step(batch(), OptimWrapper(sgd))


def test_preprocessors_by_module_by_config_and_by_default() -> None:
    given = nn.Identity()
    assert Only(preprocessor=given).data_preprocessor is given
    assert type(Only().data_preprocessor) is BaseDataPreprocessor
    config = {"type": "ImgDataPreprocessor", "mean": [0], "std": [1]}
    before = copy.deepcopy(config)
    built = Only(preprocessor=config).data_preprocessor
    assert type(built).__name__ == "ImgDataPreprocessor" and built.mean.shape[0] == 1
    assert config == before
    dotted = {"type": "pyparallel.mmengine.ImgDataPreprocessor", "pad_value": 3}
    assert type(Only(preprocessor=dotted).data_preprocessor) is ImgDataPreprocessor
    cls = {"type": ImgDataPreprocessor}
    assert type(Only(preprocessor=cls).data_preprocessor) is ImgDataPreprocessor
    kind, text = message(Only, preprocessor=[1])
    assert issubclass(kind, TypeError)
    assert text == (
        "BaseModel: data_preprocessor must be a dict, a module or None, but is list."
    )


@pytest.mark.parametrize("cls", [Only, BaseDataPreprocessor, ImgDataPreprocessor])
def test_a_mixin_is_initialized(cls: Any) -> None:
    class Mixin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = True

    class Mixed(cls, Mixin):  # type: ignore[misc]
        pass

    assert Mixed().mixed and Mixed().eval().training is False


@pytest.mark.usefixtures("no_mmengine")
@pytest.mark.parametrize("scope", ["", "mmengine.", "pyparallel."])
def test_names_of_preprocessors_are_known_without_mmengine(scope: str) -> None:
    built = Only(preprocessor={"type": f"{scope}ImgDataPreprocessor"}).data_preprocessor
    assert type(built) is ImgDataPreprocessor


@pytest.mark.usefixtures("no_mmengine")
@pytest.mark.parametrize("name", ["Nothing", "pyparallel.Nothing", None, 3])
def test_an_unknown_type_of_preprocessor_is_refused(name: Any) -> None:
    kind, text = message(Only, preprocessor={"type": name})
    assert issubclass(kind, ValueError)
    assert text == (
        "BaseModel: the type of data_preprocessor must be BaseDataPreprocessor, "
        "ImgDataPreprocessor, a dotted path or a class, but is "
        f"{name!r}."
    )


INIT = """
from torch import nn
from pyparallel.mmengine import BaseModel

class Model(BaseModel):
    def __init__(self, init_cfg=None):
        super().__init__(init_cfg=init_cfg)
        self.child, self.other, self.calls = Child(), nn.Linear(1, 1), 0

    def forward(self):
        pass

class Child(nn.Module):
    calls = 0

    def init_weights(self):
        self.calls += 1

model = Model()
model.init_weights()
model.init_weights()
assert model.child.calls == 1
config = {"type": "Xavier"}
model = Model(config)
assert model.init_cfg == config and model.init_cfg is not config
try:
    model.init_weights()
except RuntimeError as error:
    print(error, model.child.calls)
"""


def test_an_init_cfg_needs_mmengine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPARALLEL_MMENGINE", "off")
    path = str(Path(pyparallel.__file__).parents[1])
    assert forkserver.run(INIT, [path]) == (
        0,
        "Model: init_cfg must be None without mmengine, which reads it, but is "
        "{'type': 'Xavier'}. Install mmengine, or initialize the weights in __init__. "
        "0\n",
    )


def test_every_way_to_move_a_model_moves_the_target_of_its_batches() -> None:
    inner = BaseDataPreprocessor()
    model = ToyModel()
    model.child = nn.Sequential(inner)
    both = (model.data_preprocessor, inner)
    meta, cpu = torch.device("meta"), torch.device("cpu")
    assert [each.device for each in both] == [cpu, cpu]
    assert model.to("meta") is model
    assert [each.device for each in both] == [meta, meta]
    model.to_empty(device="cpu")
    assert [each.device for each in both] == [cpu, cpu]
    model.to(device=meta, dtype=torch.float64)
    assert model.data_preprocessor.device == meta
    model.to(torch.float32)
    assert model.data_preprocessor.device == meta
    model.double()
    assert model.data_preprocessor.device == meta
    for name in (cpu, "cpu", None):  # as mmengine's code does
        model._set_device(name)
        assert [each.device for each in both] == [cpu, cpu]
    wrapped = nn.Sequential(model)
    wrapped.to("meta")
    assert [each.device for each in both] == [meta, meta]
    model.to_empty(device="cpu").cpu()
    assert [each.device for each in both] == [cpu, cpu]


@pytest.mark.parametrize("preprocessor", [None, nn.Identity()])
def test_an_override_of_set_device_is_called(preprocessor: Any) -> None:
    class Watching(ToyModel):  # type: ignore[misc,valid-type]
        def _set_device(self, device: Any) -> None:
            seen.append(device)
            super()._set_device(device)

    seen: list[torch.device] = []
    model = Watching(preprocessor)
    model.to("cpu").to("meta").half().to_empty(device="cpu").cpu()
    assert [device.type for device in seen] == ["cpu", "meta", "meta", "cpu", "cpu"]


class TestLosses:
    def parse(self, losses: Any) -> tuple[Any, Any]:
        return Only().parse_losses(losses)

    def test_a_loss_of_that_name_does_not_hide_the_sum(self) -> None:
        assert list(self.parse({"loss": torch.tensor(2.0)})[1]) == ["loss"]
        losses = {"loss_a": torch.tensor(1.0), "loss": torch.tensor(2.0)}
        for more, expected in (
            ({}, {"loss": 3, "loss_a": 1, "loss_own": 2}),
            ({"loss_own": 4}, {"loss": 7, "loss_a": 1, "loss_own_": 2, "loss_own": 4}),
        ):
            given = losses | {key: torch.tensor(4.0) for key in more}
            total, log_vars = self.parse(given)
            assert total.item() == expected["loss"]
            assert {key: each.item() for key, each in log_vars.items()} == expected

    def test_logged_values_keep_no_graph(self) -> None:
        middle = torch.ones(2, requires_grad=True) * 2
        total, log_vars = self.parse({"loss_a": middle, "b": [middle, middle]})
        assert total.requires_grad and type(log_vars) is OrderedDict
        assert list(log_vars) == ["loss", "loss_a", "b"]
        assert not any(each.requires_grad for each in log_vars.values())

    @pytest.mark.parametrize(
        ("losses", "found"),
        [
            ({}, "nothing"),
            ({"acc": torch.ones(1)}, "'acc'"),
            ({"acc": torch.ones(1), "los": torch.ones(1)}, "'acc', 'los'"),
            ({"loss": []}, "'loss'"),
        ],
    )
    def test_no_loss_is_an_error(self, losses: Any, found: str) -> None:
        kind, text = message(self.parse, losses)
        assert issubclass(kind, ValueError)
        assert text == (
            "parse_losses: losses must have a tensor whose name contains 'loss', but "
            f"has {found}. Rename the losses that are to be minimized."
        )

    @pytest.mark.parametrize(
        ("losses", "text"),
        [
            ({"loss": 1.0},
             "losses['loss'] must be a tensor or a list of tensors, but is float."),
            ({"loss": (torch.ones(1),)},
             "losses['loss'] must be a tensor or a list of tensors, but is tuple."),
            ({"loss": [torch.ones(1), None]},
             "losses['loss'][1] must be a tensor, but is None."),
            ({"hits": torch.ones(1, dtype=torch.int64)},
             "losses['hits'] must have a floating-point dtype, but has torch.int64. "
             "Convert it with float()."),
            (torch.ones(1),
             "parse_losses: losses must be a dict, as forward returns for mode='loss', "
             "but is torch.Tensor."),
        ],
    )  # fmt: skip
    def test_an_invalid_loss_is_named(self, losses: Any, text: str) -> None:
        kind, found = message(self.parse, losses)
        assert issubclass(kind, TypeError)
        assert found == text
