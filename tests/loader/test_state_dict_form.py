"""The form of a state: plain data, of this version or the previous one."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import resumed
import torch
from resumed import Case, continued, uninterrupted

from pyparallel import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WORKERS = {"num_workers": 2}
CASES = {
    "shuffle": Case("shuffle, generator", 13, 2, epochs=1),
    "counting": Case("counting", 13, 2, options=WORKERS, epochs=1),
    "iterable": Case("", 0, 2, resumed.Uneven((7, 4)), WORKERS, epochs=1),
    "stateful": Case("", 0, 2, resumed.UnevenDraws((7, 4)), WORKERS, epochs=1),
    "map-style": Case("shuffle", 9, 2, resumed.Remembering(9), WORKERS, epochs=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_state_is_the_same_after_json(name: str) -> None:
    batches, stops = uninterrupted(CASES[name])
    for stop in (stops[0], stops[3], stops[-1]):
        state = stop.load()
        text = json.dumps(state)
        assert json.loads(text) == state
        loader = CASES[name].loader()
        loader.load_state_dict(json.loads(text))
        assert loader.state_dict() == state
        rest = CASES[name].run(loader, stop.epoch + (stop.moment == "end"))
        assert rest == batches[stop.given :]


def test_states_of_different_moments_differ() -> None:
    states = [stop.load() for stop in uninterrupted(CASES["shuffle"])[1][1:]]
    for number, state in enumerate(states):
        assert [state == other for other in states].count(True) == 1, number


@pytest.mark.parametrize("name", ["shuffle", "iterable"])
def test_a_state_of_version_1_is_continued(name: str) -> None:
    # Written by torch.save where states had tensors, after three batches.
    path = Path(__file__).parent / "state_version_1.pt.gz"
    with gzip.open(path) as file:
        state, rest = torch.load(io.BytesIO(file.read()), weights_only=True)[name]
    assert state["version"] == 1 and len(rest) > 2
    stop = resumed.Stop(0, "batch", 3, resumed.saved(state))
    assert [batch for _, batch in continued(CASES[name], stop)] == rest


@pytest.mark.parametrize("steps", [1, 3])
def test_with_snapshot_every_n_steps_workers_report_from_the_first_batch(
    steps: int,
) -> None:
    dataset = resumed.Remembering(9)
    options: dict[str, Any] = {"num_workers": 2, "snapshot_every_n_steps": steps}
    loader = DataLoader(dataset, 2, **options)
    batches = iter(loader)
    next(batches), next(batches)
    reported = [r["state"] for r in loader.state_dict()["workers"].values()]
    assert reported == [{"own": {"reads": 2}}, {"own": {"reads": 2}}]


@pytest.mark.parametrize(
    "steps, error, shown",
    [(-1, ValueError, "-1"), (1.5, TypeError, "1.5 (float)")],
)
def test_snapshot_every_n_steps_must_be_a_number(
    steps: Any, error: type[Exception], shown: str
) -> None:
    with pytest.raises(error) as caught:
        DataLoader(range(4), snapshot_every_n_steps=steps)
    assert str(caught.value) == (
        "DataLoader: snapshot_every_n_steps must be None or an integer of 0 or more, "
        f"but is {shown}."
    )
