"""Workers whose backend, debug mode or version differs from that of their parent.

A fork server keeps the environment in which it was started. Other start methods get
that of the parent, unless it changes after the import.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyparallel import backend

pytestmark = [pytest.mark.slow, pytest.mark.one_backend]

SCRIPT = """
import os, sys
IS_PARENT = __name__ == "__main__"
BACKENDS, MODES, METHOD, VERSION = sys.argv[1:5] if IS_PARENT else [""] * 4
if IS_PARENT:
    os.environ["PYPARALLEL_BACKEND"] = BACKENDS.split()[0]
    os.environ["PYPARALLEL_DEBUG"] = MODES.split()[0]
import torch
from pyparallel import DataLoader, backend
from pyparallel.workers import processes

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        length = 2 if index < 4 else 1 << 13  # in a message, in the ring
        return {"values": torch.full((length,), index), "name": backend.name}

def collate(samples):
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "gap": torch.zeros(1)}

if IS_PARENT:
    os.environ["PYPARALLEL_BACKEND"] = BACKENDS.split()[1]
    os.environ["PYPARALLEL_DEBUG"] = MODES.split()[1]
    processes.VERSION = VERSION or processes.VERSION
    options = dict(num_workers=1, multiprocessing_context=METHOD)
    loader = DataLoader(Data(), 2, collate_fn=collate, **options)
    for batch in loader:
        values = batch["values"][:, -1].tolist()
        print(values, set(batch["name"]) == {backend.name})
    print(loader.stats().ring_hits, loader.stats().ring_misses)
"""
SENT = "[0, 1] True\n[2, 3] True\n[4, 5] True\n[6, 7] True\n4 0\n"


def run(
    folder: Path, backends: str, modes: str, method: str = "spawn", version: str = ""
) -> Any:
    script = folder / "different.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), backends, modes, method, version]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(backend.name != "native", reason="needs the extension")
@pytest.mark.parametrize("backends", ["native python", "python native"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_use_the_backend_of_their_parent(
    backends: str, method: str, tmp_path: Path
) -> None:
    done = run(tmp_path, backends, "0 0", method)
    assert (done.stdout, done.stderr, done.returncode) == (SENT, "", 0)


@pytest.mark.parametrize("modes", ["0 poison", "poison 0"])
def test_workers_check_the_ring_if_their_parent_does(
    modes: str, tmp_path: Path
) -> None:
    done = run(tmp_path, f"{backend.name} {backend.name}", modes)
    assert (done.stdout, done.stderr, done.returncode) == (SENT, "", 0)


def test_workers_of_another_version_are_an_error(tmp_path: Path) -> None:
    names = f"{backend.name} {backend.name}"
    done = run(tmp_path, names, "0 0", "spawn", "0.0.1")
    text = "workers must have version 0.0.1 of pyparallel like their parent, but have "
    assert done.returncode == 1 and text in done.stderr
