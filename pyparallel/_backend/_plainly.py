"""How the operators in torch's operators run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def plainly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run without autograd, and on tensor subclasses as on tensors."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # no_grad() costs a microsecond
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return run
