"""The work of the ranks of test_wrappers.py."""

from __future__ import annotations

import logging
from typing import Any

import torch
from distributed_ranks import case
from mmengine_training import (
    SAMPLES,
    Net,
    alone,
    batch,
    deviation,
    gradients,
    recorded,
    sgd,
    values,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from pyparallel import DataContainer, collate, mmengine
from pyparallel.mmengine import _upstream


@case
def plain(rank: int, world: int) -> Any:
    result = {}
    options: dict[str, Any] = {
        "plain": {},
        "given devices": {"device_ids": [rank], "output_device": rank},
        "static_graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    }
    for name, kwargs in options.items():
        net = Net(unused=name == "unused")
        expected = alone(net.body, world, [[number] for number in range(20)])
        model = mmengine.MMDistributedDataParallel(net, **kwargs)
        optimizer = sgd(model)
        record = recorded(net.body, optimizer)
        wrapper = mmengine.OptimWrapper(optimizer)
        logged = [model.train_step(batch(n, world, rank), wrapper) for n in range(20)]
        result[name] = {
            "deviation": deviation(record, expected),
            "values": values(net),
            "logged": [list(logged[0]), type(logged[0]["loss"]).__name__],
            "detached": not logged[0]["loss"].requires_grad,
        }
    return result


@case
def accumulation(rank: int, world: int) -> Any:
    """Eight micro-steps in groups of three; the last of each group reduces."""
    net = Net()
    groups = [[0, 1, 2], [3, 4, 5], [6, 7]]
    expected = alone(net.body, world, groups)
    model = mmengine.MMDistributedDataParallel(net)
    reductions: list[int] = []
    now = 0

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses strings
        reductions.append(now)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, reduce)
    optimizer = sgd(model)
    record = recorded(net.body, optimizer)
    wrapper = mmengine.OptimWrapper(optimizer, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 8)
    scaled, steps, between = [], [], []
    for now in range(1, 9):
        scaled.append(1 / wrapper.scale_loss(torch.ones(())).item())
        before = len(record)
        model.train_step(batch(now - 1, world, rank), wrapper)
        steps += [now] * (len(record) - before)
        between.append(gradients(net))
    return {
        "deviation": deviation(record, expected),
        "factors": [round(each) for each in scaled],
        "steps": steps,
        "reductions": reductions,
        "between": between,
    }


class Foreign(nn.Module):
    """A preprocessor that does not support DataContainers."""

    def forward(self, data: Any, training: bool = False) -> Any:
        return {**data, "inputs": data["inputs"] * 2}


class AsTuple(nn.Module):
    def forward(self, data: Any, training: bool = False) -> Any:
        return data["inputs"], data["targets"]


class AsNothing(nn.Module):
    def forward(self, data: Any, training: bool = False) -> Any:
        return 3


@case
def batches(rank: int, world: int) -> Any:
    """Return the inputs of the model from DataContainers and from preprocessors."""
    samples = [
        {
            "inputs": DataContainer(torch.ones(5), stack=True, pad_dims=None),
            "targets": DataContainer(torch.ones(3), stack=True, pad_dims=None),
        }
        for _ in range(SAMPLES)
    ]
    contained = collate(samples, SAMPLES)
    result: dict[str, Any] = {}
    for name, preprocessor in {
        "ours": None,
        "foreign": Foreign(),
        "tuple": AsTuple(),
    }.items():
        net = Net(preprocessor)
        model = mmengine.MMDistributedDataParallel(net)
        wrapper = mmengine.OptimWrapper(sgd(model))
        losses = [
            model.train_step(data, wrapper)["loss_square"].item()
            for data in (contained, batch(0, world, rank))
        ]
        if name != "tuple":
            contained_inputs = {"inputs": contained["inputs"]}
            with torch.no_grad():
                predicted = [
                    model.val_step(contained_inputs),
                    model.test_step(contained_inputs),
                    net.body(torch.ones(SAMPLES, 5) * (2 if name == "foreign" else 1)),
                ]
            result[name + " predicted"] = predicted
        result[name] = (net.seen, losses)
    model = mmengine.MMDistributedDataParallel(Net(AsNothing()))
    try:
        model.train_step({}, mmengine.OptimWrapper(sgd(model)))
    except TypeError as error:
        result["nothing"] = str(error)
    result["is wrapper"] = mmengine.is_model_wrapper(model)
    return result


@case
def anomalies(rank: int, world: int) -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pyparallel.mmengine")
    if _upstream.available:
        from mmengine.logging import MMLogger

        logger = MMLogger.get_instance("anomalies", log_level="CRITICAL")
        logger.setLevel("ERROR")
    logger.addHandler(handler)
    model = mmengine.MMDistributedDataParallel(
        Net(unused=True), True, find_unused_parameters=True
    )
    wrapper = mmengine.OptimWrapper(sgd(model))
    model.train_step(batch(0, world, rank), wrapper)
    return sorted(lines)
