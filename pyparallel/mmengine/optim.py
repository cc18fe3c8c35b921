"""OptimWrapper: the optimizer, with accumulation and clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.errors import SettingTypeError, type_name
from ._accumulation import Accumulation
from ._clip import clip_from
from ._upstream import OptimWrapperBase, provides, upstream


@provides("OPTIM_WRAPPERS")
class OptimWrapper(Accumulation, OptimWrapperBase):
    """An optimizer together with the way in which a step is made of a loss.

    A *micro-step* is one loss. ``accumulative_counts`` of them form a group, and the
    parameters are updated at the end of a group, with the mean of its gradients. When
    `initialize_count_status` has told how many there will be, a last, shorter group is
    a mean of what it has, too: 8 micro-steps in groups of 3 divide by 3, 3, 3, 3, 3, 3,
    2, 2, and update after 3, 6 and 8. Without it, call `end_group` before the last
    micro-step; otherwise what an unfinished group has collected is never applied.

        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), 2)
        >>> for _ in range(2):
        ...     with wrapper.optim_context(model):
        ...         loss = model(torch.ones(1, 1)).sum()
        ...     wrapper.update_params(loss)
        >>> wrapper.inner_count
        2

    The one thing to get right: run the forward pass inside `optim_context` and
    `update_params` outside of it. Under DDP, gradients are then reduced once a group.

    Args:
        optimizer: any optimizer of torch.
        accumulative_counts: micro-steps in a group, 1 or more.
        clip_grad: arguments of ``torch.nn.utils.clip_grad_norm_``, or with
            ``type="value"`` of ``clip_grad_value_``. It is copied.

    Attributes:
        optimizer: the optimizer.
        grad_norm: the norm of all gradients before the last clipping, ``()``, on their
            device; None before the first and for ``type="value"``. With mmengine, its
            ``MessageHub`` gets it as ``train/grad_norm``.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of range; both are
            ``AssertionError`` too.

    From mmengine ``OptimWrapper``, whose ``isinstance`` checks it passes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        Accumulation.__init__(self, accumulative_counts)
        self.clip_grad_kwargs: dict[str, Any] | None = None
        self.clip_func: Callable[..., Any]
        self.grad_name: str
        if clip_grad is not None:
            self.clip_func, self.grad_name, self.clip_grad_kwargs = clip_from(clip_grad)
        if not hasattr(optimizer, "param_groups"):
            raise SettingTypeError(
                "OptimWrapper: optimizer must be an optimizer of torch, but is "
                f"{type_name(optimizer)}."
            )
        self.optimizer = optimizer
        self.grad_norm: torch.Tensor | None = None
        hub = upstream("MessageHub")
        self.message_hub: Any = None if hub is None else hub.get_current_instance()
        # With several groups of parameters, none has the settings of the optimizer
        # itself any more. Schedulers treat this as one more group: it is what `base_lr`
        # is read from.
        self.base_param_settings: dict[str, Any] | None = None
        if len(optimizer.param_groups) > 1:
            placeholder = torch.tensor([0.0])
            self.base_param_settings = {"params": placeholder, **optimizer.defaults}

    def update_params(
        self,
        loss: torch.Tensor,
        step_kwargs: dict[str, Any] | None = None,
        zero_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Do one micro-step: `scale_loss`, `backward`, and `step` at a group's end.

        Args:
            loss: ``()``, with a graph.
            step_kwargs: for ``optimizer.step``.
            zero_kwargs: for ``optimizer.zero_grad``, after a step.

        Raises:
            TypeError: the loss is no tensor.
            RuntimeError: more micro-steps than `initialize_count_status` was told.
        """
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward`` and count the micro-step."""
        loss.backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients and call ``optimizer.step``."""
        if self.clip_grad_kwargs:
            self._clip_grad()
        self.optimizer.step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Forget all gradients: ``optimizer.zero_grad``."""
        self.optimizer.zero_grad(**kwargs)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass of a micro-step.

        Unless it ends its group, inside ``model.no_sync()``, if there is such a method:
        DDP settles in the forward pass whether the backward pass will reduce.
        """
        no_sync: Any = None if self.should_sync() else getattr(model, "no_sync", None)
        with nullcontext() if no_sync is None else no_sync():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; several groups add ``base_param_settings``."""
        state = self.optimizer.state_dict()
        if self.base_param_settings is not None:
            state["base_param_settings"] = dict(self.base_param_settings)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the argument stays as it is.

        States of mmengine's wrapper fit, and of the optimizer alone.
        """
        state = dict(state_dict)
        base = state.pop("base_param_settings", None)
        self.optimizer.load_state_dict(state)
        if base is not None:
            self.base_param_settings = dict(base)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, and ``base_param_settings`` if there are."""
        groups = self.optimizer.param_groups
        base = self.base_param_settings
        return groups if base is None else [*groups, base]

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings that the optimizer was made with."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """Return ``lr`` of each group, and ``base_lr`` if there are several."""
        rates = {"lr": [group["lr"] for group in self.optimizer.param_groups]}
        if self.base_param_settings is None:
            return rates
        return {"base_lr": [self.base_param_settings["lr"]], **rates}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return ``momentum`` of each group: its own, the first beta of Adam, or 0."""
        return {"momentum": [_momentum(group) for group in self.optimizer.param_groups]}

    def __repr__(self) -> str:
        """Show the settings and the optimizer."""
        return (
            f"{type(self).__name__}(accumulative_counts={self._accumulative_counts}, "
            f"clip_grad={self.clip_grad_kwargs}, optimizer={self.optimizer!r})"
        )

    def _clip_grad(self) -> None:
        parameters = self._with_gradient()
        if not parameters:
            return
        norm = self.clip_func(parameters, **(self.clip_grad_kwargs or {}))
        if norm is None:  # clipping by value has no norm
            return
        # Of sharded parameters it is sharded too: each rank has a part of the sum.
        self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if self.message_hub is not None:
            self.message_hub.update_scalar(
                f"train/{self.grad_name}", float(self.grad_norm)
            )


def _momentum(group: Mapping[str, Any]) -> Any:
    if "momentum" in group:
        return group["momentum"]
    return group["betas"][0] if "betas" in group else 0
