"""Check the files to publish: one sdist and one wheel.

    python scripts/check_dist.py DIST [NAMES]

The sdist must contain every tracked file and no other, and show README.md as its page.
The wheel must contain the modules, stubs, HTML and CSS files and ``py.typed``, the
stripped extension and its record. It must be tagged for this Python and Linux, require
the torch of the record, and contain no tests and no sources. ``NAMES`` is a file with
the tracked files, as ``git ls-files`` lists them; by default the script calls git.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Tracked, but useful in a checkout only.
NOT_IN_SDIST = (
    *(".ci/", ".devcontainer/", ".github/", ".editorconfig", ".gitattributes"),
    *(".gitignore", ".pre-commit-config.yaml", ".readthedocs.yaml"),
)
#: Created by setuptools.
MADE = re.compile(r"PKG-INFO|setup\.cfg|pyparallel_torch\.egg-info/.*")
EXTENSION = re.compile(r"pyparallel/backend/_C\.[\w.-]+\.(so|json)")


def tag() -> str:
    """Return the tag of a wheel with the extension."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-linux_"


def in_sdist(path: Path) -> tuple[set[str], str, str]:
    """Return the files of an sdist, below its folder, its metadata and its README."""
    with tarfile.open(path) as archive:
        members = {
            member.name.partition("/")[2]: member
            for member in archive.getmembers()
            if member.isfile()
        }
        texts = []
        for name in ("PKG-INFO", "README.md"):
            file = archive.extractfile(members[name]) if name in members else None
            texts.append(file.read().decode() if file is not None else "")
    return set(members), texts[0], texts[1]


def wrong_fields(where: str, text: str, version: str) -> Iterator[str]:
    """Yield the faults of the name and the version in metadata."""
    metadata = Parser().parsestr(text)
    for field, value in (("Name", "pyparallel-torch"), ("Version", version)):
        if (said := metadata[field]) != value:
            yield f"{where} must say {field}: {value}, but says {said}."


def of_sdist(path: Path, tracked: set[str], version: str) -> Iterator[str]:
    """Yield the faults of an sdist."""
    wanted = {name for name in tracked if not name.startswith(NOT_IN_SDIST)}
    names, metadata, readme = in_sdist(path)
    found = {name for name in names if not MADE.fullmatch(name)}
    for name in sorted(wanted - found):
        yield f"{path.name} must have {name}, but has not. See MANIFEST.in."
    for name in sorted(found - wanted):
        yield f"{path.name} must have tracked files only, but has {name}."
    yield from wrong_fields(path.name, metadata, version)
    # The index shows this text as the page of the release.
    if Parser().parsestr(metadata).get_payload() != readme:
        yield f"{path.name} must have README.md as its page, but has another text."


def of_wheel(path: Path, tracked: set[str], version: str) -> Iterator[str]:
    """Yield the faults of a wheel."""
    beginning = f"pyparallel_torch-{version}-{tag()}"
    if not path.name.startswith(beginning):
        yield f"{path.name} must begin with {beginning}, but does not."
    shipped = re.compile(r"pyparallel/.*(\.(pyi?|html|css)|py\.typed)")
    wanted = {name for name in tracked if shipped.fullmatch(name)}
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = f"pyparallel_torch-{version}.dist-info/"
        found = {name for name in names if not name.startswith(info)}
        extension = {name for name in found if EXTENSION.fullmatch(name)}
        for name in sorted(wanted - found):
            yield f"{path.name} must have {name}, but has not."
        for name in sorted(found - wanted - extension):
            yield f"{path.name} must have modules and stubs only, but has {name}."
        if sorted(name.rpartition(".")[2] for name in extension) != ["json", "so"]:
            yield f"{path.name} must have one extension with its record."
        for name in sorted(extension):
            if name.endswith(".so") and (left := symbols(archive.read(name))):
                yield f"{path.name} must be stripped, but {name} has {left}."
        text = archive.read(f"{info}METADATA").decode() if names > found else ""
        records = [name for name in extension if name.endswith(".json")]
        record = json.loads(archive.read(records[0])) if records else {"torch": "0.0"}
    yield from wrong_fields(path.name, text, version)
    metadata = Parser().parsestr(text)
    needed = f"torch=={'.'.join(record['torch'].split('.')[:2])}.*"
    if records and needed not in (metadata.get_all("Requires-Dist") or []):
        yield f"{path.name} must say Requires-Dist: {needed}, but does not."


def symbols(content: bytes) -> str:
    """Return the names of sections that a stripped module must not have."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        command = ["readelf", "--section-headers", "--wide", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return ", ".join(re.findall(r"\.symtab|\.debug_\w+", done.stdout))


def problems(dist: Path, tracked: set[str], version: str) -> Iterator[str]:
    """Yield the faults in a folder of files to publish."""
    files = sorted(path.name for path in dist.iterdir())
    sdists, wheels = sorted(dist.glob("*.tar.gz")), sorted(dist.glob("*.whl"))
    if (len(sdists), len(wheels), len(files)) != (1, 1, 2):
        yield f"{dist} must have one sdist and one wheel, but has {files}."
        return
    if sdists[0].name != f"pyparallel_torch-{version}.tar.gz":
        yield f"{sdists[0].name} must be of version {version}."
    yield from of_sdist(sdists[0], tracked, version)
    yield from of_wheel(wheels[0], tracked, version)


def main(arguments: list[str]) -> int:
    """Print the faults; return 1 if there are any."""
    if arguments[1:]:
        listed = Path(arguments[1]).read_text(encoding="utf-8")
    else:
        command = ["git", "ls-files"]
        listed = subprocess.check_output(command, cwd=ROOT, text=True)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    found = list(problems(Path(arguments[0]), set(listed.splitlines()), version))
    print(*found, sep="\n", end="\n" if found else "")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
