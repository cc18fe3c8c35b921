"""`make lint` finds phrases that are hard to read."""

from __future__ import annotations

from pathlib import Path

import from_scripts
import pytest

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(
        not from_scripts.FOLDER.exists(), reason="there are no scripts here"
    ),
]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("first\nRead what it returns.", [(2, "what it")]),
        ("The copy of\n    # which is kept", [(1, "of which")]),
        ('"a wait that no" "body"', []),
        ('"whoever " "waits", so many', [(1, "whoever"), (1, "so many")]),
        ("the page-locked and page lock", [(1, "page-locked"), (1, "page lock")]),
        ("assert x is None and somewhat is", []),
        ("The result is none of them.", [(1, "is none")]),
    ],
)
def test_phrases_are_found_with_their_lines(
    text: str, found: list[tuple[int, str]]
) -> None:
    script = from_scripts.load("check_prose")
    assert [(line, phrase) for line, phrase, _ in script.find(text)] == found


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
