"""replicate, gather and MMDataParallel on CUDA devices, compared with torch's."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import gather as torch_gather
from torch.nn.parallel import replicate as torch_replicate

from pyparallel import DataContainer, MMDataParallel, gather, replicate

pytestmark = pytest.mark.cuda

DEVICES = [
    pytest.param([0, 0], id="one GPU twice"),
    pytest.param([0, 1], id="two GPUs", marks=pytest.mark.two_gpus),
    pytest.param([0, 1, 0], id="three on two", marks=pytest.mark.two_gpus),
]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)
    )


def lazy_net() -> nn.Module:
    net = make_net()
    net(torch.ones(2, 3, 6, 6))
    return net.cuda(0)


def run(make: Any, net: nn.Module, x: torch.Tensor, devices: list[int]) -> Any:
    """Return outputs, gradients and buffers of replicas that ``make`` makes."""
    replicas = make(net, devices)
    parts = x.chunk(len(devices))
    outputs = [
        replica(part.cuda(device))
        for replica, part, device in zip(replicas, parts, devices, strict=True)
    ]
    sum(output.square().sum().to(0) for output in outputs).backward()  # type: ignore[union-attr]
    return (
        [output.detach() for output in outputs],
        [parameter.grad for parameter in net.parameters()],
        # torch shares an integer buffer between replicas on one device; we share none.
        [buffer for buffer in net.buffers() if buffer.is_floating_point()],
    )


@pytest.mark.parametrize("devices", DEVICES)
def test_replicas_are_those_of_torch(devices: list[int]) -> None:
    net, x = lazy_net(), torch.randn(6, 3, 6, 6)
    theirs = run(torch_replicate, copy.deepcopy(net), x, devices)
    torch.testing.assert_close(run(replicate, net, x, devices), theirs)


@pytest.mark.parametrize("devices", DEVICES)
def test_detached_replicas_have_no_history(devices: list[int]) -> None:
    net = lazy_net()
    for replica, device in zip(replicate(net, devices, True), devices, strict=True):
        assert replica[0].weight.device == torch.device("cuda", device)
        assert not replica[0].weight.requires_grad
        assert torch.equal(replica[0].weight.cpu(), net[0].weight.detach().cpu())


def test_a_module_on_the_host_has_replicas_on_a_device() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    first, second = replicate(net, [0, 0])
    (first(x[:2].cuda()).sum() + second(x[2:].cuda()).sum()).backward()
    by_replicas = [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    net(x).sum().backward()
    assert by_replicas[0].device.type == "cpu"
    torch.testing.assert_close(by_replicas, [p.grad for p in net.parameters()])


# torch's own gather warns of it: its gradients come from another device's stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("target", [0, "cpu"])
def test_gathered_outputs_are_those_of_torch(devices: Any, target: Any) -> None:
    def outputs() -> Any:
        torch.manual_seed(0)
        made = []
        for i, device in enumerate(devices):
            x = torch.randn(i + 1, 3, device=f"cuda:{device}", requires_grad=True)
            made.append({"x": x, "y": (x * 2, [x.sum(1)]), "loss": x.sum(), "no": None})
        return made

    ours, theirs = outputs(), outputs()
    made = gather(ours, target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scalars become a vector
        expected = torch_gather(theirs, target)
    torch.testing.assert_close(
        {key: made[key] for key in ("x", "loss")},
        {key: expected[key] for key in ("x", "loss")},
    )
    torch.testing.assert_close(made["y"], expected["y"])
    assert made["no"] is None
    for each in (made, expected):
        (each["x"].sum() + each["y"][1][0].square().sum()).backward()
        each["loss"].sum().backward()
    torch.testing.assert_close(
        [o["x"].grad for o in ours], [o["x"].grad for o in theirs]
    )


def test_many_leaves_reach_the_host_with_their_values() -> None:
    outputs = [
        {str(i): torch.full((n,), float(i), device="cuda") for i in range(300)}
        for n in (2, 1)
    ]
    made = gather(outputs, "cpu")
    for i in range(300):
        assert made[str(i)].tolist() == [i] * 3 and made[str(i)].device.type == "cpu"


def test_samples_in_containers_reach_the_target() -> None:
    outputs = [DataContainer([torch.ones(i, 4).cuda()]) for i in (1, 2)]
    made = gather(outputs, "cpu")
    assert [(len(box), box.device.type) for box in made.data] == [
        (1, "cpu"),
        (2, "cpu"),
    ]


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_step(self, data: Any, optimizer: Any = None) -> dict[str, Any]:
        loss = self.body(data["x"]).square().mean()
        return dict(loss=loss, num_samples=len(data["x"]))


@pytest.mark.parametrize("devices", DEVICES)
def test_training_is_that_of_one_device_on_the_whole_batch(devices: list[int]) -> None:
    alone, model = Steps().cuda(0), Steps().cuda(0)
    wrapper = MMDataParallel(model, devices)
    random = torch.Generator().manual_seed(0)
    both = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (alone, model)]
    for step in range(20):
        x = torch.randn(5 if step % 5 == 4 else 8, 3, generator=random)
        losses = []
        for run_step, optimizer in zip(
            (alone.train_step, wrapper.train_step), both, strict=True
        ):
            data = {"x": x.cuda() if optimizer is both[0] else x}
            optimizer.zero_grad()
            losses.append(run_step(data, optimizer)["loss"])
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
