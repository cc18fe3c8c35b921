"""`make lint` finds phrases that are hard to read."""

from __future__ import annotations

from pathlib import Path

import from_scripts
import pytest

pytestmark = pytest.mark.one_backend


def test_a_file_with_a_phrase_fails_with_the_better_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = from_scripts.load("check_prose")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "bad.md").write_text("Two copies,\none of which is pinned.\n")
    (tmp_path / "good.md").write_text("One of two copies is pinned.\n")
    (tmp_path / "data.bin").write_bytes(b"of which \xff")
    assert script.main(["good.md", "data.bin"]) == 0
    assert script.main(["good.md", "bad.md"]) == 1
    expected = "bad.md:2: replace 'of which' by a second sentence, or 'whose'\n"
    assert capsys.readouterr().out == expected
