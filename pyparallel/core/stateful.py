"""torchdata's ``Stateful`` protocol, for loaders and samplers."""

from __future__ import annotations

import copy
import inspect
from typing import Any


def is_stateful(value: object) -> bool:
    """Return True if a value implements torchdata's ``Stateful`` protocol.

    Only the own loaders of litdata and MosaicML streaming know the arguments of
    ``state_dict`` of their datasets. So these are read again.
    """
    save = getattr(value, "state_dict", None)
    if not callable(save) or not callable(getattr(value, "load_state_dict", None)):
        return False
    try:
        inspect.signature(save).bind()
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        pass
    return True


def copy_state(value: Any) -> Any:
    """Return a copy of the state of a stateful value, None for another value.

    A copy, because ``state_dict`` may return an object that changes later. Prefetched
    batches would change it before the state is saved.
    """
    return copy.deepcopy(value.state_dict()) if is_stateful(value) else None
