"""The cases of test_distributed.py: each asserts or returns a result on each rank."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pyparallel import (
    DataContainer,
    MMDistributedDataParallel,
    mmengine,
    scatter,
    scatter_kwargs,
)
from pyparallel.mmcv.distributed_deprecated import (
    MMDistributedDataParallel as Deprecated,
)
from pyparallel.mmengine import OptimWrapper
from tests.support.ranks.distributed_model import (
    METHODS,
    Adversaries,
    Failing,
    Marked,
    OldFix,
    Protocol,
    Recorder,
    Reference,
    Updating,
    caller,
    gradients,
    make_batch,
    make_net,
    values,
)
from tests.support.ranks.distributed_ranks import case, equal_on_all


def train(rank: int, world: int, cls: Any, steps: int, **options: Any) -> torch.Tensor:
    unused = options.get("find_unused_parameters", False)
    net = make_net(unused=unused)
    model = cls(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        output = model.train_step(make_batch(step, rank, world), optimizer)
        output["loss"].backward()
        optimizer.step()
    keys = ["loss", "log_vars", "num_samples"]
    assert list(output) == keys + ["not in the loss"] * unused
    return values(net)


#: Our wrapper, and torch's around a module whose forward is the step.
BOTH = {"ours": MMDistributedDataParallel, "torch": Reference}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
]


@case
def training(rank: int, world: int) -> None:
    def assert_alike(steps: int, **options: Any) -> None:
        ours, theirs = (
            train(rank, world, cls, steps, **options) for cls in BOTH.values()
        )
        assert torch.equal(ours, theirs) and equal_on_all(ours), options

    for options in OPTIONS:
        assert_alike(20, **options)
    # torch skips most of its preparation if Python hooks reduce the gradients.
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert_alike(3)


def _norms(rank: int, world: int, cls: Any) -> list[torch.Tensor]:
    """Train, validate and train; return the BatchNorm mean before each step."""
    net = make_net(norm=True)
    model = cls(net)
    for step in range(6):
        if step == 2:
            with torch.no_grad():
                model.val_step(make_batch(step, rank, world))
        else:
            model.train_step(make_batch(step, rank, world))["loss"].backward()
    return net.norm_at_entry


@case
def buffers(rank: int, world: int) -> Any:
    return {name: _norms(rank, world, cls) for name, cls in BOTH.items()}


def _join(rank: int, world: int, cls: Any) -> Any:
    net = make_net()
    model = cls(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with model.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            model.train_step(make_batch(step, rank, world), optimizer)[
                "loss"
            ].backward()
            optimizer.step()
    return {"values": values(net), "steps": step + 1}


@case
def join(rank: int, world: int) -> Any:
    return {name: _join(rank, world, cls) for name, cls in BOTH.items()}


Point = namedtuple("Point", "x y")


@case
def calls(rank: int, world: int) -> None:
    """Pass opened containers and the very optimizers to the model."""
    model = Recorder()
    ddp = MMDistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    both = {"g": optimizer, "d": torch.optim.Adam(model.parameters())}
    with torch.no_grad():
        for name in METHODS:
            call = caller(ddp, name)
            model.calls.clear()
            call(make_batch(0, 0, 2), optimizer, both, flag=True, none=None)
            call(**make_batch(0, rank, world))
            call()
            (data, first, second), kwargs = model.calls[0]
            assert data["img"].shape == (4, 3, 8, 8)
            assert [type(box) for box in data["boxes"]] == [torch.Tensor] * 4
            assert data["metas"] == [(5, 6), (7, 8), (4, 6), (8, 8)]
            assert first is optimizer
            assert all(second[key] is both[key] for key in both)
            assert kwargs == {"flag": True, "none": None}
            assert sorted(model.calls[1][1]) == ["boxes", "img", "label", "metas"]
            assert model.calls[2] == ((), {})
            images = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
            plain = {"img": images, "wide": torch.ones(1).expand(3), "names": ["a"]}
            call(plain, more=plain)
            (found,), kwargs = model.calls[3]
            assert found is kwargs["more"] is plain and plain["img"] is images
    assert list(ddp.state_dict()) == ["module.layer.weight", "module.layer.bias"]
    # The attributes that code bases read.
    assert ddp.device_ids is ddp.output_device is None
    assert ddp.dim == 0 and type(ddp.reducer).__name__ == "Reducer"
    assert not ddp.require_forward_param_sync and ddp.require_backward_grad_sync
    assert not ddp.find_unused_parameters


@case
def outputs(rank: int, world: int) -> None:
    """Nested outputs keep their types, also where torch takes them apart."""
    for unused in (False, True):
        model = Recorder()
        ddp = MMDistributedDataParallel(model, find_unused_parameters=unused)
        y = model.layer(torch.ones(1, 2))
        model.output = {
            "loss": y.sum(),
            "ordered": OrderedDict(b=1, a=2.5),
            "default": defaultdict(list, k=[y]),
            "tuple": (1, "text", None),
            "point": Point(y, 0),
        }
        output = ddp.train_step()
        output["loss"].backward()
        for key, value in model.output.items():
            assert type(output[key]) is type(value)
        assert output["ordered"] == OrderedDict(b=1, a=2.5)
        assert output["tuple"] == (1, "text", None)
        assert torch.equal(output["point"].x, y)
        assert torch.equal(output["default"]["k"][0], y)


@case
def subclasses(rank: int, world: int) -> None:
    """Every call goes through the methods that subclasses override."""
    model = Recorder()
    with torch.no_grad():
        OldFix(model)(make_batch(0, rank, world))
        marked = Marked(model)
        marked()
        marked.train_step()
        marked.val_step()
    ((data,), _), *others = model.calls
    assert isinstance(data["img"], torch.Tensor)  # opened in _run_ddp_forward
    assert [kwargs for _, kwargs in others] == [
        {"by": "to_kwargs", "target": -1},
        {"by": "scatter", "target": [-1]},
        {"by": "scatter", "target": [-1]},
    ]


@case
def on_a_device(rank: int, world: int) -> None:
    """Only our scatter may move arguments, because some must stay on the host.

    A replacement leaves all arguments on the host. So arguments on "meta" were moved by
    torch.
    """
    model = Recorder()
    ddp, theirs = MMDistributedDataParallel(model), DDP(model)
    batch = {
        "img": DataContainer([torch.ones(2, 3)], stack=True),
        "host": DataContainer([[torch.ones(1)]], cpu_only=True),
        "default": defaultdict(list, a=[1]),
    }
    for wrapper in (ddp, theirs):
        wrapper.device_ids, wrapper.device_type = [0], "meta"
    targets: list[Any] = []

    def opened(inputs: Any, kwargs: Any, ids: Any, **options: Any) -> Any:
        targets.append(list(ids))
        return scatter_kwargs(inputs, kwargs, [-1], **options)

    scatter_of_ddp = "pyparallel.parallel.distributed.scatter_kwargs"
    with torch.no_grad(), patch(scatter_of_ddp, opened):
        theirs(torch.ones(1))
        assert model.calls[-1][0][0].is_meta
        for name in METHODS:
            call = caller(ddp, name)
            call(batch)
            seen = model.calls[-1][0][0]
            assert seen["img"].device == seen["host"][0].device == torch.device("cpu")
            assert seen["default"] == {"a": [1]}
            call()
            assert model.calls[-1] == ((), {})
        assert targets == [[0]] * 6
        ddp.mixed_precision = SimpleNamespace(param_dtype=torch.bfloat16)
        ddp.val_step(batch)
        seen = model.calls[-1][0][0]
        assert (seen["img"].dtype, seen["host"][0].dtype) == (
            torch.bfloat16,
            torch.float32,
        )


@case
def failing_step(rank: int, world: int) -> None:
    """After an exception in the step, the wrapper has the state of torch's wrapper."""
    found = []
    for cls in (MMDistributedDataParallel, DDP):
        net = make_net(norm=True)
        ddp = cls(Failing(net))
        step = ddp if cls is DDP else ddp.train_step
        for i in range(6):
            data = scatter(make_batch(i, rank, world), [-1])[0]
            try:
                step(data, fail=i in (1, 4))["loss"].backward()
            except ZeroDivisionError:
                assert DDP._get_active_ddp_module() is None
        assert ddp._get_ddp_logging_data()["iteration"] == 5
        found.append(gradients(net))
    assert torch.equal(*found) and equal_on_all(found[0])


