"""The site's pages: all are linked, all links work, all names are described.

`make docs` builds the site; these tests do not need Sphinx.
"""

from __future__ import annotations

import re

import pytest
from docs_blocks import all_blocks, pages
from repository import ROOT

import pyparallel
import pyparallel.memory
import pyparallel.mmcv
import pyparallel.mmengine

pytestmark = pytest.mark.one_backend

#: Modules of the reference, and the names that it has of each.
MODULES: dict[str, list[str]] = {
    "pyparallel": [name for name in pyparallel.__all__ if name != "memory"],
    "pyparallel.memory": [
        name
        for name, value in vars(pyparallel.memory).items()
        if getattr(value, "__module__", "") == "pyparallel.memory" and name[0] != "_"
    ],
    "pyparallel.mmcv": ["install", "installed", "uninstall"],
    "pyparallel.mmengine": pyparallel.mmengine.__all__,
}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def anchors(page: str) -> list[str]:
    """Return the anchors of a page's headings as code hosting makes them."""
    found: list[str] = []
    for title in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        taken = found.count(slug) and f"{slug}-{found.count(slug)}"
        found.append(taken or slug)
    return found


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_files_and_headings(page: str) -> None:
    for target in re.findall(r"\]\(([^) ]+)\)", prose(page)):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert path.exists() and path.is_relative_to(ROOT), f"{page}: {target}"
        if anchor:
            known = anchors(path.relative_to(ROOT).as_posix())
            assert anchor in known, f"{page}: {target} is not in {known}"


def described() -> dict[str, str]:
    """Return every name of the reference with the directive that describes it."""
    found: dict[str, str] = {}
    for block in all_blocks("{eval-rst}"):
        module = ""
        for kind, name in re.findall(r"^\.\. (\w+):: (\S+)$", block.text, re.MULTILINE):
            if kind == "currentmodule":
                module = f"{name}."
                continue
            full = name if name.startswith("pyparallel.") else module + name
            assert full not in found, f"{full} is described twice"
            found[full] = kind
    return found


DESCRIBED = described()


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name(module: str) -> None:
    names = {f"{module}.{name}" for name in MODULES[module]}
    assert len(names) >= 3
    assert names <= set(DESCRIBED)


def test_errors_of_the_library_are_in_the_reference() -> None:
    from pyparallel.core import errors as errors_module

    errors = {
        f"pyparallel.core.errors.{name}"
        for name, value in vars(errors_module).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and not issubclass(value, Warning)
    }
    public = "pyparallel.core.errors.Error"  # described by its public name
    assert public in errors and errors - {public} <= set(DESCRIBED)
