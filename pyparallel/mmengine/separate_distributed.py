"""MMSeparateDistributedDataParallel: one DDP for each child of a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.devices import current_device
from ..core.errors import NoSingleAnswerError
from ..core.tracing import span
from ..parallel.distributed import (
    broadcast_from_first,
    check_frozen,
    frozen_parameters,
)
from ._steps import ModelSteps, open_containers
from ._upstream import MMSeparateDistributedDataParallelBase, provides
from .distributed import MMDistributedDataParallel

#: Modules without a forward pass, so DDP cannot wrap them.
_LISTS = (nn.ParameterList, nn.ParameterDict)
#: The name of the option in this torch; since 2.13 torch warns about the old name.
_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"


@provides("MODEL_WRAPPERS")
class MMSeparateDistributedDataParallel(
    ModelSteps, MMSeparateDistributedDataParallelBase
):
    """A model whose children are wrapped in DDP one by one, for example a GAN.

    Each backward pass of such a model covers only some of its children; one DDP for the
    whole model would wait for the others. The model runs its own ``train_step`` and
    uses its children as before, with one optimizer wrapper for each::

        with optim_wrapper["critic"].optim_context(self.critic):
            loss = self.critic(fake.detach()).mean()
        optim_wrapper["critic"].update_params(loss)

    Args:
        module: the model. **Its children are replaced** by their wrappers: a child with
            parameters that require grad by a `MMDistributedDataParallel`, one for all
            its names. The other children are not wrapped.
        broadcast_buffers: whether the DDP of each child broadcasts its buffers before
            each forward pass.
        find_unused_parameters: an argument of the DDP of each child.
        **kwargs: further arguments of `MMDistributedDataParallel`:
            ``detect_anomalous_params``, ``device_ids``, ``process_group``...

    The constructor moves the model to the current accelerator, or to the CPU without
    one. It broadcasts from the first rank all state that no DDP synchronizes: the
    model's own parameters, also in a ``ParameterList`` or ``ParameterDict``, frozen
    children, and all buffers.

    Equivalent to mmengine's ``MMSeparateDistributedDataParallel``, and passes its
    ``isinstance`` checks. With mmengine's class each rank trains the model's own
    parameters alone, a child that is None fails, and `no_sync` covers only one child.

    Note: [parameters without a forward]
    DDP prepares its reduction in the forward pass of its module, but the model's own
    parameters have no such pass. So a hook on each of them averages its gradient over
    the ranks after a backward pass has accumulated it. Averaging a gradient again does
    not change its averaged part. So accumulation works without further code, and the
    next pass outside `no_sync` also averages the gradients from within it. In every
    backward pass, all ranks must use the same of these parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        # Without DDP's constructor, because only the children reduce gradients.
        nn.Module.__init__(self)
        self._group = kwargs.get("process_group")
        self._own_sync = True
        kwargs.setdefault(_SYNC_BUFFERS, broadcast_buffers)
        module.to(current_device())
        for name, child in module._modules.items():
            if isinstance(child, MMDistributedDataParallel):  # of an earlier wrapper
                module._modules[name] = child.module
        self._frozen = frozen_parameters(module)
        children = {
            id(child): child for child in module.children() if _needs_ddp(child)
        }
        wrappers = {
            key: MMDistributedDataParallel(
                child, find_unused_parameters=find_unused_parameters, **kwargs
            )
            for key, child in children.items()
        }
        self._synchronize(module, children)
        for name, child in module._modules.items():
            if id(child) in wrappers:
                module._modules[name] = wrappers[id(child)]
        self.module = module
        self._add_hooks()

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """Return ``module.train_step`` of the batch.

        Args:
            data: a batch of the loader.
            optim_wrapper: an `OptimWrapperDict`; the model selects its wrappers.
        """
        if dist.get_world_size(self._group) > 1:
            check_frozen(type(self).__name__, self._frozen)
        with span("pyparallel.step"):
            data = open_containers(data, self.module)
            return self.module.train_step(data, optim_wrapper)

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: only the children have a forward pass."""
        raise NoSingleAnswerError(
            f"{type(self).__name__}: forward must be called on one child, but was "
            "called on the whole model. Call train_step, val_step or test_step."
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable the reduction of gradients in all children.

        As in DDP, this applies to forward passes within the context. The model's own
        parameters are not reduced by backward passes within the context.
        """
        before = self._own_sync
        with ExitStack() as stack:
            for child in self.module.children():  # each once
                if isinstance(child, MMDistributedDataParallel):
                    stack.enter_context(child.no_sync())
            self._own_sync = False
            try:
                yield
            finally:
                self._own_sync = before

    def train(self, mode: bool = True) -> MMSeparateDistributedDataParallel:
        """Set the training mode of the model and all its children."""
        self.training = mode
        self.module.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, for a copy or a pickle; DDP's method needs its own."""
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy, whose parameters have no hooks yet."""
        nn.Module.__setstate__(self, state)
        self._add_hooks()

    def _synchronize(self, module: nn.Module, wrapped: dict[int, nn.Module]) -> None:
        """Broadcast the state outside of DDP."""
        own = _own_parameters(module)
        others = [each for each in module.children() if id(each) not in wrapped]
        rest = [parameter for each in others for parameter in each.parameters()]
        tensors = {id(tensor): tensor for tensor in (*own, *rest, *module.buffers())}
        broadcast_from_first(tensors.values(), self._group)

    def _add_hooks(self) -> None:
        """Average the gradients of the model's own parameters."""
        for parameter in dict.fromkeys(_own_parameters(self.module)):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average_grad)

    def _average_grad(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is None or not self._own_sync:
            return
        with torch.no_grad():
            mean = grad.contiguous() / dist.get_world_size(self._group)
            dist.all_reduce(mean, group=self._group)
            grad.copy_(mean)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that no child uses in a forward pass."""
    lists = [child for child in module.children() if isinstance(child, _LISTS)]
    owners = [module.parameters(recurse=False), *(each.parameters() for each in lists)]
    return [parameter for each in owners for parameter in each]


def _needs_ddp(child: nn.Module) -> bool:
    """Return True if a child has gradients that DDP can reduce."""
    return not isinstance(child, _LISTS) and any(
        parameter.requires_grad for parameter in child.parameters()
    )
