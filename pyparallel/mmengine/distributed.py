"""MMDistributedDataParallel: DDP whose steps are those of mmengine."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import distributed
from .._trace import span
from ._steps import micro_step, opened, run_forward
from ._upstream import MMDistributedDataParallelBase, provides
from .anomaly import detect_anomalous_params as find_anomalous


@provides("MODEL_WRAPPERS")
class MMDistributedDataParallel(
    distributed.MMDistributedDataParallel, MMDistributedDataParallelBase
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
        DistributedDataParallel.__init__(self, module, **kwargs)
        self.detect_anomalous_params = detect_anomalous_params

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """Preprocess, compute the losses, and update the parameters.

        Args:
            data: a batch as the loader gives it.
            optim_wrapper: an `OptimWrapper`. It says whether gradients are reduced.

        Returns:
            What ``parse_losses`` of the model gave to log.

        Raises:
            TypeError: the preprocessor returned neither keyword arguments nor a list
                or tuple.
        """
        with span("pyparallel.step"):
            loss, log_vars = micro_step(self, data, optim_wrapper)
            if self.detect_anomalous_params:
                find_anomalous(loss, self)
            return log_vars

    def val_step(self, data: Any) -> Any:
        """Return ``module.val_step`` of the batch. The ranks do not talk."""
        with span("pyparallel.step"):
            return self.module.val_step(opened(data, self.module))

    def test_step(self, data: Any) -> Any:
        """Return ``module.test_step`` of the batch. The ranks do not talk."""
        with span("pyparallel.step"):
            return self.module.test_step(opened(data, self.module))

    def _run_forward(self, data: Any, mode: str) -> Any:
        return run_forward(self, data, mode, type(self).__name__)


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
