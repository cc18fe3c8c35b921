"""Ranks that are killed, and links that are cut: the job ends as an undisturbed one.

Two hosts are two network namespaces, or two addresses of this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mmengine.optim_runs import same_state
from tests.support.ranks import elastic_runs
from tests.support.ranks.torchrun import free_port
from tests.support.repository.folders import SUPPORT

# As in docs/distributed.md; each test runs its commands.
ADDRESSES, CARD = ("10.77.0.1", "10.77.0.2"), "eth0"
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


def ip() -> str:
    """Return the program that sets up networks, also where only root has it in PATH."""
    found = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        pytest.skip("needs the program ip")
    return found


@contextlib.contextmanager
def two_networks() -> Iterator[list[list[str]]]:
    """Give two networks that see only each other, each as a command to start in it.

    Each is held by a process that lives until its input is closed, which also happens
    when the test is killed: so no name is left, and none is taken from other tests.
    """
    program = ip()
    with contextlib.ExitStack() as held:
        inside = []
        for _ in ADDRESSES:
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            held.callback(holder.communicate)
            assert holder.stdout is not None and holder.stderr is not None
            if holder.stdout.readline() != "ready\n":
                pytest.skip(f"needs network namespaces: {holder.stderr.read().strip()}")
            inside.append(["nsenter", f"--net=/proc/{holder.pid}/ns/net"])
        peer = ["peer", "name", CARD, "netns", str(holder.pid)]
        links = [program, "link", "add", CARD, "type", "veth", *peer]
        done = subprocess.run([*inside[0], *links], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs virtual network cards: {done.stderr.strip()}")
        for enter, address in zip(inside, ADDRESSES, strict=True):
            settings = ["addr", "add", f"{address}/24", "dev", CARD]
            subprocess.run([*enter, program, *settings], check=True)
            for link in ("lo", CARD):  # both are down at first
                subprocess.run([*enter, program, "link", "set", link, "up"], check=True)
        yield inside


def train(
    folder: Path,
    commands: Sequence[elastic_runs.Command],
    within: Sequence[Sequence[str]] = ((), ()),
    faults: str = "",
    meanwhile: Callable[[list[Path]], None] = lambda logs: None,
) -> list[Path]:
    """Run one job with one rank on each host; return the logs.

    Args:
        folder: gets the logs and the checkpoint.
        commands: of each host.
        within: commands that start something on each host.
        faults: of ``elastic_job.py``.
        meanwhile: is called with the logs while the job runs.
    """
    checkpoint, logs, agents = folder / "last.pt", [], []
    for number, (command, prefix) in enumerate(zip(commands, within, strict=True)):
        logs.append(folder / f"{number}.log")
        agents.append(elastic_runs.start(command, logs[-1], checkpoint, faults, prefix))
    try:
        meanwhile(logs)
    finally:
        codes = elastic_runs.finish(*agents)
    assert codes == [0, 0], "\n".join([f"{codes}", *(log.read_text() for log in logs)])
    return logs


#: Signals of one job after the other, and the exit codes of both agents of torchrun.
#: One rank gets a signal, or each agent gets one, as SLURM sends it to all its tasks.
SIGNALS = {
    "SIGUSR1:rank:0:15": [0, 0],
    "SIGTERM:rank:1:17": [0, 0],
    "SIGUSR1:agent:0:19,SIGUSR1:agent:1:19": [1, 1],
    "": [0, 0],
}
HANDLED = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@pytest.mark.soak
def test_a_signal_on_one_host_stops_both_and_they_continue(tmp_path: Path) -> None:
    expected, _ = elastic_runs.unstopped(tmp_path / "whole")
    script, folder = SUPPORT / "ranks" / "sharded_job.py", tmp_path / "stopped"
    folder.mkdir()
    begins = 0
    with two_networks() as within:
        for fault, stopped in SIGNALS.items():
            faults = fault.split(",") if fault else []
            agents, logs = [], []
            for host, command in enumerate(elastic_runs.documented()[1:]):
                command.options += HANDLED.split()
                logs.append(folder / f"{begins}-{host}.log")
                job = [str(script), str(folder), "2", *faults]
                agents.append(elastic_runs.launch(command, logs[-1], job, within[host]))
            codes = elastic_runs.finish(*agents)
            texts = [log.read_text() for log in logs]
            assert sorted(codes) == stopped, (fault, texts)
            assert all((folder / each).exists() for each in faults), (fault, texts)
            begun = [re.findall(r"begins after step (\d+)", text) for text in texts]
            assert begun == 2 * [[str(begins)]], (fault, texts)
            first, second = map(networks, logs)
            assert len({*first, *second, os.readlink("/proc/self/ns/net")}) == 3
            begins = int(fault.rpartition(":")[2] or 0)
    found = torch.load(folder / "trained.pt")
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def networks(log: Path) -> set[str]:
    return set(re.findall(r"^network (net:\[\d+\])$", log.read_text(), re.M))


@pytest.mark.soak
def test_two_hosts_train_as_one_does_also_when_a_rank_is_killed(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    fault, commands = "step:1:11", elastic_runs.documented()[1:]
    with contextlib.ExitStack() as held:
        within: Sequence[Sequence[str]] = ((), ())
        try:
            within = held.enter_context(two_networks())
        except pytest.skip.Exception:  # as without root: two addresses of this machine
            here = ("10.77.0.", "127.0.0."), (":29400", f":{free_port()}"), (CARD, "lo")
            commands = [each.changed(*here) for each in commands]
        logs = train(tmp_path, commands, within, fault)
    assert (tmp_path / fault).exists()
    assert elastic_runs.beginnings(*logs) == {0: [0, 8], 1: [0, 8]}
    starts = [sum(map(len, elastic_runs.beginnings(log).values())) for log in logs]
    assert starts == [2, 2]  # each agent had one of the two ranks
    if within[0]:
        first, second = map(networks, logs)
        assert len(first) == len(second) == 1
        assert len({*first, *second, os.readlink("/proc/self/ns/net")}) == 3
    assert same_state(elastic_runs.trained(tmp_path / "last.pt"), undisturbed)


FAILED = r"^step 11 failed: \[.*\] Timed out waiting 8000ms for (recv|send) operation "


@pytest.mark.soak
@pytest.mark.skipif(
    os.environ.get("PYPARALLEL_LONG") != "1", reason="a long run: make soak"
)
def test_a_link_that_is_cut_for_a_moment_or_for_long_changes_no_result(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    # The first cut is shorter than the timeout: the bytes are sent again.
    faults = "blink:1:5,cut:1:11"

    def failed(log: Path) -> bool:
        return "\nstep 11 failed" in log.read_text()

    with two_networks() as within:

        def mend(logs: list[Path]) -> None:
            deadline = time.monotonic() + elastic_runs.LIMIT / 2
            while not all(map(failed, logs)) and time.monotonic() < deadline:
                time.sleep(0.1)
            # One of the hosts has rank 1: on the other one it is up.
            for enter in within:
                subprocess.run([*enter, ip(), "link", "set", CARD, "up"], check=True)

        commands = elastic_runs.documented()[1:]
        logs = train(tmp_path, commands, within, faults, mend)
    for fault in faults.split(","):
        assert (tmp_path / fault).exists()
    assert elastic_runs.beginnings(*logs) == {0: [0, 8], 1: [0, 8]}
    for log in logs:
        text = log.read_text()
        seconds = dict(re.findall(r"^step (\d+): ([\d.]+) s$", text, re.M)[:11])
        # The link was down for two seconds; then TCP had still to try again.
        assert 1 < float(seconds["5"]) < 7.9 < float(seconds["11"]) < 30, text
        assert re.search(FAILED, text, re.M), text
    assert same_state(elastic_runs.trained(tmp_path / "last.pt"), undisturbed)
