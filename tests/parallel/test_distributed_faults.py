"""Faults between four ranks: the error of each survivor, and its time limit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import forkserver
from tests.support.ranks import elastic_runs
from tests.support.ranks.fault_ranks import (
    FAULTY,
    LIMIT,
    SHORT,
    STEPS,
    STRUCK_STEP,
    WORLD,
)

pytestmark = [pytest.mark.one_backend, pytest.mark.slow, pytest.mark.timeout(2 * LIMIT)]

PROTOCOLS = ("mmcv", "mmengine")
#: Seconds until every survivor has raised, on a busy machine. On a quiet one
#: it is less than one, or as much more than `SHORT`.
BOUND = 24.0 + SHORT

GLOO = r"\[[^\]]+/gloo/[^\]]+\] "
PEER = r"\[[\d.]+\]:\d+"
LOST = (
    rf"{GLOO}(Connection closed by peer {PEER}|"
    rf"Read error {PEER}: Connection reset by peer)"
    r"(\. This is typically caused by a remote worker .*)?"  # from torch 2.13 on
)
TIMED_OUT = rf"{GLOO}Timed out waiting {SHORT * 1000:.0f}ms for (recv|send) operation.*"
#: Of ranks that wait, the first to give up ends, and the others lose its connection.
GAVE_UP = rf"{TIMED_OUT}|{LOST}|Application timeout caused pair closure"
LEFT_OUT = (
    "RuntimeError",
    r"Expected to have finished reduction in the prior iteration before starting a new "
    r"one\. .*`find_unused_parameters=True`.*",
)


@dataclasses.dataclass
class Fault:
    """The fault of rank 1 and its effects; an error has a class and a pattern."""

    case: str
    survivors: tuple[str, str] | None
    step: int = STRUCK_STEP  # in which the survivors get the error
    faulty: tuple[str, str] | None = None
    ends: bool = True  # rank 1 reports its end
    waited: bool = False  # for the timeout of the group

    def __str__(self) -> str:
        return self.case


LOSES, WAITS = ("RuntimeError", LOST), ("RuntimeError", GAVE_UP)
FAULTS = [
    Fault("is_killed", LOSES, ends=False),
    Fault(
        "is_killed_and_nobody_ends",
        ("RuntimeError", f"{LOST}|{TIMED_OUT}"),
        ends=False,
        waited=True,
    ),
    Fault("is_stopped", WAITS, faulty=WAITS, waited=True),  # when it is woken
    Fault(
        "raises_in_forward", LOSES, faulty=("ZeroDivisionError", "in the forward pass")
    ),
    Fault(
        "raises_in_the_dataset", LOSES, faulty=("OSError", "sample 2 cannot be read")
    ),
    Fault("has_fewer_batches", LOSES),
    Fault("has_fewer_batches_and_waits", WAITS, faulty=WAITS, waited=True),
    Fault("has_fewer_batches_and_goes_on", WAITS, waited=True),
    Fault("has_fewer_batches_in_join", None, step=STEPS - 1),
    Fault(
        "has_fewer_batches_in_a_join_that_throws",
        (
            "RuntimeError",
            r"Detected at least one rank that exhausted inputs\. Throwing across all "
            r"ranks\.",
        ),
        faulty=("RuntimeError", r"Rank 1 exhausted all inputs\."),
    ),
    # Each rank counts its own reductions: those of different steps are averaged, and
    # the others get the error when the rank with fewer of them ends.
    Fault("skips_a_step", LOSES, step=STEPS - 1),
    Fault("skips_a_backward", LOSES, step=STEPS - 1),
    Fault("skips_a_backward_with_buffers", WAITS, faulty=WAITS, waited=True),
    Fault("runs_forward_twice", None, step=STEPS - 1),
    Fault("runs_forward_twice_with_buffers", WAITS, faulty=WAITS, waited=True),
    Fault("all_leave_parameters_out", LEFT_OUT, step=1, faulty=LEFT_OUT),
    Fault("leaves_parameters_out", LOSES, step=0, faulty=LEFT_OUT),
]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where all ranks have written how they ended."""
    folder = tmp_path_factory.mktemp("faults")
    code = (
        "from tests.support.ranks import fault_ranks, fault_cases\n"
        f"fault_ranks.run(fault_cases.CASES, {str(folder)!r})"
    )
    done = forkserver.run(code, elastic_runs.PATHS, 2 * LIMIT)
    assert done == (0, ""), done
    return folder


def of(ended: Path, case: str, protocol: str) -> Ranks:
    """Return the result of each rank, or its output if it has no result."""
    folder, found = ended / f"{case}.{protocol}", []
    for rank in range(WORLD):
        file = folder / f"{rank}.json"
        text = file.read_text() if file.exists() else "{}"
        printed = forkserver.without_gloo((folder / f"{rank}.log").read_text())
        found.append({"printed": printed} | json.loads(text))
    return found


def error(rank: dict[str, Any]) -> tuple[str, str] | None:
    return (rank["error"], rank["message"]) if "error" in rank else None


