"""OptimWrapper: the optimizer, with accumulation and clipping of gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.errors import (
    CountError,
    LossTypeError,
    OptimWarning,
    SettingTypeError,
    SettingValueError,
    check_int,
    type_name,
    warn,
    warn_once,
)
from ..core.torch_private import BatchNorm
from ._upstream import OptimWrapperBase, provides, upstream

_CLIP_GRAD = "OptimWrapper: clip_grad"


class Accumulation:
    """The part of an optimizer wrapper that counts micro-steps.

    The private attributes have mmengine's names, because code outside reads them.
    """

    optimizer: Optimizer

    def __init__(self, accumulative_counts: int) -> None:
        self._accumulative_counts = check_int(
            accumulative_counts, 1, "OptimWrapper: accumulative_counts"
        )
        self._inner_count = 0
        self._max_counts = -1  # unknown
        self._remainder_counts = -1  # micro-steps in the last group, if it is short
        # Groups are counted from here; `end_group` sets it to where a short one ends.
        self._group_start = 0
        self._short_group = 1  # micro-steps in that one

    @property
    def inner_count(self) -> int:
        """The number of micro-steps done."""
        return self._inner_count

    def should_update(self) -> bool:
        """Tell whether the micro-step that was just done ends its group."""
        return self._ends_group(self._inner_count)

    def should_sync(self) -> bool:
        """Tell whether the next micro-step ends its group, and so reduces gradients."""
        return self._ends_group(self._inner_count + 1)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss divided by the number of micro-steps in its group.

        Raises:
            TypeError: the loss is no tensor.
            RuntimeError: more micro-steps than `initialize_count_status` was told.
        """
        if not isinstance(loss, torch.Tensor):
            raise LossTypeError(
                f"{type(self).__name__}: loss must be a tensor, but is {loss!r} "
                f"({type_name(loss)}). The total of a model's losses is one if it "
                "returns a tensor under a key with 'loss' in it."
            )
        factor = self._factor()
        return loss if factor == 1 else loss / factor

    def initialize_count_status(
        self, model: nn.Module | None, init_counts: int, max_counts: int
    ) -> None:
        """Tell how many micro-steps were done and how many there will be in all.

        Args:
            model: for a warning, once, if it has BatchNorm and gradients accumulate.
            init_counts: micro-steps done, 0 or more. Within a group, that group goes
                on with less; a warning says so.
            max_counts: micro-steps in all, those done included; -1 if unknown.

        Raises:
            TypeError, ValueError: a count is no integer or too small.
        """
        where = "OptimWrapper.initialize_count_status: "
        done = check_int(init_counts, 0, where + "init_counts")
        most = check_int(max_counts, -1, where + "max_counts")
        every = self._accumulative_counts
        if done % every:
            warn(
                f"[PP301] {where}init_counts must be a multiple of {every} to lose no "
                f"gradient, but is {done}. The next update lacks {done % every} of its "
                f"{every} micro-steps.",
                OptimWarning,
            )
        self._warn_of_batch_norm(model)
        self._inner_count, self._max_counts = done, most
        self._group_start = 0
        self._remainder_counts = most % every

    def end_group(self) -> None:
        """Make the next micro-step the last one of its group, whatever its number.

        For the last batch of a loader of unknown length. Call it on all ranks, before
        the forward pass. That micro-step reduces and updates; the update is the mean of
        the micro-steps that its group has, and the next group starts after it.

        What the group has collected must lie in the ``grad`` of its parameters, as it
        does except under FSDP; there, use `initialize_count_status`.

        Raises:
            RuntimeError: more micro-steps than `initialize_count_status` was told.
        """
        if self._accumulative_counts == 1 or self._inner_count < self._group_start:
            return  # every one is the last, or it was said before
        done = (self._inner_count - self._group_start) % self._accumulative_counts
        factor = self._factor()
        if done and factor != done + 1:
            with torch.no_grad():  # they were divided by the size of a whole group
                for parameter in self._with_gradient():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor / (done + 1))
        self._short_group = done + 1
        self._group_start = self._inner_count + 1
        left = self._max_counts - self._group_start
        self._remainder_counts = left % self._accumulative_counts

    def _ends_group(self, count: int) -> bool:
        position = (count - self._group_start) % self._accumulative_counts
        return position == 0 or count == self._max_counts

    def _factor(self) -> int:
        """Return the size of the group that the next micro-step belongs to."""
        count, most = self._inner_count, self._max_counts
        if self._accumulative_counts == 1:
            return 1
        if count < self._group_start:
            return self._short_group
        if most == -1 or count < most - self._remainder_counts:
            return self._accumulative_counts
        if count >= most:
            raise CountError(
                f"{type(self).__name__}: there must be at most {most} micro-steps, as "
                f"initialize_count_status was told, but this is number {count + 1}. "
                "Tell it the micro-steps of the whole run."
            )
        return self._remainder_counts

    def _with_gradient(self) -> list[torch.Tensor]:
        """Return the parameters that have a gradient, in the optimizer's order."""
        groups = self.optimizer.param_groups
        parameters = (each for group in groups for each in group["params"])
        return [p for p in parameters if p.requires_grad and p.grad is not None]

    def _warn_of_batch_norm(self, model: nn.Module | None) -> None:
        if model is None or self._accumulative_counts == 1:
            return
        found = [
            name for name, each in model.named_modules() if isinstance(each, BatchNorm)
        ]
        if found:
            warn_once(
                "PP302",
                f"OptimWrapper: {self._accumulative_counts} micro-steps give the "
                f"gradient of one large batch, but {len(found)} BatchNorm layers "
                f"(first: {found[0]!r}) take their statistics from each small one.",
                OptimWarning,
            )


