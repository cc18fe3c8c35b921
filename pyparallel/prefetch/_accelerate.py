"""Tell accelerate about the batch of the loop, not about one that was read ahead.

A loader that accelerate has prepared tells its ``GradientState`` which batch is the
last of an epoch, and how many samples of that batch are no repetitions. ``accumulate``
and ``gather_for_metrics`` read this. A thread that reads ahead would tell it too early.
"""

from __future__ import annotations

from typing import Any


class Prepared:
    """The facts of a loader for accelerate, at the position of the loop.

    The loader gets this object in place of its ``GradientState`` until `release`.
    For loaders of other libraries all methods do nothing.

    Attributes:
        end_of_dataloader: the batch in use is the last one.
        remainder: the number of samples of the last batch of all ranks together, -1 if
            it is unknown.
    """

    end_of_dataloader: bool = False
    remainder: int = -1

    def __init__(self, loader: Any = None) -> None:
        found = getattr(loader, "__dict__", {}).get("gradient_state")
        if isinstance(found, Prepared):  # another pass reads the same loader
            found = found._state
        is_known = hasattr(found, "_add_dataloader")
        self._loader: Any = loader if is_known else None
        self._state: Any = found if is_known else None
        self._is_shown = False
        if is_known:
            loader.gradient_state = self

    def _add_dataloader(self, loader: Any) -> None:
        """Ignore the start of the loader, which calls this in the thread."""

    def _remove_dataloader(self, loader: Any) -> None:
        """Ignore the end of the loader, which calls this in the thread."""

    def read(self) -> tuple[bool, int] | None:
        """Return the facts of the batch that the thread has read."""
        loader = self._loader
        return None if loader is None else (loader.end_of_dataloader, loader.remainder)

    def release(self) -> None:
        """Return the ``GradientState`` to the loader: the thread reads no more."""
        loader, self._loader = self._loader, None
        if loader is not None and loader.gradient_state is self:
            loader.gradient_state = self._state

    def show(self, end_of_dataloader: bool, remainder: int) -> None:
        """Tell accelerate the facts of the batch that the loop gets."""
        if self._state is None:
            return
        self.end_of_dataloader, self.remainder = end_of_dataloader, remainder
        if not self._is_shown:
            self._is_shown = True
            self._state._add_dataloader(self)

    def end(self) -> None:
        """Tell accelerate that the loop has ended."""
        if self._is_shown:
            self._is_shown = False
            self._state._remove_dataloader(self)
