"""OptimWrapper: an optimizer with gradient accumulation and gradient clipping."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..batch import pytree
from ..batch.container import map_tensors
from ..core.errors import (
    CountError,
    LossTypeError,
    OptimWarning,
    SettingTypeError,
    SettingValueError,
    check_whole,
    type_name,
    warn,
    warn_once,
)
from ..core.torch_private import BatchNorm
from ._shards import check_present, clip, has_unknown_shards, learn_shards
from ._upstream import OptimWrapperBase, provides, upstream

_CLIP_GRAD = "OptimWrapper: clip_grad"


class Accumulation:
    """Counts the micro-steps of an optimizer wrapper.

    The private attributes have mmengine's names, because other libraries read them.
    """

    optimizer: Optimizer

    def __init__(self, accumulative_counts: int) -> None:
        self._accumulative_counts = check_whole(
            accumulative_counts, 1, "OptimWrapper: accumulative_counts"
        )
        self._inner_count = 0
        self._max_counts = -1  # unknown
        self._remainder_counts = -1  # micro-steps in a shorter last group
        # The micro-step at which a group starts, and every accumulative_counts after
        # it. `end_group` sets it to the end of the group that it shortens.
        self._group_start = 0
        self._short_group_size = 1  # the divisor of the last loss of that group
        self._short_group_factor = 1.0  # of the gradients of that group

    @property
    def inner_count(self) -> int:
        """The number of completed micro-steps."""
        return self._inner_count

    def should_update(self) -> bool:
        """Return True if the last completed micro-step ends its group."""
        return self._ends_group(self._inner_count)

    def should_sync(self) -> bool:
        """Return True if the next micro-step ends its group and reduces gradients."""
        return self._ends_group(self._inner_count + 1)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss divided by the number of micro-steps in its group.

        Raises:
            TypeError: the loss is not a tensor.
            RuntimeError: more micro-steps than ``max_counts`` of
                `initialize_count_status`.
        """
        if not isinstance(loss, torch.Tensor):
            raise LossTypeError(
                f"{type(self).__name__}: loss must be a tensor, but is {loss!r} "
                f"({type_name(loss)}). Return a tensor from the model, with 'loss' in "
                "its key."
            )
        size = self._group_size()
        return loss if size == 1 else loss / size

    def initialize_count_status(
        self, model: nn.Module | None, init_counts: int, max_counts: int
    ) -> None:
        """Set the number of completed micro-steps and the total number.

        Args:
            model: the model, or None. If it has BatchNorm layers and gradients
                accumulate, a warning is issued once.
            init_counts: completed micro-steps, 0 or more. If they end within a group,
                the next update has fewer micro-steps, and a warning is issued.
            max_counts: micro-steps of the whole run, including the completed ones;
                negative if unknown.

        Raises:
            TypeError, ValueError: a count is not a whole number, or ``init_counts`` is
                negative.
        """
        where = "OptimWrapper.initialize_count_status: "
        done = check_whole(init_counts, 0, where + "init_counts")
        is_unknown = isinstance(max_counts, int | float) and max_counts < 0
        most = -1 if is_unknown else check_whole(max_counts, 0, where + "max_counts")
        every = self._accumulative_counts
        if done % every:
            warn(
                f"[PP301] {where}init_counts must be a multiple of {every} to lose no "
                f"gradient, but is {done}. The next update lacks {done % every} of its "
                f"{every} micro-steps. Resume at a multiple of {every}.",
                OptimWarning,
            )
        self._warn_about_batch_norm(model)
        self._inner_count, self._max_counts = done, most
        self._group_start = 0
        self._remainder_counts = most % every

    def end_group(self) -> None:
        """End the current group of micro-steps with the next one.

        Use it for the last batch of a loader of unknown length. Call it on all ranks,
        before the forward pass. The next micro-step then reduces gradients and updates
        the parameters with the mean over the micro-steps of its group. The following
        group starts after it.

        Raises:
            RuntimeError: more micro-steps than ``max_counts`` of
                `initialize_count_status`.
        """
        if self._accumulative_counts == 1 or self._inner_count < self._group_start:
            return  # every micro-step ends its group, or this is the second call
        done = (self._inner_count - self._group_start) % self._accumulative_counts
        size = self._group_size()
        # Sharded models accumulate outside of ``grad`` until the last micro-step. Its
        # loss gets the divisor of the others, and `backward` then corrects the sum.
        self._short_group_size = size if done else 1
        self._short_group_factor = size / (done + 1) if done else 1.0
        self._group_start = self._inner_count + 1
        left = self._max_counts - self._group_start
        self._remainder_counts = left % self._accumulative_counts

    def _ends_group(self, count: int) -> bool:
        position = (count - self._group_start) % self._accumulative_counts
        return position == 0 or count == self._max_counts

    def _group_size(self) -> int:
        """Return the number of micro-steps in the group of the next micro-step."""
        count, most = self._inner_count, self._max_counts
        if self._accumulative_counts == 1:
            return 1
        if count < self._group_start:
            return self._short_group_size
        if most == -1 or count < most - self._remainder_counts:
            return self._accumulative_counts
        if count >= most:
            raise CountError(
                f"{type(self).__name__}: there must be at most {most} micro-steps "
                f"(max_counts), but this is number {count + 1}. Pass the number of the "
                "whole run to initialize_count_status."
            )
        return self._remainder_counts

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Iterate over the parameters of the optimizer."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _complete_backward(self) -> None:
        """Count a micro-step; scale the sum of a shortened group after its last one."""
        factor = self._short_group_factor
        if self._inner_count < self._group_start and factor != 1:
            with torch.no_grad():
                for parameter in self._parameters():
                    if parameter.requires_grad and parameter.grad is not None:
                        parameter.grad.mul_(factor)
        self._inner_count += 1

    def _warn_about_batch_norm(self, model: nn.Module | None) -> None:
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
                f"(first: {found[0]!r}) take their statistics from each small one. Use "
                "another normalization layer, or accumulative_counts=1.",
                OptimWarning,
            )


