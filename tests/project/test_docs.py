"""The examples of the documentation are correct."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from repository import ROOT
from torchrun import python, torchrun

import pyparallel

pytestmark = pytest.mark.one_backend

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(pyparallel.__path__, "pyparallel.")
    if not module.name.endswith(("__main__", "._C"))
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_have_the_shown_results(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0


@pytest.mark.slow
def test_python_in_the_readme_prints_the_output_that_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert ["torchrun --nproc_per_node=2" in block for block in blocks] == [True, False]
    script = tmp_path / "block.py"
    for block, run in zip(blocks, (torchrun, python), strict=True):
        script.write_text(block, encoding="utf-8")
        done = run(script, limit=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == re.findall("^#> (.*)$", block, re.M)
