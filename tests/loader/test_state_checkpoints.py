"""States in checkpoints: torch.distributed.checkpoint, json, torch.save, and damage."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DistributedSampler

from pyparallel import DataLoader, PreDataLoader, SizeBatchSampler
from tests.support.loader import resumed
from tests.support.ranks import distributed_ranks as ranks

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Objects(resumed.Counting):
    """A sampler whose state has objects that JSON does not have."""

    def __init__(self, length: int, value: Any) -> None:
        super().__init__(length)
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.next, self.epoch_seen), 3: self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.epoch_seen = state["at"]
        assert type(state[3]) is type(self.value)


#: Loaders of 12 samples by kind.
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(range(12), 2, shuffle=True),
    "generator": lambda: DataLoader(
        range(12), 2, shuffle=True, generator=torch.Generator()
    ),
    "distributed": lambda: DataLoader(
        range(24), 2, sampler=DistributedSampler(range(24), 2, 1)
    ),
    "sizes": lambda: DataLoader(
        range(12), batch_sampler=SizeBatchSampler([*range(12)], 2)
    ),
    "stateful": lambda: DataLoader(range(12), 2, sampler=resumed.Counting(12)),
    "cursor": lambda: DataLoader(range(12), 2, sampler=resumed.WithState(12)),
    "tensor": lambda: DataLoader(range(12), 2, sampler=Objects(12, torch.ones(3))),
    "array": lambda: DataLoader(range(12), 2, sampler=Objects(12, np.ones(3))),
    "dataset": lambda: DataLoader(resumed.Remembering(12), 2),
    "workers": lambda: DataLoader(
        resumed.Remembering(12), 2, num_workers=2, snapshot_every_n_steps=1
    ),
    "stream": lambda: DataLoader(resumed.UnevenStateful((12,)), 2),
    "streams": lambda: DataLoader(resumed.Uneven((8, 4)), 2, num_workers=2),
    "seeds": lambda: DataLoader(range(12), 2, sample_seeds=True, on_error="skip"),
}
IN_PROCESS = [name for name in LOADERS if name not in ("workers", "streams")]


def states_of(kind: str) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """Yield states by position, with the batches of the rest of two epochs."""
    resumed.seed(3)
    loader, found = LOADERS[kind](), []
    states = [("new", 0, loader.state_dict())]
    for epoch in range(2):
        batches = iter(loader)
        states.append((f"begun {epoch}", len(found), loader.state_dict()))
        for batch in batches:
            found.append(torch.as_tensor(batch).tolist())
            states.append((f"batch {len(found)}", len(found), loader.state_dict()))
        states.append((f"end {epoch}", len(found), loader.state_dict()))
    for position, given, state in states[:-1]:
        yield position, state, found[given:]


def rest_of(kind: str, state: Any, number: int) -> list[Any]:
    """Return batches of a new loader after a state."""
    resumed.seed(4)
    loader, found = LOADERS[kind](), []
    loader.load_state_dict(state)
    while len(found) < number:
        found += [torch.as_tensor(batch).tolist() for batch in loader]
    return found


def by_dcp(state: Any, fresh: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"loader": state}, checkpoint_id=folder, no_dist=True)
        loaded = {"loader": fresh}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        return loaded["loader"]


def by_torch(state: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=weights_only)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_is_the_same_after_a_checkpoint(kind: str) -> None:
    fresh = LOADERS[kind]().state_dict()
    for position, state, rest in [*states_of(kind)][:: 1 if kind in IN_PROCESS else 4]:
        assert state.keys() == fresh.keys(), position
        if kind == "array":  # weights_only=True refuses the state of the sampler
            assert not isinstance(state["state"], str)
            loaded = by_torch(state, weights_only=False)
            assert rest_of(kind, by_dcp(state, fresh), len(rest)) == rest, position
            with pytest.raises(TypeError):
                json.dumps(state)
        else:
            assert [type(leaf) for leaf in state.values()] == [int, str, str]
            loaded = by_torch(json.loads(json.dumps(state)), weights_only=True)
            assert loaded == state == by_dcp(state, copy.deepcopy(fresh)), position
        assert rest_of(kind, loaded, len(rest)) == rest, position


# ------------------------------------------------------------------------ damage
def damaged(value: Any) -> Iterator[Any]:
    """Yield changes of a value: of its type, of a number, and without each key."""
    yield from (other for other in (None, [], {}, "", 1.5, -1, (1,)) if other != value)
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: other} for other in damaged(value[key]))
        yield {**value, "more": 1}
    elif isinstance(value, int):
        yield from (value + 1, float(value), str(value), True)
    elif isinstance(value, str):
        yield from damaged_texts(value)
    elif isinstance(value, SimpleNamespace):
        for text in damaged(value.text):
            yield SimpleNamespace(text=text, values=value.values)
        for values in (None, [], value.values * 2, {}):
            yield SimpleNamespace(text=value.text, values=values)
        yield from (SimpleNamespace(text=value.text), value.text)


def damaged_texts(text: str) -> Iterator[str]:
    """Yield texts with another number or character, or without some."""
    source = random.Random(len(text))
    places = [i for i, char in enumerate(text) if char.isdigit()]
    for i in source.sample(places, min(20, len(places))):
        yield f"{text[:i]}{(int(text[i]) + 1) % 10}{text[i + 1 :]}"
    for i in source.sample(range(len(text)), min(10, len(text))):
        yield text[:i] + chr(ord(text[i]) ^ 1) + text[i + 1 :]
        yield text[:i] + text[i + 1 :]
    yield from (f"{text} ", text.replace('": ', '":'), text.replace("e", "E"))


@pytest.mark.parametrize(
    "wrap", [lambda loader: loader, PreDataLoader], ids=["", "pre"]
)
@pytest.mark.parametrize("kind", IN_PROCESS)
def test_a_damaged_state_is_refused_and_changes_nothing(kind: str, wrap: Any) -> None:
    number = 0
    for position, state, rest in [*states_of(kind)][::3]:
        loader = wrap(LOADERS[kind]())
        loader.load_state_dict(state)
        before = loader.state_dict()
        for bad in damaged(state):
            if bad in ({}, state):  # {} discards a loaded state
                continue
            number += 1
            with pytest.raises(
                ValueError, match=r"^DataLoader\.load_state_dict: the st"
            ):
                loader.load_state_dict(bad)
        if kind != "array":
            assert loader.state_dict() == before == state
        found = [torch.as_tensor(batch).tolist() for batch in loader]
        assert found == rest[: len(found)], position
    assert number > 200


def test_a_truncated_file_of_a_state_is_named() -> None:
    state = LOADERS["shuffle"]().state_dict()
    state["state"] = state["state"][:-9]
    with pytest.raises(ValueError) as raised:
        LOADERS["shuffle"]().load_state_dict(state)
    text = str(raised.value)
    start = "DataLoader.load_state_dict: the state must have the checksum '"
    assert text.startswith(start) and text.endswith(
        "it is damaged. Load a state that nothing has changed since state_dict()."
    )


# ----------------------------------------------------- several ranks in one checkpoint
def rank_loader(rank: int, world: int, kind: str) -> DataLoader[Any]:
    if kind == "sizes":
        sampler = SizeBatchSampler([*range(32)], 2, num_replicas=world, rank=rank)
        return DataLoader(range(32), batch_sampler=sampler)
    sampler: Any = DistributedSampler(range(32), world, rank)
    return DataLoader(range(32), 2, sampler=sampler)


def sharded_model() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 6))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def whole(model: Any) -> list[Any]:
    return [value.full_tensor().tolist() for value in model.state_dict().values()]


def contents(loader: Any, model: Any, rank: int, way: str) -> dict[str, Any]:
    """Return the entries of a checkpoint by DCP."""
    key = {"by rank": f"loader{rank}"}.get(way, "loader")
    value = loader if way == "stateful" else loader.state_dict()
    return {"model": model.state_dict(), key: value}


WAYS = ("by rank", "shared", "stateful")


@ranks.case
def save_with_dcp(rank: int, world: int) -> Any:
    found = {}
    for kind in ("distributed", "sizes"):
        for way in WAYS:
            loader, model = rank_loader(rank, world, kind), sharded_model()
            batches = iter(loader)
            used = [next(batches).tolist() for _ in range(2)]
            saved = contents(loader, model, rank, way)
            dcp.save(saved, checkpoint_id=checkpoint_of(kind, way))
            rest = [batch.tolist() for batch in batches]
            found[f"{kind}, {way}"] = (used, rest, whole(model))
    return found


@ranks.case
def load_with_dcp(rank: int, world: int) -> Any:
    found = {}
    for kind in ("distributed", "sizes"):
        for way in WAYS:
            loader, model = rank_loader(rank, world, kind), sharded_model()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            loaded = contents(loader, model, rank % 2, way)
            dcp.load(loaded, checkpoint_id=checkpoint_of(kind, way))
            model.load_state_dict(loaded["model"])
            if way != "stateful":
                (key,) = (name for name in loaded if name.startswith("loader"))
                loader.load_state_dict(loaded[key])
            rest = [batch.tolist() for batch in loader]
            found[f"{kind}, {way}"] = (rest, whole(model))
    return found


def checkpoint_of(kind: str, way: str) -> str:
    return os.path.join(os.environ["PYPARALLEL_TEST_FOLDER"], f"{kind}, {way}")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_continue_from_one_checkpoint(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYPARALLEL_TEST_FOLDER", str(tmp_path))
    saved = ranks.launch(tmp_path, __name__, ["save_with_dcp"])["save_with_dcp"]
    (tmp_path / "again").mkdir()
    loaded = ranks.launch(tmp_path / "again", __name__, ["load_with_dcp"], world)
    for name in saved[0]:
        found = [rank[name] for rank in loaded["load_with_dcp"]]
        used, rest, model = zip(*(rank[name] for rank in saved), strict=True)
        assert all(weights == model[0] for _, weights in found)
        if world == 2:
            assert [batches for batches, _ in found] == [*rest], name
        parts = [*used, *(batches for batches, _ in found)]
        samples = sorted(index for part in parts for batch in part for index in batch)
        assert samples == [*range(32)], name
