"""MMDistributedDataParallel: DDP whose steps are those of mmengine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..parallel import distributed
from ._steps import ModelSteps, TrainStep
from ._upstream import MMDistributedDataParallelBase, provides
from .anomaly import detect_anomalous_params as find_anomalous


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


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
