"""Commands in the pages: their targets, settings, options and files exist."""

from __future__ import annotations

import re

import pytest
from docs_blocks import SETTING, all_blocks, commands, pages
from repository import ROOT

pytestmark = pytest.mark.one_backend

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


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


def test_targets_of_make_exist_and_so_do_their_settings() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    of_scripts = (ROOT / "scripts/gpu_check.py").read_text(encoding="utf-8")
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z][a-z-]*)[` ]", text))
        assert named <= targets, page
    for name, words in COMMANDS:
        if words[0] != "make":
            continue
        settings = [word for word in words[1:] if SETTING.match(word)]
        assert {word for word in words[1:] if word not in settings} <= targets, name
        for setting in settings:
            assert setting.partition("=")[0] in MAKEFILE + of_scripts, name


def test_files_that_commands_name_exist() -> None:
    for name, words in COMMANDS:
        for word in words:
            if re.fullmatch(
                r"(examples|tests|scripts|benchmarks)/\S+\.(py|json)", word
            ):
                assert (ROOT / word).exists(), f"{name}: {word}"
