"""``examples/resume.py`` with faults at known steps: what torchrun starts in the tests.

    elastic_job.py FAULTS FOLDER [arguments of resume.py]

FAULTS is empty or ``kind:rank:step,...``, and each strikes once: ``step`` kills the
rank in the backward pass of that step, ``write`` while it writes the checkpoint after
it. What has struck is a file in FOLDER: a job that is started again must get further.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import torch  # noqa: E402  # the example's modules have to be found first
from _checkpoint import Checkpoint  # noqa: E402

from pyparallel.mmengine import OptimWrapper  # noqa: E402


class Faults:
    """Kill this process where it was told to; each fault only once in a job."""

    def __init__(self, faults: str, folder: Path) -> None:
        self.faults, self.folder, self.step = faults.split(","), folder, 0
        self.load, self.update = Checkpoint.load, OptimWrapper.update_params
        self.fsync = os.fsync

    def install(self) -> None:
        """Put all faults into what the example calls."""

        def load(checkpoint: Checkpoint, **progress: Any) -> dict[str, Any]:
            found = self.load(checkpoint, **progress)
            self.step = found["step"]
            return found

        def update(wrapper: OptimWrapper, loss: torch.Tensor, **options: Any) -> None:
            self.step += 1
            loss.register_hook(lambda gradient: self.strike("step"))
            self.update(wrapper, loss, **options)

        def fsync(file: int) -> None:
            self.strike("write", file)
            self.fsync(file)

        # Until this process ends.
        Checkpoint.load = load  # type: ignore[method-assign]
        OptimWrapper.update_params = update  # type: ignore[method-assign]
        os.fsync = fsync

    def strike(self, kind: str, file: int | None = None) -> None:
        """Die here, if this is the place; a file keeps half of its content."""
        fault = f"{kind}:{os.environ['RANK']}:{self.step}"
        struck = self.folder / fault
        if fault not in self.faults or struck.exists():
            return
        struck.touch()
        if file is not None:
            os.ftruncate(file, os.fstat(file).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Faults(sys.argv[1], Path(sys.argv[2])).install()
    print("network", os.readlink("/proc/self/ns/net"), flush=True)
    del sys.argv[1:3]
    runpy.run_path(str(EXAMPLES / "resume.py"), run_name="__main__")
