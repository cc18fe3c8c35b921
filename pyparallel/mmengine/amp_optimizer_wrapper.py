"""AmpOptimWrapper: mixed precision with loss scaling, also on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.errors import SettingTypeError, SettingValueError, type_name
from ..core.torch_private import is_flattened
from ._shards import local_leaves, meshes_of
from ._upstream import AmpOptimWrapperBase, provides
from .optimizer_wrapper import OptimWrapper

_DTYPE_NAMES = ("float16", "bfloat16", "float32", "float64")
_CPU_DTYPES = (torch.bfloat16, torch.float16)


@provides("OPTIM_WRAPPERS")
class AmpOptimWrapper(OptimWrapper, AmpOptimWrapperBase):
    """An `OptimWrapper` with autocasting and loss scaling.

    Forward passes within `optim_context` run under ``torch.autocast`` for the device of
    the model, also if its sharded parameters are offloaded to the CPU. The loss is
    multiplied by a scale before the backward pass, and gradients are divided by it
    before they are clipped and applied. If a gradient is not finite, the step is
    skipped and the scale is halved. Losses of bfloat16 are scaled too. A scale that is
    a power of two, such as torch's defaults, changes no bit of a result in range.

    Args:
        loss_scale: ``"dynamic"`` for torch's defaults, a number above 0 for a constant
            scale, or a dict of arguments of ``torch.amp.GradScaler``, which is copied.
        dtype: ``torch.bfloat16``, ``torch.float16`` or their names, also float32 and
            float64 if the device can autocast to them. None is the default of the
            device: float16 on CUDA, bfloat16 on the CPU.
        use_fsdp: if True, ``ShardedGradScaler`` makes all ranks skip the same steps.
            Parameters of ``FullyShardedDataParallel`` always use it. Those of
            ``fully_shard`` do not need it, but get it if the optimizer has others too.
            torch.distributed must be initialized.
        **kwargs: arguments of `OptimWrapper`, among them ``optimizer``.

    Attributes:
        loss_scaler: the ``GradScaler``.
        cast_dtype: the dtype, or None.

    Raises:
        TypeError, ValueError: a setting has the wrong type or is out of range.

    Equivalent to mmengine's ``AmpOptimWrapper``, and passes its ``isinstance`` checks.
    mmengine's class raises an error on the CPU.
    """

    def __init__(
        self,
        loss_scale: str | float | Mapping[str, Any] = "dynamic",
        dtype: str | torch.dtype | None = None,
        use_fsdp: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        device_type = self._device_type()
        self.cast_dtype: torch.dtype | None = _resolve_dtype(dtype, device_type)
        settings, self._scale_update_param = _parse_loss_scale(loss_scale)
        self._use_fsdp = use_fsdp
        self._scaler_settings = (device_type, settings)
        self._scales_all_ranks = self._needs_all_ranks()
        self.loss_scaler: torch.amp.GradScaler
        self.loss_scaler = _make_scaler(self._scales_all_ranks, device_type, settings)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale the loss, call its ``backward`` and count the micro-step."""
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Clip the unscaled gradients, step if all are finite, and update the scale."""
        optimizer: Any = self.optimizer
        if self._has_several_kinds():
            optimizer = _LocalGradients(self.optimizer)
        if self.clip_grad_kwargs:
            self.loss_scaler.unscale_(optimizer)
            try:
                self._clip_grad()
            except BaseException:  # such as of error_if_nonfinite
                # Otherwise the scaler would refuse every later step.
                self.loss_scaler.update(self._scale_update_param)
                raise
        self.loss_scaler.step(optimizer, **kwargs)
        self.loss_scaler.update(self._scale_update_param)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass of a micro-step with autocasting; see `OptimWrapper`."""
        self._adapt_scaler()
        autocast = torch.autocast(self._device_type(model), dtype=self.cast_dtype)
        with super().optim_context(model), autocast:
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `OptimWrapper` with the scaler's as ``loss_scaler``."""
        return {**super().state_dict(), "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`; the argument is not changed.

        A state without ``loss_scaler``, such as from `OptimWrapper`, keeps the scale.
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

    def _needs_all_ranks(self) -> bool:
        """Return True if a rank cannot find out alone whether to skip a step."""
        is_sharded = self._use_fsdp or any(map(is_flattened, self._parameters()))
        return is_sharded or self._has_several_kinds()

    def _has_several_kinds(self) -> bool:
        """Return True for a ``DTensor`` beside other tensors, or of several meshes."""
        return len(meshes_of(self._parameters())) > 1

    def _adapt_scaler(self) -> None:
        """Replace the scaler if the parameters were sharded after its construction."""
        if not self._scales_all_ranks and self._needs_all_ranks():
            self._scales_all_ranks = True
            state = self.loss_scaler.state_dict()
            self.loss_scaler = _make_scaler(True, *self._scaler_settings)
            self.loss_scaler.load_state_dict(state)

    def _device_type(self, model: nn.Module | None = None) -> str:
        """Return the type of the device that computes with the parameters."""
        first = next(self._parameters())
        if is_flattened(first):
            device: Any = getattr(model, "compute_device", None)
            if device is None:
                device = torch.accelerator.current_accelerator(check_available=True)
            return str((device or first.device).type)
        mesh = getattr(first, "device_mesh", None)
        return first.device.type if mesh is None else str(mesh.device_type)


class _LocalGradients:
    """An optimizer as its scaler sees it: with the gradients' parts on this rank.

    A scaler raises for a ``DTensor`` among other gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [
            {"params": local_leaves(group["params"])}
            for group in optimizer.param_groups
        ]
        self.step = optimizer.step


def _resolve_dtype(dtype: Any, device_type: str) -> torch.dtype | None:
    """Return the dtype of a setting; raise if the device cannot autocast to it."""
    where = "AmpOptimWrapper: dtype"
    if dtype is None:
        return None
    if isinstance(dtype, str):
        if dtype not in _DTYPE_NAMES:
            raise SettingValueError(
                f"{where} must be one of {', '.join(_DTYPE_NAMES)}, but is {dtype!r}."
            )
        dtype = getattr(torch, dtype)
    if not isinstance(dtype, torch.dtype):
        raise SettingTypeError(
            f"{where} must be a torch.dtype, its name or None, but is {dtype!r} "
            f"({type_name(dtype)})."
        )
    if device_type == "cpu" and dtype not in _CPU_DTYPES:
        raise SettingValueError(
            f"{where} must be torch.bfloat16 or torch.float16 for parameters on the "
            f"CPU, but is {dtype}. Use OptimWrapper to train without casting."
        )
    return dtype


def _parse_loss_scale(loss_scale: Any) -> tuple[dict[str, Any], float | None]:
    """Return the settings of the scaler, and the scale if it is constant."""
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


def _make_scaler(
    sharded: bool, device_type: str, settings: dict[str, Any]
) -> torch.amp.GradScaler:
    cls: Callable[..., torch.amp.GradScaler] = torch.amp.GradScaler
    if sharded:  # needs torch.distributed, which some builds of torch lack
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
