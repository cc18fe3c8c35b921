"""Print the notes of a version from CHANGELOG.md, if all files agree on it.

    python scripts/release_notes.py 0.1.0 > notes.md

pyproject.toml must contain the version. The first section of CHANGELOG.md must name the
version and the date of the release. tests/public_api.txt must contain no marked change.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def sections(changelog: str) -> dict[str, str]:
    """Return the text under each heading of the second level."""
    parts = re.split(r"^## (.+)$", changelog, flags=re.MULTILINE)[1:]
    return {
        title.strip(): text.strip()
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def is_day(text: str) -> bool:
    """Return True if a text is a date that is not in the future."""
    try:
        return datetime.date.fromisoformat(text) <= datetime.date.today()
    except ValueError:
        return False


def problems(version: str, project: str, changelog: str, api: str) -> Iterator[str]:
    """Yield the reasons against the release of a version.

    Args:
        version: ``1.2.3``.
        project: the text of pyproject.toml.
        changelog: the text of CHANGELOG.md.
        api: the text of tests/public_api.txt.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"The version must be of the form 1.2.3, but is {version}."
    said = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    if said != [version]:
        yield f"pyproject.toml must have version {version}, but has {', '.join(said)}."
    titles = list(sections(changelog))
    first = titles[0] if titles else "nothing"
    name, _, day = first.partition(" (")
    if name != version or not is_day(day.removesuffix(")")):
        yield (
            f"CHANGELOG.md must begin with '## {version} (YYYY-MM-DD)', a day that has "
            f"been, but begins with '## {first}'."
        )
    changes = re.findall(r"^[+-] (.+)$", api, re.MULTILINE)
    if changes:
        yield (
            f"tests/public_api.txt must be frozen, but has {len(changes)} marked "
            "lines. Run scripts/public_api.py --freeze."
        )


def notes(version: str, changelog: str) -> str:
    """Return the text of a version's section, or an empty string."""
    found = [
        text
        for title, text in sections(changelog).items()
        if title.split(" (")[0] == version
    ]
    return found[0] if found else ""


def main(arguments: list[str]) -> int:
    """Print the notes of a version, or print the errors and return 1."""
    if len(arguments) != 1:
        print((__doc__ or "").split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    names = "pyproject.toml", "CHANGELOG.md", "tests/public_api.txt"
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in names]
    wrong = list(problems(arguments[0], *texts))
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    print(notes(arguments[0], texts[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
