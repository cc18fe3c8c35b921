"""mmengine's own Runner trains with our classes by config, as with its own.

The oracle is mmengine: the same Runner with its own classes on the same data. Every run
is a case of ``mmengine_runner_cases``, on two ranks of torchrun.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.support.ranks.torchrun import torchrun
from tests.support.repository.folders import SUPPORT

pytestmark = [pytest.mark.peers, pytest.mark.slow]

if importlib.util.find_spec("mmengine") is None:
    pytest.skip("mmengine is not installed", allow_module_level=True)

OURS = [
    "pyparallel.mmengine.distributed.MMDistributedDataParallel",
    "pyparallel.mmengine.data_preprocessor.BaseDataPreprocessor",
    "pyparallel.mmengine.optimizer_wrapper.OptimWrapper",
]
AMP = "pyparallel.mmengine.amp_optimizer_wrapper.AmpOptimWrapper"
FULLY_SHARDED = "pyparallel.mmengine.fully_sharded_distributed"
#: Without ranks the model is its own wrapper.
OURS_ALONE = ["tests.support.mmengine.runner_parts.Reader", *OURS[1:]]


class Results(list[dict[str, Any]]):
    log = ""

    def of(self, case: str) -> list[Any]:
        """Return the result of a successful case on each rank."""
        found = [rank[case] for rank in self]
        failed = [each for each in found if isinstance(each, str)]
        assert not failed, self.log.partition(f"--- {case}\n")[2] or failed
        return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("runner")
    done = torchrun(SUPPORT / "mmengine" / "runner_cases.py", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    found = Results(torch.load(folder / f"{rank}.pt") for rank in range(2))
    found.log = done.stderr
    return found


def assert_same(results: Results, ours: str, stock: str) -> None:
    """Losses, accuracies, norms and the final weights agree to the bit."""
    for one, other in zip(results.of(ours), results.of(stock), strict=True):
        for key in ("losses", "accuracy", "norms"):
            assert one[key] == other[key], key
        assert all(map(torch.equal, one["weights"], other["weights"]))
        assert len(one["weights"]) == len(other["weights"]) > 0


def assert_learns(results: Results, case: str) -> None:
    for rank in results.of(case):
        first, last = rank["losses"][:4], rank["losses"][-4:]
        assert sum(last) < 0.6 * sum(first)


def test_scoped_names_train_to_the_bits_of_the_stock_classes(results: Results) -> None:
    assert_same(results, "scoped", "stock")
    assert_learns(results, "scoped")
    for rank in results.of("scoped"):
        assert rank["classes"] == OURS
        assert len(rank["losses"]) == 2 * 2048 // (2 * 16)
        assert rank["accuracy"][-1] > 0.9  # the most frequent kind has 0.53
    first, second = results.of("scoped")
    assert first["losses"] != second["losses"]


@pytest.mark.parametrize(
    "case",
    ["dotted", "default_scope", "containers_and_a_stock_preprocessor"],
)
def test_other_names_of_the_classes_give_equal_results(
    results: Results, case: str
) -> None:
    assert_same(results, case, "short_stock")
    for rank in results.of(case):
        known = OURS[1] if case != "containers_and_a_stock_preprocessor" else ""
        assert rank["classes"][0] == OURS[0] and rank["classes"][2] == OURS[2]
        assert not known or rank["classes"][1] == known


def test_one_process_opens_the_containers_in_the_preprocessor(results: Results) -> None:
    assert_same(results, "alone_ours", "alone_stock")
    for rank in results.of("alone_ours"):
        assert rank["classes"] == OURS_ALONE
        assert rank["imported"] == []  # the names in the config were enough


def test_accumulation_and_clipping_are_the_same_to_the_bit(results: Results) -> None:
    assert_same(results, "accumulated_ours", "accumulated_stock")
    for rank in results.of("accumulated_ours"):
        assert (len(rank["losses"]), len(rank["norms"])) == (7, 3)


def test_mixed_precision_trains_on_the_cpu(results: Results) -> None:
    pairs = zip(results.of("mixed_ours"), results.of("short_stock"), strict=True)
    for mixed, full in pairs:
        assert mixed["classes"][2] == AMP
        assert mixed["losses"] != full["losses"]
        # bfloat16 has 8 bits; the losses are about 1.
        assert mixed["losses"] == pytest.approx(full["losses"], abs=0.02)


def test_a_wrapped_model_is_not_wrapped_again(results: Results) -> None:
    wrapped = results.of("wrapped_before")
    assert wrapped == [rank["losses"] for rank in results.of("short_stock")]


def test_a_resumed_run_equals_an_uninterrupted_one(results: Results) -> None:
    pairs = zip(results.of("resumed"), results.of("straight"), strict=True)
    for resumed, straight in pairs:
        assert len(resumed["losses"]) == len(straight["losses"]) == 16
        # The first epoch of every rank is that of the rank that saved it.
        assert resumed["losses"][8:] == straight["losses"][8:]
        assert all(map(torch.equal, resumed["weights"], straight["weights"]))


def test_the_flexible_runner_has_equal_results(results: Results) -> None:
    assert_same(results, "flexible_runner", "short_stock")
    assert results.of("flexible_runner")[0]["classes"] == OURS


def test_the_flexible_runner_shards(results: Results) -> None:
    sharded, whole = results.of("flexible_sharded"), results.of("short_stock")
    for one, other in zip(sharded, whole, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], abs=1e-6)
        numbers = [sum(each.numel() for each in it["weights"]) for it in (one, other)]
        assert 0 < numbers[0] < numbers[1]  # this rank's shard


def test_the_configs_of_the_documentation_train(results: Results) -> None:
    sharded = [f"{FULLY_SHARDED}.MMFullyShardedDataParallel", *OURS[1:]]
    expected = [OURS, OURS, OURS, sharded]
    for rank in results.of("documented"):
        assert rank == [(classes, 4) for classes in expected]


def test_a_config_can_join_the_process_group(results: Results) -> None:
    assert results.of("joined_by_config") == [("gloo", 0), ("gloo", 1)]


@pytest.mark.parametrize(
    ("case", "start"),
    [
        ("no_group", "AttributeError: module 'torch._C' has no attribute '_cuda_setD"),
        ("resumed_without_install", "UnpicklingError: Weights only load failed."),
    ],
)
def test_errors_of_mmengine_equal_the_documentation(
    results: Results, case: str, start: str
) -> None:
    if case == "no_group" and torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA, and can choose a device")
    for rank in results:
        assert str(rank[case]).startswith(start)
