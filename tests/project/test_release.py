"""Published files are checked, and a release is complete or rejected."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.repository import from_scripts

pytestmark = pytest.mark.one_backend


TRACKED = {
    "setup.py",
    "README.md",
    ".ci/run",
    ".gitignore",
    "csrc/core/box.h",
    "tests/test_a.py",
    "pyparallel/__init__.py",
    "pyparallel/py.typed",
    "pyparallel/backend/_C.pyi",
    "pyparallel/profiler/page.html",
}
INFO = "pyparallel_torch-1.2.3.dist-info/METADATA"
METADATA = "Metadata-Version: 2.4\nName: pyparallel-torch\nVersion: 1.2.3\n"
METADATA += "Requires-Dist: torch==2.13.*\n"
RECORD = b'{"torch": "2.13.0+cpu"}'
SO = "pyparallel/backend/_C.cpython-311-x86_64-linux-gnu.so"
WHEEL = {name: b"" for name in TRACKED if name.startswith("pyparallel/")}
WHEEL |= {SO: b"", SO.replace(".so", ".json"): RECORD, INFO: METADATA.encode()}
SDIST = {name: b"" for name in TRACKED if not name.startswith(".")}
PAGE = f"{METADATA}\n# pyparallel\n".encode()
SDIST |= {"README.md": b"# pyparallel\n", "PKG-INFO": PAGE}
SDIST |= {"pyparallel_torch.egg-info/SOURCES.txt": b""}


OTHER = METADATA.replace("1.2.3", "1.2.4").encode()
LOOSE = METADATA.replace("==2.13.*", ">=2.8").encode()
#: A change of a file of the source archive or the wheel, and the fault.
FAULTS = [
    ("", "", None, ""),
    ("sdist", "csrc/core/box.h", None, "must have {}, but has not. See MANIFEST.in."),
    ("sdist", "notes.txt", b"", "must have tracked files only, but has {}."),
    (
        "sdist",
        "PKG-INFO",
        PAGE.replace(b"1.2.3", b"1"),
        "must say Version: 1.2.3, but says 1.",
    ),
    (
        "sdist",
        "PKG-INFO",
        PAGE + b"old",
        "must have README.md as its page, but has another text.",
    ),
    ("wheel", "pyparallel/py.typed", None, "must have {}, but has not."),
    ("wheel", "pyparallel/profiler/page.html", None, "must have {}, but has not."),
    ("wheel", "tests/test_a.py", b"", "must have modules and stubs only, but has {}."),
    # A module that was deleted is still in a folder of an earlier build.
    (
        "wheel",
        "pyparallel/old.py",
        b"",
        "must have modules and stubs only, but has {}.",
    ),
    ("wheel", SO, None, "must have one extension with its record."),
    ("wheel", SO, b".symtab", "must be stripped, but {} has .symtab."),
    ("wheel", INFO, OTHER, "must say Version: 1.2.3, but says 1.2.4."),
    ("wheel", INFO, LOOSE, "must say Requires-Dist: torch==2.13.*, but does not."),
]


@pytest.mark.parametrize(("archive", "name", "content", "expected"), FAULTS)
def test_defects_of_an_archive_are_reported(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    archive: str,
    name: str,
    content: bytes | None,
    expected: str,
) -> None:
    check = from_scripts.load("check_dist")
    monkeypatch.setattr(check, "symbols", lambda content: content.decode())
    files: dict[str, dict[str, bytes]] = {"sdist": {**SDIST}, "wheel": {**WHEEL}}
    if content is not None:
        files[archive][name] = content
    elif name:
        del files[archive][name]
    with tarfile.open(tmp_path / "pyparallel_torch-1.2.3.tar.gz", "w:gz") as sdist:
        for path, data in files["sdist"].items():
            member = tarfile.TarInfo(f"pyparallel_torch-1.2.3/{path}")
            member.size = len(data)
            sdist.addfile(member, io.BytesIO(data))
    tag = f"{check.tag()}x86_64"
    wheel_path = tmp_path / f"pyparallel_torch-1.2.3-{tag}.whl"
    with zipfile.ZipFile(wheel_path, "w") as wheel:
        for path, data in files["wheel"].items():
            wheel.writestr(path, data)
    found = check.problems(tmp_path, TRACKED, "1.2.3")
    texts = [text.partition(" ")[2] for text in found]
    assert texts == ([expected.format(name)] if name else [])
