"""The wrapper that mmcv 1.x kept beside its DDP: it only broadcasts at the start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..parallel.distributed import broadcast_from_first
from ..parallel.registry import MODULE_WRAPPERS
from ..scatter_gather.scatter import first_arguments, scatter_kwargs


# Not under its own name, which other code may register.
@MODULE_WRAPPERS.register_module("distributed_deprecated.MMDistributedDataParallel")
class MMDistributedDataParallel(nn.Module):
    """A wrapper that broadcasts the state of a model from rank 0 at construction.

    It does **not** reduce gradients. Use `pyparallel.MMDistributedDataParallel` for
    that, or reduce them in an optimizer hook, as older code does.

    Args:
        module: the model.
        dim: the dimension along which plain tensors are split.
        broadcast_buffers: also broadcast the buffers that the state dict does not
            contain.
        bucket_cap_mb: the approximate size of one broadcast in MiB.

    Equivalent to the class of ``mmcv.parallel.distributed_deprecated`` in mmcv 1.x.
    """

    def __init__(
        self,
        module: nn.Module,
        dim: int = 0,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
    ) -> None:
        super().__init__()
        self.module = module
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.broadcast_bucket_size = bucket_cap_mb * 1024 * 1024
        self._sync_params()

    def _sync_params(self) -> None:
        """Overwrite the state on every rank with the state of rank 0."""
        state: dict[str, Any] = dict(self.module.state_dict())
        if self.broadcast_buffers:
            state |= dict(self.module.named_buffers())
        tensors = [each for each in state.values() if isinstance(each, torch.Tensor)]
        broadcast_from_first(tensors, max_nbytes=self.broadcast_bucket_size)

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Open the DataContainers in the arguments; see `pyparallel.scatter_kwargs`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model with opened DataContainers."""
        args, kwargs = self._open_arguments(inputs, kwargs)
        return self.module(*args, **kwargs)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.train_step`` of the opened arguments."""
        args, kwargs = self._open_arguments(inputs, kwargs)
        step: Any = self.module.train_step
        return step(*args, **kwargs)

    def val_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.val_step`` of the opened arguments."""
        args, kwargs = self._open_arguments(inputs, kwargs)
        step: Any = self.module.val_step
        return step(*args, **kwargs)

    def _open_arguments(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Open the arguments on the device of the model."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        target: Any = -1
        if first is not None and first.device.type != "cpu":
            target = first.device
        return first_arguments(self.scatter(inputs, kwargs, [target]))
