"""MMDistributedDataParallel: DDP that opens DataContainers and runs steps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.torch_private import require
from ..core.tracing import span
from ..scatter_gather.scatter import first_arguments, scatter_kwargs
from ._same_model import check_same_model

_HOST = -1
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)


class MMDistributedDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` for batches made by `collate`, with the step API.

    Takes the arguments of torch's class. `train_step` and `val_step` run between
    torch's own preparation and completion of a forward, so everything that holds for
    ``forward`` holds for them: ``static_graph``, ``find_unused_parameters``,
    ``no_sync``, ``join``, buffer broadcast and the logger.

    DataContainers are opened for CPU modules (``device_ids=None``, gloo) too. What is
    ``cpu_only`` stays on the host.

    Models that differ between the ranks in shapes, dtypes or what is frozen are a
    `ModelsDifferError` on every rank, which names the tensor; it is raised before
    anything is changed, unless ``init_sync=False``, as torch's own comparison.

    Subclasses may override ``scatter``, ``to_kwargs`` and ``_run_ddp_forward``. From
    mmcv 1.x ``MMDistributedDataParallel``.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        require(type(self).__name__, DistributedDataParallel)
        self._check_same_model(module, *args, **kwargs)
        super().__init__(module, *args, **kwargs)

    def _check_same_model(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Compare the ranks' models where torch is about to do so."""
        given = _SIGNATURE.bind(self, module, *args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        group, mesh = options["process_group"], options["device_mesh"]
        if group is None and mesh is not None:
            group = mesh.get_group(mesh_dim=0)
        # Without a group, or out of it, torch says what is wrong.
        ready = dist.is_initialized() and dist.get_rank(group) >= 0
        if ready and options["init_sync"]:
            # From torch 2.13 on, `forward_sync_buffers` has them sent in any case.
            sent = options["broadcast_buffers"] in (None, True)
            sent = sent or options.get("forward_sync_buffers") is not None
            check_same_model(type(self).__name__, module, group, buffers=sent)

    def to_kwargs(
        self, inputs: Any, kwargs: Any, device_id: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Open the arguments for one device; see `scatter_kwargs`."""
        return self._scattered(inputs, kwargs, [device_id])

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Open the arguments for several devices; see `scatter_kwargs`."""
        return self._scattered(inputs, kwargs, device_ids)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.train_step`` of the opened arguments, as a forward of DDP.

        Called by runners as ``train_step(data_batch, optimizer, **kwargs)``. The
        gradients are reduced in the backward pass of what it returns.
        """
        return self._step("train_step", inputs, kwargs)

    def val_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.val_step`` of the opened arguments; see `train_step`."""
        return self._step("val_step", inputs, kwargs)

    def _step(self, name: str, inputs: Any, kwargs: Any) -> Any:
        device_ids = self.device_ids or [_HOST]
        with span("pyparallel.step"):
            inputs, kwargs = first_arguments(self.scatter(inputs, kwargs, device_ids))
            step = getattr(self.module, name)
            self._prepare()
            with self._inside_ddp_forward():
                output = step(*inputs, **kwargs)
            # torch's own steps of a forward have no types, here and below.
            return self._post_forward(output)  # type: ignore[no-untyped-call]

    def _prepare(self) -> None:
        """Do what torch does before a forward, except moving the arguments.

        torch would send every tensor that it finds to the device, those of ``cpu_only``
        containers too, fail on a ``defaultdict`` and on a call without arguments. It
        gets a placeholder that it leaves alone.
        """
        super()._pre_forward(None)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepare a forward; on the host, open its arguments."""
        if not self.device_ids:
            inputs, kwargs = self._opened(inputs, kwargs)
        self._prepare()
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model; on a device, with the arguments opened here.

        Overriding methods open them themselves by `to_kwargs`, as in mmcv 1.x. On the
        host they are open already, and opening them again changes nothing.
        """
        if self.device_ids:
            inputs, kwargs = self._opened(inputs, kwargs)
        result = super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        return result

    def _opened(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        device_id = self.device_ids[0] if self.device_ids else _HOST
        return first_arguments(self.to_kwargs(inputs, kwargs, device_id))

    def _scattered(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        precision = self.mixed_precision
        dtype = None if precision is None else precision.param_dtype
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim, dtype=dtype)
