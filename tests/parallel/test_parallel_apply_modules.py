"""Modules: torch's form compared with torch, replicas, gradients, buffers."""

from __future__ import annotations

import copy
import importlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

from pyparallel import parallel_apply

pytestmark = pytest.mark.one_backend

torch_on_host = importlib.import_module("benchmarks.torch_on_host")

TWO = ["cpu", "cpu"]


class Two(nn.Module):
    """A module of two inputs, with a keyword and a nest as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Any, y: Any = 0.0, *, scale: float = 1.0) -> dict[str, Any]:
        return {"out": self.linear(x) * scale + y, "meta": [scale]}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        pairs = zip(a, b, strict=True)
        return type(a) is type(b) and all(equal(x, y) for x, y in pairs)
    return bool(a == b)


def tensors(n: int) -> list[torch.Tensor]:
    return [torch.randn(4, 3) for _ in range(n)]


FORMS = {
    "tensors": (tensors(3), None),
    "lists of arguments": ([[x, 1.0] for x in tensors(3)], None),
    "tuples of arguments": ([(x,) for x in tensors(3)], None),
    "mixed": ([tensors(1)[0], (tensors(1)[0], 2.0), [tensors(1)[0]]], None),
    "keywords": (tensors(3), [{"scale": 2.0}, {}, {"scale": 0.5}]),
    "a tensor of inputs": (torch.randn(3, 4, 3), None),
}


@pytest.mark.parametrize("devices", [None, ["cpu"] * 3], ids=["found", "named"])
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_torch_equals_torch(form: str, devices: Any) -> None:
    inputs, kwargs = FORMS[form]
    modules = [Two() for _ in range(3)]
    expected = torch_on_host.parallel_apply(modules, inputs, kwargs, ["cpu"] * 3)
    for made in (modules, tuple(modules), nn.ModuleList(modules)):
        assert equal(parallel_apply(made, inputs, kwargs, devices), expected)
    named = parallel_apply(modules, inputs, kwargs_tup=kwargs, devices=devices)
    assert equal(named, expected)


def test_torchs_form_takes_none_for_no_keywords_and_methods_for_modules() -> None:
    modules, inputs = [Two(), Two()], tensors(2)
    expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
    methods = [module.forward for module in modules]
    assert equal(parallel_apply(methods, inputs, [None, {}], TWO), expected)
    assert equal(parallel_apply([modules[0]], inputs[:1]), expected[:1])


def test_torchs_form_has_a_thread_for_each_module() -> None:
    met = threading.Barrier(3)
    ids = parallel_apply(
        [lambda x: met.wait(30) * 0 + threading.get_ident()] * 3, [1] * 3
    )
    assert len(set(ids)) == 3


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("devices", [TWO, ["cpu"] * 3, "cpu"], ids=str)
def test_gradients_flow_to_the_module(devices: Any) -> None:
    module, oracle = network(), network()
    batch = torch.randn(7, 3)
    torch.cat(parallel_apply(module, batch, devices)).square().sum().backward()
    oracle(batch).square().sum().backward()
    for mine, other in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_gradients_flow_to_inputs_and_keyword_arguments() -> None:
    batch = torch.randn(5, 3, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    found = parallel_apply(lambda x, s: x * s, batch, TWO, module_kwargs={"s": scale})
    torch.cat(found).sum().backward()
    assert torch.equal(batch.grad, torch.full((5, 3), 2.0))
    torch.testing.assert_close(scale.grad, batch.detach().sum())


def change_by_optimizer(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def change_by_state_dict(module: nn.Module) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})


def change_by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(3)
        parameter.data = parameter.data.clone() + 1


def change_parameter(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(torch.ones(5, 3))


def change_structure(module: nn.Module) -> None:
    module[1] = nn.ReLU()
    module.append(nn.Linear(2, 4))


def change_hooks(module: nn.Module) -> None:
    module[2].register_forward_hook(lambda m, args, out: out + 5)


@pytest.mark.parametrize(
    "change",
    [
        change_by_optimizer,
        change_by_state_dict,
        change_by_data,
        change_parameter,
        change_structure,
        change_hooks,
    ],
)
def test_a_changed_module_is_used_with_its_changes(change: Any) -> None:
    module = network()
    batch = torch.randn(6, 3)
    before = torch.cat(parallel_apply(module, batch, TWO))
    change(module)
    found = torch.cat(parallel_apply(module, batch, TWO))
    assert found.shape != before.shape or not torch.allclose(found, before)
    torch.testing.assert_close(found, module(batch))


def test_training_and_evaluation_are_the_modules() -> None:
    module = nn.Dropout(0.999999)
    batch = torch.ones(6, 50)
    assert torch.cat(parallel_apply(module, batch, TWO)).sum() < 100
    module.eval()
    assert torch.equal(torch.cat(parallel_apply(module, batch, TWO)), batch)


def test_buffers_advance_by_the_first_part() -> None:
    module = nn.BatchNorm1d(3)
    oracle = copy.deepcopy(module)
    items = [torch.randn(4, 3) for _ in range(6)]
    parallel_apply(module, items, TWO)
    for item in items[:3]:
        oracle(item)
    for mine, other in zip(module.buffers(), oracle.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def test_every_part_has_a_replica_of_its_own_and_one_part_the_module() -> None:
    class Which(nn.Module):
        def forward(self, x: Any) -> int:
            self.seen = x
            return id(self)

    module = Which()
    found = parallel_apply(module, range(4), TWO)
    assert found[0] == found[1] != found[2] == found[3]
    assert not hasattr(module, "seen")
    assert parallel_apply(module, [8], "cpu") == [id(module)]
    assert module.seen == 8


def test_a_lambda_around_a_module_shares_it() -> None:
    module = network()
    batch = torch.randn(4, 3)
    found = parallel_apply(lambda x: module(x), batch, TWO)
    torch.testing.assert_close(torch.cat(found), module(batch))
