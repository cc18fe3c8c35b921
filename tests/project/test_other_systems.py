"""Systems other than Linux run pure Python without workers."""

from __future__ import annotations

import pytest

from tests.support.ranks.torchrun import python
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


def test_the_package_needs_no_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPARALLEL_BACKEND", "python")
    done = python(ROOT / "scripts" / "check_portable.py", "--without-posix", limit=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "win32: import, collate and loaders without workers are correct\n"
    )
