"""`make` names a missing requirement before it installs anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend

NO_VENV = "/bin/false -m venv must work, but does not. Install the module"
A_SPACE = "The path of this folder must have no space"


@pytest.mark.parametrize(
    ("folder", "target", "message"),
    [("a b", "help", A_SPACE), ("ab", "lint-types", NO_VENV)],
)
def test_a_machine_that_cannot_make_an_environment_is_an_error(
    tmp_path: Path, folder: str, target: str, message: str
) -> None:
    copy = tmp_path / folder
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml", "scripts"):
        (copy / name).symlink_to(ROOT / name)
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "python").symlink_to("/bin/false")  # of an earlier try
    command = ["make", target, "PYTHON=/bin/false"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
