"""The public interface: all of it is recorded, and changes are detected."""

from __future__ import annotations

import importlib.util
import inspect
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


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`A.b` is a property", []),
        ("`A.b(x)` takes x; so does `pyparallel.A.b`", []),
        ("A.b is a property", ["A.b"]),  # a word, not code
        ("`A.bc` and `B.A.b`", ["A.b"]),
        ("nothing", ["A.b"]),
    ],
)
def test_a_change_is_named_as_code(
    api: ModuleType, text: str, missing: list[str]
) -> None:
    log = f"# Changelog\n\n## 2.0\n\n- `A.b`\n\n### Interface\n\n{text}\n"
    older = "\n## 1.0\n\n### Interface\n\n`A.b`\n"
    assert api.unnamed(["A.b"], api.interface(log + older)) == missing
    assert api.interface("# Changelog\n\n## 2.0\n" + older) == ""


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
def docstrings(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield the public names of a module, their docstrings, and those of a base."""
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        yield f"{module.__name__}.{name}", value.__doc__ or "", ""
        for member in () if inspect.isroutine(value) else sorted(vars(value)):
            one = vars(value)[member]
            is_property = isinstance(one, property)
            if member[0] != "_" and (inspect.isroutine(one) or is_property):
                bases = [vars(c).get(member) for c in value.__mro__[1:]]
                inherited = [b.__doc__ for b in bases if getattr(b, "__doc__", None)]
                path = f"{module.__name__}.{name}.{member}"
                yield path, one.__doc__ or "", str([*inherited, ""][0])


@pytest.mark.parametrize("name", ["", ".memory", ".mmcv", ".mmengine", ".registry"])
def test_the_first_line_of_every_docstring_is_a_sentence(name: str) -> None:
    module = importlib.import_module(f"pyparallel{name}")
    found = list(docstrings(module))
    assert len(found) >= 3
    for path, text, inherited in found:
        first = (text or inherited).strip().split("\n\n")[0]
        assert first[-1:] in tuple(".:") and len(first.split()) >= 3, (path, first)
        assert "(" not in first.split()[0], f"{path}: a signature is no description"


@pytest.mark.slow
def test_completion_offers_public_names_only() -> None:
    code = "import pyparallel.mmengine\nprint(*dir(pyparallel))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    offered = [name for name in done.stdout.split() if not name.startswith("__")]
    assert offered == sorted([*pyparallel.__all__, "mmengine"])
    assert set(pyparallel.__all__) <= set(dir(pyparallel))
