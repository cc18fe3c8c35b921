"""Build, import and test the package with several versions of Python and torch.

    python scripts/test_matrix.py                    # all cells, one after the other
    python scripts/test_matrix.py --cells 3.13:2.15  # some; newest:newest is the newest
    python scripts/test_matrix.py --cells 3.13t:2.12 # free-threaded, in no default cell
    python scripts/test_matrix.py --quick            # only what depends on torch
    python scripts/test_matrix.py --wheels dist --torch 2.13  # a wheel for each Python
    python scripts/test_matrix.py --cells 3.13:2.15 --prepare FOLDER   # all but tests
    python scripts/test_matrix.py --cells 3.13:2.15 --prepared FOLDER  # the tests
    python scripts/test_matrix.py --find 3.12        # print an interpreter, or nothing

Each cell has a virtual environment and a copy of the tree in a temporary folder, which
is removed at its end. The script uses at most 12 GB of disk at a time. An interpreter
comes from a variable such as PYTHON_3_13, from PATH, from pyenv, or is the one that
runs this script. A cell without an interpreter fails, unless --skip-missing is given.
TORCH_PIP has the options of pip for torch, as in the Makefile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = runpy.run_path(str(ROOT / "pyparallel" / "core" / "versions.py"))
OLDEST, NEWEST = VERSIONS["OLDEST_TORCH"], VERSIONS["NEWEST_TORCH"]
PYTHONS: tuple[str, ...] = VERSIONS["PYTHONS"]
#: The version of the interpreter that runs this script.
OWN = ".".join(map(str, sys.version_info[:2]))
DISK = 12 << 30
TOOLS = ("setuptools>=77,<81", "wheel", "ninja", "pybind11>=2.11")
#: The tests of a quick cell: pyproject.toml describes the markers.
QUICK = "cuda_torch and not slow"
#: Test folders in pure Python. A quick cell has those whose results its operators make.
IN_PYTHON_QUICK = ("batch", "images", "scatter_gather")
IN_PYTHON = (*IN_PYTHON_QUICK, "core", "backend", "loader", "parallel")
#: Folders of tests of the repository.
LEFT_OUT = ("benchmarks", "fakecuda", "project")


#: A name, a command, and its environment variables.
Step = tuple[str, list[str], dict[str, str]]
CHECK = "import pyparallel.backend as b; assert b.name == 'native', b.reason"


class Cell(NamedTuple):
    """One pair of versions, as ``("3.13", "2.15")``."""

    python: str
    torch: str


#: torch 2.8 has no wheel for Python 3.14, and torch 2.15 none for 3.10. Machines with
#: GPUs have Python 3.12 and torch 2.11.
CELLS = (
    Cell("3.10", OLDEST),
    Cell("3.13", OLDEST),
    Cell("3.12", "2.11"),
    Cell("3.10", "2.14"),
    Cell("3.14", NEWEST),
)


def interpreter(version: str, pyenv: Path) -> str | None:
    """Return an interpreter of this version."""
    named = os.environ.get(f"PYTHON_{version.replace('.', '_').upper()}")
    number = version.removesuffix("t")  # pyenv has 3.13.1t of 3.13t
    pattern = f"versions/{number}.*[0-9]{version[len(number) :]}/bin/python"
    kept = sorted(pyenv.glob(pattern))
    own = sys.executable if version == OWN else None
    # pyenv also puts shims of disabled versions on PATH: they do not run.
    for path in (named, shutil.which(f"python{version}"), *map(str, kept), own):
        if (
            path
            and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
        ):
            return path
    return None


def cells_of(texts: Sequence[str]) -> list[Cell]:
    """Return the cells of ``3.13:2.15`` or ``newest:newest``, or all."""
    cells = []
    for text in texts:
        python, _, torch = text.partition(":")
        if python == "newest":
            python = newest_python()
        cells.append(Cell(python, NEWEST if torch == "newest" else torch))
    return cells or list(CELLS)


def newest_python() -> str:
    """Return the newest supported version with an installed interpreter."""
    for version in reversed(PYTHONS):
        if interpreter(version, pyenv_root()):
            return version
        print(f"no python{version} was found; the next older version is tried")
    return PYTHONS[-1]


def pyenv_root() -> Path:
    """Return the folder of pyenv, which may not exist."""
    return Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))


def test_folders(tree: Path) -> list[str]:
    """Return the folders of the tests of a cell."""
    found = {path.parent.name for path in (tree / "tests").glob("*/test_*.py")}
    return [f"tests/{name}" for name in sorted(found - {*LEFT_OUT})]


def run(cell: Cell, python: str, folder: Path, options: argparse.Namespace) -> str:
    """Build, import and test one cell in a folder; return the failed step, or ""."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYPARALLEL")}
    # Libraries of torch's CUDA build are not cached: they take most of the disk.
    env |= {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # The constraints in a configuration file of pip may exclude the torch of the cell.
    env.setdefault("PIP_CONSTRAINT", os.devnull)
    if not env.get("FORCE_CUDA"):
        env["FORCE_ONLY_CPU"] = "1"
    tree, venv = folder / "tree", folder / "venv"
    # torch looks for ninja on PATH. Without ninja one compiler runs at a time.
    env["PATH"] = f"{venv / 'bin'}{os.pathsep}{env['PATH']}"
    own = str(venv / "bin" / "python")
    pip = [own, "-m", "pip", "install", "-q"]
    torch = [*os.environ.get("TORCH_PIP", "").split(), f"torch=={cell.torch}.*"]
    steps: list[Step] = [
        ("copy", [str(ROOT / "scripts" / "copy_tree"), str(tree)], {}),
        ("environment", [python, "-m", "venv", str(venv)], {}),
        ("tools", [*pip, *TOOLS], {}),
        ("torch", [*pip, *torch], {}),
    ]
    if options.wheels:
        made = folder / "wheel"
        wheel = [own, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
        steps += [
            ("wheel", [*wheel, "-w", str(made), "."], {}),
            ("install", [*pip, "--find-links", str(made), "pyparallel-torch"], {}),
            # -I removes the sources in the working folder from sys.path.
            ("import", [own, "-I", "-c", CHECK], {}),
            ("self-test", [str(venv / "bin" / "pyparallel"), "doctor"], {}),
        ]
    else:
        steps += build_steps(own)
    if options.prepared:
        del steps[1:]  # only the copy is repeated
    if not options.wheels and not options.prepare:
        steps += test_steps(cell, own, options)
    for name, command, more in steps:
        started = time.monotonic()
        where = tree if tree.exists() else folder
        done = subprocess.run(
            command,
            cwd=where,
            env=env | more,
            stdin=subprocess.DEVNULL,
            stdout=None if name.startswith("tests") else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        took = time.monotonic() - started
        print(f"    {name}: {'FAILED' if done.returncode else 'ok'}, {took:.0f} s")
        if done.returncode:
            print((done.stdout or "")[-4000:], flush=True)
            return name
        sys.stdout.flush()
    for path in (folder / "wheel").glob("*.whl"):
        options.wheels.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, options.wheels)
    return ""


def build_steps(own: str) -> list[Step]:
    """Return the steps that build the package in the tree and import it."""
    pip = [own, "-m", "pip", "install", "-q", "--no-build-isolation"]
    # The newest release of a test tool may have no wheel for this Python.
    pip += ["--prefer-binary"]
    return [
        ("package", [*pip, "-e", ".[test]"], {"PYPARALLEL_BUILD": "python"}),
        ("build", [own, "setup.py", "-q", "build_ext", "--inplace"], {}),
        ("import", [own, "-c", CHECK], {}),
    ]


def test_steps(cell: Cell, own: str, options: argparse.Namespace) -> list[Step]:
    """Return the tests of both backends.

    Free-threaded Python, as ``3.13t``, has the GIL from its start with the extension,
    and has none, as the extension is removed, in pure Python.
    """
    # As in the Makefile: slow files begin first.
    pytest = [own, "-m", "pytest", "-q", "-n", str(options.jobs), "--dist", "loadfile"]
    pytest += ["--no-loadscope-reorder", "-m"]
    folders = IN_PYTHON_QUICK if options.quick else IN_PYTHON
    in_python = [f"tests/{name}" for name in folders]
    native = [*pytest, QUICK if options.quick else "not peers"]
    quick = QUICK if options.quick else "not peers and not slow"
    python = [*pytest, f"{quick} and not one_backend"]
    with_it, without = (
        {"PYPARALLEL_BACKEND": "native"},
        {"PYPARALLEL_BACKEND": "python"},
    )
    remove: list[Step] = []
    if cell.python.endswith("t"):
        with_it["PYTHON_GIL"], without["PYTHON_GIL"] = "1", "0"
        code = "from pyparallel.backend import _C; import os; os.remove(_C.__file__)"
        remove = [("removal of the extension", [own, "-c", code], with_it)]
    return [
        ("tests, native", [*native, *test_folders(ROOT)], with_it),
        *remove,
        ("tests, python", [*python, *in_python], without),
    ]


@contextlib.contextmanager
def folder_of_cell(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of a cell, and remove it unless it is prepared for its tests."""
    folder: Path | None = options.prepare or options.prepared
    folder = folder or Path(tempfile.mkdtemp(prefix="pyparallel-matrix-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        free = shutil.disk_usage(folder).free
        if free < DISK and not options.prepared:
            raise SystemExit(
                f"A cell needs {DISK >> 30} GB of disk, but {folder} has "
                f"{free >> 30} GB. Choose another folder by TMPDIR or --prepare."
            )
        yield folder.resolve()
    finally:
        if not options.prepare:
            shutil.rmtree(folder)


def main(arguments: Sequence[str]) -> int:
    """Run the cells; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", nargs="+", default=[], metavar="PYTHON:TORCH")
    parser.add_argument("--quick", action="store_true", help="run fewer tests")
    parser.add_argument("--jobs", type=int, default=2, help="parallel tests")
    parser.add_argument("--skip-missing", action="store_true")
    parser.add_argument("--wheels", type=Path, help="build wheels into this folder")
    parser.add_argument("--torch", default=NEWEST, help="the torch of the wheels")
    parser.add_argument("--prepare", type=Path, help="build one cell in this folder")
    parser.add_argument(
        "--prepared", type=Path, help="test that cell, and remove the folder"
    )
    parser.add_argument("--find", metavar="PYTHON", help="print its interpreter")
    options = parser.parse_args(arguments)
    if options.find:
        print(interpreter(options.find, pyenv_root()) or "")
        return 0
    results: list[tuple[Cell, str]] = []
    cells = cells_of(options.cells)
    if options.wheels and not options.cells:
        cells = [Cell(python, options.torch) for python in PYTHONS]
    for cell in cells:
        print(f"=== Python {cell.python}, torch {cell.torch}", flush=True)
        python = interpreter(cell.python, pyenv_root())
        if python is None:
            print(f"    no python{cell.python} was found")
            results.append((cell, "skipped" if options.skip_missing else "no Python"))
            continue
        with folder_of_cell(options) as folder:
            results.append((cell, run(cell, python, folder, options)))
    print("\nPython  torch")
    for cell, failed in results:
        print(f"{cell.python:<7} {cell.torch:<6} {failed or 'passed'}")
    return int(any(failed not in ("", "skipped") for _, failed in results))


if __name__ == "__main__":
    # So that a killed run removes its folder too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
