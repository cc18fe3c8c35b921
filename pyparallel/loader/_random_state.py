"""The random states that an order of samples can come from, as plain data.

Plain means strings, numbers, lists and dicts: what ``json`` writes and ``==`` compares.
Bytes are base64.
"""

from __future__ import annotations

import base64
import contextlib
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import get_worker_info

#: The words of ``random`` and, without the last one, of NumPy: a Mersenne Twister's.
_PYTHON, _NUMPY = struct.Struct("<625I"), struct.Struct("<624I")


def capture(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """Return the state of torch's CPU generator, ``random``, NumPy and ``generators``.

    NumPy's is there if NumPy has been imported and its global generator is the
    ordinary one, ``MT19937``.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _text_of(torch.get_rng_state()),
        "python": [version, _text(_PYTHON.pack(*words)), gauss],
        "generators": {name: _text_of(g.get_state()) for name, g in generators.items()},
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found = numpy.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":
            key = _text(found["state"]["key"].astype("<u4").tobytes())
            rest = (found["state"]["pos"], found["has_gauss"], found["gauss"])
            state["numpy"] = [key, int(rest[0]), int(rest[1]), float(rest[2])]
    return state


def restore(state: dict[str, Any], generators: dict[str, torch.Generator]) -> None:
    """Put the generators back to what ``capture`` returned."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, _PYTHON.unpack(base64.b64decode(words)), gauss))
    for name, made in generators.items():
        made.set_state(_tensor(state["generators"][name]))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and "numpy" in state:
        key, *rest = state["numpy"]
        numpy.set_state(("MT19937", _NUMPY.unpack(base64.b64decode(key)), *rest))


def from_version_1(state: dict[str, Any]) -> dict[str, Any]:
    """Return a capture of version 1, which had tensors, in today's form."""
    version, words, gauss = state["python"]
    found: dict[str, Any] = {
        "torch": _text_of(state["torch"]),
        "python": [version, _text(_PYTHON.pack(*words)), gauss],
        "generators": {k: _text_of(made) for k, made in state["generators"].items()},
    }
    if "numpy" in state:
        key, *rest = state["numpy"]
        found["numpy"] = [_text_of(key), *rest]
    return found


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _text_of(tensor: torch.Tensor) -> str:
    data = bytearray(tensor.nbytes)
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.view(torch.uint8))
    return _text(data)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


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
