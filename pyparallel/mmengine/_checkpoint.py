"""What ``torch.load`` must know to read checkpoints of mmengine with weights only.

A checkpoint of mmengine 0.10 holds its message hub, whose ``HistoryBuffer`` keeps numpy
arrays and the functions ``min``, ``max``, ``mean`` and ``current`` of its class. Python
pickles those functions as calls of ``getattr``.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

_STATISTICS = ("current", "max", "mean", "min")
_KINDS = "? b B h H i I l L q Q e f d"  # of numpy's numbers, by their characters


def safe_globals() -> list[Callable[..., Any]]:
    """Return the classes and functions that such checkpoints name.

    All of them only make values: arrays and numbers of numpy, histories. In the places
    of ``getattr`` and ``bytes`` are functions that give the statistics of a history, no
    bytes, and nothing else. A checkpoint cannot run code of its own by them.
    """
    numpy = importlib.import_module("numpy")
    buffer = importlib.import_module("mmengine.logging").HistoryBuffer

    def statistic(owner: Any, name: Any) -> Any:
        if owner is not buffer or name not in _STATISTICS:
            raise pickle.UnpicklingError(
                "torch.load: a checkpoint may take from HistoryBuffer "
                f"{', '.join(_STATISTICS)} by getattr, but takes {name!r} from "
                f"{owner!r}. Load it with weights_only=False if you trust it."
            )
        return getattr(buffer, name)

    def nothing() -> bytes:  # of an empty array
        return b""

    _stands_for(statistic, "getattr")
    _stands_for(nothing, "bytes")
    kinds = {type(numpy.dtype(each)) for each in _KINDS.split()}
    # How an array and a number of numpy are made: the functions that pickle calls.
    make_array = numpy.zeros(1).__reduce__()[0]
    make_number = numpy.float64(1).__reduce__()[0]
    basic = [buffer, numpy.ndarray, numpy.dtype, make_array, make_number]
    return [*basic, statistic, nothing, *sorted(kinds, key=repr)]


def _stands_for(function: Any, name: str) -> None:
    """Let ``torch.load`` call this where a checkpoint asks for the builtin ``name``."""
    function.__module__ = "builtins"
    function.__name__ = function.__qualname__ = name
