"""MMDistributedDataParallel on real gloo ranks, compared with DDP and mmcv 1.x."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed_cases
import pytest
import torch
from distributed_ranks import Results, launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow, pytest.mark.timeout(150)]

CASES = [
    "training",
    "naive_training",
    "no_sync",
    "buffers",
    "join",
    "calls",
    "outputs",
    "subclasses",
    "on_a_device",
    "failing_step",
    "reducer_in_the_step",
    "python_reducer",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two ranks")
    return launch(folder, "distributed_cases", CASES)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("options", distributed_cases.OPTIONS)
class TestTwentyTrainingSteps:
    def test_leave_equal_parameters_on_both_ranks(
        self, results: Results, options: str
    ) -> None:
        first, second = (rank[options]["ours"] for rank in results["training"])
        assert torch.equal(first["values"], second["values"])

    def test_have_the_gradients_of_one_process_on_the_whole_batch(
        self, results: Results, options: str
    ) -> None:
        for rank in results["training"]:
            assert rank[options]["ours"]["deviation"] < 1e-6

    def test_are_bit_equal_to_torch_ddp_whose_forward_is_the_step(
        self, results: Results, options: str
    ) -> None:
        for rank in results["training"]:
            ours, theirs = rank[options]["ours"], rank[options]["torch"]
            assert torch.equal(ours["values"], theirs["values"])

    def test_return_the_dict_of_the_model(self, results: Results, options: str) -> None:
        keys = ["loss", "log_vars", "num_samples"]
        if options == "unused_output":
            keys.append("not in the loss")
        assert results["training"][0][options]["ours"]["keys"] == keys


@pytest.mark.parametrize("options", ["static_graph", "unused_output"])
def test_steps_without_the_bracket_of_torch_do_not_reduce_gradients(
    results: Results, options: str
) -> None:
    for rank in results["naive_training"]:
        assert rank[options]["deviation"] > 1e-3


@pytest.mark.parametrize("options", ["plain", "unused_output", "small_buckets"])
def test_no_sync_reduces_only_the_last_of_three_micro_steps(
    results: Results, options: str
) -> None:
    first, second = (rank[options] for rank in results["no_sync"])
    for round_ in range(2):
        assert differ(first[2 * round_], second[2 * round_]) > 1e-3
        assert first[2 * round_ + 1].abs().max() < 1e-6
        assert second[2 * round_ + 1].abs().max() < 1e-6


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


def test_buffers_drift_apart_after_a_validation_step_without_the_bracket(
    results: Results,
) -> None:
    first, second = (rank["naive"] for rank in results["buffers"])
    assert [torch.equal(*pair) for pair in zip(first, second, strict=True)][3:] == [
        False
    ] * 3


def test_ranks_with_unequal_numbers_of_batches_end_equal_under_join(
    results: Results,
) -> None:
    first, second = results["join"]
    assert [first["ours"]["steps"], second["ours"]["steps"]] == [3, 5]
    assert torch.equal(first["ours"]["values"], second["ours"]["values"])
    assert torch.equal(first["ours"]["values"], first["torch"]["values"])


def test_join_without_the_bracket_does_not_survive_unequal_batches(
    tmp_path: Path,
) -> None:
    results = launch(tmp_path, "distributed_cases", ["naive_join"], limit=20)
    with pytest.raises(AssertionError, match="case naive_join did not finish"):
        results["naive_join"]


@pytest.mark.parametrize("method", ["forward", "train_step", "val_step"])
class TestTheModelGets:
    def seen(self, results: Results, method: str) -> Any:
        return results["calls"][0][method]

    def test_opened_containers(self, results: Results, method: str) -> None:
        seen = self.seen(results, method)
        assert seen["img"] == (4, 3, 8, 8)
        assert seen["boxes"] == ["Tensor"] * 4
        assert seen["metas"] == [(5, 6), (7, 8), (4, 6), (8, 8)]

    def test_optimizers_by_identity(self, results: Results, method: str) -> None:
        seen = self.seen(results, method)
        assert seen["the optimizer"]
        assert seen["the optimizers"] == [True, True]

    def test_keyword_arguments(self, results: Results, method: str) -> None:
        seen = self.seen(results, method)
        assert seen["kwargs"] == {"flag": True, "none": None}
        assert seen["keys"] == ["boxes", "img", "label", "metas"]

    def test_nothing_when_nothing_is_given(self, results: Results, method: str) -> None:
        assert self.seen(results, method)["nothing"] == ((), {})

    def test_the_same_on_a_device_where_only_scatter_moves(
        self, results: Results, method: str
    ) -> None:
        for rank in results["on_a_device"]:
            assert rank["torch"] == "meta"
            assert rank[method] == [["cpu", "cpu"], {"a": [1]}, ((), {})]
            assert rank["targets"] == [[0]] * 6


def test_containers_reach_the_model_closed_without_the_bracket(
    results: Results,
) -> None:
    assert results["calls"][0]["naive"] == "DataContainer"


def test_mixed_precision_casts_everything_but_cpu_only(results: Results) -> None:
    assert results["on_a_device"][0]["precision"] == [torch.bfloat16, torch.float32]


def test_the_attributes_that_code_bases_read_are_there(results: Results) -> None:
    seen = results["calls"][0]
    assert seen["attributes"] == [None, 0, None, False, True, False, "Reducer"]
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


def test_a_subclass_may_open_the_arguments_in_run_ddp_forward(results: Results) -> None:
    assert results["subclasses"][0]["old fix"] == (4, 3, 8, 8)


def test_every_call_goes_through_the_methods_that_subclasses_override(
    results: Results,
) -> None:
    assert results["subclasses"][0]["marked"] == [
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


def test_the_python_reducer_reduces_the_gradients_of_a_step(results: Results) -> None:
    for rank in results["python_reducer"]:
        assert rank["deviation"] < 1e-6


def test_three_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    results = launch(tmp_path, "distributed_cases", ["training"], world=3)
    for rank in results["training"]:
        for options in distributed_cases.OPTIONS:
            assert rank[options]["ours"]["deviation"] < 1e-6


@pytest.mark.cuda
def test_on_a_gpu_all_but_cpu_only_data_is_moved(tmp_path: Path) -> None:
    results = launch(tmp_path, "distributed_cases", ["on_a_gpu"], world=1)
    seen = results["on_a_gpu"][0]
    for method in ("forward", "train_step", "val_step"):
        assert seen[method] == ["cuda", "cpu", ((), {})]
    assert torch.equal(seen["gradient"], torch.full((1, 2), 3.0))
