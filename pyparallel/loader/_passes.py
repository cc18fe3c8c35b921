"""The passes of subclasses whose ``__iter__`` is a generator.

Note: [passes]. Such a class may read batches ahead of the loop, as MONAI's
``ThreadDataLoader``, or keep one iterator for all epochs, as timm's
``MultiEpochsDataLoader``. Our iterator does not know the position of the loop then. So
`watched` wraps the generator, and a `Pass` compares the batches that our iterator has
returned with those that the generator has yielded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

from ..core.errors import BatchTypeError
from ..core.torch_private import LoaderIter, TorchLoader


class Pass:
    """One run of the generator of a subclass.

    Attributes:
        is_inside: whether the code of the generator runs.
        has_ended: the generator has yielded all batches of its epoch.
    """

    def __init__(self, name: str) -> None:
        self.is_inside = True
        self._name = name
        self._num_read = self._num_yielded = 0
        self._read: tuple[int, int] = (0, 0)  # the thread and the batch
        self._is_exact, self._is_in_thread = True, False
        self.has_ended = False

    def count_read(self, batch: Any) -> None:
        """Count a batch that our iterator returns to the code of the subclass."""
        self._num_read += 1
        self._read = threading.get_ident(), id(batch)

    def count_yielded(self, batch: Any) -> bool:
        """Count a batch that the generator yields. Return True if it is the first."""
        is_first = not self._num_yielded
        self._num_yielded += 1
        thread, last = self._read
        if id(batch) == last:  # the generator may leave out other batches
            self._num_yielded = self._num_read
        self._is_in_thread = thread != threading.get_ident()
        self._is_exact = self._num_yielded == self._num_read and not self._is_in_thread
        self.is_inside = False
        return is_first

    def check(self, method: str, *, is_own: bool) -> None:
        """Raise RuntimeError if the position of the loop is unknown.

        Args:
            method: the method that needs the position.
            is_own: the iterator of the position was made in this pass.
        """
        if self.is_inside or self.has_ended:
            return
        where = f"DataLoader.{method} must know the position of the loop, but "
        advice = (
            'Use pyparallel.DataLoader without that class: with worker_method="thread" '
            "or in a PreDataLoader it reads ahead, too."
        )
        if not is_own:
            raise RuntimeError(
                f"{where}{self._name} reads one iterator in several epochs. {advice} "
                "With persistent_workers=True workers stay alive between epochs."
            )
        if self._is_exact:
            return
        found = f"has read {self._num_read} and yielded {self._num_yielded} batches"
        if self._is_in_thread:
            found = "reads batches in another thread"
        raise RuntimeError(f"{where}{self._name} {found}. {advice}")


def check_bases(cls: type, base: type) -> None:
    """Raise TypeError if a class replaces the iterators of its base ``base``.

    A method without ``super()`` cannot reach the next class, as those of torchdata's
    ``StatefulDataLoader`` and litdata's ``StreamingDataLoader``.
    """
    for other in cls.__mro__[: cls.__mro__.index(base)]:
        method = vars(other).get("_get_iterator")
        is_theirs = issubclass(other, TorchLoader) and not issubclass(other, base)
        code = getattr(method, "__code__", None)
        if is_theirs and code is not None and "__class__" not in code.co_freevars:
            raise BatchTypeError(
                f"{cls.__name__} must use the iterators of pyparallel.DataLoader, but "
                f"{other.__name__} makes iterators of its own. Use one of the two "
                "classes, without the other."
            )


def watched(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``__iter__`` of a subclass that records its passes.

    The result of another kind than a generator is returned as it is.
    """

    @functools.wraps(function)
    def iterate(loader: Any) -> Any:
        batches: Any = function(loader)
        is_outermost = getattr(type(loader).__iter__, "__wrapped__", None) is function
        is_generator: bool = inspect.isgenerator(batches)
        if is_outermost and is_generator:
            return _watch(loader, batches, function.__qualname__)
        return batches

    vars(iterate)["watched"] = True
    return iterate


def repeats_iterator(loader: Any) -> bool:
    """Return True if a subclass reads one iterator of an endless order in all epochs.

    It refers to the iterator, and has replaced the sampler by one without a length.
    """
    found = [each for each in vars(loader).values() if isinstance(each, LoaderIter)]
    is_kept = any(each is not loader._iterator for each in found)
    return is_kept and not hasattr(type(loader._index_sampler), "__len__")


def _loads_in_vain(loader: Any, found: Pass) -> bool:
    """Return True at a first batch which does not follow the state that was loaded."""
    if loader._loaded is not None:  # no iterator has taken it
        return True
    progress = loader._progress
    is_resumed = progress.outer is found and progress.num_delivered > 1
    return is_resumed and repeats_iterator(loader)


def _watch(
    loader: Any, batches: Generator[Any, None, None], name: str
) -> Generator[Any, None, None]:
    found = loader._pass = Pass(name)
    try:
        with contextlib.closing(batches):
            for batch in batches:
                if found.count_yielded(batch) and _loads_in_vain(loader, found):
                    found.check("load_state_dict", is_own=False)
                yield batch
                found.is_inside = True
        found.has_ended = True
    finally:
        found.is_inside = False
