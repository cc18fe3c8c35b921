"""MMSeparateDistributedDataParallel: one DDP for each part of a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import NoSingleAnswerError
from ..core.tracing import span
from ..parallel.distributed import broadcast_from_first
from ._steps import ModelSteps, opened
from ._upstream import MMSeparateDistributedDataParallelBase, provides
from .distributed import MMDistributedDataParallel

#: Modules without a forward pass, which is what DDP wraps.
_LISTS = (nn.ParameterList, nn.ParameterDict)
#: How torch calls it; from 2.13 on it warns of the old name.
_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"


@provides("MODEL_WRAPPERS")
class MMSeparateDistributedDataParallel(
    ModelSteps, MMSeparateDistributedDataParallelBase
):
    """A model whose children are wrapped in DDP one by one: for GANs and their kind.

    Each training step of such a model updates only some of its children, which one DDP
    around all of them would wait for. The model runs its own ``train_step`` and uses
    its children as before, with one optimizer wrapper for each::

        with optim_wrapper["critic"].optim_context(self.critic):
            loss = self.critic(fake.detach()).mean()
        optim_wrapper["critic"].update_params(loss)

    Args:
        module: the model; **its children are replaced** by their wrappers. A child
            with parameters that require grad becomes a `MMDistributedDataParallel`, and
            the same wrapper under all its names. The other children stay.
        broadcast_buffers: whether the children's DDP broadcast their buffers before
            each forward.
        find_unused_parameters: of the children's DDP.
        **kwargs: of `MMDistributedDataParallel`: ``detect_anomalous_params``,
            ``device_ids``, ``process_group``...

    The model goes to the current accelerator, or to the CPU where there is none. What
    no DDP takes care of (the model's own parameters, also in a ``ParameterList`` or
    ``ParameterDict``, frozen children, and all buffers) becomes that of the first rank
    at construction.

    From mmengine ``MMSeparateDistributedDataParallel``, whose ``isinstance`` checks it
    passes. There the model's own parameters were trained on each rank alone, a child
    that is None failed, and `no_sync` worked for one child only.

    Note: [parameters without a forward]
    DDP prepares its reduction in the forward pass of its module. The model's own
    parameters are used anywhere, so a hook on each of them averages its gradient over
    the ranks when a backward pass has accumulated it. A gradient that was averaged
    before stays what it is under another average; hence accumulation needs nothing
    more, and passes inside `no_sync` are made up for by the next one outside of it. The
    ranks must use the same ones of these parameters, in every backward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        # Without DDP's own constructor: this one reduces nothing itself.
        nn.Module.__init__(self)
        self._group = kwargs.get("process_group")
        self._own_sync = True
        kwargs.setdefault(_SYNC_BUFFERS, broadcast_buffers)
        module.to(_device())
        children = {id(child): child for child in module.children() if _trains(child)}
        wrappers = {
            key: MMDistributedDataParallel(
                child, find_unused_parameters=find_unused_parameters, **kwargs
            )
            for key, child in children.items()
        }
        self._synchronise(module, children)
        for name, child in module._modules.items():
            if id(child) in wrappers:
                module._modules[name] = wrappers[id(child)]
        self.module = module

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """Return ``module.train_step`` of the batch.

        Args:
            data: a batch as the loader gives it.
            optim_wrapper: an `OptimWrapperDict`, of which the model takes what it
                needs.
        """
        with span("pyparallel.step"):
            return self.module.train_step(opened(data, self.module), optim_wrapper)

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise: the children have forward passes of their own."""
        raise NoSingleAnswerError(
            f"{type(self).__name__}: forward must be asked of one child, but was asked "
            "of all together. Call train_step, val_step or test_step."
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let no child reduce gradients whose forward pass runs inside.

        As in DDP. Gradients of the model's own parameters are not reduced by backward
        passes inside.
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
        """Set the mode of the model and all its children."""
        self.training = mode
        self.module.train(mode)
        return self

    def _synchronise(self, module: nn.Module, wrapped: dict[int, nn.Module]) -> None:
        """Give all ranks the values of the first for what no DDP takes care of."""
        lists = [child for child in module.children() if isinstance(child, _LISTS)]
        own = list(module.parameters(recurse=False))
        own += [parameter for each in lists for parameter in each.parameters()]
        others = [each for each in module.children() if id(each) not in wrapped]
        rest = [parameter for each in others for parameter in each.parameters()]
        tensors = {id(tensor): tensor for tensor in (*own, *rest, *module.buffers())}
        broadcast_from_first(tensors.values(), self._group)
        for parameter in dict.fromkeys(own):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is None or not self._own_sync:
            return
        with torch.no_grad():
            mean = grad.contiguous() / dist.get_world_size(self._group)
            dist.all_reduce(mean, group=self._group)
            grad.copy_(mean)


def _trains(child: nn.Module) -> bool:
    """Tell whether there is something in a child that DDP can reduce."""
    return not isinstance(child, _LISTS) and any(
        parameter.requires_grad for parameter in child.parameters()
    )


def _device() -> torch.device:
    """Return the current accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
