"""replicate on the host, with copies to other devices, and its errors."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pyparallel import replicate
from pyparallel.parallel import replicate as replicate_module
from pyparallel.transfer import between_devices

pytestmark = [pytest.mark.one_backend, pytest.mark.cuda_torch]

CPU, FAR, FARTHER = torch.device("cpu"), torch.device("meta"), torch.device("meta", 1)
TWO = ["cpu", "cpu"]


class Odd(nn.Module):
    """Parameters, buffers and children at unusual places, some of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.listed = nn.ParameterList([torch.ones(3), torch.zeros(3)])
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.LayerNorm(3)})
        self.keyed = nn.ParameterDict({"scale": torch.full((3,), 2.0)})
        self.nothing: nn.Module | None = None
        self.register_module("absent", None)
        self.register_parameter("none", None)
        self.register_buffer("no_buffer", None)
        self.register_buffer("seen", torch.zeros(1))
        self.tied.register_buffer("seen", self.seen)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.again(x)) + self.listed[0] + self.listed[1]
        return self.named["b"](self.named["a"](x)) * self.keyed["scale"] * self.frozen


class Lookup(nn.Module):
    """Rows of a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.rows((x[:, 0] > 0).long())
        return rows


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def run_both(module: nn.Module, x: torch.Tensor, devices: Any) -> Any:
    """Return gradients by replicas of the parts of ``x``, and by the module itself."""
    parts = zip(replicate(module, devices), x.chunk(len(devices)), strict=True)
    outputs = [replica(part) for replica, part in parts]
    torch.cat(outputs).square().sum().backward()
    by_replicas = gradients(module)
    module.zero_grad()  # it drops them
    module(x).square().sum().backward()
    return by_replicas, gradients(module)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 3),
        Odd,
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda: parametrize.register_parametrization(
            nn.Linear(3, 3), "weight", nn.Softplus()
        ),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)).eval(),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        Lookup,
    ],
    ids=["linear", "odd", "nested", "parametrized", "hooked", "norm", "sparse"],
)
@pytest.mark.parametrize("num_devices", [2, 3])
def test_gradients_are_those_of_the_module_on_the_whole_batch(
    make: Any, num_devices: int
) -> None:
    torch.manual_seed(0)
    by_replicas, alone = run_both(make(), torch.randn(5, 3), ["cpu"] * num_devices)
    assert any(grad is not None for grad in alone.values())
    dense = [
        [None if grad is None else grad.to_dense() for grad in each.values()]
        for each in (by_replicas, alone)
    ]
    torch.testing.assert_close(*dense)


def test_lists_of_devices_may_be_empty_short_or_named_in_any_way() -> None:
    net = nn.Linear(1, 1)
    assert replicate(net, []) == []
    for devices in ("cpu", -1, CPU, [-1], (CPU,), iter(["cpu"])):
        (replica,) = replicate(net, devices)
        assert type(replica) is nn.Linear and replica is not net
    assert len(replicate(nn.ReLU(), ["cpu"] * 3)) == 3


def test_parameters_share_memory_and_have_a_history_each() -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    first, second = (replica[0] for replica in replicate(net, TWO))
    pointers = {each.weight.data_ptr() for each in (first, second, net[0])}
    assert len(pointers) == 1
    assert first.weight.grad_fn is not second.weight.grad_fn
    assert list(first.parameters()) == []
    assert list(first._former_parameters) == ["weight", "bias"]
    assert first._former_parameters["weight"] is first.weight
    (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
    assert net[0].weight.grad is not None
    assert net[1].weight.grad is None, "no replica used it"


def test_a_change_of_a_parameter_before_the_backward_pass_is_noticed() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    (replica,) = replicate(net, ["cpu"])
    output = replica(torch.ones(1, 1))
    with torch.no_grad():
        net[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replicas_can_be_made_without_gradients(mode: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    with mode():
        for replica in replicate(net, TWO):
            x = torch.ones(3, 2)
            output = replica(x)
            assert torch.equal(output, net(x)) and not output.requires_grad


class TestBuffers:
    @pytest.mark.parametrize("detach", [False, True])
    def test_the_first_replica_has_those_of_the_module_the_others_copies(
        self, detach: bool
    ) -> None:
        net = nn.BatchNorm1d(1, momentum=1.0)
        replicas = replicate(net, ["cpu"] * 3, detach=detach)
        assert replicas[0].running_mean is net.running_mean
        assert len({each.running_mean.data_ptr() for each in replicas}) == 3
        for value, replica in zip((1.0, 5.0), replicas[:2], strict=True):
            replica(torch.tensor([[value], [value + 2]]))
        assert net.running_mean.tolist() == [2.0]
        assert net.num_batches_tracked == 1

    def test_a_buffer_that_requires_grad_gets_the_sum_of_gradients(self) -> None:
        net = nn.Module()
        net.register_buffer("scale", torch.ones(1, requires_grad=True))
        for replica in replicate(net, TWO):
            (replica.scale * 3).backward()
        assert net.scale.grad.tolist() == [6.0]


class TestStructure:
    def test_shared_parts_of_the_module_are_shared_in_a_replica(self) -> None:
        net = Odd()
        first, second = replicate(net, TWO)
        for replica in (first, second):
            assert replica.first is replica.again
            assert replica.tied.weight is replica.first.weight
            assert replica.tied.seen is replica.seen
            assert replica.absent is replica.none is None
            assert replica.no_buffer is replica.nothing is None
            assert not replica.frozen.requires_grad
        assert first.first is not second.first
        assert first.seen is not second.seen

    def test_the_module_is_not_changed(self) -> None:
        net = Odd()
        before = {id(each): dict(vars(each)) for each in net.modules()}
        names = [name for name, _ in net.named_parameters()]
        for replica in replicate(net, TWO):
            replica.own = 1
            replica.first.bias = None
        assert {id(each): dict(vars(each)) for each in net.modules()} == before
        assert [name for name, _ in net.named_parameters()] == names

    def test_an_rnn_runs_on_the_tensors_of_its_replica(self) -> None:
        net = nn.LSTM(2, 3)
        for replica in replicate(net, TWO):
            assert replica._flat_weights[0] is replica.weight_ih_l0
            replica(torch.ones(4, 1, 2))[0].sum().backward()
        assert net.weight_ih_l0.grad is not None


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
    def test_tensors_and_gradients_of_a_device_are_one_copy(
        self, far: list[Any]
    ) -> None:
        net = make_net()
        num_parameters, num_buffers = len([*net.parameters()]), len([*net.buffers()])
        replicas = replicate(net, [CPU, FAR, FARTHER, FAR, CPU])
        assert far == [(num_parameters + num_buffers, [FAR, FARTHER])]
        far.clear()
        sum(r(torch.ones(1, 2)).sum() for r in replicas).backward()  # type: ignore[union-attr]
        assert far == [(num_parameters, [CPU])] * 2

    @pytest.mark.usefixtures("far")
    @pytest.mark.parametrize(
        "devices",
        [[FAR], [CPU, FAR], [FAR, FARTHER], [FAR, CPU, FAR], [FAR, FAR, FARTHER]],
        ids=str,
    )
    def test_gradients_are_those_of_the_module(self, devices: Any) -> None:
        torch.testing.assert_close(*run_both(make_net(), torch.randn(6, 2), devices))

    @pytest.mark.usefixtures("far")
    def test_a_parameter_without_a_gradient_gets_none(self) -> None:
        net = make_net()
        for replica in replicate(net, [FAR, FARTHER]):
            replica[0](torch.ones(1, 2)).sum().backward()
        assert net[0].weight.grad is not None and net[2].weight.grad is None

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
        for replica in replicate(net, [FAR, CPU], detach=True):
            weight = replica[0].weight
            assert not weight.requires_grad and weight.grad_fn is None
            assert not replica(torch.ones(1, 2)).requires_grad
        assert weight.data_ptr() == net[0].weight.data_ptr()  # of the host


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

    def test_integers_are_copied_without_a_gradient_and_nothing_to_nowhere(
        self,
    ) -> None:
        whole, real = torch.arange(3), torch.ones(2, requires_grad=True)
        ((moved, also),) = between_devices.copy_to_devices([whole, real], [CPU])
        assert torch.equal(moved, whole) and not moved.requires_grad
        also.sum().backward()
        assert real.grad is not None and real.grad.tolist() == [1.0, 1.0]
        assert between_devices.copy_to_devices([], [CPU, FAR]) == [[], []]
        assert between_devices.copy_to_devices([whole], []) == []
