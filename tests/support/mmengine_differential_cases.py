"""The work of the ranks of test_differential_wrappers.py: ours and mmengine's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from distributed_ranks import case
from mmengine_cases import Model, all_values, optimizers, wrappers
from mmengine_training import Net, batch, sgd, values
from torch import nn

from pyparallel import mmengine as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mmengine uses torch.jit
    import mmengine.model as theirs
    from mmengine.model import is_model_wrapper
    from mmengine.optim import OptimWrapper, OptimWrapperDict


def train(library: Any, rank: int, world: int, **options: Any) -> Any:
    """Return the results of eight micro-steps with mmengine's optimizer wrapper."""
    net = Net(unused="detect_anomalous_params" in options)
    model = library.MMDistributedDataParallel(net, **options)
    assert is_model_wrapper(model)
    # torch's static graph does not start with a step that is not reduced.
    every = 1 if "static_graph" in options else 3
    wrapper = OptimWrapper(sgd(model), every, {"max_norm": 0.5})
    wrapper.initialize_count_status(model, 0, 8)
    logged = [model.train_step(batch(n, world, rank), wrapper) for n in range(8)]
    inputs = {"inputs": batch(9, world, rank)["inputs"]}
    with torch.no_grad():
        predicted = [model.val_step(inputs), model.test_step(inputs)]
    losses = torch.stack([each["loss"].detach() for each in logged])
    keys = [list(each) for each in logged] + [list(model.state_dict())]
    return torch.cat([values(net), losses, *map(torch.flatten, predicted)]), keys


@case
def training(rank: int, world: int) -> None:
    unused = {"find_unused_parameters": True, "detect_anomalous_params": True}
    plans: list[dict[str, Any]] = [{}, {"static_graph": True}, unused]
    for options in plans:
        mine, keys = train(ours, rank, world, **options)
        other, their_keys = train(theirs, rank, world, **options)
        assert torch.equal(mine, other) and keys == their_keys, options


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
def separate(rank: int, world: int) -> None:
    found: list[Any] = []
    warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers
    for library in (ours, theirs):
        model = Simple()
        both = optimizers(model)
        wrapped = library.MMSeparateDistributedDataParallel(model)
        assert is_model_wrapper(wrapped)
        wrapper: Any = wrappers(both, 1, 20)
        if library is theirs:
            wrapper = OptimWrapperDict(**{k: OptimWrapper(o) for k, o in both.items()})
        for number in range(20):
            wrapped.train_step(batch(number, world, rank), wrapper)
        kinds = [type(child).__name__ for child in model.children()]
        keys = [*wrapped.state_dict(), *kinds, wrapped.eval().training]
        found.append((all_values(model), keys))
    (mine, keys), (other, their_keys) = found
    assert torch.equal(mine, other) and keys == their_keys
