"""Ranks that are killed or hang: the errors of the others, and the restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import elastic_runs
import pytest
from optim_runs import same_state

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.slow,
    pytest.mark.timeout(elastic_runs.LIMIT + 60),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return elastic_runs.undisturbed(tmp_path_factory.mktemp("undisturbed"))


def test_a_job_that_is_killed_twice_equals_an_undisturbed_one(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    # A rank in the middle of a step; then the one that writes, in the middle of it.
    faults = "step:1:11,write:0:12"
    checkpoint, log = tmp_path / "run" / "last.pt", tmp_path / "log"
    command = elastic_runs.documented()[0]
    assert "--max-restarts=2" in command.options
    agent = elastic_runs.start(command, log, checkpoint, faults)
    text = f"{elastic_runs.finish(agent)} {log.read_text()}"
    assert text.startswith("[0] "), text
    for fault in faults.split(","):
        assert (tmp_path / fault).exists(), text
    # Step 8 is in the middle of an epoch of 6; the checkpoint after 12 was torn.
    assert elastic_runs.beginnings(log) == {0: [0, 8, 8], 1: [0, 8, 8]}, text
    assert undisturbed["progress"] == {"epoch": 3, "step": 24}
    assert same_state(elastic_runs.trained(checkpoint), undisturbed)
    # The next start removed partly written files.
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.pt"]
