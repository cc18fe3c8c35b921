"""A batch without some of its tensors, for as long as they are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .container import map_tensors

_PLACE = torch.empty(0)


class Frame:
    """A batch whose tensors are being moved, and those tensors.

    Args:
        batch: of any containers; what is in ``cpu_only`` DataContainers stays there.
        takes: tells which tensors are moved.

    Attributes:
        tensors: those that are moved, in the order of the batch.
    """

    def __init__(self, batch: Any, takes: Callable[[torch.Tensor], bool]) -> None:
        self.tensors: list[torch.Tensor] = []

        def cut_out(tensor: torch.Tensor) -> torch.Tensor:
            if not takes(tensor):
                return tensor
            self.tensors.append(tensor)
            return _PLACE

        # It may wait for long: it must not hold the tensors' memory meanwhile.
        self._batch = map_tensors(cut_out, batch)

    def take(self) -> list[torch.Tensor]:
        """Return the tensors and forget them."""
        taken, self.tensors = self.tensors, []
        return taken

    def fill(self, tensors: list[torch.Tensor]) -> Any:
        """Return the batch with these tensors in their places."""
        following = iter(tensors)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return next(following) if tensor is _PLACE else tensor

        return map_tensors(place, self._batch)
