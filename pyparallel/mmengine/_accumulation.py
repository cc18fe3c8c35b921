"""How many micro-steps make a step: counts, factors, and where a group ends."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.errors import (
    CountError,
    LossTypeError,
    OptimWarning,
    check_int,
    type_name,
    warn,
    warn_once,
)
from ..core.torch_private import BatchNorm


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