@provides("OPTIM_WRAPPERS")
class OptimWrapper(Accumulation, OptimWrapperBase):
    """An optimizer with gradient accumulation and gradient clipping.

    A *micro-step* is the backward pass of one loss. ``accumulative_counts`` micro-steps
    form a group. The parameters are updated at the end of a group, with the mean of its
    gradients. If `initialize_count_status` has set the total number of micro-steps, a
    shorter last group is averaged over its own size: 8 micro-steps in groups of 3 are
    divided by 3, 3, 3, 3, 3, 3, 2, 2, and update after 3, 6 and 8. Otherwise call
    `end_group` before the last micro-step, or the gradients of an incomplete last group
    are never applied.

        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), 2)
        >>> for _ in range(2):
        ...     with wrapper.optim_context(model):
        ...         loss = model(torch.ones(1, 1)).sum()
        ...     wrapper.update_params(loss)
        >>> wrapper.inner_count
        2

    Run the forward pass inside `optim_context`, and `update_params` outside of it. DDP
    then reduces gradients once in each group.

    Args:
        optimizer: a torch optimizer.
        accumulative_counts: micro-steps in a group, 1 or more.
        clip_grad: arguments of ``torch.nn.utils.clip_grad_norm_``, or of
            ``clip_grad_value_`` together with ``type="value"``. The dict is copied.

    Attributes:
        optimizer: the optimizer.
        grad_norm: the norm of all gradients before the last clipping, a tensor of
            shape ``()`` on their device. None before the first clipping, and for
            ``type="value"``. With mmengine, its ``MessageHub`` receives the norm as
            ``train/grad_norm``.

    Raises:
        TypeError, ValueError: a setting has the wrong type or is out of range. Both
            are also ``AssertionError``.

    Equivalent to mmengine's ``OptimWrapper``, and passes its ``isinstance`` checks.
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
            clipping = _parse_clip_grad(clip_grad)
            self.clip_func, self.grad_name, self.clip_grad_kwargs = clipping
        if not hasattr(optimizer, "param_groups"):
            raise SettingTypeError(
                "OptimWrapper: optimizer must be a torch optimizer, but is "
                f"{type_name(optimizer)}."
            )
        self.optimizer = optimizer
        self.grad_norm: torch.Tensor | None = None
        hub = upstream("MessageHub")
        self.message_hub: Any = None if hub is None else hub.get_current_instance()
        # With several parameter groups, no group keeps the settings of the optimizer
        # itself. Schedulers update them here as one more group, and `base_lr` comes
        # from it.
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
            loss: a tensor of shape ``()`` with a graph.
            step_kwargs: arguments of ``optimizer.step``.
            zero_kwargs: arguments of ``optimizer.zero_grad``, which follows a step.

        Raises:
            TypeError: the loss is not a tensor.
            RuntimeError: more micro-steps than ``max_counts`` of
                `initialize_count_status`.
        """
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward`` and count the micro-step."""
        loss.backward(**kwargs)
        self._complete_backward()

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients and call ``optimizer.step``."""
        if self.clip_grad_kwargs:
            self._clip_grad()
        self.optimizer.step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear all gradients with ``optimizer.zero_grad``."""
        self.optimizer.zero_grad(**kwargs)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass of a micro-step within this context.

        A micro-step that does not end its group runs inside ``model.no_sync()``, if the
        model has that method. DDP decides in the forward pass whether the backward pass
        reduces gradients.

        With ``clip_grad``, it finds the shards of ``FullyShardedDataParallel`` in the
        model, which clipping needs.

        Raises:
            RuntimeError: the optimizer was created before the model was sharded, and
                would not train it.
        """
        check_present(self.optimizer.param_groups)
        if self.clip_grad_kwargs and has_unknown_shards(self._parameters()):
            learn_shards(model)
        no_sync: Any = None if self.should_sync() else getattr(model, "no_sync", None)
        with nullcontext() if no_sync is None else no_sync():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with ``base_param_settings`` if it is set."""
        state = self.optimizer.state_dict()
        if self.base_param_settings is not None:
            state["base_param_settings"] = dict(self.base_param_settings)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, of mmengine's wrapper, or of the optimizer.

        The argument is not changed, nor by later steps.
        """
        state = dict(state_dict)
        base = state.pop("base_param_settings", None)
        self.optimizer.load_state_dict(state)
        _copy_shared(self.optimizer.state, state["state"])
        if base is not None:
            self.base_param_settings = dict(base)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, then ``base_param_settings`` if it is set."""
        groups = self.optimizer.param_groups
        base = self.base_param_settings
        return groups if base is None else [*groups, base]

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of the optimizer."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """Return ``lr`` of each group, with ``base_lr`` if there are several groups."""
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
        parameters = [each for each in self._parameters() if each.requires_grad]
        norm = clip(self.clip_func, parameters, self.clip_grad_kwargs or {})
        if norm is None:  # clip_grad_value_ returns no norm
            return
        self.grad_norm = norm
        if self.message_hub is not None:
            self.message_hub.update_scalar(
                f"train/{self.grad_name}", float(self.grad_norm)
            )


def _parse_clip_grad(clip_grad: Any) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    """Return the clipping function, its name in logs, and its arguments."""
    if not isinstance(clip_grad, Mapping):
        raise SettingTypeError(
            f"{_CLIP_GRAD} must be a dict or None, but is {clip_grad!r} "
            f"({type_name(clip_grad)}). Write dict(max_norm=...)."
        )
    kwargs = dict(clip_grad)
    clip_type = kwargs.pop("type", "norm")
    function: Callable[..., Any]
    if clip_type == "norm":
        function, required = torch.nn.utils.clip_grad_norm_, "max_norm"
    elif clip_type == "value":
        function, required = torch.nn.utils.clip_grad_value_, "clip_value"
    else:
        raise SettingValueError(
            f"{_CLIP_GRAD}['type'] must be 'norm' or 'value', but is {clip_type!r}."
        )
    if not kwargs:
        raise SettingValueError(
            f"{_CLIP_GRAD} must have arguments besides type, but is "
            f"{dict(clip_grad)!r}. Give at least {required}."
        )
    try:
        inspect.signature(function).bind([], **kwargs)
    except TypeError as error:
        raise SettingTypeError(
            f"{_CLIP_GRAD} must hold arguments of {function.__name__}, but is "
            f"{dict(clip_grad)!r}: {error}."
        ) from error
    return function, f"grad_{clip_type}", kwargs


def _copy_shared(state: dict[Any, Any], loaded: Mapping[Any, Any]) -> None:
    """Copy the tensors of an optimizer that torch took from a loaded state."""
    theirs = {id(leaf) for leaf in pytree.flatten([*loaded.values()])[0]}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if id(tensor) in theirs else tensor

    for parameter, values in state.items():
        state[parameter] = map_tensors(own, values)


def _momentum(group: Mapping[str, Any]) -> Any:
    if "momentum" in group:
        return group["momentum"]
    return group["betas"][0] if "betas" in group else 0
