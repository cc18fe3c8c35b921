"""Concat along other dimensions, and of indices: batches of graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from pyparallel import Collate, Concat, DataLoader, List, Pad, Ragged, Stack
from tests.support.processes.backends import both, using

GRAPHS = Collate(
    x=Concat(),
    edge_index=Concat(-1, index_of="x"),
    edge_attr=Concat(),
    bonds={"ends": Concat(index_of="x")},
    y=Stack(),
)
devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def graphs(seed: int, device: str = "cpu", dtype: torch.dtype = torch.int64) -> Any:
    rng = random.Random(seed)
    samples = []
    for i in range(rng.randint(1, 5)):
        nodes, edges = rng.randint(0, 5), rng.randint(0, 6)
        edges = edges if nodes else 0
        ends = [[rng.randrange(nodes) for _ in range(edges)] for _ in range(2)]
        index = torch.tensor(ends, dtype=dtype, device=device)
        samples.append(
            {
                "x": torch.rand(nodes, 3, device=device),
                "edge_index": index,
                "edge_attr": torch.rand(edges, device=device),
                "bonds": {"ends": index.T[: edges // 2]},
                "y": i,
            }
        )
    return samples


def one_graph(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the union of graphs, node by node and edge by edge, as lists."""
    union: dict[str, list[Any]] = {"x": [], "edges": [], "bonds": [], "graph_of": []}
    for i, sample in enumerate(samples):
        first = len(union["x"])
        for name, ends in (
            ("edges", sample["edge_index"].T),
            ("bonds", sample["bonds"]["ends"]),
        ):
            union[name] += [[int(a) + first, int(b) + first] for a, b in ends]
        for row in sample["x"]:
            union["x"].append(row.tolist())
            union["graph_of"].append(i)
    return union


@both
@devices
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_batch_of_graphs_is_their_union(
    backend: ModuleType, device: str, dtype: torch.dtype
) -> None:
    for seed in range(40):
        samples = graphs(seed, device, dtype)
        before = [each["edge_index"].clone() for each in samples]
        with using(backend):
            batch = GRAPHS(samples)
        expected = one_graph(samples)
        x, edge_index, ends = batch["x"], batch["edge_index"], batch["bonds"]["ends"]
        assert type(edge_index) is torch.Tensor and type(ends) is Ragged
        assert edge_index.dtype == ends.dtype == dtype
        assert edge_index.is_contiguous() and str(edge_index.device)[:4] == device[:4]
        assert x.values.tolist() == expected["x"]
        assert edge_index.T.tolist() == expected["edges"]
        assert ends.values.tolist() == expected["bonds"]
        assert x.segment_ids.tolist() == expected["graph_of"]
        assert len(edge_index[0]) == len(batch["edge_attr"].values)
        # The samples keep their values.
        assert all(
            torch.equal(one, other["edge_index"])
            for one, other in zip(before, samples, strict=True)
        )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_makes_batches_of_graphs(num_workers: int) -> None:
    samples = [each for seed in range(3) for each in graphs(seed)]
    loader = DataLoader(samples, 2, num_workers=num_workers, collate_fn=GRAPHS)
    for i, batch in enumerate(loader):
        expected = GRAPHS(samples[2 * i : 2 * i + 2])
        assert torch.equal(batch["edge_index"], expected["edge_index"])
        assert batch["x"] == expected["x"] and batch["bonds"] == expected["bonds"]


@both
@pytest.mark.parametrize("dim", [1, 2, -1, -2, -3])
def test_values_are_concatenated_along_any_dimension(
    backend: ModuleType, dim: int
) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        shape = [rng.randint(0, 3) for _ in range(3)]
        values = []
        for _ in range(rng.randint(1, 4)):
            shape[dim] = rng.randint(0, 4)
            values.append(torch.rand(shape).requires_grad_())
        with using(backend):
            found = Collate(x=Concat(dim))([{"x": each} for each in values])["x"]
        assert torch.equal(found.values if dim == 0 else found, torch.cat(values, dim))
        upstream = torch.rand_like(found)
        found.backward(upstream)
        parts = upstream.split([each.shape[dim] for each in values], dim)
        grads = [each.grad for each in values]
        assert all(map(torch.equal, grads, parts))


@pytest.mark.parametrize("empty", [[], [[], []], torch.tensor([]), torch.empty(2, 0)])
@pytest.mark.parametrize("at", [0, 1])
def test_no_edges_have_the_shape_and_dtype_of_edges(empty: Any, at: int) -> None:
    edges: list[Any] = [[[0, 1], [1, 0]]]
    edges.insert(at, empty)
    if isinstance(empty, torch.Tensor) and at == 0:
        edges[0] = empty.to(torch.int64)  # a tensor has a dtype of its own
    elif isinstance(empty, torch.Tensor):
        edges[1] = empty.long()
    samples = [{"x": [[1.0]] * 2, "edge_index": each} for each in edges]
    rules = Collate(x=Concat(), edge_index=Concat(1, index_of="x"))
    first = 2 - 2 * at
    found = rules(samples)["edge_index"]
    assert found.dtype == torch.int64
    assert found.tolist() == [[first, first + 1], [first + 1, first]]