@case
def reducer_in_the_step(rank: int, world: int) -> None:
    """Backward passes inside the step are reduced by the reducer attribute."""
    torch.manual_seed(0)
    model = Adversaries()
    ddp = MMDistributedDataParallel(model, find_unused_parameters=True)
    optimizers = {k: torch.optim.SGD(getattr(model, k).parameters(), 0.1) for k in "gd"}
    start = values(model)
    for step in range(6):
        generator = torch.Generator().manual_seed(9 * step + rank)
        data = torch.rand(3, 2, generator=generator)
        ddp.train_step(data, optimizers, ddp_reducer=ddp.reducer)
    assert equal_on_all(values(model))
    assert (values(model) - start).abs().max() > 1e-2


@case
def updates_in_the_step(rank: int, world: int) -> None:
    """Refuse a backward pass that DDP would not reduce, before a parameter changes."""
    data = {"inputs": torch.full((3, 2), rank + 1.0)}
    message = (
        "MMDistributedDataParallel.train_step must leave the backward pass to its "
        "caller on several ranks, but runs one itself, whose gradients DDP does not "
        "reduce. Return the loss. For models of mmengine's protocol use "
        "MMDistributedDataParallel of pyparallel.mmengine."
    )
    kinds: list[Any] = [(Protocol, OptimWrapper)]
    kinds += [(Updating, lambda _: None), (Updating, lambda optimizer: optimizer)]
    for options, (cls, given) in itertools.product(OPTIONS[:3], kinds):
        model = cls()
        before, optimizer = values(model), torch.optim.SGD(model.parameters(), 0.1)
        ddp = MMDistributedDataParallel(model, **options)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            ddp.train_step(data, given(optimizer))
        assert torch.equal(values(model), before)
        if cls is Protocol:  # the advice
            ours = mmengine.MMDistributedDataParallel(model)
            ours.train_step(data, given(optimizer))
            assert equal_on_all(values(model))
            assert not torch.equal(values(model), before)
    # Ranks that shall not reduce: local updates, and groups of one rank.
    with ddp.no_sync():
        ddp.train_step(data, optimizer)
    assert not equal_on_all(values(model))
    groups = [torch.distributed.new_group([each]) for each in range(world)]
    alone = MMDistributedDataParallel(Updating(), process_group=groups[rank])
    alone.train_step(data, None)


