"""Errors of replicate, and copies to other devices, run on the host."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pyparallel import replicate
from pyparallel.parallel import replicate as replicate_module
from pyparallel.transfer import between_devices

pytestmark = pytest.mark.one_backend

CPU, FAR, FARTHER = torch.device("cpu"), torch.device("meta"), torch.device("meta", 1)


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1)))


def compiled_in_place() -> nn.Module:
    net = nn.Sequential(nn.Linear(1, 1))
    net[0].compile(backend="eager")
    return net


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, device="meta"))


PLAIN = (
    "module must be made of plain modules, but module{} is scripted or compiled ({}). "
    "Replicate the module that it was made from."
)
REFUSED: dict[str, Any] = {
    "module must be a torch.nn.Module, but is function.": (
        lambda: replicate(scripted, ["cpu"])  # type: ignore[arg-type]
    ),
    PLAIN.format(".0", "torch.jit._trace.TopLevelTracedModule"): (
        lambda: replicate(scripted(), ["cpu"])
    ),
    PLAIN.format(".0", "torch.nn.modules.linear.Linear"): (
        lambda: replicate(compiled_in_place(), ["cpu"])
    ),
    PLAIN.format("", "torch._dynamo.eval_frame.OptimizedModule"): (
        lambda: replicate(torch.compile(nn.Linear(1, 1), backend="eager"), ["cpu"])
    ),
    "module must be on one device, but has 0.weight on cpu and 1.weight on meta.": (
        lambda: replicate(on_two_devices(), ["cpu"])
    ),
    "devices must be a list of devices, but is 1.5 (float).": (
        lambda: replicate(nn.Linear(1, 1), 1.5)  # type: ignore[arg-type]
    ),
    "a device must be an index, a string or a torch.device, but is None (None).": (
        lambda: replicate(nn.Linear(1, 1), [None])  # type: ignore[list-item]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_are_refused(message: str) -> None:
    error = ValueError if "on one device" in message else TypeError
    with pytest.raises(error, match=f"^{re.escape(f'replicate: {message}')}$"):
        REFUSED[message]()


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        replicate(nn.LazyLinear(1), ["cpu"])


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices with the names of remote ones; copies to them stay on the host."""
    calls: list[Any] = []

    def copies(tensors: Any, devices: Any) -> Any:
        calls.append((len(tensors), list(devices)))
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(between_devices, "_copies", copies)
    monkeypatch.setattr(replicate_module, "_targets", lambda devices: devices)
    return calls


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).eval()


class TestOtherDevices:
    def test_all_others_get_everything_at_once(self, far: list[Any]) -> None:
        net = make_net()
        num_tensors = len([*net.parameters(), *net.buffers()])
        replicate(net, [CPU, FAR, FARTHER, FAR, CPU])
        assert far == [(num_tensors, [FAR, FARTHER])]

    @pytest.mark.usefixtures("far")
    @pytest.mark.parametrize(
        "devices",
        [[FAR], [CPU, FAR], [FAR, FARTHER], [FAR, CPU, FAR], [FAR, FAR, FARTHER]],
        ids=str,
    )
    def test_gradients_are_those_of_the_module(self, devices: Any) -> None:
        net, x = make_net(), torch.randn(6, 2)
        parts = x.chunk(len(devices))
        outputs = [
            replica(part)
            for replica, part in zip(replicate(net, devices), parts, strict=True)
        ]
        torch.cat(outputs).square().sum().backward()
        by_replicas = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        net(x).square().sum().backward()
        alone = [p.grad for p in net.parameters()]
        torch.testing.assert_close(by_replicas, alone)

    def test_the_gradients_of_one_device_return_in_one_copy(
        self, far: list[Any]
    ) -> None:
        net = make_net()
        loss = sum(r(torch.ones(1, 2)).sum() for r in replicate(net, [FAR, FARTHER]))
        far.clear()
        loss.backward()  # type: ignore[union-attr]
        num_parameters = len(list(net.parameters()))
        assert far == [(num_parameters, [CPU])] * 2

    @pytest.mark.usefixtures("far")
    def test_gradients_have_gradients(self) -> None:
        net = nn.Linear(1, 1, bias=False)
        (replica,) = replicate(net, [FAR])
        loss = replica(torch.tensor([[2.0]])).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, net.weight, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), net.weight)
        torch.testing.assert_close(second, 6 * 2.0**3 * net.weight.detach())

    @pytest.mark.usefixtures("far")
    def test_replicas_on_one_far_device_share_parameters_and_not_buffers(self) -> None:
        net = make_net()
        first, second = replicate(net, [FAR, FAR])
        assert first[0].weight.data_ptr() == second[0].weight.data_ptr()
        assert first[0].weight.data_ptr() != net[0].weight.data_ptr()
        assert first[1].running_mean is not second[1].running_mean
        assert net[1].running_mean is not first[1].running_mean
        pointers = {each[1].running_mean.data_ptr() for each in (net, first, second)}
        assert len(pointers) == 3


class TestCopiesBetweenDevices:
    def test_devices_with_packed_copies_of_torch_get_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Any] = []

        def broadcast(tensors: Any, devices: Any) -> Any:
            seen.append(([each.dtype for each in tensors], devices))
            return [[(device, each) for each in tensors] for device in devices]

        comm = SimpleNamespace(comm=SimpleNamespace(broadcast_coalesced=broadcast))
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: comm)
        tensors = [
            torch.empty(2, device="meta"),
            torch.empty(2, device="meta", dtype=torch.complex64),
            torch.empty(0, device="meta", dtype=torch.int64),
        ]
        (copied,) = between_devices._copies(tensors, [FARTHER])
        assert seen == [([torch.float32, torch.int64], [FAR, FARTHER])]
        assert copied[0] == (FARTHER, tensors[0])  # type: ignore[comparison-overlap]
        assert copied[1].dtype is torch.complex64  # by Tensor.to
        assert copied[2] == (FARTHER, tensors[2])  # type: ignore[comparison-overlap]

    def test_copies_to_the_host_use_to_host(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            torch, "get_device_module", lambda device=None: SimpleNamespace()
        )
        monkeypatch.setattr(
            between_devices,
            "MixedHostCopy",
            lambda tensors, api, snapshot: SimpleNamespace(
                wait=lambda: ["came", len(tensors)]
            ),
        )
        tensors = [torch.empty(1, device="meta")]
        assert between_devices._copies(tensors, [CPU]) == [["came", 1]]

    def test_integers_are_copied_without_a_gradient(self) -> None:
        whole, real = torch.arange(3), torch.ones(2, requires_grad=True)
        ((moved, also),) = between_devices.copy_to_devices([whole, real], [CPU])
        assert torch.equal(moved, whole) and not moved.requires_grad
        also.sum().backward()
        assert real.grad is not None and real.grad.tolist() == [1.0, 1.0]
