"""The wrapper that mmcv 1.x kept beside its DDP: it synchronises once, at the start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..parallel.distributed import broadcast_from_first
from ..parallel.registry import MODULE_WRAPPERS
from ..scatter_gather.scatter import first_arguments, scatter_kwargs


@MODULE_WRAPPERS.register_module()
class MMDistributedDataParallel(nn.Module):
    """A module whose state is broadcast from rank 0 when it is wrapped; no more.

    Gradients are **not** reduced: use `pyparallel.MMDistributedDataParallel` for that,
    or reduce them in an optimizer hook as old code bases do.

    Args:
        module: the model.
        dim: the dimension along which plain tensors are split.
        broadcast_buffers: broadcast the buffers that no state dict holds, too.
        bucket_cap_mb: about how many MiB travel in one broadcast.

    From mmcv 1.x ``mmcv.parallel.distributed_deprecated``.
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
        """Overwrite the state of every rank with that of rank 0."""
        state: dict[str, Any] = dict(self.module.state_dict())
        if self.broadcast_buffers:
            state |= dict(self.module.named_buffers())
        tensors = [each for each in state.values() if isinstance(each, torch.Tensor)]
        broadcast_from_first(tensors, max_nbytes=self.broadcast_bucket_size)

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Open the arguments; see `pyparallel.scatter_kwargs`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model with every DataContainer opened."""
        args, kwargs = self._opened(inputs, kwargs)
        return self.module(*args, **kwargs)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.train_step`` of the opened arguments."""
        args, kwargs = self._opened(inputs, kwargs)
        step: Any = self.module.train_step
        return step(*args, **kwargs)

    def val_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.val_step`` of the opened arguments."""
        args, kwargs = self._opened(inputs, kwargs)
        step: Any = self.module.val_step
        return step(*args, **kwargs)

    def _opened(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Open the arguments where the model is."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        target: Any = -1
        if first is not None and first.device.type != "cpu":
            target = first.device
        return first_arguments(self.scatter(inputs, kwargs, [target]))
