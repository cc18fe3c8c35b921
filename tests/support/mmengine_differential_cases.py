"""The work of the ranks of test_differential_wrappers.py: ours and mmengine's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from distributed_ranks import case
from mmengine_adversaries import Model, all_values, optimizers, wrappers
from mmengine_training import Net, batch, sgd, values
from torch import nn

from pyparallel import mmengine as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mmengine uses torch.jit
    import mmengine.model as theirs
    from mmengine.model import is_model_wrapper
    from mmengine.optim import OptimWrapper, OptimWrapperDict

BOTH = {"ours": ours, "theirs": theirs}


@case
def training(rank: int, world: int) -> Any:
    """Eight micro-steps with mmengine's optimizer wrapper."""
    result: dict[str, Any] = {}
    options: dict[str, Any] = {
        "plain": {},
        "static_graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True, "detect_anomalous_params": True},
    }
    for name, kwargs in options.items():
        found = {}
        for kind, library in BOTH.items():
            net = Net(unused=name == "unused")
            model = library.MMDistributedDataParallel(net, **kwargs)
            # torch's static graph does not start with a step that is not reduced.
            every = 1 if name == "static_graph" else 3
            wrapper = OptimWrapper(sgd(model), every, {"max_norm": 0.5})
            wrapper.initialize_count_status(model, 0, 8)
            logged = [
                model.train_step(batch(number, world, rank), wrapper)
                for number in range(8)
            ]
            inputs = {"inputs": batch(9, world, rank)["inputs"]}
            with torch.no_grad():
                predicted = [model.val_step(inputs), model.test_step(inputs)]
            losses = torch.stack([each["loss"].detach() for each in logged])
            keys = [list(each) for each in logged] + [list(model.state_dict())]
            found[kind] = (values(net), losses, *predicted, keys)
        result[name] = found
    return result


class Simple(Model):
    """Without features that mmengine's wrapper lacks: None, lists, own parameters."""

    def __init__(self) -> None:
        super().__init__()
        del self.missing, self.same_generator, self.shifts, self.scale
        self.offset.zero_()

    def fake(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.generator(inputs))

    def made_parameters(self) -> list[nn.Parameter]:
        return list(self.generator.parameters())


@case
def separate(rank: int, world: int) -> Any:
    found = {}
    for kind, library in BOTH.items():
        model = Simple()
        both = optimizers(model)
        warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers
        wrapped = library.MMSeparateDistributedDataParallel(model)
        if kind == "ours":
            wrapper: Any = wrappers(both, 1, 20)
        else:
            each = {name: OptimWrapper(optimizer) for name, optimizer in both.items()}
            wrapper = OptimWrapperDict(**each)
        for number in range(20):
            wrapped.train_step(batch(number, world, rank), wrapper)
        kinds = [type(child).__name__ for child in model.children()]
        keys = [*wrapped.state_dict(), *kinds, wrapped.eval().training]
        found[kind] = (all_values(model), keys)
    return found


@case
def classes(rank: int, world: int) -> Any:
    names = ["MMDistributedDataParallel", "MMSeparateDistributedDataParallel",
             "MMFullyShardedDataParallel"]  # fmt: skip
    model = ours.MMDistributedDataParallel(Net())
    return [
        *(issubclass(getattr(ours, name), getattr(theirs, name)) for name in names),
        is_model_wrapper(model),
        is_model_wrapper(ours.MMSeparateDistributedDataParallel(Simple())),
    ]


def paused(wrapped: Any) -> None:
    with wrapped.no_sync():
        pass


@case
def fixed(rank: int, world: int) -> Any:
    """Return the behaviour of mmengine where ours differs on purpose."""
    raised = {}
    tries: dict[str, Any] = {
        "device_ids": lambda library: library.MMDistributedDataParallel(
            Net(), device_ids=[rank]
        ),
        "no_sync": lambda library: paused(
            library.MMSeparateDistributedDataParallel(Simple())
        ),
        "a child that is None": lambda library: (
            library.MMSeparateDistributedDataParallel(Model())
        ),
    }
    for name, call in tries.items():
        for kind, library in BOTH.items():
            try:
                call(library)
                raised[name, kind] = ""
            except (ValueError, AttributeError, RuntimeError) as error:
                raised[name, kind] = type(error).__name__
    return raised
