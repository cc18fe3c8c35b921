"""torch's own parallel_apply, on a machine without an accelerator.

The code of the function is torch's. Only the globals that it looks up are replaced:
without an accelerator there is no device index and no stream. The omitted parts would
take time on a device, so the replacement does not make torch slower.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

_accelerator = SimpleNamespace(
    current_stream=lambda device: nullcontext(),
    is_available=lambda: True,
    current_accelerator=lambda: torch.device("cpu"),
    device_index=lambda device: nullcontext(),
)
#: torch 2.8 uses these.
_cuda = SimpleNamespace(
    Stream=torch.cuda.Stream,
    current_stream=lambda device: None,
    device=lambda device: nullcontext(),
    stream=lambda stream: nullcontext(),
)


class _Torch:
    """torch, with the host as its accelerator."""

    accelerator = _accelerator
    cuda = _cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _get_device_index(device: Any, optional: bool = False) -> Any:
    return "cpu" if device is None else device


# The package has the function under the name of the module.
_module = importlib.import_module("torch.nn.parallel.parallel_apply")
_names = {
    **vars(_module),
    "torch": _Torch(),
    "_get_device_index": _get_device_index,
}
#: ``torch.nn.parallel.parallel_apply``, on the host.
parallel_apply: Callable[..., list[Any]] = FunctionType(
    _module.parallel_apply.__code__,
    _names,
    "parallel_apply",
    _module.parallel_apply.__defaults__,
)
