"""Clipping of gradients as it is configured: ``dict(max_norm=1)`` and the like."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.errors import SettingTypeError, SettingValueError, type_name

_WHERE = "OptimWrapper: clip_grad"


class Clip(NamedTuple):
    """How gradients are clipped, in the words of mmengine's attributes."""

    function: Callable[..., Any]
    name: str  # what is logged: "grad_norm", "grad_value"
    kwargs: dict[str, Any]


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
            f"{_WHERE} must be a dict or None, but is {clip_grad!r} "
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
            f"{_WHERE}['type'] must be 'norm' or 'value', but is {way!r}."
        )
    if not kwargs:
        needed = "max_norm" if way == "norm" else "clip_value"
        raise SettingValueError(
            f"{_WHERE} must have arguments besides type, but is {dict(clip_grad)!r}. "
            f"Give at least {needed}."
        )
    try:
        inspect.signature(clip.function).bind([], **kwargs)
    except TypeError as error:
        raise SettingTypeError(
            f"{_WHERE} must hold arguments of {clip.function.__name__}, but is "
            f"{dict(clip_grad)!r}: {error}."
        ) from error
    return clip