@pytest.mark.parametrize("rule", [Pad(), Stack()], ids=repr)
def test_lists_of_empty_lists_have_the_dtype_of_the_others(rule: Any) -> None:
    empty: list[Any] = [[], []]
    values = [empty, [[1, 2], [3, 4]]] if rule == Pad() else [empty, empty]
    like = torch.empty(2, 0, dtype=torch.int64)
    for column in (values, values[::-1]):
        found = Collate(x=rule)([{"x": each} for each in column])["x"]
        assert found.dtype == (torch.int64 if rule == Pad() else torch.float32)
    mixed = Collate(x=Stack())([{"x": empty}, {"x": like}])["x"]
    assert mixed.dtype == torch.int64


EDGE = [[0], [0]]
WRONG_SAMPLES: list[tuple[Any, Any, type[Exception], str]] = [
    (
        [[1.0]],
        [EDGE, [[0.0], [0.0]]],
        TypeError,
        "batch[1]['edge_index'] must have integers, the indices of rows of 'x', but "
        "has torch.float32. Convert it to torch.int64.",
    ),
    (
        [[1.0]],
        [EDGE, [[True], [True]]],
        TypeError,
        "batch[1]['edge_index'] must have integers, the indices of rows of 'x', but "
        "has torch.bool. Convert it to torch.int64.",
    ),
    (
        [[1.0]] * 150,
        [torch.zeros(2, 1, dtype=torch.uint8)] * 2,
        ValueError,
        "'edge_index' must have a dtype that can hold 299, the last row of 'x' in the "
        "batch, but has torch.uint8. Convert the samples to torch.int64.",
    ),
    (
        [[1.0]],
        [[0], [0]],
        ValueError,
        "batch[0]['edge_index'] must have the dimension 1 to be concatenated along it, "
        "but has shape (1,). Use Concat(), along dimension 0.",
    ),
    (
        [[1.0]],
        [EDGE, [[0]]],
        ValueError,
        "batch[1]['edge_index'] must match batch[0]['edge_index'] outside dimension 1, "
        "but has shape (1, 1) where (2, 1) was expected. Use Pad(dims=2), Concat() or "
        "List().",
    ),
]


@pytest.mark.parametrize(("x", "edges", "cls", "text"), WRONG_SAMPLES)
def test_wrong_indices_are_named(
    x: Any, edges: Any, cls: type[Exception], text: str
) -> None:
    rules = Collate(x=Concat(), edge_index=Concat(1, index_of="x"))
    with pytest.raises(cls) as caught:
        rules([{"x": x, "edge_index": each} for each in edges])
    assert str(caught.value) == f"Collate, Concat(dim=1, index_of='x'): {text}"


_RULE = "Collate, edge_index=Concat(dim=1, index_of='x'): 'x' must have the rule "
WRONG_RULES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Collate(edge_index=Concat(1, index_of="x")),
        ValueError,
        f"{_RULE}Concat(), which concatenates its rows, but has no rule. Add the rule "
        "Concat().",
    ),
    (
        lambda: Collate(x=Pad(), edge_index=Concat(1, index_of="x")),
        ValueError,
        f"{_RULE}Concat(), which concatenates its rows, but has Pad(). Add the rule "
        "Concat().",
    ),
    (
        lambda: Collate(x=Concat(1), edge_index=Concat(1, index_of="x")),
        ValueError,
        f"{_RULE}Concat(), which concatenates its rows, but has Concat(dim=1). Add the "
        "rule Concat().",
    ),
    (
        lambda: Collate(x=Concat(), default=Concat(index_of="x")),
        ValueError,
        "Collate, default=Concat(index_of='x'): default must be a rule without "
        "index_of. Give each field of indices its own rule.",
    ),
    (
        lambda: Concat("x"),  # type: ignore[arg-type]
        TypeError,
        "Concat: dim must be an integer, but is 'x' (str).",
    ),
    (
        lambda: Concat(True),
        TypeError,
        "Concat: dim must be an integer, but is True (bool).",
    ),
    (
        lambda: Concat(index_of=0),  # type: ignore[arg-type]
        TypeError,
        "Concat: index_of must be the name of a field, but is 0 (int).",
    ),
]


@pytest.mark.parametrize(("make", "cls", "text"), WRONG_RULES)
def test_wrong_rules_are_errors(
    make: Callable[[], Any], cls: type[Exception], text: str
) -> None:
    with pytest.raises(cls) as caught:
        make()
    assert str(caught.value) == text


def test_a_rule_is_shown_as_its_code() -> None:
    shown = "Collate(x=Concat(), edge_index=Concat(dim=-1, index_of='x'), z=List())"
    assert repr(eval(shown)) == shown
    assert List() != Concat(1) != Concat(1, index_of="x") == Concat(1, index_of="x")
