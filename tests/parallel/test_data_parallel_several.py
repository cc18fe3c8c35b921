"""MMDataParallel with several replicas: training, parts, and the outputs of steps."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from pyparallel import DataContainer, MMDataParallel, scatter
from pyparallel.mmengine import BaseModel, OptimWrapper, OptimWrapperDict
from tests.support.ranks.distributed_model import METHODS, caller

pytestmark = [pytest.mark.one_backend, pytest.mark.cuda_torch]


class Steps(nn.Module):
    """A regression whose steps return what runners of mmcv 1.x expect."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.norm_of_nothing = nn.Linear(2, 2)  # gets no gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def train_step(self, data: Any, optimizer: Any = None) -> dict[str, Any]:
        output = self(data["x"])
        loss = (output - data["y"]).square().mean()
        return dict(
            loss=loss,
            log_vars=OrderedDict(loss=loss.item(), mae=output.abs().mean(), lr=0.5),
            num_samples=len(data["x"]),
            output=output,
        )

    val_step = train_step


class Seen(nn.Module):
    """Records the module and the arguments of each call in one list of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((self, args, kwargs))
        return None

    train_step = val_step = forward


def make_data(num_samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, 3, generator=random),
        "y": torch.randn(num_samples, 1, generator=random),
    }


def trained(wrapper: Any, batches: list[Any], open_first: bool) -> list[torch.Tensor]:
    """Return the parameters after a step of SGD for each batch, and the losses."""
    optimizer = torch.optim.SGD(
        wrapper.parameters(), 0.1, momentum=0.9, weight_decay=0.1
    )
    losses = []
    for batch in batches:
        data = scatter(batch, [-1])[0] if open_first else batch
        output = wrapper.train_step(data, optimizer)
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        losses.append(output["loss"].detach())
    return [*(p.detach() for p in wrapper.parameters()), torch.stack(losses)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=str
)
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_training_is_that_of_one_device_on_the_whole_batch(
    num_replicas: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    alone = Steps().to(dtype)
    wrapper = MMDataParallel(copy.deepcopy(alone), ["cpu"] * num_replicas)
    sizes = [8, 8, 8, 8, 5] * 4  # of 20 steps; every fifth ends an epoch
    batches = [
        {key: value.to(dtype) for key, value in make_data(size, seed).items()}
        for seed, size in enumerate(sizes)
    ]
    ours, theirs = trained(wrapper, batches, False), trained(alone, batches, True)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert alone.norm_of_nothing.weight.grad is None
    assert wrapper.module.norm_of_nothing.weight.grad is None


class TestDevices:
    @pytest.mark.parametrize("present", [False, True])
    def test_the_host_named_several_times_is_several_replicas(
        self, present: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: present)
        host = torch.device("cpu")
        for asked in (["cpu", -1, "cpu:0"], (host,) * 3, iter([-1] * 3)):
            for target in (None, "cpu", -1):
                wrapper = MMDataParallel(nn.Linear(1, 1), asked, target)
                assert wrapper.output_device == host
                asked = wrapper.device_ids
                assert asked == [host] * 3

    def test_an_invalid_output_device_is_named(self) -> None:
        message = "MMDataParallel: a device for outputs must be -1 or name a device"
        with pytest.raises(ValueError, match=message):
            MMDataParallel(nn.Linear(1, 1), ["cpu", "cpu"], "nowhere")

    @pytest.mark.parametrize("method", METHODS)
    def test_a_module_elsewhere_is_an_error(self, method: str) -> None:
        wrapper = MMDataParallel(nn.Linear(1, 1, device="meta"), ["cpu", "cpu"])
        with pytest.raises(RuntimeError, match="must have its parameters and buffers"):
            caller(wrapper, method)(torch.ones(2, 1))


class TestParts:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("num_devices", [3, 4])
    def test_every_replica_gets_its_part_in_order(
        self, method: str, num_devices: int
    ) -> None:
        model, both = Seen(), {"g": object()}
        wrapper = MMDataParallel(model, ["cpu"] * num_devices)
        key = DataContainer([[1, 2], [3, 4], [5]], cpu_only=True)
        caller(wrapper, method)(torch.arange(5.0), both, key=key)
        assert all(replica is not model for replica, _, _ in model.calls)
        calls = sorted(model.calls, key=lambda call: float(call[1][0][0]))
        assert [args[0].tolist() for _, args, _ in calls] == [[0, 1], [2, 3], [4]]
        assert all(args[1]["g"] is both["g"] for _, args, _ in calls)
        assert [kwargs for _, _, kwargs in calls] == [{"key": k} for k in key.data]

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("args", [(), (torch.ones(1),)], ids=["none", "one"])
    def test_one_part_uses_the_module_itself(self, method: str, args: Any) -> None:
        model = Seen()
        caller(MMDataParallel(model, ["cpu"] * 2), method)(*args)
        assert model.calls == [(model, args, {})]

    def test_forward_gathers_along_dim(self) -> None:
        wrapper = MMDataParallel(nn.Tanh(), ["cpu", "cpu"], dim=1)
        x = torch.randn(2, 5)
        assert torch.equal(wrapper(x), x.tanh())

    def test_losses_that_forward_returns_are_a_vector_also_of_one_part(self) -> None:
        wrapper = MMDataParallel(nn.MSELoss(), ["cpu", "cpu"])
        for num, expected in ((3, [1, 1]), (1, [1])):
            assert wrapper(torch.ones(num), torch.zeros(num)).tolist() == expected

    @pytest.mark.parametrize("method", METHODS)
    def test_the_four_steps_can_be_overridden(self, method: str) -> None:
        names, seen = ["scatter", "replicate", "parallel_apply", "gather"], []

        def noting(name: str) -> Any:
            def call(*args: Any) -> Any:
                seen.append(name)
                return getattr(MMDataParallel, name)(*args)

            return call

        own = type("Own", (MMDataParallel,), {name: noting(name) for name in names})
        data = make_data(2)
        caller(own(Steps(), ["cpu"] * 3), method)(
            data["x"] if method == "forward" else data
        )
        assert list(dict.fromkeys(seen)) == names


STEPS = ["train_step", "val_step"]
UPDATES = "must leave updates to its caller on several devices, but"


class StepByFirstSample(nn.Module):
    """A step that returns a value selected by the first sample of its part."""

    def __init__(self, outputs: dict[int, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.outputs = outputs

    def train_step(self, x: Any, *args: Any) -> Any:
        while not isinstance(x, torch.Tensor):
            x = x["x"] if isinstance(x, dict) else x[0]
        return self.outputs[int(x.flatten()[0])]

    val_step = train_step


def step(one: Any, other: Any, data: Any = None, name: str = "train_step") -> Any:
    """Return the output of a step whose replicas return ``one`` and ``other``."""
    wrapper = MMDataParallel(StepByFirstSample({0: one, 2: other}), ["cpu", "cpu"])
    return getattr(wrapper, name)(torch.arange(3) if data is None else data)


def output(loss: float, num_samples: Any = None, **more: Any) -> dict[str, Any]:
    made = dict(loss=torch.tensor(loss), **more)
    return made if num_samples is None else made | {"num_samples": num_samples}


class TestCombined:
    @pytest.mark.parametrize("name", STEPS)
    def test_losses_and_logs_are_weighted_and_samples_counted(self, name: str) -> None:
        logs = OrderedDict(a=1.0, b=torch.tensor(2.0), c={"d": 4}, lr=0.1)
        others = OrderedDict(a=4.0, b=torch.tensor(5.0), c={"d": 1}, lr=0.1)
        made = step(
            OrderedDict(output(3.0, 4, log_vars=logs)),
            OrderedDict(output(0.0, torch.tensor(2), log_vars=others)),
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

    def test_logs_of_infinite_values_are_infinite_or_nan(self) -> None:
        inf, most = math.inf, sys.float_info.max
        parts = ({"a": inf, "b": inf, "c": most}, {"a": -inf, "b": 1.0, "c": most / 2})
        logged = step(*(output(0.0, 2, log_vars=part) for part in parts))["log_vars"]
        assert math.isnan(logged["a"]) and logged["b"] == logged["c"] == inf

    def test_a_part_without_samples_does_not_count(self) -> None:
        made = step(output(2.0, 4), output(float("nan"), 0))
        assert made["loss"].item() == 2.0 and made["num_samples"] == 4

    def test_everything_else_is_gathered(self) -> None:
        made = step(
            output(0.0, 1, scores=torch.ones(1), names=["a"], acc=torch.tensor(0.5)),
            output(0.0, 1, scores=torch.zeros(2), names=["b"], acc=torch.tensor(0.7)),
        )
        assert made["scores"].tolist() == [1, 0, 0] and made["names"] == ["a", "b"]
        torch.testing.assert_close(made["acc"], torch.tensor([0.5, 0.7]))
        made = step(dict(loss=torch.ones(2)), dict(loss=torch.zeros(1)))
        assert made == {"loss": made["loss"]} and made["loss"].tolist() == [1, 1, 0]
        assert step(torch.tensor(1.0), torch.tensor(2.0)).tolist() == [1, 2]  # no dict

    def test_one_part_has_results_of_equal_types(self) -> None:
        made = step(output(3.0, 2, acc=torch.tensor(1.0)), None, torch.zeros(1))
        assert made["loss"].shape == () and made["loss"].item() == 3.0
        assert made["num_samples"] == 2 and made["acc"].tolist() == [1.0]


class TestCounts:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (torch.arange(3), 5.0),
            (DataContainer([[torch.zeros(2)] * 2, [torch.full((1,), 2)]]), 5.0),
            (DataContainer([torch.zeros(1), torch.full((3,), 2)], cpu_only=True), 7.5),
            (
                {"x": DataContainer([torch.zeros(4), torch.full((2,), 2)], stack=True)},
                5.0,
            ),
        ],
        ids=["tensor", "list", "cpu_only", "stacked"],
    )
    def test_without_num_samples_the_arguments_count(
        self, data: Any, expected: float
    ) -> None:
        assert step(output(3.0), output(9.0), data)["loss"].item() == expected

    def test_arguments_may_not_contain_the_number(self) -> None:
        class Own(MMDataParallel):
            """Other parts than are expected of the arguments."""

            def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
                return [(torch.tensor([i]),) for i in (0, 2)], [{}] * 2

        message = (
            ".train_step must return num_samples on several devices, to weight the "
            "loss, if its arguments do not contain the number of samples, but returned "
            "none. Return dict(loss=..., log_vars=..., num_samples=...)."
        )
        model = StepByFirstSample({0: output(1.0), 2: output(2.0)})
        several_sizes = {"x": torch.arange(3), "y": torch.ones(4)}
        for cls, number, data in (
            (MMDataParallel, 2, several_sizes),
            (Own, 3, torch.arange(3)),
        ):
            expected = re.escape(cls.__name__ + message)
            with pytest.raises(ValueError, match=f"^{expected}$"):
                cls(model, ["cpu"] * number).train_step(data)


MISMATCHES: dict[str, tuple[Any, Any]] = {
    "MMDataParallel.train_step: num_samples must be an integer, but is 1.5 (float).": (
        output(1.0, 1.5),
        output(1.0, 1),
    ),
    "MMDataParallel.train_step: num_samples must be 0 or more, but is -1.": (
        output(1.0, -1),
        output(1.0, 1),
    ),
    "MMDataParallel.train_step: num_samples must be 1 or more on one replica, but is 0 "
    "on all.": (output(1.0, 0), output(1.0, 0)),
    "gather: outputs[1] must have the keys of outputs[0], but lacks 'loss'. Return the "
    "same keys on every replica.": (output(1.0, 1), dict(num_samples=1)),
    "gather: outputs[1]['log_vars'] must have the keys of outputs[0]['log_vars'], but "
    "has 'b' too. Return the same keys on every replica.": (
        output(1.0, 1, log_vars={}),
        output(1.0, 1, log_vars={"b": 1.0}),
    ),
    "gather: outputs[1]['log_vars']['stage'] must equal "
    "outputs[0]['log_vars']['stage'], but is 'b' where 'a' was expected. Return a "
    "tensor, or a list with one entry for each sample.": (
        output(1.0, 1, log_vars={"stage": "a"}),
        output(1.0, 1, log_vars={"stage": "b"}),
    ),
}


@pytest.mark.parametrize("message", MISMATCHES)
def test_outputs_that_do_not_fit_are_refused(message: str) -> None:
    error = TypeError if "an integer" in message else ValueError
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        step(*MISMATCHES[message])


class TestUpdates:
    """Steps that update parameters would do it once for each replica."""

    class Stepping(StepByFirstSample):
        def train_step(self, x: torch.Tensor, optimizer: Any) -> Any:
            (self.weight * 2).backward()
            optimizer = optimizer["d"] if isinstance(optimizer, dict) else optimizer
            if optimizer is not None:
                optimizer.step()

        val_step = train_step

    @pytest.mark.parametrize("name", STEPS)
    @pytest.mark.parametrize("wrap", [lambda o: o, lambda o: {"d": o}, lambda o: None])
    def test_a_backward_pass_in_a_step_is_an_error_and_no_parameter_changes(
        self, name: str, wrap: Any
    ) -> None:
        model = self.Stepping({})
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        wrapper = MMDataParallel(model, ["cpu", "cpu"])
        message = (
            f"MMDataParallel.{name} must leave the backward pass to its caller on "
            "several devices, but runs one itself, whose gradients are not weighted by "
            "the numbers of samples. Return the loss."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            getattr(wrapper, name)(torch.zeros(4), wrap(optimizer))
        assert model.weight.item() == 1.0
        (model.weight * 2).backward()  # by the caller, afterwards: as ever
        optimizer.step()
        assert model.weight.item() < 1.0

    class Late(Stepping):
        """Updates by gradients of an earlier pass, or without a backward pass."""

        def train_step(self, x: torch.Tensor, optimizer: Any) -> Any:
            (optimizer["d"] if isinstance(optimizer, dict) else optimizer).step()

        val_step = train_step

    @pytest.mark.parametrize("name", STEPS)
    @pytest.mark.parametrize("wrap", [lambda o: o, lambda o: {"d": o}])
    def test_an_optimizer_is_not_stepped_and_nothing_changes(
        self, name: str, wrap: Any
    ) -> None:
        model = self.Late({})
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        (model.weight * 2).backward()
        wrapper = MMDataParallel(model, ["cpu", "cpu"])
        message = (
            f"MMDataParallel.{name} {UPDATES} calls SGD.step, as every replica would. "
            "Use MMDistributedDataParallel of pyparallel.mmengine."
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
                "parameters. Use MMDistributedDataParallel of pyparallel.mmengine."
            )
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                wrapper.train_step({"inputs": torch.ones(2, 1)}, given)
