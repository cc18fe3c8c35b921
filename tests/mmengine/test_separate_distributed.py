"""MMSeparateDistributedDataParallel on real ranks, compared with one process."""

from __future__ import annotations

import pytest
import torch
from distributed_ranks import Results, launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

CASES = ["adversaries", "structure", "no_sync"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two ranks")
    return launch(folder, "mmengine_separate_cases", CASES, limit=180)


@pytest.mark.parametrize("plan", ["each", "groups"])
def test_two_optimizers_equal_one_process(results: Results, plan: str) -> None:
    """The model's own parameters, buffers and frozen children too."""
    ranks = [rank[plan] for rank in results["adversaries"]]
    for rank in ranks:
        assert rank["deviation"] < 1e-6
        assert torch.equal(rank["values"], ranks[0]["values"])
        assert rank["logged"] == ["critic", "generator"]


def test_each_trained_child_has_one_wrapper_and_the_model_has_none(
    results: Results,
) -> None:
    wrapped = "MMDistributedDataParallel"
    layers = ["0.weight", "0.bias", "2.weight", "2.bias"]
    for rank in results["structure"]:
        assert rank == {
            "kinds": {
                "generator": wrapped,
                "critic": wrapped,
                "shifts": "ParameterList",
                "same_generator": wrapped,
                "frozen": "Linear",
                "activation": "ReLU",
                "missing": "NoneType",
            },
            "shared": True,
            "options": [(True, False), True],
            "keys": [  # those of mmengine
                "module.scale",
                "module.offset",
                *[f"module.generator.module.{each}" for each in layers],
                *[f"module.critic.module.{each}" for each in layers],
                "module.shifts.0",
                *[f"module.same_generator.module.{each}" for each in layers],
                "module.frozen.weight",
                "module.frozen.bias",
            ],
            "predicted": [True, True],  # from the content of DataContainers
            "modes": [False] * 3 + [True] * 3,
            "message": (
                "MMSeparateDistributedDataParallel: forward must be called on one "
                "child, but was called on the whole model. Call train_step, val_step "
                "or test_step."
            ),
            "is wrapper": [True, False],
        }


def test_no_sync_is_made_up_for_by_the_next_pass(results: Results) -> None:
    ranks = results["no_sync"]
    assert all(rank["flags"] == [False, False, True, True] for rank in ranks)
    inside = [rank["gradients"][0] for rank in ranks]
    outside = [rank["gradients"][1] for rank in ranks]
    for number, mean in enumerate(zip(*inside, strict=True)):
        assert not torch.equal(mean[0], mean[1])
        for each in outside:
            assert torch.allclose(each[number], 2 * sum(mean) / len(ranks), rtol=1e-5)
