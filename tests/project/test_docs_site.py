"""The site's pages: links and commands lead to files, and all names are described.

`make docs` builds the site; these tests do not need Sphinx.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyparallel
import pyparallel.memory
import pyparallel.mmcv
import pyparallel.mmengine
from pyparallel import Collate, Pad
from pyparallel.core import errors
from tests.support.repository.docs_blocks import all_blocks, pages
from tests.support.repository.folders import ROOT

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
    "pyparallel.core.errors": [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and not issubclass(value, Warning)
        and name != "Error"  # described by its public name
    ],
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


IMAGES = [{"image": torch.ones(channels, 4, 4)} for channels in (3, 1)]
PADDED: Any = pyparallel.Padded(torch.ones(2, 3, 4, 4))
RAGGED: Any = pyparallel.Ragged(torch.ones(3, 4), torch.tensor([0, 1, 3]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.utils.data.default_collate([torch.ones(2), torch.ones(3)]),
        lambda: Collate()([{"x": torch.ones(2)}, {"x": torch.ones(3)}]),
        lambda: Collate(image=Pad())([{"img": 1}]),
        lambda: Collate(mask=Pad())([{"image": 1}, {"mask": [1]}]),
        lambda: Collate(image=Pad())(IMAGES),
        lambda: torch.nn.Conv2d(3, 1, 1)(PADDED),
        lambda: torch.nn.Linear(4, 1)(RAGGED),
        lambda: PADDED.cuda(),
    ],
)
def test_troubleshooting_has_the_error(call: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as caught:
        call()
    text = re.sub(r"(, but got|, Parameter).*", "", str(caught.value), flags=re.DOTALL)
    assert text in " ".join(text_of("docs/troubleshooting.md").split())


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


def test_targets_and_files_that_commands_name_exist() -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.MULTILINE)
    for block in all_blocks("sh"):
        typed = re.findall(r"^make ([a-z][a-z-]*)", block.text, re.MULTILINE)
        assert set(typed) <= set(targets), block.name
        folders = r"\b(?:examples|tests|scripts|benchmarks)/\S+\.(?:py|json)\b"
        for path in re.findall(folders, block.text):
            assert (ROOT / path).exists(), f"{block.name}: {path}"


def test_every_setting_that_the_code_reads_is_described() -> None:
    paths = [*ROOT.glob("pyparallel/**/*.py"), ROOT / "setup.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    read = set(re.findall(r"\bPYPARALLEL_[A-Z_]+\b", text))
    assert read >= {"PYPARALLEL_BACKEND", "PYPARALLEL_BUILD"}
    page = text_of("docs/environment.md")
    assert {name for name in read if f"`{name}" not in page} == set()
    known = text + text_of("tests/conftest.py")
    for name in re.findall(r"\b(?:PYPARALLEL|FORCE)_[A-Z_]+\b", page):
        assert name in known
