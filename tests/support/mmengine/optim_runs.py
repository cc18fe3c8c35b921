"""Small trainings for the optimizer wrappers, and the same ones in plain torch.

`plain` does not use the wrappers: it gets the steps and the divisors from a list of
groups that the test defines.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

#: Settings of the clipping, for the wrappers.
CLIPS: list[Any] = [
    None,
    {"max_norm": 0.3},
    {"type": "norm", "max_norm": 0.5, "norm_type": 1},
    {"type": "value", "clip_value": 0.05},
]


class Recorded(nn.Module):
    """A model of two layers that records the forward passes under ``no_sync``."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.to(dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn.to(dtype))
        self.synced: list[bool] = []
        self._paused = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.synced.append(not self._paused)
        return self.layers(x).square().mean()


def batches(number: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + number)
    return [torch.randn(2, 5, generator=generator).to(dtype) for _ in range(number)]


def optimizer(
    model: Recorded, kind: str = "sgd", groups: int = 1
) -> torch.optim.Optimizer:
    """Make an optimizer with one group of parameters or one for each layer."""
    classes: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    settings: dict[str, Any] = {"sgd": {"momentum": 0.9}, "adam": {}}
    parameters: Any = list(model.parameters())
    if groups == 2:
        parameters = [
            {"params": parameters[:2], "lr": 0.03},
            {"params": parameters[2:]},
        ]
    return classes[kind](parameters, lr=0.1, **settings[kind])


def cut(number: int, every: int, announced: bool) -> list[list[int]]:
    """Split ``range(number)`` into groups; a short last one counts if ``announced``."""
    groups = [list(range(number))[i : i + every] for i in range(0, number, every)]
    return [group for group in groups if announced or len(group) == every]


def clip_of(clip: dict[str, Any] | None) -> Callable[[list[torch.Tensor]], Any]:
    """Return torch's function for a ``clip_grad`` of the wrappers."""
    if clip is None:
        return lambda parameters: None
    rest = {key: value for key, value in clip.items() if key != "type"}
    if clip.get("type") == "value":
        return lambda parameters: nn.utils.clip_grad_value_(parameters, **rest)
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, **rest)


def plain(
    model: Recorded,
    optimizer: torch.optim.Optimizer,
    data: Sequence[torch.Tensor],
    groups: Sequence[Sequence[int]],
    clip: dict[str, Any] | None = None,
) -> None:
    """Train in plain torch: one step for each group, with the mean of its gradients."""
    for group in groups:
        optimizer.zero_grad()
        for index in group:
            (model(data[index]) / len(group)).backward()
        clip_of(clip)(list(model.parameters()))
        optimizer.step()


def wrapped(model: Recorded, wrapper: Any, data: Sequence[torch.Tensor]) -> list[int]:
    """Train with a wrapper; return the number of batches before each step."""
    steps = []
    for index, batch in enumerate(data):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with wrapper.optim_context(model):
            loss = model(batch)
        wrapper.update_params(loss)
        after = zip(before, model.parameters(), strict=True)
        if any(not torch.equal(old, new) for old, new in after):
            steps.append(index + 1)
    return steps


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def same_state(one: Any, other: Any) -> bool:
    """Return True if two state dicts are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and list(one) == list(other)
            and all(same_state(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return type(one) is type(other) and bool(one == other)


@contextlib.contextmanager
def refuses(message: str, *classes: type[Exception]) -> Iterator[None]:
    """Expect an error of all these classes with exactly this message."""
    with pytest.raises(classes[0], match=f"^{re.escape(message)}$") as caught:
        yield
    assert all(isinstance(caught.value, cls) for cls in classes)
