"""The deprecated wrapper: state is that of rank 0 after wrapping, and nothing more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_model import Recorder, make_batch
from distributed_ranks import Results, case, launch
from torch import nn

from pyparallel import DataContainer, is_module_wrapper
from pyparallel.mmcv.distributed_deprecated import MMDistributedDataParallel

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(100)]


class Mixed(nn.Module):
    """State of many kinds, different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.weight = nn.Parameter(torch.rand(3, 4))
        self.transposed = nn.Parameter(torch.rand(5, 2).t())
        self.double_precision = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.tied = self.weight
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("half_precision", torch.rand(3).half())
        self.register_buffer("brain", torch.rand(3).bfloat16())
        self.register_buffer("complex", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("short", torch.full((3,), rank, dtype=torch.int16))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("absent", None)
        self.register_buffer("hidden", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight @ x).sum()

    def get_extra_state(self) -> str:
        return "not a tensor"

    def set_extra_state(self, state: str) -> None:
        pass

    def tensors(self) -> dict[str, torch.Tensor]:
        state = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in state.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "tiny buckets": {"bucket_cap_mb": 1e-6},
    "no buffers": {"broadcast_buffers": False},
}


@case
def wrapped_state(rank: int, world: int) -> Any:
    result = {}
    for name, options in OPTIONS.items():
        model = Mixed(rank)
        before = model.tensors()
        MMDistributedDataParallel(model, **options)
        result[name] = (before, model.tensors())
    return result


@case
def gradients(rank: int, world: int) -> Any:
    model = Mixed(rank)
    MMDistributedDataParallel(model)(torch.full((4,), rank + 1.0)).backward()
    return model.weight.grad


@case
def opened(rank: int, world: int) -> Any:
    model = Recorder()
    model.output = {"loss": 1}
    wrapper = MMDistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result: dict[str, Any] = {"wrapper": is_module_wrapper(wrapper)}
    for name in ("forward", "train_step", "val_step"):
        call = wrapper if name == "forward" else getattr(wrapper, name)
        output = call(make_batch(0, rank, world), optimizer, flag=True)
        (data, passed), kwargs = model.calls[-1]
        call()
        result[name] = [
            output is model.output,
            tuple(data["img"].shape),
            data["metas"],
            passed is optimizer,
            kwargs,
            model.calls[-1],
        ]
    result["attributes"] = [wrapper.dim, wrapper.broadcast_buffers]
    result["state"] = list(wrapper.state_dict())
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("deprecated")
    cases = ["wrapped_state", "gradients", "opened"]
    return launch(folder, "test_distributed_deprecated", cases)


@pytest.mark.parametrize("options", OPTIONS)
def test_wrapping_gives_every_rank_the_state_of_rank_0(
    results: Results, options: str
) -> None:
    (before, after), (other_before, other_after) = (
        rank[options] for rank in results["wrapped_state"]
    )
    for name, expected in before.items():
        assert torch.equal(after[name], expected)
        if options == "no buffers" and name == "hidden":
            expected = other_before[name]
        assert torch.equal(other_after[name], expected), name
    assert not torch.equal(other_before["weight"], before["weight"])
    assert not torch.equal(other_before["hidden"], before["hidden"])


def test_a_broadcast_holds_about_bucket_cap_mb_of_one_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(
        torch.distributed,
        "broadcast",
        lambda tensor, **_: sent.append(tensor.nbytes),
    )
    model = nn.Sequential(*(nn.Linear(1, 3, bias=False) for _ in range(5)))
    model.register_buffer("steps", torch.tensor(0))
    for cap, expected in ((25, [60, 8]), (24 / 2**20, [24, 24, 12, 8])):
        sent.clear()
        MMDistributedDataParallel(model, bucket_cap_mb=cap)
        assert sorted(sent) == sorted(expected)


def test_gradients_are_not_reduced(results: Results) -> None:
    first, second = results["gradients"]
    assert torch.equal(first, torch.full((3, 4), 1.0))
    assert torch.equal(second, torch.full((3, 4), 2.0))


@pytest.mark.parametrize("method", ["forward", "train_step", "val_step"])
def test_the_model_gets_opened_containers(results: Results, method: str) -> None:
    metas = [(5, 6), (7, 8), (4, 6), (8, 8)]
    expected = [True, (4, 3, 8, 8), metas, True, {"flag": True}, ((), {})]
    assert results["opened"][0][method] == expected


def test_it_is_a_module_wrapper_with_the_attributes_of_mmcv(results: Results) -> None:
    seen = results["opened"][0]
    assert seen["wrapper"]
    assert seen["attributes"] == [0, True]
    assert seen["state"] == ["module.layer.weight", "module.layer.bias"]


def test_arguments_go_where_the_model_is() -> None:
    class Alone(MMDistributedDataParallel):
        targets: Any = None

        def _sync_params(self) -> None:
            pass

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            self.targets = device_ids
            return super().scatter(inputs, kwargs, [-1])

    batch = DataContainer([torch.ones(1, 2)], stack=True)
    for model, target in (
        (nn.Linear(2, 2), -1),
        (nn.Linear(2, 2, device="meta"), torch.device("meta")),
        (nn.Identity(), -1),
    ):
        wrapper = Alone(model)
        wrapper(batch.data[0] if target == -1 else batch.data[0].to("meta"))
        assert wrapper.targets == [target]
