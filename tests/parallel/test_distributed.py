"""MMDistributedDataParallel on real gloo ranks, compared with DDP and mmcv 1.x."""

from __future__ import annotations

from pathlib import Path

import distributed_cases
import pytest
import torch
from distributed_ranks import Results, launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = "training buffers join calls outputs subclasses on_a_device failing_step"
    cases = [*names.split(), "reducer_in_the_step"]
    return launch(tmp_path_factory.mktemp("two ranks"), "distributed_cases", cases)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("options", [*distributed_cases.OPTIONS, "python_reducer"])
def test_trained_parameters_are_those_of_torch_ddp_whose_forward_is_the_step(
    results: Results, options: str
) -> None:
    first, second = (rank[options]["ours"] for rank in results["training"])
    assert torch.equal(first["values"], second["values"])
    keys = ["loss", "log_vars", "num_samples"]
    if options == "unused_output":
        keys.append("not in the loss")
    for rank in results["training"]:
        ours, theirs = rank[options]["ours"], rank[options]["torch"]
        assert torch.equal(ours["values"], theirs["values"])
        assert ours["keys"] == keys


def test_buffers_are_broadcast_again_after_a_validation_step(results: Results) -> None:
    first, second = results["buffers"]
    for kind in ("ours", "torch"):
        assert [
            torch.equal(*pair) for pair in zip(first[kind], second[kind], strict=True)
        ] == [
            True,
            True,
            True,  # the validation step
            False,  # torch skips one broadcast, and so do we
            True,
            True,
        ]
    for rank in (first, second):
        assert all(map(torch.equal, rank["ours"], rank["torch"]))


def test_ranks_with_unequal_numbers_of_batches_end_equal_under_join(
    results: Results,
) -> None:
    first, second = results["join"]
    assert [first["ours"]["steps"], second["ours"]["steps"]] == [3, 5]
    assert torch.equal(first["ours"]["values"], second["ours"]["values"])
    assert torch.equal(first["ours"]["values"], first["torch"]["values"])


@pytest.mark.parametrize("method", ["forward", "train_step", "val_step"])
def test_the_model_gets_opened_containers_and_the_very_optimizers(
    results: Results, method: str
) -> None:
    assert results["calls"][0][method] == [
        (4, 3, 8, 8),
        ["Tensor"] * 4,
        [(5, 6), (7, 8), (4, 6), (8, 8)],
        True,
        [True, True],
        {"flag": True, "none": None},
        ["boxes", "img", "label", "metas"],
        ((), {}),
    ]
    for rank in results["on_a_device"]:  # where only scatter moves
        assert rank["torch"] == "meta"
        assert rank[method] == [["cpu", "cpu"], {"a": [1]}, ((), {})]
        assert rank["targets"] == [[0]] * 6
        # Mixed precision casts everything but cpu_only.
        assert rank["precision"] == [torch.bfloat16, torch.float32]


def test_the_attributes_that_code_bases_read_are_there(results: Results) -> None:
    seen = results["calls"][0]
    assert seen["attributes"] == [None, 0, None, False, True, False]
    assert seen["reducer"] == "Reducer"
    assert seen["state"] == ["module.layer.weight", "module.layer.bias"]


@pytest.mark.parametrize("unused", [False, True])
def test_nested_outputs_keep_their_types_and_values(
    results: Results, unused: bool
) -> None:
    types, plain, tensors = results["outputs"][0][unused]
    assert types == {
        "loss": "Tensor",
        "ordered": "OrderedDict",
        "default": "defaultdict",
        "tuple": "tuple",
        "point": "Point",
    }
    assert plain == [True, (1, "text", None)]
    assert tensors == [True, True]


def test_every_call_goes_through_the_methods_that_subclasses_override(
    results: Results,
) -> None:
    seen = results["subclasses"][0]
    assert seen["old fix"] == (4, 3, 8, 8)  # opened in _run_ddp_forward
    assert seen["marked"] == [
        {"by": "to_kwargs", "target": -1},
        {"by": "scatter", "target": [-1]},
        {"by": "scatter", "target": [-1]},
    ]


def test_a_step_that_raises_leaves_the_state_that_torch_leaves(
    results: Results,
) -> None:
    first, second = results["failing_step"]
    for rank in (first, second):
        assert torch.equal(rank["ours"][0], rank["torch"][0])
        assert rank["ours"][1] == rank["torch"][1] == 5
    assert differ(first["ours"][0], second["ours"][0]) == 0


def test_backward_passes_inside_the_step_are_reduced_by_the_reducer_attribute(
    results: Results,
) -> None:
    first, second = results["reducer_in_the_step"]
    assert torch.equal(first[0], second[0])
    assert differ(*first) > 1e-2


@pytest.mark.cuda
def test_on_a_gpu_all_but_cpu_only_data_is_moved(tmp_path: Path) -> None:
    results = launch(tmp_path, "distributed_cases", ["on_a_gpu"], world=1)
    seen = results["on_a_gpu"][0]
    for method in ("forward", "train_step", "val_step"):
        assert seen[method] == ["cuda", "cpu", ((), {})]
    assert torch.equal(seen["gradient"], torch.full((1, 2), 3.0))
