"""The file for type checkers uses every public name, and its imports exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect

import pytest

import pyparallel
import pyparallel.mmcv
import pyparallel.mmengine
import pyparallel.registry
from pyparallel import Padding
from tests.support.repository.folders import ROOT

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
