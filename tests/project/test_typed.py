"""The file for type checkers uses every public name, and its imports exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

import pyparallel
import pyparallel.mmcv
import pyparallel.mmengine
import pyparallel.registry
from pyparallel import Padding

pytestmark = pytest.mark.one_backend

FILE = ROOT / "tests" / "typed" / "uses_everything.py"
MODULES = {"memory": pyparallel.memory, "registry": pyparallel.registry}
pad_stack = importlib.import_module("pyparallel.batch.pad_stack")
MODULES |= {"mmcv": pyparallel.mmcv, "mmengine": pyparallel.mmengine}


def used(text: str) -> set[str]:
    """Return the names that code uses, and `module.name`; imports do not count."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


def test_every_public_name_is_used() -> None:
    public = {f"{m}.{name}" for m, module in MODULES.items() for name in module.__all__}
    assert public.union(pyparallel.__all__) <= used(FILE.read_text("utf-8"))


def test_the_overloads_of_pad_stack_have_all_options() -> None:
    arguments = {*inspect.signature(pad_stack.pad_stack).parameters} - {"options"}
    options = {each.name for each in dataclasses.fields(Padding)}
    shown = {*pad_stack._Options.__annotations__, "padding", "sizes", "mask"}
    assert shown == (arguments | options) - {"samples"}


@pytest.mark.slow  # without a cache, mypy reads torch for minutes
def test_a_checker_sees_the_types_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    assert (Path(pyparallel.__file__).parent / "py.typed").exists()
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from pyparallel import collate, memory, missing\n"
        "collate([], samples_per_gpu='4')\n"
        "memory.empty_cache().nothing\n"
        "collate([1], 2)\n"
    )
    # With the settings, and so with the cache, of `make lint`.
    command = [sys.executable, "-m", "mypy", str(wrong)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [line.partition(".py:")[2] for line in done.stdout.splitlines()]
    assert found[:3] == [
        '1: error: Module "pyparallel" has no attribute "missing"  [attr-defined]',
        '2: error: Argument "samples_per_gpu" to "collate" has incompatible type '
        '"str"; expected "int | None"  [arg-type]',
        '3: error: "int" has no attribute "nothing"  [attr-defined]',
    ]
    assert done.returncode == 1 and len(found) == 4, done.stdout
