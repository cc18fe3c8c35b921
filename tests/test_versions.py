"""The supported range of versions is the same everywhere."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import from_scripts
import pytest
import torch

from pyparallel import _versions
from pyparallel._versions import NEWEST_TORCH, OLDEST_TORCH, PYTHONS

ROOT = Path(__file__).parent.parent


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_metadata_have_the_range() -> None:
    text = text_of("pyproject.toml")
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert tuple(classifiers) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in text
    assert f'target-version = "py{PYTHONS[0].replace(".", "")}"' in text
    assert f'python_version = "{PYTHONS[0]}"' in text


def test_readme_and_install_page_have_the_range() -> None:
    python, torchs = _versions.supported().values()
    assert f"Both need Python {python}, a C++ compiler" in text_of("README.md")
    assert f"# {OLDEST_TORCH} or later, the build you want" in text_of("README.md")
    assert f"Linux, Python {python}, torch {torchs}." in text_of("docs/install.md")


def test_the_range_is_in_order_and_has_what_runs_here() -> None:
    assert list(PYTHONS) == sorted(PYTHONS, key=_versions.series)
    assert _versions.series(OLDEST_TORCH) < _versions.series(NEWEST_TORCH)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
    assert _versions.too_old(torch.__version__) is None


@pytest.mark.parametrize(
    ("python", "torchs", "names"),
    [
        (PYTHONS[-1] + ".2", NEWEST_TORCH + ".1+cpu", []),
        ("3.99.0", OLDEST_TORCH + ".0", ["Python 3.99.0: 3.14 is"]),
        (PYTHONS[0], "2.99.0a0+git1", ["torch 2.99.0a0+git1: 2.15 is"]),
    ],
)
def test_only_newer_versions_are_untested(
    python: str, torchs: str, names: list[str]
) -> None:
    assert _versions.untested(python, torchs) == [
        f"No test of this pyparallel has run with {name} the newest. Run the "
        "self-test, and look for a newer pyparallel."
        for name in names
    ]


# ---------------------------------------------------------------------- the matrix
@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script of the matrix, where no interpreter is installed."""
    script = from_scripts.load("test_matrix")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for version in PYTHONS:
        monkeypatch.delenv(f"PYTHON_{version.replace('.', '_')}", raising=False)
    return script


def test_the_matrix_has_both_ends_of_both_ranges(matrix: ModuleType) -> None:
    cells = matrix.cells_of([])
    assert {PYTHONS[0], PYTHONS[-1]} < {cell.python for cell in cells}
    assert {OLDEST_TORCH, NEWEST_TORCH} < {cell.torch for cell in cells}
    assert all(cell.python in PYTHONS for cell in cells)


def test_its_tests_exist(matrix: ModuleType) -> None:
    quick, long = (matrix.test_files(ROOT, quick) for quick in (True, False))
    assert [name for name in quick if not (ROOT / name).exists()] == []
    assert len(long) > len(quick) and "tests/test_docs.py" not in long


def program(path: Path, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_that_does_not_run_is_passed_over(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert matrix.interpreter("3.13", tmp_path) is None
    assert matrix.cells_of(["newest:newest"]) == [(PYTHONS[-1], NEWEST_TORCH)]
    program(tmp_path / "python3.13", code=127)
    kept = program(tmp_path / "versions" / "3.13.0" / "bin" / "python")
    assert matrix.interpreter("3.13", tmp_path) == str(kept)
    assert matrix.cells_of(["newest:2.11"]) == [("3.13", "2.11")]
    named = program(tmp_path / "own")
    monkeypatch.setenv("PYTHON_3_13", str(named))
    assert matrix.interpreter("3.13", tmp_path) == str(named)


def test_a_cell_without_an_interpreter_fails_or_is_skipped(
    matrix: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.main(["--cells", "3.13:newest"]) == 1
    assert matrix.main(["--cells", "3.13:newest", "--skip-missing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("3.13 ")] == [
        f"3.13    {NEWEST_TORCH}   no Python",
        f"3.13    {NEWEST_TORCH}   skipped",
    ]


@pytest.mark.parametrize("fails", ["build", "tests, python", ""])
def test_the_first_step_that_fails_ends_a_cell(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str
) -> None:
    begun: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], **rest: Any) -> Any:
        begun.append(command)
        name = "build" if "build_ext" in command else ""
        if "pytest" in command:
            name = f"tests, {env['PYPARALLEL_BACKEND']}"
        return subprocess.CompletedProcess(command, int(name == fails != ""), "text")

    monkeypatch.setattr(matrix.subprocess, "run", run)
    options = argparse.Namespace(quick=True, jobs=2, wheels=None)
    assert matrix.run(matrix.Cell("3.13", "2.15"), "py", tmp_path, options) == fails
    assert begun[1][:3] == ["py", "-m", "venv"] and "torch==2.15.*" in begun[3]
    assert len(begun) == {"build": 6, "tests, python": 9, "": 9}[fails]
