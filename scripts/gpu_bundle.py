#!/usr/bin/env python3
"""Write one folder with all that scripts/gpu_check.py needs on a bare machine.

``gpu_bundle.py wheels FOLDER --python 3.12`` downloads the wheels of the test tools and
of peers. ``gpu_bundle.py bundle FOLDER --wheels WHEELS`` writes the sources, these
wheels, the commit and the script ``run``. Beside this folder, a machine with a GPU
needs a torch for CUDA and its nvcc, but no index and no git.

ACCVLAB_MULTI_TENSOR_COPIER=FOLDER adds the C++ source of NVIDIA's multi_tensor_copier,
which no index has. Without it, the benchmark lists that peer as not installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_check import described
from test_matrix import TOOLS

ROOT = Path(__file__).resolve().parents[1]
#: A larger folder may be refused where a machine is lent with a limit on uploads.
MOST_BYTES = 60 << 20
#: The dependencies of the extra "test" and of TOOLS. With theirs, pip would also
#: download torch.
DEPENDENCIES = "execnet iniconfig optree packaging pluggy pygments sortedcontainers"
DEPENDENCIES += " typing_extensions"
#: Peers of the benchmark, with the dependencies that most torch images lack.
PEERS = "tensordict cloudpickle pyvers mmengine==0.10.7 addict platformdirs termcolor"
PEERS += " yapf"
#: pip compares these names exactly.
PLATFORMS = "manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux2014"
COPIER = "ACCVLAB_MULTI_TENSOR_COPIER"


def test_extra() -> list[str]:
    """Return the requirements of the extra "test" of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (found,) = re.findall(r"^test = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"(.+?)"', found)


def download(folder: Path, python: str, machine: str) -> None:
    """Download all wheels for this version of Python into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--python-version", python]
    for platform in PLATFORMS.split():
        command += ["--platform", f"{platform}_{machine}"]
    command += [*test_extra(), *TOOLS, *DEPENDENCIES.split(), *PEERS.split()]
    subprocess.run(command, check=True)


def bundle(folder: Path, wheels: Path) -> None:
    """Write the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([ROOT / "scripts/copy_tree", folder / "project"], check=True)
    (folder / "wheels").mkdir()
    for wheel in wheels.glob("*.whl"):
        shutil.copy2(wheel, folder / "wheels")
    (folder / "commit").write_text(f"{described()}\n", encoding="utf-8")
    shutil.copy2(ROOT / "scripts/gpu_run", folder / "run")
    if source := os.environ.get(COPIER):
        copy_source(Path(source), folder / "copier")
    else:
        print(f"Without multi_tensor_copier: {COPIER} names no folder with its source.")
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if nbytes > MOST_BYTES:
        sys.exit(
            f"{folder} must have at most {MOST_BYTES >> 20} MiB, but has "
            f"{nbytes / (1 << 20):.1f}. Remove peers from {Path(__file__).name}."
        )
    print(f"{folder}: {nbytes / (1 << 20):.1f} MiB, commit {described()}")


def copy_source(source: Path, target: Path) -> None:
    """Copy the C++ files of a folder."""
    found = sorted(source.rglob("csrc/*"))
    if not any(path.suffix == ".cpp" for path in found):
        sys.exit(f"{COPIER} must be a folder with csrc/*.cpp, but is {source}.")
    (target / "csrc").mkdir(parents=True)
    for path in found:
        shutil.copy2(path, target / "csrc")


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the wheels, or write the bundle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("wheels", help="download the wheels")
    one.add_argument("folder", type=Path)
    one.add_argument("--python", default="3.12", help="of the machine with a GPU")
    one.add_argument("--machine", default="x86_64")
    two = commands.add_parser("bundle", help="write the folder")
    two.add_argument("folder", type=Path)
    two.add_argument("--wheels", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.command == "wheels":
        download(options.folder, options.python, options.machine)
    else:
        bundle(options.folder.resolve(), options.wheels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
