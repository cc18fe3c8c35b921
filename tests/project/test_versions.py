"""All files state the same supported versions."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from pyparallel.core import versions
from pyparallel.core.versions import NEWEST_TORCH, OLDEST_TORCH, PYTHONS
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_all_files_state_the_tested_range_and_it_includes_what_runs() -> None:
    text = text_of("pyproject.toml")
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert tuple(classifiers) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in text
    assert f'target-version = "py{PYTHONS[0].replace(".", "")}"' in text
    assert f'python_version = "{PYTHONS[0]}"' in text
    python, torchs = versions.supported().values()
    assert f"Both commands need Python {python}, a C++ compiler" in text_of("README.md")
    assert f"# {OLDEST_TORCH} or later, the build you want" in text_of("README.md")
    assert f"Linux, Python {python}, torch {torchs}." in text_of("docs/install.md")
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
