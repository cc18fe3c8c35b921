"""MMDistributedDataParallel: DDP with mmengine's steps, and `is_model_wrapper`."""

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

#: The registry of model wrappers, which `is_model_wrapper` searches: mmengine's if that
#: is installed, otherwise a registry with torch's classes.
MODEL_WRAPPERS: Any = upstream("MODEL_WRAPPERS")
if MODEL_WRAPPERS is None:
    MODEL_WRAPPERS = Registry("model_wrapper")
    MODEL_WRAPPERS.register_module(module=nn.DataParallel)
    MODEL_WRAPPERS.register_module(module=DistributedDataParallel)


@provides("MODEL_WRAPPERS")
class MMDistributedDataParallel(
    TrainStep,
    ModelSteps,
    distributed.MMDistributedDataParallel,
    MMDistributedDataParallelBase,
):
    """``DistributedDataParallel`` with the training, validation and test steps.

    The forward pass of `train_step` is a forward pass of DDP, so ``static_graph``,
    ``find_unused_parameters``, ``no_sync`` and the other features work as in torch.
    Unlike in torch's class, the second argument is not ``device_ids``.

    Args:
        module: a model with ``data_preprocessor``, ``parse_losses``, ``val_step``,
            ``test_step``, and a ``forward`` that takes a ``mode``.
        detect_anomalous_params: for debugging: after each training step, log the
            parameters that its loss did not depend on; see `detect_anomalous_params`.
        **kwargs: arguments of torch's class. For a model on the CPU ``device_ids`` and
            ``output_device`` are ignored, because runners always pass them and torch
            raises for them.

    DataContainers of a batch are opened by the preprocessor or before it. The class
    passes the ``isinstance`` checks of mmengine's ``MMDistributedDataParallel``.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = False, **kwargs: Any
    ) -> None:
        if _is_on_cpu(module):
            kwargs = {**kwargs, "device_ids": None, "output_device": None}
        self._check_same_model(module, **kwargs)
        DistributedDataParallel.__init__(self, module, **kwargs)
        self._frozen = distributed.frozen_parameters(module)
        self.detect_anomalous_params = detect_anomalous_params

    def _after_update(self, loss: torch.Tensor) -> None:
        if self.detect_anomalous_params:
            find_anomalous(loss, self)


def is_model_wrapper(model: Any, registry: Any = MODEL_WRAPPERS) -> bool:
    """Return True if ``model`` wraps the real model in its attribute ``module``.

    True for instances of the classes in the registry and its children, including
    subclasses, and for such an instance inside ``torch.compile``. For `MODEL_WRAPPERS`
    also True for the wrappers of ``pyparallel.mmengine``. False for an object that is
    not a module.

    Args:
        model: any object.
        registry: the registry to search.

    mmengine's function returns False for a wrapper inside ``torch.compile``.
    """
    model = uncompiled(model)
    ours: tuple[Any, ...] = tuple(provided.get("MODEL_WRAPPERS", ()))
    if registry is MODEL_WRAPPERS and isinstance(model, ours):
        return True
    return is_instance_of(model, registry)


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
