"""The format of a loader's state: what ``state_dict()`` returns.

Note: [state format]. A state has three entries, at each position of each loader:
``version``, ``epochs`` and ``state``. Its leaves are an integer and two texts.
``torch.distributed.checkpoint`` loads into the entries of a fresh state, so entries
must not come or go. If ranks save under one key, it takes each leaf from any of the
ranks. All that differs between ranks is therefore in one leaf, with its checksum.

``epochs`` is the JSON text of the numbers of ``set_epoch``. ``state`` is a checksum and
the JSON text of everything else. The values of users in it, which are the states of
datasets and samplers and the indices of samples that raised, are one list:

1. as JSON, if JSON returns equal values of equal types;
2. otherwise as base64 text of ``torch.save``, if ``torch.load(weights_only=True)``
   accepts it, as with tensors and tuples;
3. otherwise as objects. ``state`` is then a ``SimpleNamespace`` of the text and the
   objects. ``torch.save`` accepts it if it can pickle the objects; ``json`` does not.

The modules of this folder use a dict of plain values instead: `encode` and `decode`
convert it.
"""

from __future__ import annotations

import base64
import copy
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from ..core.errors import type_name

#: The version of the format.
VERSION = 4
_KEYS = ["version", "epochs", "state"]
#: The entry that accelerate adds to a state.
_OF_ACCELERATE = "_iterator_finished"
_WHERE = "DataLoader.load_state_dict: the state must"
_ADVICE = "Load a state that nothing has changed since state_dict()."
#: The names of the values of users in the states of datasets and samplers.
_USERS = ("own", "iterator")
_SCALARS = (str, int, float, bool, type(None))


def encode(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in the format that ``state_dict()`` returns, of new values.

    Args:
        state: the dict that the modules of this folder use.
    """
    values: list[Any] = []

    def take_out(value: Any) -> int:
        values.append(value)
        return len(values) - 1

    body = _replace_values(state, take_out)
    epochs = json.dumps(body.pop("epochs"))
    body["values"] = values if _is_json(values) else _to_text(values)
    text = json.dumps(body)
    leaf: Any = f"{_checksum(epochs, text)} {text}"
    if body["values"] is None:
        leaf = SimpleNamespace(text=leaf, values=copy.deepcopy(values))
    return {"version": VERSION, "epochs": epochs, "state": leaf}


def _replace_values(
    state: dict[str, Any], replace: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return a state with other values of users."""

    def saved(part: Any) -> Any:
        if part is None:
            return None
        found = {name: part[name] for name in _USERS if part.get(name) is not None}
        return {**part, **{name: replace(value) for name, value in found.items()}}

    workers = {
        worker: {**record, "state": saved(record["state"])}
        for worker, record in state["workers"].items()
    }
    errors = [[replace(index), *text] for index, *text in state["errors"]]
    sampler = saved(state["sampler"])
    return {**state, "sampler": sampler, "workers": workers, "errors": errors}


def decode(state: Any) -> dict[str, Any]:
    """Return the dict of a state that `encode` returned.

    Raises:
        ValueError: the state has another format, or was changed.
    """
    if not isinstance(state, dict) or "version" not in state:
        found = list(state)[:4] if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"{_WHERE} come from DataLoader.state_dict(), but is {found}. States of "
            "other loaders are not supported."
        )
    state = {name: value for name, value in state.items() if name != _OF_ACCELERATE}
    version = state["version"]
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{_WHERE} be of version {VERSION}, but is of version {version!r}. Load it "
            "with the version of pyparallel that saved it."
        )
    if sorted(map(str, state)) != sorted(_KEYS):
        raise ValueError(
            f"{_WHERE} have the entries {_KEYS}, but has {list(state)}. {_ADVICE}"
        )
    return copy.deepcopy(_decode(state["epochs"], state["state"]))


def _decode(epochs: Any, leaf: Any) -> dict[str, Any]:
    """Return the entries of the two texts of a state."""
    is_split = isinstance(leaf, SimpleNamespace)
    text: Any = getattr(leaf, "text", None) if is_split else leaf
    for name, value in {"epochs": epochs, "state": text}.items():
        if type(value) is not str:
            raise ValueError(
                f"{_WHERE} have a text as its entry {name!r}, but has "
                f"{_shorten(value)} ({type_name(value)}). {_ADVICE}"
            )
    expected, _, text = text.partition(" ")
    if expected != (found := _checksum(epochs, text)):
        raise ValueError(
            f"{_WHERE} have the checksum {_shorten(expected)} that was saved with it, "
            f"but has {found}: it is damaged. {_ADVICE}"
        )
    body = json.loads(text)
    values = body.pop("values")
    if is_split:
        values = getattr(leaf, "values", None)
    elif isinstance(values, str):
        values = _from_text(values)
    taken: list[int] = []
    _replace_values(body, taken.append)
    if not isinstance(values, list) or len(values) != len(taken):
        raise ValueError(
            f"{_WHERE} have {len(taken)} values of the dataset and the sampler, but "
            f"has {_shorten(values)}. {_ADVICE}"
        )
    return {"epochs": json.loads(epochs), **_replace_values(body, values.__getitem__)}


def _checksum(epochs: str, text: str) -> str:
    data = f"{VERSION} {epochs} {text}".encode(errors="surrogatepass")
    return f"{crc32(data):08x}"


def _is_json(value: Any) -> bool:
    """Return True if JSON returns an equal value of the same types."""
    cls = type(value)
    if cls in _SCALARS:
        return True
    try:
        if cls is list:
            return all(map(_is_json, value))
        return cls is dict and all(
            type(key) is str and _is_json(each) for key, each in value.items()
        )
    except RecursionError:  # a cycle
        return False


def _to_text(values: Any) -> str | None:
    """Return the text of values, None if ``weights_only=True`` refuses them."""
    file = io.BytesIO()
    try:
        torch.save(values, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception:  # also of methods of the values
        return None
    return base64.b64encode(file.getvalue()).decode("ascii")


def _from_text(text: str) -> Any:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{_WHERE} have states of the dataset and the sampler that "
            f"torch.load(weights_only=True) accepts, but it raises {error!r}. Allow "
            "their classes with torch.serialization.add_safe_globals."
        ) from error


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
