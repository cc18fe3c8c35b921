"""Commands in the pages: their targets, settings, options and files exist."""

from __future__ import annotations

import re

import pytest
from docs_blocks import SETTING, all_blocks, commands, pages
from repository import ROOT

pytestmark = pytest.mark.one_backend


def typed() -> list[tuple[str, list[str]]]:
    """Return every command of every block with the block's name, without settings."""
    found = []
    for block in all_blocks("sh"):
        for words in commands(block.text):
            while words and SETTING.match(words[0]):
                words = words[1:]
            if words:
                found.append((block.name, words))
    return found


COMMANDS = typed()


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z][a-z-]*)[` ]", text))
        assert named <= targets, page
    for name, words in COMMANDS:
        if words[0] == "make":
            given = {word for word in words[1:] if not SETTING.match(word)}
            assert given <= targets, name


def test_files_that_commands_name_exist() -> None:
    for name, words in COMMANDS:
        for word in words:
            if re.fullmatch(
                r"(examples|tests|scripts|benchmarks)/\S+\.(py|json)", word
            ):
                assert (ROOT / word).exists(), f"{name}: {word}"
