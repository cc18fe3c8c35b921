"""The public interface: all of it is recorded, and changes are detected."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import from_scripts
import pytest
from repository import ROOT

import pyparallel

pytestmark = pytest.mark.one_backend


@pytest.fixture(scope="module")
def api() -> Iterator[ModuleType]:
    yield from_scripts.load("public_api")


@pytest.fixture(scope="module")
def now(api: ModuleType) -> list[str]:
    if importlib.util.find_spec("mmengine"):
        pytest.skip("beside mmengine the classes have its bases")
    return api.present()


# ------------------------------------------------------------------------- the rules
def test_the_file_equals_the_code(api: ModuleType, now: list[str]) -> None:
    _, recorded = api.parse(api.FILE.read_text("utf-8"))
    assert recorded == now, (
        "run scripts/public_api.py --write and name in CHANGELOG.md: "
        f"{api.changed(recorded, now)}"
    )


def test_the_changelog_names_every_change(api: ModuleType) -> None:
    changes = api.changed(*api.parse(api.FILE.read_text("utf-8")))
    section = api.interface((ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert section, "the first section of CHANGELOG.md must have '### Interface'"
    assert api.unnamed(changes, section) == []


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


# ------------------------------------------------------------------- it can fail


OLD = ["pyparallel.a(x: int)", "pyparallel.A: class of object", "pyparallel.A.b()"]


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (OLD, []),
        (["pyparallel.a(x: int = 0)", *OLD[1:]], ["a"]),  # a default
        (["pyparallel.a(y: int)", *OLD[1:]], ["a"]),  # a name
        ([*OLD[:2], "pyparallel.A.b: property"], ["A.b"]),  # a kind
        ([*OLD, "pyparallel.A.c()"], ["A.c"]),
        (OLD[:1], ["A"]),  # its method goes with it
        ([*OLD, "pyparallel.m.B: class of object", "pyparallel.m.B.c()"], ["m.B"]),
        ([OLD[0], "pyparallel.A: class of KeyError", OLD[2]], ["A"]),  # a base
    ],
)
def test_changes_are_found_by_name(
    api: ModuleType, lines: list[str], names: list[str]
) -> None:
    assert api.changed(OLD, lines) == names
    assert api.parse(api.noted(OLD, lines)) == (sorted(OLD), sorted(lines))


def test_the_command_compares_notes_and_freezes(
    api: ModuleType,
    now: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "public_api.txt"
    monkeypatch.setattr(api, "FILE", file)
    gone = [line for line in now if api.name_of(line) != "collate"]
    was = [*gone, "pyparallel.collate(batch)", "pyparallel.old()"]
    file.write_text(api.noted(was, was))
    assert api.main([]) == 1
    assert capsys.readouterr().out == (
        "public_api.txt must match the code, but these differ: collate, old.\n"
        "Run scripts/public_api.py --write, and name them in CHANGELOG.md.\n"
    )
    assert api.main(["--write"]) == api.main([]) == 0
    assert "- pyparallel.old()\n" in file.read_text()
    assert api.changed(*api.parse(file.read_text())) == ["collate", "old"]
    assert api.main(["--freeze"]) == api.main([]) == 0
    assert api.changed(*api.parse(file.read_text())) == []


# ------------------------------------------------------------------- what editors show


@pytest.mark.slow
def test_completion_offers_public_names_only() -> None:
    code = "import pyparallel.mmengine\nprint(*dir(pyparallel))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    offered = [name for name in done.stdout.split() if not name.startswith("__")]
    assert offered == sorted([*pyparallel.__all__, "mmengine"])
    assert set(pyparallel.__all__) <= set(dir(pyparallel))
