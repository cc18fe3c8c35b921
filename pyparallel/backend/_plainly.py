"""How the operators in torch's operators run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ..core.torch_private import set_grad_enabled, without_torch_function

_P = ParamSpec("_P")
_R = TypeVar("_R")


def plainly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run without autograd, and on tensor subclasses as on tensors."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        set_grad_enabled(False)  # no_grad() costs a microsecond
        try:
            with without_torch_function():
                return function(*args, **kwargs)
        finally:
            set_grad_enabled(before)

    return run
