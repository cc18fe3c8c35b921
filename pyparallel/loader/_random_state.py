"""Save, restore and seed the random states of torch (CPU), ``random`` and NumPy.

A saved state is plain data: strings, numbers, lists and dicts that ``json`` can write
and ``==`` can compare. Bytes are base64 text.

Note: [sample seeds]. With ``sample_seeds=True``, each sample of a map-style dataset has
its own random states. Their key is the BLAKE2b hash (RFC 7693) of the seed, the epoch
and the index of the sample. It does not depend on earlier samples or on the worker.
Parts of the key seed torch, ``random`` and NumPy for that sample. A batch has a key as
well, for random numbers of ``collate_fn``.
"""

from __future__ import annotations

import base64
import marshal
import operator
import random
import struct
import sys
from collections.abc import Generator
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, MapDataPipe, get_worker_info

from ..core.errors import BatchTypeError, restoring, type_name

#: The words of a Mersenne Twister: ``random`` appends its position to them.
_PYTHON, _NUMPY = struct.Struct("<625I"), struct.Struct("<624I")


def _numpy_random() -> Any:
    """Return ``numpy.random``, None if no code has imported it.

    Another thread may be importing it. The import statement waits for that.
    """
    if "numpy.random" not in sys.modules:
        return None
    import numpy.random

    return numpy.random


def capture(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """Return the state of torch's CPU generator, ``random``, NumPy and ``generators``.

    The state of NumPy is included if NumPy has been imported and its global generator
    is the default one, ``MT19937``.
    """
    own = {name: generator.get_state() for name, generator in generators.items()}
    return encode(raw_states(), own)


def encode(
    shared: tuple[Any, Any, Any], generators: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return a state as `capture` does, of `raw_states` and states of generators."""
    for_torch, (version, words, gauss), for_numpy = shared
    state: dict[str, Any] = {
        "torch": _encode_tensor(for_torch),
        "python": [version, _encode(_PYTHON.pack(*words)), gauss],
        "generators": {name: _encode_tensor(g) for name, g in generators.items()},
    }
    if for_numpy is not None and for_numpy["bit_generator"] == "MT19937":
        key = _encode(for_numpy["state"]["key"].astype("<u4").tobytes())
        rest = (for_numpy["state"]["pos"], for_numpy["has_gauss"], for_numpy["gauss"])
        state["numpy"] = [key, int(rest[0]), int(rest[1]), float(rest[2])]
    return state


def restore(state: dict[str, Any], generators: dict[str, torch.Generator]) -> None:
    """Restore a state that `capture` returned."""
    numpy = _numpy_random()
    _restore(state, generators, torch.default_generator, random, numpy)


def check(state: dict[str, Any], generators: dict[str, torch.Generator]) -> None:
    """Raise an error if `restore` would raise one. This changes no random state."""
    numpy = _numpy_random()
    copies = {name: torch.Generator(each.device) for name, each in generators.items()}
    others = torch.Generator(), random.Random(), numpy and numpy.RandomState()
    _restore(state, copies, *others)


def _restore(
    state: dict[str, Any],
    generators: dict[str, torch.Generator],
    for_torch: torch.Generator,
    for_python: Any,
    for_numpy: Any,
) -> None:
    for_torch.set_state(_decode_tensor(state["torch"]))
    version, words, gauss = state["python"]
    for_python.setstate((version, _PYTHON.unpack(base64.b64decode(words)), gauss))
    for name, generator in generators.items():
        generator.set_state(_decode_tensor(state["generators"][name]))
    if for_numpy is not None and "numpy" in state:
        key, *rest = state["numpy"]
        words = _NUMPY.unpack(base64.b64decode(key))
        for_numpy.set_state(("MT19937", words, *rest))


def _encode(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_tensor(tensor: torch.Tensor) -> str:
    data = bytearray(tensor.nbytes)
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.view(torch.uint8))
    return _encode(data)


def _decode_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@restoring
def preserve_in_parent() -> Generator[None, None, None]:
    """Restore the random states at the end of the block, except in a worker.

    A dataset may restore random states from its own state. In a worker these states are
    the dataset's. In the parent, the loader has already restored later states.
    """
    if get_worker_info() is not None:
        yield
        return
    state = capture({})
    yield
    restore(state, {})


class SampleTask(NamedTuple):
    """The indices of a batch, with the numbers that seed samples and replacements.

    Attributes:
        seed: the seed of the loader.
        epoch: the number of the epoch.
        number: the number of the batch in the epoch.
        indices: the indices to read.
    """

    seed: int
    epoch: int
    number: int
    indices: Any


class IndexKindError(BatchTypeError):
    """An index cannot seed its sample."""


def check_sample_seeds(dataset: Any) -> None:
    """Raise ``TypeError`` if the samples of a dataset have no indices."""
    if isinstance(dataset, IterableDataset | MapDataPipe):
        kind = "iterable" if isinstance(dataset, IterableDataset) else "a DataPipe"
        raise BatchTypeError(
            "DataLoader: with sample_seeds=True dataset must be map-style, so that "
            f"each sample has an index, but is {kind} ({type_name(dataset)}). Draw "
            "from a generator that the dataset keeps in its state_dict."
        )
    try:
        import numpy as np  # now, so that a sample which imports it is seeded, too
    except ImportError:
        return
    np.random  # noqa: B018


def sample_key(seed: int, epoch: int, purpose: str, index: Any) -> bytes:
    """Return a hash of all arguments, 32 bytes.

    Raises:
        IndexKindError: the index is neither an integer nor plain data.
    """
    try:
        index = operator.index(index)
    except TypeError:
        pass
    try:
        # Version 2 writes equal values as equal bytes in every Python.
        data = marshal.dumps((seed, epoch, purpose, index), 2)
    except ValueError:
        raise IndexKindError(
            "DataLoader: with sample_seeds=True an index must be an integer, a string "
            f"or a tuple of these, but is {index!r} ({type_name(index)})."
        ) from None
    return blake2b(data, digest_size=32).digest()


def seed_all(key: bytes) -> None:
    """Seed torch's CPU generator, ``random`` and NumPy from the bytes of a key."""
    torch.default_generator.manual_seed(int.from_bytes(key[:8], "little"))
    random.seed(int.from_bytes(key[8:16], "little"))
    numpy = _numpy_random()
    # Only this kind of NumPy's global generator can be seeded again.
    kind = numpy and type(numpy.mtrand._rand._bit_generator).__name__
    if kind == "MT19937":
        numpy.seed(int.from_bytes(key[16:20], "little"))


def own_seed(key: bytes) -> int:
    """Return the seed of a key for generators of the user, below ``2**32``."""
    return int.from_bytes(key[20:24], "little")


def raw_states() -> tuple[Any, Any, Any]:
    """Return the random states of torch (CPU), ``random`` and NumPy, quickly."""
    numpy = _numpy_random()
    found = None if numpy is None else numpy.get_state(legacy=False)
    return torch.get_rng_state(), random.getstate(), found


def restore_raw(states: tuple[Any, Any, Any]) -> None:
    """Restore the random states that `raw_states` returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy.random"].set_state(states[2])
