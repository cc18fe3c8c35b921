"""``scripts/busy``: the busy processes end with the command, in every case."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest
from prefetch_loaders import until
from repository import ROOT

pytestmark = pytest.mark.one_backend

BUSY = ROOT / "scripts" / "busy"


def test_the_exit_code_is_that_of_the_command() -> None:
    assert subprocess.run([BUSY, "1", "sh", "-c", "exit 7"]).returncode == 7


def asleep(parent: psutil.Process) -> list[psutil.Process]:
    """Return the children that run their own command."""
    return [each for each in parent.children() if each.name() == "sleep"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_never_waits_ends_when_the_command_is_interrupted(number: int) -> None:
    command = [BUSY, "2", "sleep", "60"]
    with subprocess.Popen(command, start_new_session=True) as process:
        parent = psutil.Process(process.pid)
        until(lambda: len(parent.children()) == 3 and asleep(parent))
        (command_itself,) = asleep(parent)
        others = [each for each in parent.children() if each != command_itself]
        process.send_signal(number)
        command_itself.send_signal(number)  # a terminal sends it to both
        process.wait(60)
        assert psutil.wait_procs(others, timeout=60)[1] == []
