"""AmpOptimWrapper: mixed precision with a loss scale, on the CPU too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.errors import SettingTypeError, SettingValueError, type_name
from ._upstream import AmpOptimWrapperBase, provides
from .optimizer_wrapper import OptimWrapper

_NAMED = ("float16", "bfloat16", "float32", "float64")
_ON_CPU = (torch.bfloat16, torch.float16)


@provides("OPTIM_WRAPPERS")
class AmpOptimWrapper(OptimWrapper, AmpOptimWrapperBase):
    """An `OptimWrapper` whose `optim_context` autocasts and whose losses are scaled.

    Forward passes run under ``torch.autocast`` for the device of the parameters. The
    loss is multiplied by a scale before the backward pass, and gradients are divided by
    it before they are clipped and applied. If one is not finite, the step is left out
    and the scale halved. There is a scale for bfloat16 too; a power of two, such as
    torch's defaults, changes no bit of a result that is in range.

    Args:
        loss_scale: ``"dynamic"`` for torch's defaults, a number above 0 for a scale
            that stays, or arguments of ``torch.amp.GradScaler``. It is copied.
        dtype: ``torch.bfloat16``, ``torch.float16`` or their names; where the device
            autocasts to them, float32 and float64 as well. None is the device's
            default: float16 on CUDA, bfloat16 on the CPU.
        use_fsdp: all ranks leave out the same steps, as sharded parameters need it
            (``ShardedGradScaler``); torch.distributed must be initialised.
        **kwargs: of `OptimWrapper`; ``optimizer`` is one of them.

    Attributes:
        loss_scaler: the ``GradScaler``.
        cast_dtype: the dtype, or None.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of range.

    From mmengine ``AmpOptimWrapper``, which refuses to work on a CPU, and whose
    ``isinstance`` checks it passes.
    """

    def __init__(
        self,
        loss_scale: str | float | Mapping[str, Any] = "dynamic",
        dtype: str | torch.dtype | None = None,
        use_fsdp: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.cast_dtype: torch.dtype | None = _dtype(dtype, self._device_type())
        settings, self._scale_update_param = _scaling(loss_scale)
        found = _scaler(use_fsdp, self._device_type(), settings)
        self.loss_scaler: torch.amp.GradScaler = found

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale the loss, call its ``backward`` and count the micro-step."""
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Clip the unscaled gradients, step unless one is infinite, set the scale."""
        if self.clip_grad_kwargs:
            self.loss_scaler.unscale_(self.optimizer)
            self._clip_grad()
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update(self._scale_update_param)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass of a micro-step, autocasting; see `OptimWrapper`."""
        autocast = torch.autocast(self._device_type(), dtype=self.cast_dtype)
        with super().optim_context(model), autocast:
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `OptimWrapper`, and the scale as ``loss_scaler``."""
        return {**super().state_dict(), "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the argument stays as it is.

        Without ``loss_scaler`` in it, such as from `OptimWrapper`, the scale stays.
        """
        state = dict(state_dict)
        scale = state.pop("loss_scaler", None)
        before = self.loss_scaler.state_dict()
        try:
            if scale is not None:
                self.loss_scaler.load_state_dict(scale)
            super().load_state_dict(state)
        except BaseException:
            self.loss_scaler.load_state_dict(before)
            raise

    def _device_type(self) -> str:
        """Return the type of the device that the parameters are on now."""
        groups = self.optimizer.param_groups
        parameters = (each for group in groups for each in group["params"])
        device: torch.device = next(parameters).device
        return device.type


def _dtype(dtype: Any, device_type: str) -> torch.dtype | None:
    """Return the dtype that is meant, if the device can autocast to it."""
    where = "AmpOptimWrapper: dtype"
    if dtype is None:
        return None
    if isinstance(dtype, str):
        if dtype not in _NAMED:
            raise SettingValueError(
                f"{where} must be one of {', '.join(_NAMED)}, but is {dtype!r}."
            )
        dtype = getattr(torch, dtype)
    if not isinstance(dtype, torch.dtype):
        raise SettingTypeError(
            f"{where} must be a torch.dtype, its name or None, but is {dtype!r} "
            f"({type_name(dtype)})."
        )
    if device_type == "cpu" and dtype not in _ON_CPU:
        raise SettingValueError(
            f"{where} must be torch.bfloat16 or torch.float16 for parameters on the "
            f"CPU, but is {dtype}. Use OptimWrapper to train without casting."
        )
    return dtype


def _scaling(loss_scale: Any) -> tuple[dict[str, Any], float | None]:
    """Return the settings of the scaler, and the scale if it is to stay as it is."""
    where = "AmpOptimWrapper: loss_scale"
    if isinstance(loss_scale, Mapping):
        return dict(loss_scale), None
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return {}, None
    if not isinstance(loss_scale, int | float) or isinstance(loss_scale, bool):
        raise SettingTypeError(
            f"{where} must be 'dynamic', a number or a dict, but is {loss_scale!r} "
            f"({type_name(loss_scale)})."
        )
    if not 0 < loss_scale < float("inf"):
        raise SettingValueError(
            f"{where} must be above 0 and finite, but is {loss_scale}."
        )
    return {"init_scale": float(loss_scale)}, float(loss_scale)


def _scaler(
    sharded: bool, device_type: str, settings: dict[str, Any]
) -> torch.amp.GradScaler:
    cls: Callable[..., torch.amp.GradScaler] = torch.amp.GradScaler
    if sharded:  # imports torch.distributed, which not every torch has
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        cls = ShardedGradScaler
    try:
        inspect.signature(cls).bind(device_type, **settings)
    except TypeError as error:
        raise SettingTypeError(
            f"AmpOptimWrapper: loss_scale must hold arguments of {cls.__name__}, but "
            f"is {settings!r}: {error}."
        ) from error
    return cls(device_type, **settings)
