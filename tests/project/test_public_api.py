"""The public interface: all of it is recorded, and changes are detected."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import pyparallel
from tests.support.repository import from_scripts
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


@pytest.fixture(scope="module")
def api() -> Iterator[ModuleType]:
    yield from_scripts.load("public_api")


@pytest.fixture(scope="module")
def now(api: ModuleType) -> list[str]:
    if importlib.util.find_spec("mmengine"):
        pytest.skip("beside mmengine the classes have its bases")
    return api.present()


def test_the_file_equals_the_code(api: ModuleType, now: list[str]) -> None:
    _, recorded = api.parse(api.FILE.read_text("utf-8"))
    assert recorded == now, (
        "run scripts/public_api.py --write and name in CHANGELOG.md: "
        f"{api.changed(recorded, now)}"
    )


def test_the_changelog_names_every_change(api: ModuleType) -> None:
    changes = api.changed(*api.parse(api.FILE.read_text("utf-8")))
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert api.unnamed(changes, api.interface(changelog)) == []
    assert not changes or api.was_released(changelog)
    assert not api.was_released("# Changelog\n\n## 0.1.0 (unreleased)\n")
    later = "# Changelog\n\n## Unreleased\n\n### Interface\n\n`a`\n\n## 0.1.0\n"
    assert api.was_released(later)
    assert api.unnamed(["a", "b"], api.interface(later)) == ["b"]


def test_every_public_name_is_there(api: ModuleType, now: list[str]) -> None:
    names = {api.name_of(line) for line in now}
    for path in api.MODULES:
        module = importlib.import_module(path)
        prefix = path.removeprefix("pyparallel").removeprefix(".")
        for name in module.__all__:
            assert f"{prefix}.{name}".removeprefix(".") in names
    assert {"DataContainer.to", "Padding.mask", "LoaderStats.verdict"} <= names
    assert "errors.MissingKeyError: class of ValueError, KeyError" in [
        line.removeprefix("pyparallel.") for line in now
    ]


@pytest.mark.slow
def test_completion_offers_public_names_only() -> None:
    code = "import pyparallel.mmengine\nprint(*dir(pyparallel))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    offered = [name for name in done.stdout.split() if not name.startswith("__")]
    assert offered == sorted([*pyparallel.__all__, "mmengine"])
    assert set(pyparallel.__all__) <= set(dir(pyparallel))
