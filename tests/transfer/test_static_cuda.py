"""Captured graphs read static batches at their addresses, with the values of eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyparallel import Collate, DataLoader, Pad, PreDataLoader, StaticBatches, scatter
from pyparallel.transfer import debug

pytestmark = pytest.mark.cuda

BUCKETS = ((8, 4), (16, 4), (24, 4))


def sample(i: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    length = 1 + (i * 7) % 23
    return {
        "x": torch.rand(length, 4, generator=generator),
        "scale": torch.rand((), generator=generator),
    }


def loader() -> DataLoader[Any]:
    collate = Collate(x=Pad(buckets=BUCKETS))
    return DataLoader([sample(i) for i in range(40)], 2, collate_fn=collate)


def model(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x = batch["x"] * batch["scale"].view(-1, 1, 1)
    torch.cuda._sleep(3_000_000)
    return x.relu().sum(1) + x.mean()


def in_epoch(how: str, static: StaticBatches) -> Iterator[Any]:
    if how == "loader":
        with PreDataLoader(loader(), "cuda", static=static) as pre:
            yield from pre
    else:
        for batch in loader():
            yield scatter(batch, ["cuda"], out=static)[0]


@pytest.mark.parametrize("debugging", [False, True])
@pytest.mark.parametrize("num_slabs", [1, 2])
@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("how", ["scatter", "loader"])
def test_graphs_of_each_plan_replay_over_epochs(
    how: str, side: bool, num_slabs: int, debugging: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(debug, "enabled", debugging)
    monkeypatch.setattr(debug, "poison_enabled", debugging)
    eager = [model(scatter(batch, ["cuda"])[0]).cpu() for batch in loader()]
    static = StaticBatches(num_slabs, max_plans=len(BUCKETS))
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    found: list[torch.Tensor] = []
    home = torch.cuda.current_stream()
    stream = torch.cuda.Stream() if side else home
    for _ in range(2):
        for batch in in_epoch(how, static):
            address = batch["x"].data_ptr()
            if address not in graphs:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    out = model(batch)
                graphs[address] = graph, out
            graph, out = graphs[address]
            stream.wait_stream(home)
            with torch.cuda.stream(stream):
                graph.replay()
                found.append(out.clone())  # the next replay overwrites it
            home.wait_stream(stream)
    torch.cuda.synchronize()
    assert len(graphs) == num_slabs * len(BUCKETS)
    assert static.num_plans == len(BUCKETS)
    expected = eager * 2
    assert len(found) == len(expected)
    assert all(map(torch.equal, (each.cpu() for each in found), expected))
    del graphs
    debug.reset()


def test_a_batch_is_not_received_during_a_capture() -> None:
    static = StaticBatches()
    (kept,) = scatter(torch.ones(3), ["cuda"], out=static)
    steps = iter(PreDataLoader([torch.zeros(3)], "cuda", static=static))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        doubled = kept * 2
        with pytest.raises(RuntimeError, match="must not be under graph capture"):
            scatter(torch.zeros(3), ["cuda"], out=static)
        with pytest.raises(RuntimeError, match="must not be under graph capture"):
            next(steps)
    graph.replay()
    assert doubled.tolist() == [2, 2, 2] and kept.tolist() == [1, 1, 1]


def test_a_freed_slab_is_not_reused_before_the_replays_on_it() -> None:
    static = StaticBatches()
    (batch,) = scatter(torch.ones(1 << 16), ["cuda"], out=static)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(20_000_000)
        total = batch.sum()
    graph.replay()
    static.clear()
    del batch
    others = [scatter(torch.zeros(1 << 16), ["cuda"])[0] for _ in range(8)]
    assert total.item() == 1 << 16
    del others