def is_one(found: tuple[str, str] | None, expected: tuple[str, str] | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found[0] == expected[0] and bool(re.fullmatch(expected[1], found[1], re.S))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_survivor_raises_in_time_when_a_rank(
    fault: Fault, protocol: str, ended: Path
) -> None:
    ranks = of(ended, fault.case, protocol)
    survivors = [rank for n, rank in enumerate(ranks) if n != FAULTY]
    struck = float((ended / f"{fault.case}.{protocol}" / "struck").read_text())
    for rank in survivors:
        assert is_one(error(rank), fault.survivors), ranks
        assert rank["step"] == fault.step, ranks
        assert rank["time"] - struck < BOUND, ranks
    assert is_one(error(ranks[FAULTY]), fault.faulty), ranks
    assert ("time" in ranks[FAULTY]) == fault.ends, ranks
    messages = [rank.get("message", "") for rank in ranks]
    assert any(re.match(TIMED_OUT, each) for each in messages) == fault.waited, ranks
    assert {rank["printed"] for rank in ranks} == {""}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", ["has_fewer_batches_in_join", "runs_forward_twice"])
def test_a_job_that_survives_has_trained_one_model(
    case: str, protocol: str, ended: Path
) -> None:
    first, *others = (rank["result"] for rank in of(ended, case, protocol))
    assert first and all(each == first for each in others)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_unused_forward_changes_nothing(protocol: str, ended: Path) -> None:
    twice = of(ended, "runs_forward_twice", protocol)
    # At its end, this case trains as usual.
    once = of(ended, "builds_another_model", protocol)
    assert twice[0]["result"] == once[0]["result"][1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_different_models_are_an_error_on_all_ranks_and_the_group_is_usable(
    protocol: str, ended: Path
) -> None:
    at = "net." if protocol == "mmcv" else ""
    bias = f"parameter of shape (6,), torch.float32, named '{at}body.0.bias'"
    weight = f"a parameter of shape (3, 6), torch.float32, named '{at}body.2.weight'"
    first = f"parameter of shape (6, 5), torch.float32, named '{at}body.0.weight'"
    differences = [
        f"2 is {weight} on ranks 0, 2, 3, but {weight.replace('6', '7')} on rank 1",
        f"4 is missing on ranks 0, 2, 3, but a parameter of shape (3,), "
        f"torch.float32, named '{at}body.3.weight' on rank 1",
        f"1 is a {bias} on ranks 0, 2, 3, but a frozen {bias} on rank 1",
        f"0 is a {first} on ranks 0, 2, 3, but a frozen {first} on rank 1",
        f"2 is {weight} on ranks 0, 2, 3, but {weight.replace('t32', 't64')} on rank 1",
        f"4 is missing on ranks 0, 2, 3, but a buffer of shape (3,), torch.float32, "
        f"named '{at}mean' on rank 1",
        f"0 is a {first} on ranks 0, 2, 3, but missing on rank 1",
        f"2 is {weight} on ranks 0, 2, 3, but a parameter without a shape, named "
        f"'{at}body.2.weight' on rank 1",
    ]
    expected = [
        [
            "ModelsDifferError",
            "MMDistributedDataParallel: the models of all ranks must have equal "
            f"tensors, but tensor {each}. Build the same model on every rank.",
            True,  # it is as it was
        ]
        for each in differences
    ]
    ranks = of(ended, "builds_another_model", protocol)
    assert [rank.get("result", rank)[0] for rank in ranks] == [expected] * WORLD
    assert len({str(rank["result"][1]) for rank in ranks}) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_models_may_differ_where_torch_sends_nothing(
    protocol: str, ended: Path
) -> None:
    ranks = of(ended, "builds_another_model_that_will_do", protocol)
    expected = ["_renamed", "_ignored", "init_sync"]
    assert [rank.get("result", rank) for rank in ranks] == [expected] * WORLD


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ranks_of_a_group_are_named_as_the_job_numbers_them(
    protocol: str, ended: Path
) -> None:
    *others, third, fourth = of(
        ended, "builds_another_model_in_a_part_of_the_ranks", protocol
    )
    assert [rank["result"] for rank in others] == [None] * 2
    assert third["result"] == fourth["result"]
    assert " on rank 2, but " in third["result"]
    assert third["result"].endswith(" on rank 3. Build the same model on every rank.")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-7), ("float64", 1e-14)])
@pytest.mark.parametrize(
    "case",
    ["accumulated_without_sync", "joined", "joined_and_divided_by_who_is_left"],
)
def test_gradients_of_two_to_four_ranks_are_those_of_the_full_batch(
    case: str, dtype: str, most: float, protocol: str, ended: Path
) -> None:
    for number, rank in enumerate(of(ended, case, protocol)):
        assert "result" in rank, rank
        worlds = {str(world) for world in range(2, WORLD + 1) if number < world}
        assert rank["result"][dtype].keys() == worlds
        assert max(rank["result"][dtype].values()) <= most, rank