class Clip(NamedTuple):
    """How gradients are clipped, in the words of mmengine's attributes."""

    function: Callable[..., Any]
    name: str  # what is logged: "grad_norm", "grad_value"
    kwargs: dict[str, Any]


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


def clip_from(clip_grad: Any) -> Clip:
    """Read a ``clip_grad`` setting, which stays as it is.

    Args:
        clip_grad: ``type`` is ``"norm"`` (the default) or ``"value"``; the rest are
            arguments of ``clip_grad_norm_`` or ``clip_grad_value_`` of
            ``torch.nn.utils``.

    Raises:
        TypeError: it is no mapping, or torch's function does not take an argument.
        ValueError: it is empty, or ``type`` is another one.
    """
    if not isinstance(clip_grad, Mapping):
        raise SettingTypeError(
            f"{_CLIP_GRAD} must be a dict or None, but is {clip_grad!r} "
            f"({type_name(clip_grad)}). Write dict(max_norm=...)."
        )
    kwargs = dict(clip_grad)
    way = kwargs.pop("type", "norm")
    if way == "norm":
        clip = Clip(torch.nn.utils.clip_grad_norm_, "grad_norm", kwargs)
    elif way == "value":
        clip = Clip(torch.nn.utils.clip_grad_value_, "grad_value", kwargs)
    else:
        raise SettingValueError(
            f"{_CLIP_GRAD}['type'] must be 'norm' or 'value', but is {way!r}."
        )
    if not kwargs:
        needed = "max_norm" if way == "norm" else "clip_value"
        raise SettingValueError(
            f"{_CLIP_GRAD} must have arguments besides type, but is "
            f"{dict(clip_grad)!r}. Give at least {needed}."
        )
    try:
        inspect.signature(clip.function).bind([], **kwargs)
    except TypeError as error:
        raise SettingTypeError(
            f"{_CLIP_GRAD} must hold arguments of {clip.function.__name__}, but is "
            f"{dict(clip_grad)!r}: {error}."
        ) from error
    return clip


def _momentum(group: Mapping[str, Any]) -> Any:
    if "momentum" in group:
        return group["momentum"]
    return group["betas"][0] if "betas" in group else 0
