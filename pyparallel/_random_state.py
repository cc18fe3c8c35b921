"""The random states that an order of samples can come from, as plain data.

Plain means tensors, numbers and tuples: what ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import get_worker_info


def capture(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """Return the state of torch's CPU generator, ``random``, NumPy and ``generators``.

    NumPy's is there if NumPy has been imported and its global generator is the
    ordinary one, ``MT19937``.
    """
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "generators": {name: made.get_state() for name, made in generators.items()},
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found = numpy.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":
            keys = bytearray(found["state"]["key"].tobytes())
            rest = (found["state"]["pos"], found["has_gauss"], found["gauss"])
            words = torch.frombuffer(keys, dtype=torch.int32)
            state["numpy"] = (words, int(rest[0]), int(rest[1]), float(rest[2]))
    return state


def restore(state: dict[str, Any], generators: dict[str, torch.Generator]) -> None:
    """Put the generators back to what ``capture`` returned, wherever that lies."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    for name, made in generators.items():
        made.set_state(state["generators"][name].cpu())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and "numpy" in state:
        words, *rest = state["numpy"]
        numpy.set_state(("MT19937", words.cpu().numpy().view("uint32"), *rest))


@contextlib.contextmanager
def kept_in_parent() -> Iterator[None]:
    """Undo changes of the random states that the block makes, unless in a worker.

    A dataset may restore random states from its own state. In a worker they are the
    dataset's; in the parent the loader has restored later ones.
    """
    if get_worker_info() is not None:
        yield
        return
    state = capture({})
    yield
    restore(state, {})
