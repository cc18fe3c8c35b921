"""A short soak with every kind of fault once, in a fixed or random order."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.loader import soak
from tests.support.repository.folders import ROOT, SUPPORT, python_path

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]


@pytest.mark.timeout(400)
def test_with_every_fault_no_sample_is_lost_and_nothing_is_left() -> None:
    # Spawned workers import torch for seconds, so only the long run has them.
    options = ["--batches=24", "--seed=3", "--starts=fork:8 forkserver:3 fork:8"]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "loader" / "soak.py"), *options],
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert {name: found[name] for name in soak.BAD} == dict.fromkeys(soak.BAD, 0)
    assert [kind for kind, count in found["faults"].items() if not count] == []
    assert found["samples"] == 3 * 24 * found["epochs"] > 0
