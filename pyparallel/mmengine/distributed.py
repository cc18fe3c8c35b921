"""MMDistributedDataParallel: DDP whose steps are those of mmengine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..parallel import distributed
from ..parallel.registry import Registry, is_instance_of, uncompiled
from ._steps import ModelSteps, TrainStep
from ._upstream import MMDistributedDataParallelBase, provided, provides, upstream
from .anomalous_params import detect_anomalous_params as find_anomalous


def _registry() -> Any:
    """Return mmengine's registry, or one with the classes that torch has."""
    found = upstream("MODEL_WRAPPERS")
    if found is None:
        found = Registry("model_wrapper")
        found.register_module(module=nn.DataParallel)
        found.register_module(module=nn.parallel.DistributedDataParallel)
    return found


#: The classes of which `is_model_wrapper` knows the instances, with all subclasses:
#: mmengine's registry where that is installed, otherwise one with torch's classes.
MODEL_WRAPPERS: Any = _registry()


@provides("MODEL_WRAPPERS")
class MMDistributedDataParallel(
    TrainStep,
    ModelSteps,
    distributed.MMDistributedDataParallel,
    MMDistributedDataParallelBase,
):
    """``DistributedDataParallel`` for a `BaseModel`: it preprocesses, trains and logs.

    The forward pass of `train_step` is a forward of DDP, so ``static_graph``,
    ``find_unused_parameters``, ``no_sync`` and the rest do what torch says. The second
    argument is not ``device_ids``.

    Args:
        module: a model with ``data_preprocessor``, ``parse_losses``, ``val_step``,
            ``test_step``, and a ``forward`` that takes a ``mode``.
        detect_anomalous_params: log, after each training step, which parameters its
            loss did not depend on; see `detect_anomalous_params`. For debugging.
        **kwargs: of torch's class. ``device_ids`` and ``output_device`` are left out
            for a model on the CPU, where torch refuses them: runners always give them.

    DataContainers of a batch are opened before the preprocessor, or by it. From
    mmengine ``MMDistributedDataParallel``, whose ``isinstance`` checks it passes.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = False, **kwargs: Any
    ) -> None:
        if _is_on_cpu(module):
            kwargs = {**kwargs, "device_ids": None, "output_device": None}
        self._check_same_model(module, **kwargs)
        DistributedDataParallel.__init__(self, module, **kwargs)
        self.detect_anomalous_params = detect_anomalous_params

    def _after_update(self, loss: torch.Tensor) -> None:
        if self.detect_anomalous_params:
            find_anomalous(loss, self)


def is_model_wrapper(model: Any, registry: Any = MODEL_WRAPPERS) -> bool:
    """Tell whether ``model`` wraps the real model in its attribute ``module``.

    True for instances of the classes in the registry or its children, and for their
    subclasses; also when ``torch.compile`` wraps the wrapper. `MODEL_WRAPPERS` has the
    wrappers of ``pyparallel.mmengine``, too. Objects that are not modules give False.

    Args:
        model: anything.
        registry: where to look.

    From mmengine, which did not look behind ``torch.compile``.
    """
    model = uncompiled(model)
    ours: tuple[Any, ...] = tuple(provided.get("MODEL_WRAPPERS", ()))
    if registry is MODEL_WRAPPERS and isinstance(model, ours):
        return True
    return is_instance_of(model, registry)


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
