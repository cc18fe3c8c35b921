"""The outputs of steps on several replicas, and steps that are errors there."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from pyparallel import DataContainer, MMDataParallel, collate
from pyparallel.mmengine import BaseModel, OptimWrapper, OptimWrapperDict

pytestmark = pytest.mark.one_backend

STEPS = ["train_step", "val_step"]
UPDATES = "must leave updates to its caller on several devices, but"


class StepByFirstSample(nn.Module):
    """A step that returns a value selected by the first sample of its part."""

    def __init__(self, outputs: dict[int, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.outputs = outputs

    def train_step(self, x: torch.Tensor, *args: Any) -> Any:
        output = self.outputs[int(x[0] if isinstance(x, torch.Tensor) else x[0][0])]
        return output(self) if callable(output) else output

    val_step = train_step


def step(one: Any, other: Any, data: Any = None, name: str = "train_step") -> Any:
    """Return the output of a step whose replicas return ``one`` and ``other``."""
    wrapper = MMDataParallel(StepByFirstSample({0: one, 2: other}), ["cpu", "cpu"])
    return getattr(wrapper, name)(torch.arange(3) if data is None else data)


def output(loss: float, num_samples: Any = None, **more: Any) -> dict[str, Any]:
    made = dict(loss=torch.tensor(loss), **more)
    return made if num_samples is None else made | {"num_samples": num_samples}


def refused(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        step(*args, **kwargs)


class TestCombined:
    @pytest.mark.parametrize("name", STEPS)
    def test_losses_and_logs_are_weighted_and_samples_counted(self, name: str) -> None:
        logs = OrderedDict(a=1.0, b=torch.tensor(2.0), c={"d": 4}, lr=0.1)
        others = OrderedDict(a=4.0, b=torch.tensor(5.0), c={"d": 1}, lr=0.1)
        made = step(
            OrderedDict(output(3.0, 4, log_vars=logs)),
            OrderedDict(output(0.0, 2, log_vars=others)),
            name=name,
        )
        assert type(made) is OrderedDict
        assert list(made) == ["loss", "log_vars", "num_samples"]
        assert made["loss"].shape == () and made["loss"].item() == 2.0
        assert made["num_samples"] == 6
        logged = made["log_vars"]
        assert type(logged) is OrderedDict and list(logged) == ["a", "b", "c", "lr"]
        assert logged["a"] == 2.0 and logged["b"].item() == 3.0
        assert logged["c"] == {"d": 3.0}
        assert logged["lr"] == 0.1 and type(logged["lr"]) is float

    def test_gradients_are_weighted_too(self) -> None:
        def loss(factor: float, num: int) -> Any:
            return lambda module: dict(loss=module.weight * factor, num_samples=num)

        model = StepByFirstSample({0: loss(10.0, 1), 2: loss(20.0, 3)})
        made = MMDataParallel(model, ["cpu", "cpu"]).train_step(torch.arange(3))
        made["loss"].backward()
        assert model.weight.grad == 17.5

    def test_a_replica_without_samples_does_not_count(self) -> None:
        made = step(output(2.0, 4), output(float("nan"), 0))
        assert made["loss"].item() == 2.0 and made["num_samples"] == 4

    def test_counts_may_be_tensors(self) -> None:
        one, other = torch.tensor(1), torch.tensor(3)
        assert step(output(4.0, one), output(0.0, other))["loss"].item() == 1.0

    def test_everything_else_is_gathered(self) -> None:
        made = step(
            output(0.0, 1, scores=torch.ones(1), names=["a"], acc=torch.tensor(0.5)),
            output(0.0, 1, scores=torch.zeros(2), names=["b"], acc=torch.tensor(0.7)),
        )
        assert made["scores"].tolist() == [1, 0, 0] and made["names"] == ["a", "b"]
        torch.testing.assert_close(made["acc"], torch.tensor([0.5, 0.7]))

    def test_a_loss_for_each_sample_is_gathered(self) -> None:
        made = step(dict(loss=torch.ones(2)), dict(loss=torch.zeros(1)))
        assert made == {"loss": made["loss"]} and made["loss"].tolist() == [1, 1, 0]

    def test_an_output_that_is_no_dict_is_gathered(self) -> None:
        assert step(torch.tensor(1.0), torch.tensor(2.0)).tolist() == [1, 2]
        assert step([object()], [object()]) is not None
        assert len(step([object()], [object()])) == 2

    def test_one_part_has_results_of_equal_types(self) -> None:
        made = step(output(3.0, 2, acc=torch.tensor(1.0)), None, torch.zeros(1))
        assert made["loss"].shape == () and made["loss"].item() == 3.0
        assert made["num_samples"] == 2 and made["acc"].tolist() == [1.0]


class TestCounts:
    def test_without_num_samples_tensors_count(self) -> None:
        assert step(output(3.0), output(0.0))["loss"].item() == 2.0

    def test_without_num_samples_containers_count(self) -> None:
        boxes = [torch.full((n, 1), float(k)) for n, k in ((5, 0), (1, 1), (9, 2))]
        batch = collate([DataContainer(box) for box in boxes], samples_per_gpu=2)
        assert step(output(3.0), output(0.0), batch)["loss"].item() == 2.0

    @pytest.mark.parametrize(
        "data",
        [
            DataContainer([torch.zeros(1), torch.tensor(2.0).expand(3)], cpu_only=True),
            {"x": DataContainer([torch.zeros(4), torch.full((2,), 2.0)], stack=True)},
        ],
        ids=["cpu_only", "stacked"],
    )
    def test_chunks_of_any_container_count(self, data: Any) -> None:
        class First(StepByFirstSample):
            def train_step(self, x: Any, *args: Any) -> Any:
                return super().train_step(x["x"] if isinstance(x, dict) else x)

        model = First({0: output(3.0), 2: output(9.0)})
        made = MMDataParallel(model, ["cpu", "cpu"]).train_step(data)
        assert made["loss"].item() == (7.5 if isinstance(data, DataContainer) else 5.0)

    def test_tensors_of_several_sizes_do_not_tell(self) -> None:
        class First(StepByFirstSample):
            def train_step(self, x: Any, *args: Any) -> Any:
                return super().train_step(x["x"])

        wrapper = MMDataParallel(First({0: output(1.0), 2: output(2.0)}), ["cpu"] * 2)
        message = (
            "MMDataParallel.train_step must return num_samples on several devices, to "
            "weight the loss, if its arguments do not contain the number of samples, "
            "but returned none. Return dict(loss=..., log_vars=..., num_samples=...)."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            wrapper.train_step({"x": torch.arange(3), "y": torch.ones(4)})

    def test_a_scatter_that_makes_other_parts_than_are_expected_does_not_tell(
        self,
    ) -> None:
        class Own(MMDataParallel):
            def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
                return [(torch.tensor([i]),) for i in (0, 2)], [{}] * 2

        wrapper = Own(StepByFirstSample({0: output(1.0), 2: output(2.0)}), ["cpu"] * 3)
        with pytest.raises(ValueError, match=r"^Own\.train_step must return num_samp"):
            wrapper.train_step(torch.arange(3))

    def test_invalid_counts_are_refused(self) -> None:
        refused(
            TypeError,
            "MMDataParallel.train_step: num_samples must be an integer, but is 1.5 "
            "(float).",
            output(1.0, 1.5),
            output(1.0, 1),
        )
        refused(
            ValueError,
            "MMDataParallel.train_step: num_samples must be 0 or more, but is -1.",
            output(1.0, -1),
            output(1.0, 1),
        )
        refused(
            ValueError,
            "MMDataParallel.train_step: num_samples must be 1 or more on one replica, "
            "but is 0 on all.",
            output(1.0, 0),
            output(1.0, 0),
        )


class TestMismatches:
    def test_a_loss_that_only_one_replica_has(self) -> None:
        refused(
            ValueError,
            "gather: outputs[1] must have the keys of outputs[0], but lacks 'loss'. "
            "Return the same keys on every replica.",
            output(1.0, 1),
            dict(num_samples=1),
        )

    def test_a_log_that_only_one_replica_has(self) -> None:
        refused(
            ValueError,
            "gather: outputs[1]['log_vars'] must have the keys of "
            "outputs[0]['log_vars'], but has 'b' too. Return the same keys on every "
            "replica.",
            output(1.0, 1, log_vars={}),
            output(1.0, 1, log_vars={"b": 1.0}),
        )

    def test_a_log_that_is_no_number_must_be_the_same(self) -> None:
        refused(
            ValueError,
            "gather: outputs[1]['log_vars']['stage'] must equal "
            "outputs[0]['log_vars']['stage'], but is 'b' where 'a' was expected. "
            "Return a tensor, or a list with one entry for each sample.",
            output(1.0, 1, log_vars={"stage": "a"}),
            output(1.0, 1, log_vars={"stage": "b"}),
        )


class TestUpdates:
    """Steps that update parameters would do it once for each replica."""

    class Stepping(StepByFirstSample):
        def train_step(self, x: torch.Tensor, optimizer: Any) -> Any:
            (self.weight * 2).backward()
            optimizer = optimizer["d"] if isinstance(optimizer, dict) else optimizer
            optimizer.step()

        val_step = train_step

    @pytest.mark.parametrize("name", STEPS)
    @pytest.mark.parametrize("wrap", [lambda o: o, lambda o: {"d": o}])
    def test_an_optimizer_is_not_stepped_and_nothing_changes(
        self, name: str, wrap: Any
    ) -> None:
        model = self.Stepping({})
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        wrapper = MMDataParallel(model, ["cpu", "cpu"])
        message = (
            f"MMDataParallel.{name} {UPDATES} calls SGD.step, as every replica would. "
            "Use MMDistributedDataParallel."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            getattr(wrapper, name)(torch.zeros(4), wrap(optimizer))
        assert model.weight.item() == 1.0
        optimizer.step()  # by the caller, afterwards: as ever
        assert model.weight.item() < 1.0

    def test_an_optimizer_wrapper_is_refused_before_anything_runs(self) -> None:
        class Model(BaseModel):
            def forward(
                self, inputs: Any, data_samples: Any = None, mode: Any = ""
            ) -> Any:
                raise ZeroDivisionError

        model = Model()
        model.layer = nn.Linear(1, 1)
        wrapper = MMDataParallel(model, ["cpu", "cpu"])
        made = OptimWrapper(torch.optim.SGD(model.parameters(), 1.0))
        several = OptimWrapperDict(a=made)
        for given, of in ((made, made), ({"optim": made}, made), (several, several)):
            cls = type(of)
            message = (
                f"MMDataParallel.train_step {UPDATES} got a {cls.__module__}."
                f"{cls.__qualname__}, with which every replica would update the "
                "parameters. Use MMDistributedDataParallel."
            )
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                wrapper.train_step({"inputs": torch.ones(2, 1)}, given)

    def test_predictions_of_a_base_model_are_those_of_one_device(self) -> None:
        class Model(BaseModel):
            def forward(
                self, inputs: Any, data_samples: Any = None, mode: Any = ""
            ) -> Any:
                return [{"score": float(x)} for x in inputs]

        wrapper = MMDataParallel(Model(), ["cpu", "cpu"])
        predictions = wrapper.val_step({"inputs": torch.arange(3.0)})
        assert predictions == [{"score": float(i)} for i in range(3)]
