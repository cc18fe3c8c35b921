"""Runs scripts/gpu_check.py with a fake interpreter, which records its calls."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from repository import ROOT

#: An interpreter that records its calls, and fails or waits on request.
PYTHON = """#!/bin/bash
end() {
  [[ " ${FAILING:-} " == *" $1 "* ]] && echo "$1 broke" && exit 3
  [[ " ${SLOW:-} " == *" $1 "* ]] && echo $$ >"$FAKE/pid" && echo "$1 began" &&
    exec sleep 60
  echo "$1 is fine"; exit 0
}
case "$*" in
  -c*device_count*) echo "$PROBED"; exit 0;;
  -c*find_spec*) cat "$FAKE/missing" 2>/dev/null; exit 0;;
esac
for name in SANITIZED PYTORCH_NO_CUDA_MEMORY_CACHING PYPARALLEL_NO_SKIP \\
  PYPARALLEL_MMENGINE FORCE_CUDA WERROR MAX_JOBS; do
  [ -z "${!name:-}" ] || printf '%s=%s ' $name "${!name}"
done >>"$FAKE/calls"
echo "$*" >>"$FAKE/calls"
case "$*" in
  *--no-index*) exit "${BAD_WHEELS:-0}";;
  "-m pip "*) [ -n "${ONLINE:-}" ] && rm "$FAKE/missing"; exit 0;;
  setup.py*) end build;;
  "-m pyparallel") end selftest;;
  *"-m cuda and kernel"*) end "$SANITIZED";;
  *--junitxml*) end tests;;
  "-m pytest"*) end "${@: -1}";;
  "-m benchmarks.gpu"*) end bench;;
  "-m benchmarks.kernels") end ncu;;
esac
echo "unexpected: $*"; exit 9
"""
#: compute-sanitizer or ncu: records its options, and runs the interpreter.
TOOL = """#!/bin/bash
for option; do [ "$option" = "$FAKE/python" ] && break; options+=("$option"); done
echo "${0##*/} ${options[*]}" >>"$FAKE/calls"
[[ $1 == --tool ]] && export SANITIZED=$2
while [ "$1" != "$FAKE/python" ]; do shift; done
exec "$@"
"""
PROBED: dict[str, Any] = {"python": "3.12.3", "torch": "9.0", "gpus": ["A GPU"]}
TITLE = "1 x A GPU, torch 9.0, Python 3.12.3, commit abc"
ONE_GPU = "tests for two GPUs are left out: there is one"


class Check:
    """Runs the script in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.probed = {**PROBED, "bins": [str(folder / "wheel")]}
        self.program("python", PYTHON)
        for name in ("compute-sanitizer", "ncu"):
            self.program(f"wheel/{name}", TOOL)

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, **settings: str) -> subprocess.Popen[str]:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("GPU_", "CUDA_", "MAX_JOBS", "PYPARALLEL_", "WERROR"))
        }
        (self.folder / "calls").unlink(missing_ok=True)
        kept |= {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(self.folder / "cuda")}
        kept |= {"FAKE": str(self.folder), "OUT": str(self.out), "GPU_COMMIT": "abc"}
        kept |= {
            "PROBED": json.dumps(self.probed),
            "GPU_WHEELS": str(self.folder / "w"),
        }
        script = ROOT / "scripts" / "gpu_check.py"
        command = [sys.executable, script, self.folder / "tree", self.folder / "python"]
        return subprocess.Popen(
            command,
            env={**kept, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, **settings: str) -> subprocess.CompletedProcess[str]:
        with self.start(**settings) as process:
            out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


def rows(text: str) -> list[str]:
    """Return the lines of a summary, without their times."""
    _, _, after = text.rpartition("=== summary")
    lines = after.splitlines()[1:] if after != text else text.splitlines()
    return [re.sub(r" +\d+ s  ", " # s  ", line) for line in lines]
