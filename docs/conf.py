"""Settings of the documentation site. ``make docs`` builds it; no network is needed.

The source folder is the root of the repository, so that a link such as
``../benchmarks/README.md`` leads to the same page on the site and where code is hosted.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# autodoc imports the package; docs of an installed one would be those of another tree.
sys.path.insert(0, str(ROOT))

project = "pyparallel"
metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
release = version = re.findall(r'^version = "(.+)"$', metadata, re.MULTILINE)[0]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/*.md",
    "benchmarks/results/*.md",
    "csrc/README.md",
    "examples/README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "dist", "demo-output"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]

# As the anchors of code hosting: lower case, hyphens.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# `name` in a docstring is a link to the object with this name.
default_role = "py:obj"
# Objects of other projects: the pages have no links to them, so that the build needs no
# network. The rest are names of types that only annotations use.
nitpick_ignore_regex = [
    ("py:.*", r"(?!pyparallel)\w+\..*"),
    ("py:class", r"_?[A-Z]\w*|optional|pyparallel\.parallel\.replicate\.Module"),
    ("py:class", r"pyparallel\.loader\.preflight\.Finding"),
    ("py:class", r"pyparallel\..*\._[A-Z]\w*"),  # private type variables
]

html_theme = "furo"
html_title = f"pyparallel {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
# Error texts are looked for with the quotes that they have.
smartquotes_action = "D"


def _on_the_site(page: Path) -> Any:
    """Return what takes the place of a link on ``page``."""

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        name = target.partition("#")[0]
        path = page.parent / name
        if name and path.is_dir():
            return text
        if path.resolve() == ROOT / "README.md":  # the first page is in its place
            target = os.path.relpath(ROOT / "docs/index.md", page.parent)
            return f"[{text}]({target})"
        if path.suffix != ".md" or not text.endswith(path.name):
            return link[0]
        # A page that is called by the name of its file has a title here.
        title = path.read_text(encoding="utf-8").partition("\n")[0]
        return f"[{title.lstrip('# ')}]({target})"

    return replace


def _adapt(app: Any, docname: str, source: list[str]) -> None:
    """Make a page that was written for code hosting fit the site."""
    text = source[0]
    text = re.sub(
        r"\[([^]]*)\]\(([^):]+)\)", _on_the_site(ROOT / f"{docname}.md"), text
    )
    text = text.replace("\n\n```\n", "\n```\n")  # the empty line that ends a doctest
    if docname.startswith("benchmarks/results/"):
        text = f"---\norphan: true\n---\n{text}"  # reached by links alone
    source[0] = text


def _skip(
    app: Any, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of namedtuples: their class describes them."""
    return str(value.__doc__).startswith("Alias for field number") or None


def _from_the_top(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Find a public name, or one of an error, that a docstring of a module mentions."""
    for module in (
        "pyparallel",
        "pyparallel.core.errors",
        "pyparallel.profiler.profile",
    ):
        name = f"{module}.{node.get('reftarget')}"
        if node.get("reftype") == "obj" and name in env.domains.python_domain.objects:
            node["reftarget"] = name
            docname = node.get("refdoc", env.docname)
            return env.domains.python_domain.resolve_xref(
                env, docname, app.builder, "obj", name, node, content
            )
    return None


def setup(app: Any) -> dict[str, Any]:
    """Connect the adaptations; tell Sphinx that pages may be read side by side."""
    app.connect("source-read", _adapt)
    app.connect("missing-reference", _from_the_top)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
