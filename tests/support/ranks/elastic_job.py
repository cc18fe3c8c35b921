"""``examples/resume.py`` with faults at known steps: what torchrun starts in the tests.

    elastic_job.py FAULTS FOLDER CHECKPOINT

FAULTS is empty or ``kind:rank:step,...``. Each fault occurs once. ``step`` kills the
rank in the backward pass of that step, and ``write`` during the write of the checkpoint
after it. ``cut`` takes the network of its host down in the backward pass; from that
step on, ranks give up after `GIVE_UP` seconds. ``blink`` does the same, but for only
`BLINK` seconds. A file in FOLDER records each fault, so that a restarted job gets
further.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.ranks.distributed_ranks import set_timeout
from tests.support.repository.folders import ROOT

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import torch  # noqa: E402  # needs the path of the example's modules
from _checkpoint import Checkpoint  # noqa: E402

from pyparallel import mmengine  # noqa: E402
from pyparallel.mmengine import OptimWrapper  # noqa: E402

GIVE_UP, BLINK = 8.0, 2.0


def set_link(up: bool) -> None:
    """Take gloo's network interface up or down, as ``ip link set`` does."""
    name = os.environ["GLOO_SOCKET_IFNAME"].encode()
    get, put, is_up, request = 0x8913, 0x8914, 1, "16sH22x"  # of <linux/sockios.h>
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        found = fcntl.ioctl(asked, get, struct.pack(request, name, 0))
        flags = struct.unpack(request, found)[1]
        flags = flags | is_up if up else flags & ~is_up
        fcntl.ioctl(asked, put, struct.pack(request, name, flags))


class Faults:
    """Cause the faults of this process, each only once in a job."""

    def __init__(self, faults: str, folder: Path) -> None:
        self.faults, self.folder, self.step = faults.split(","), folder, 0
        self.load, self.update = Checkpoint.load, OptimWrapper.update_params
        self.fsync, self.init = os.fsync, mmengine.init_dist

    def install(self) -> None:
        """Patch the functions of the example with all faults."""

        def init(launcher: str, timeout: float) -> None:
            # Also with ranks that start slowly.
            self.init(launcher, timeout=2 * timeout)

        def load(checkpoint: Checkpoint, **progress: Any) -> dict[str, Any]:
            found = self.load(checkpoint, **progress)
            self.step = found["step"]
            return found

        def update(wrapper: OptimWrapper, loss: torch.Tensor, **options: Any) -> None:
            self.step += 1
            loss.register_hook(lambda gradient: self.strike_backward())
            if any(f"{each}:{self.step}" in self.faults for each in ("cut:0", "cut:1")):
                # From here on, because both ranks have started, however long that took.
                set_timeout(GIVE_UP)
            begun = time.monotonic()
            try:
                self.update(wrapper, loss, **options)
            except RuntimeError as error:
                print(f"step {self.step} failed: {error}", flush=True)
                raise
            finally:
                print(f"step {self.step}: {time.monotonic() - begun:.2f} s", flush=True)

        def fsync(file: int) -> None:
            self.strike("write", file)
            self.fsync(file)

        # Until this process ends.
        Checkpoint.load = load  # type: ignore[method-assign]
        OptimWrapper.update_params = update  # type: ignore[method-assign]
        os.fsync = fsync
        mmengine.init_dist = init

    def strike_backward(self) -> None:
        """Die here, or take the network down, if a fault is planned here."""
        self.strike("step")
        if self.begins("cut"):
            set_link(False)
        if self.begins("blink"):
            set_link(False)
            threading.Timer(BLINK, set_link, [True]).start()

    def strike(self, kind: str, file: int | None = None) -> None:
        """Die here if a fault is planned; the file keeps half of its content."""
        if not self.begins(kind):
            return
        if file is not None:
            os.ftruncate(file, os.fstat(file).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def begins(self, kind: str) -> bool:
        """Return True if a fault is planned here, and record it."""
        fault = f"{kind}:{os.environ['RANK']}:{self.step}"
        struck = self.folder / fault
        if fault not in self.faults or struck.exists():
            return False
        struck.touch()
        return True


if __name__ == "__main__":
    Faults(sys.argv[1], Path(sys.argv[2])).install()
    print("network", os.readlink("/proc/self/ns/net"), flush=True)
    del sys.argv[1:3]
    runpy.run_path(str(EXAMPLES / "resume.py"), run_name="__main__")