@case
def static_graphs(rank: int, world: int) -> None:
    """Reduce the first pass of a static graph within no_sync, also in a copy."""
    made = MMDistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    for copied in (lambda each: each, copy.deepcopy, by_pickle):
        ddp = copied(made)
        for _ in range(2):
            with torch.no_grad(), ddp.no_sync():
                ddp(torch.ones(1, 2))
            with ddp.no_sync():
                ddp(torch.full((1, 2), 1.0 * rank)).sum().backward()
            ddp(torch.full((1, 2), 1.0 * rank)).sum().backward()
            assert ddp.module.weight.grad.tolist() == [[world - 1.0] * 2], copied
            assert ddp.require_backward_grad_sync
            ddp.zero_grad()


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


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


@case
def deprecated(rank: int, world: int) -> None:
    """Copy the state of rank 0 to all ranks, but do not reduce gradients."""
    options: list[dict[str, Any]] = [
        {},
        {"bucket_cap_mb": 1e-6},
        {"broadcast_buffers": False},
    ]
    for each in options:
        model, expected = Mixed(rank), Mixed(0).tensors()
        if "broadcast_buffers" in each:
            expected["hidden"] = model.hidden.clone()
        assert (rank == 0) == torch.equal(model.weight, expected["weight"])
        wrapper = Deprecated(model, **each)
        for name, tensor in model.tensors().items():
            assert torch.equal(tensor, expected[name]), (each, name)
    wrapper(torch.full((4,), rank + 1.0)).backward()
    assert torch.equal(model.weight.grad, torch.full((3, 4), rank + 1.0))


@case
def on_a_gpu(rank: int, world: int) -> None:
    model = Recorder().cuda()
    ddp = MMDistributedDataParallel(model, device_ids=[0])
    with torch.no_grad():
        for name in METHODS:
            call = caller(ddp, name)
            host = DataContainer([[torch.ones(1)]], cpu_only=True)
            call(make_batch(0, rank, world), defaultdict(list, a=[host]))
            data, default = model.calls[-1][0]
            assert data["img"].is_cuda and not default["a"][0][0].is_cuda
            call()
            assert model.calls[-1] == ((), {})
    layer: Any = torch.nn.Linear(2, 1).cuda()
    layer.train_step = layer.forward
    ddp = MMDistributedDataParallel(layer, device_ids=[0], static_graph=True)
    for _ in range(2):
        layer.zero_grad()
        ddp.train_step(DataContainer([torch.ones(3, 2)])).sum().backward()
        assert layer.weight.grad.tolist() == [[3.0, 3.0]]
