"""The cases of test_distributed.py: each returns a result on each rank."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from distributed_model import (
    Adversaries,
    Failing,
    Marked,
    OldFix,
    Recorder,
    Reference,
    gradients,
    make_batch,
    make_net,
    values,
)
from distributed_ranks import case
from torch.nn.parallel import DistributedDataParallel as DDP

from pyparallel import (
    DataContainer,
    MMDistributedDataParallel,
    scatter,
    scatter_kwargs,
)


def train(
    rank: int, world: int, cls: Any, steps: int = 20, **options: Any
) -> dict[str, Any]:
    net = make_net(unused=options.get("find_unused_parameters", False))
    model = cls(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        output = model.train_step(make_batch(step, rank, world), optimizer)
        output["loss"].backward()
        optimizer.step()
    return {"values": values(net), "keys": list(output)}


def with_both(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the results with our wrapper and with torch's."""
    kinds = {"ours": MMDistributedDataParallel, "torch": Reference}
    return {name: function(*args, cls, **options) for name, cls in kinds.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "unused_output": {"find_unused_parameters": True},
    "small_buckets": {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
}


@case
def training(rank: int, world: int) -> Any:
    found = {
        name: with_both(train, rank, world, **options)
        for name, options in OPTIONS.items()
    }
    # torch skips most of its preparation if Python hooks reduce the gradients.
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return found | {"python_reducer": with_both(train, rank, world, steps=3)}


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
    return with_both(_norms, rank, world)


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
    return with_both(_join, rank, world)


Point = namedtuple("Point", "x y")


@case
def calls(rank: int, world: int) -> Any:
    """Return the arguments of the model for each way to call it."""
    model = Recorder()
    ddp = MMDistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    both = {"g": optimizer, "d": torch.optim.Adam(model.parameters())}
    result: dict[str, Any] = {}
    with torch.no_grad():
        for name in ("forward", "train_step", "val_step"):
            call = ddp if name == "forward" else getattr(ddp, name)
            model.calls.clear()
            call(make_batch(0, rank, world), optimizer, both, flag=True, none=None)
            call(**make_batch(0, rank, world))
            call()
            (data, first, second), kwargs = model.calls[0]
            result[name] = [
                tuple(data["img"].shape),
                [type(box).__name__ for box in data["boxes"]],
                data["metas"],
                first is optimizer,
                [second[key] is both[key] for key in both],
                kwargs,
                sorted(model.calls[1][1]),
                model.calls[2],
            ]
    result["state"] = list(ddp.state_dict())
    names = (
        "device_ids dim output_device require_forward_param_sync "
        "require_backward_grad_sync find_unused_parameters"
    )
    result["attributes"] = [getattr(ddp, name) for name in names.split()]
    result["reducer"] = type(ddp.reducer).__name__
    return result


@case
def outputs(rank: int, world: int) -> Any:
    """Nested outputs, also where torch takes them apart for unused parameters."""
    result = {}
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
        result[unused] = [
            {key: type(value).__name__ for key, value in output.items()},
            [output["ordered"] == OrderedDict(b=1, a=2.5), output["tuple"]],
            [
                torch.equal(output["point"].x, y),
                torch.equal(output["default"]["k"][0], y),
            ],
        ]
    return result


@case
def subclasses(rank: int, world: int) -> Any:
    model = Recorder()
    with torch.no_grad():
        OldFix(model)(make_batch(0, rank, world))
        marked = Marked(model)
        marked()
        marked.train_step()
        marked.val_step()
    shape = tuple(model.calls[0][0][0]["img"].shape)
    return {"old fix": shape, "marked": [kwargs for _, kwargs in model.calls[1:]]}


@case
def on_a_device(rank: int, world: int) -> Any:
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

    result = {}
    scatter_of_ddp = "pyparallel.parallel.distributed.scatter_kwargs"
    with torch.no_grad(), patch(scatter_of_ddp, opened):
        theirs(torch.ones(1))
        result["torch"] = model.calls[-1][0][0].device.type
        for name in ("forward", "train_step", "val_step"):
            call = ddp if name == "forward" else getattr(ddp, name)
            call(batch)
            seen = model.calls[-1][0][0]
            devices = [seen["img"].device.type, seen["host"][0].device.type]
            call()
            result[name] = [devices, dict(seen["default"]), model.calls[-1]]
        result["targets"] = targets[:]
        ddp.mixed_precision = SimpleNamespace(param_dtype=torch.bfloat16)
        ddp.val_step(batch)
        seen = model.calls[-1][0][0]
        result["precision"] = [seen["img"].dtype, seen["host"][0].dtype]
    return result


@case
def failing_step(rank: int, world: int) -> Any:
    """After an exception in the step, the wrapper has the state of torch's wrapper."""
    result = {}
    for name, cls in {"ours": MMDistributedDataParallel, "torch": DDP}.items():
        net = make_net(norm=True)
        ddp = cls(Failing(net))
        step = ddp if cls is DDP else ddp.train_step
        for i in range(6):
            data = scatter(make_batch(i, rank, world), [-1])[0]
            try:
                step(data, fail=i in (1, 4))["loss"].backward()
            except ZeroDivisionError:
                assert DDP._get_active_ddp_module() is None
        log = ddp._get_ddp_logging_data()
        result[name] = [gradients(net), log["iteration"]]
    return result


@case
def reducer_in_the_step(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = Adversaries()
    ddp = MMDistributedDataParallel(model, find_unused_parameters=True)
    optimizers = {k: torch.optim.SGD(getattr(model, k).parameters(), 0.1) for k in "gd"}
    start = values(model)
    for step in range(6):
        data = torch.rand(
            3, 2, generator=torch.Generator().manual_seed(9 * step + rank)
        )
        ddp.train_step(data, optimizers, ddp_reducer=ddp.reducer)
    return [values(model), start]


@case
def on_a_gpu(rank: int, world: int) -> Any:
    """Return the devices of the model's tensors and the results of two steps."""
    model = Recorder().cuda()
    ddp = MMDistributedDataParallel(model, device_ids=[0])
    result: dict[str, Any] = {}
    with torch.no_grad():
        for name in ("forward", "train_step", "val_step"):
            call = ddp if name == "forward" else getattr(ddp, name)
            host = DataContainer([[torch.ones(1)]], cpu_only=True)
            call(make_batch(0, rank, world), defaultdict(list, a=[host]))
            data, default = model.calls[-1][0]
            call()
            result[name] = [
                data["img"].device.type,
                default["a"][0][0].device.type,
                model.calls[-1],
            ]
    layer = torch.nn.Linear(2, 1).cuda()
    layer.train_step = layer.forward
    step = MMDistributedDataParallel(
        layer, device_ids=[0], static_graph=True
    ).train_step
    for _ in range(2):
        layer.zero_grad()
        step(DataContainer([torch.ones(3, 2)])).sum().backward()
        result["gradient"] = layer.weight.grad.cpu()
    return result
