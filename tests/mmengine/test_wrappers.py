"""The wrappers on real gloo ranks, compared with one process and the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_ranks import Results, launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

CASES = ["plain", "accumulation", "batches", "anomalies"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two ranks")
    return launch(folder, "mmengine_cases", CASES, limit=180)


@pytest.mark.parametrize(
    "options", ["plain", "given devices", "static_graph", "unused", "views"]
)
def test_twenty_steps_are_those_of_one_process(results: Results, options: str) -> None:
    ranks = [rank[options] for rank in results["plain"]]
    for rank in ranks:
        assert rank["deviation"] < 1e-6
        assert torch.equal(rank["values"], ranks[0]["values"])
        assert rank["logged"] == [["loss", "loss_square", "acc"], "Tensor"]
        assert rank["detached"]


def test_eight_micro_steps_in_groups_of_three_are_those_of_one_process(
    results: Results,
) -> None:
    first, second = results["accumulation"]
    for rank in (first, second):
        assert rank["deviation"] < 1e-6
        assert rank["factors"] == [3, 3, 3, 3, 3, 3, 2, 2]
        assert rank["steps"] == rank["reductions"] == [3, 6, 8]
    pairs = zip(first["between"], second["between"], strict=True)
    assert [number for number, pair in enumerate(pairs, 1) if torch.equal(*pair)] == [
        *(3, 6, 8)  # in between, each rank keeps its own gradients
    ]


@pytest.mark.parametrize("preprocessor", ["ours", "foreign"])
def test_data_containers_are_opened_for_every_step(
    results: Results, preprocessor: str
) -> None:
    for rank in results["batches"]:
        seen, _ = rank[preprocessor]
        modes = ["loss", "loss", "predict", "predict"]
        assert seen == [("Tensor", mode) for mode in modes]
        validated, tested, expected = rank[preprocessor + " predicted"]
        assert torch.equal(validated, expected) and torch.equal(tested, expected)


def test_results_of_the_preprocessor_are_arguments(results: Results) -> None:
    for rank in results["batches"]:
        assert rank["tuple"] == ([("Tensor", "loss")] * 2, rank["ours"][1])
        assert rank["nothing"] == (
            "MMDistributedDataParallel: data_preprocessor must return a dict, a list "
            "or a tuple of arguments, but returned int."
        )
        assert rank["is wrapper"]


def test_parameters_without_a_gradient_are_named(results: Results) -> None:
    expected: list[Any] = [
        f"parameter module.unused.{name} of shape {shape} is not in the "
        "computational graph of the loss"
        for name, shape in (("bias", (2,)), ("weight", (2, 2)))
    ]
    for rank in results["anomalies"]:
        assert rank == expected
