"""All files state the same supported versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import from_scripts
import pytest
import torch
from repository import ROOT

from pyparallel.core import versions
from pyparallel.core.versions import NEWEST_TORCH, OLDEST_TORCH, PYTHONS


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
    python, torchs = versions.supported().values()
    assert f"Both commands need Python {python}, a C++ compiler" in text_of("README.md")
    assert f"# {OLDEST_TORCH} or later, the build you want" in text_of("README.md")
    assert f"Linux, Python {python}, torch {torchs}." in text_of("docs/install.md")


def test_the_range_is_in_order_and_includes_the_running_versions() -> None:
    assert list(PYTHONS) == sorted(PYTHONS, key=versions.series)
    assert versions.series(OLDEST_TORCH) < versions.series(NEWEST_TORCH)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
    assert versions.too_old(torch.__version__) is None


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
    assert versions.untested(python, torchs) == [
        f"No test of this pyparallel has run with {name} the newest. Run the "
        "self-test, and look for a newer pyparallel."
        for name in names
    ]


# ---------------------------------------------------------------------- the matrix
@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Load the script of the matrix, as if no interpreter were installed."""
    script = from_scripts.load("test_matrix")
    monkeypatch.setattr(script, "OWN", "3.9")
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
    quick, long = (matrix.test_folders(ROOT, quick) for quick in (True, False))
    assert [name for name in quick if not (ROOT / name).exists()] == []
    assert {*quick} < {*long} and "tests/project" not in long


def commands_of(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: str = ""
) -> list[list[str]]:
    """Return the commands that the matrix runs from now on; none runs in fact."""
    begun: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], **rest: Any) -> Any:
        begun.append(command)
        name = "build" if "build_ext" in command else ""
        if name or "wheel" in command:  # finds ninja
            assert env["PATH"].split(os.pathsep)[0] == str(Path(command[0]).parent)
        if "pytest" in command:
            name = f"tests, {env['PYPARALLEL_BACKEND']}"
        return subprocess.CompletedProcess(command, int(name == fails != ""), "text")

    monkeypatch.setattr(matrix.subprocess, "run", run)
    monkeypatch.setattr(matrix, "interpreter", lambda version, pyenv: "py")
    return begun


@pytest.mark.parametrize("fails", ["build", "tests, python", ""])
def test_the_first_step_that_fails_ends_a_cell(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    begun = commands_of(matrix, monkeypatch, fails)
    assert matrix.main(["--cells", "3.13:2.15", "--quick"]) == int(fails != "")
    assert begun[1][:3] == ["py", "-m", "venv"] and "torch==2.15.*" in begun[3]
    assert len(begun) == {"build": 6, "tests, python": 9, "": 9}[fails]
    assert not Path(begun[0][1]).parent.exists()


def test_each_wheel_is_installed_and_tests_itself(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = commands_of(matrix, monkeypatch)
    options = ["--wheels", str(tmp_path / "dist"), "--torch", "2.13"]
    assert matrix.main(options) == 0
    steps = [begun[first : first + 8] for first in range(0, len(begun), 8)]
    assert len(steps) == len(PYTHONS)
    for *_, torch_, wheel, install, load, self_test in steps:
        venv = Path(install[0]).parent
        assert torch_[-1] == "torch==2.13.*" and "--no-deps" in wheel
        assert "pyparallel-torch" in install and matrix.CHECK in load
        assert self_test == [str(venv / "pyparallel"), "doctor"]
