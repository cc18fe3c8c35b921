"""MMDataParallel with several replicas, compared with one on the whole batch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from distributed_model import Net, make_samples
from torch import nn
from torch.nn.functional import cross_entropy

from pyparallel import DataContainer, MMDataParallel, collate, scatter

pytestmark = [pytest.mark.one_backend, pytest.mark.cuda_torch]

METHODS = ["forward", "train_step", "val_step"]


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


def caller(wrapper: Any, method: str) -> Any:
    return wrapper if method == "forward" else getattr(wrapper, method)


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


class Counted(Net):
    """The model of the distributed tests; it counts its samples."""

    def train_step(self, data: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        loss = cross_entropy(self.head(self(data)), data["label"])
        return dict(loss=loss, num_samples=len(data["metas"]))


@pytest.mark.slow
def test_training_on_ragged_samples_in_containers_is_that_of_one_device() -> None:
    torch.manual_seed(0)
    alone = Counted()
    wrapper = MMDataParallel(copy.deepcopy(alone), ["cpu", "cpu"])
    sizes = [(step, 8 if step % 5 else (6, 5, 4, 2)[step // 5]) for step in range(20)]
    chunked = [collate(make_samples(step, n), samples_per_gpu=4) for step, n in sizes]
    whole = [collate(make_samples(step, n), samples_per_gpu=8) for step, n in sizes]
    ours, theirs = trained(wrapper, chunked, False), trained(alone, whole, True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


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
        class Loss(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.sum()

        wrapper = MMDataParallel(Loss(), ["cpu", "cpu"])
        assert wrapper(torch.ones(3)).tolist() == [2, 1]
        assert wrapper(torch.ones(1)).tolist() == [1]


class TestModes:
    @pytest.mark.parametrize("method", METHODS)
    def test_an_error_names_its_replica(self, method: str) -> None:
        class Failing(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                if x[0] == 3:
                    raise KeyError("in the model")
                return x

            train_step = val_step = forward

        wrapper = MMDataParallel(Failing(), ["cpu"] * 2)
        with pytest.raises(KeyError, match="in the model") as caught:
            caller(wrapper, method)(torch.arange(6.0))
        notes = getattr(caught.value, "__notes__", [])
        assert any("1 on device cpu" in note for note in notes)


class TestSubclasses:
    @pytest.mark.parametrize("method", METHODS)
    def test_all_four_methods_are_called(self, method: str) -> None:
        seen: list[str] = []

        class Marked(MMDataParallel):
            def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
                seen.append(f"scatter {len(device_ids)}")
                return super().scatter(inputs, kwargs, device_ids)

            def replicate(self, module: Any, device_ids: Any) -> Any:
                seen.append(f"replicate {len(device_ids)}")
                return super().replicate(module, device_ids)

            def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
                seen.append(f"parallel_apply {len(replicas)}")
                return super().parallel_apply(replicas, inputs, kwargs)

            def gather(self, outputs: Any, output_device: Any) -> Any:
                seen.append(f"gather {len(outputs)}")
                return super().gather(outputs, output_device)

        data = make_data(2)
        caller(Marked(Steps(), ["cpu"] * 3), method)(
            data["x"] if method == "forward" else data
        )
        first = ["scatter 3", "replicate 2", "parallel_apply 2", "gather 2"]
        assert seen[:4] == first and set(seen[4:]) <= {"gather 2"}
