"""The self-test in two processes: gloo on the loopback, ended by a deadline."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ._rank import PASSED, STAGE, WORLD_SIZE

#: After so many seconds the processes are killed.
SECONDS = 28.0
_MOST_PRINTED = 1 << 16
_LOOPBACK = 772  # the number of such interfaces in Linux
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pyparallel.doctor import _rank; "
    "_rank.run(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))"
)


#: The first thing that a rank does, before it says anything.
IMPORTING = "importing pyparallel"


class Failure(NamedTuple):
    """A test that has not passed.

    Attributes:
        text: what is wrong, in a sentence.
        output: the last lines that the rank has printed.
        late: the stages of the ranks that had not passed in time; empty: none was late.
    """

    text: str
    output: list[str]
    late: tuple[str, ...] = ()


class _Rank:
    """A process, and what it has printed so far."""

    def __init__(self, number: int, folder: str, seconds: float) -> None:
        self.number, self._printed = number, b""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", _CODE, json.dumps(sys.path)),
                *(str(number), folder, str(seconds)),
            ],
            env=_environment(number, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def read(self) -> bool:
        """Take what is there to be read; False at the end."""
        if self.process.stdout is None:
            return False
        found = os.read(self.process.stdout.fileno(), 1 << 16)
        self._printed = (self._printed + found)[-_MOST_PRINTED:]
        return bool(found)

    @property
    def lines(self) -> list[str]:
        """All lines, but for those of stages."""
        return [line for line in self._all() if not line.startswith(STAGE)]

    @property
    def stage(self) -> str:
        """What the process is at."""
        said = [line for line in self._all() if line.startswith(STAGE)]
        return said[-1].removeprefix(STAGE) if said else IMPORTING

    def has_passed(self) -> bool:
        """Tell whether it has said so."""
        return PASSED in self.lines

    def end(self) -> None:
        """End the process, whatever it does, and let go of its pipes."""
        if not self.has_passed():
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()  # a rank that has passed ends with its input
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _all(self) -> list[str]:
        return self._printed.decode(errors="replace").splitlines()


def two_processes(seconds: float = SECONDS) -> Failure | None:
    """Let two gloo processes collate, scatter and train; return what is wrong, or None.

    They meet in a folder of their own and talk on the loopback interface. Neither they
    nor the folder are there when this returns or raises. If this process is killed,
    they end by themselves.

    Args:
        seconds: the most that all of it may take.
    """
    deadline = time.monotonic() + seconds
    ranks: list[_Rank] = []
    try:
        with tempfile.TemporaryDirectory(prefix="pyparallel-doctor-") as folder:
            try:
                for number in range(WORLD_SIZE):
                    ranks.append(_Rank(number, folder, seconds))
                return _watch(ranks, deadline, seconds)
            finally:
                for rank in ranks:
                    rank.end()
    except OSError as error:
        return Failure(f"the processes cannot be started: {error}.", [])


def _watch(ranks: list[_Rank], deadline: float, seconds: float) -> Failure | None:
    """Read what ranks print until all have passed, one has ended, or the deadline."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            if rank.process.stdout is not None:
                selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        while not all(rank.has_passed() for rank in ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                return _late(ranks, seconds)
            for key, _ in selector.select(left):
                if not key.data.read():
                    return _ended(key.data, deadline)
    return None


def _late(ranks: list[_Rank], seconds: float) -> Failure:
    late = [rank for rank in ranks if not rank.has_passed()]
    states = " and ".join(f"rank {rank.number} was {rank.stage}" for rank in late)
    text = (
        f"two processes must be done in {seconds:.3g} s, but {states}. Look whether "
        "the machine is busy, and whether programs may connect on its loopback "
        "interface."
    )
    lines = [line for rank in late for line in rank.lines[-10:]]
    return Failure(text, lines, tuple(rank.stage for rank in late))


def _ended(rank: _Rank, deadline: float) -> Failure:
    try:
        code = rank.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        how = "closed its output"
    else:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
    said = rank.lines[-1] if rank.lines else "nothing printed"
    text = f"rank {rank.number} {how} while {rank.stage}: {said}"
    return Failure(text, rank.lines[-20:])


def _environment(rank: int, folder: str) -> dict[str, str]:
    """Return the environment of a rank: one thread, no device, nothing but loopback."""
    own = {
        "TMPDIR": folder,  # torch makes folders there for its compiler
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    loopback = loopback_interface()
    if loopback is not None:
        own["GLOO_SOCKET_IFNAME"] = loopback
    return os.environ | own


def loopback_interface(folder: Path = Path("/sys/class/net")) -> str | None:
    """Return the name of the loopback interface; None where none can be found."""
    for path in sorted(folder.glob("*/type")):
        try:
            if path.read_text(encoding="ascii").strip() == str(_LOOPBACK):
                return path.parent.name
        except OSError:
            pass
    return None
