"""The public interface as text: every name with its signature, one to a line.

    python scripts/public_api.py           # compare with tests/public_api.txt
    python scripts/public_api.py --write   # record changes, marked with + and -
    python scripts/public_api.py --freeze  # for a release: remove the marks

Before the first release, ``--write`` marks nothing. After it, the first section of
CHANGELOG.md must list the changes since the last ``--freeze`` under ``### Interface``.
``tests/project/test_public_api.py`` checks both files.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ForwardRef

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "public_api.txt"
PACKAGE = "pyparallel"
#: Documented modules: all names in their ``__all__`` are public.
MODULES = [PACKAGE, *(f"{PACKAGE}.{n}" for n in ("memory", "mmcv", "mmengine"))]
MODULES += [f"{PACKAGE}.registry"]
#: Their classes are not exported, but the builtins that catch them are part of the API.
ERRORS = f"{PACKAGE}.core.errors"
#: Not exported, but returned by public functions: modules and names.
RESULTS = [
    (f"{PACKAGE}.profiler.profile", "Profile"),
    (f"{PACKAGE}.loader.preflight", "Finding"),
    (f"{PACKAGE}.sampler.report", "SizeBatchReport"),
    (f"{PACKAGE}.sampler.report", "BatchFigures"),
    (f"{PACKAGE}.loader.sample_errors", "SampleError"),
]
#: Special methods that users call through operators and statements.
SPECIAL = {"__call__", "__contains__", "__enter__", "__exit__", "__getitem__"}
SPECIAL |= {"__iter__", "__len__", "__next__"}
HEAD = """\
# The public interface, made by scripts/public_api.py. Lines that begin with + or - have
# changed since it was last frozen; CHANGELOG.md names them under "### Interface".
"""


def annotation(value: Any) -> str:
    """Return the text of an annotation, the same in all versions of Python."""
    if isinstance(value, ForwardRef):
        return value.__forward_arg__
    if value is None or isinstance(value, str):
        return str(value)
    return value.__qualname__ if isinstance(value, type) else str(value)


def default(value: Any) -> str:
    """Return the text of a default, or the class of a mutable object."""
    plain = value is None or type(value).__module__ in ("builtins", "torch")
    return repr(value) if plain else f"<{type(value).__qualname__}>"


def signature(function: Any) -> str:
    """Return parameters with kinds, annotations and defaults, and the return type."""
    found = inspect.signature(function)
    shown: list[str] = []
    kind: Any = None
    for parameter in found.parameters.values():
        before, kind = kind, parameter.kind
        if before is parameter.POSITIONAL_ONLY and kind is not before:
            shown.append("/")
        if kind is parameter.KEYWORD_ONLY and before not in (
            kind,
            parameter.VAR_POSITIONAL,
        ):
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default(parameter.default)}"
        shown.append(text)
    if kind is inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    returned = found.return_annotation
    back = "" if returned is found.empty else f" -> {annotation(returned)}"
    return f"({', '.join(shown)}){back}"


def of_function(name: str, function: Any) -> Iterator[str]:
    """Yield the line of a function; without names of arguments, those of its overloads.

    Other overloads have the same arguments with the types of common calls.
    """
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    if kinds != {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        yield f"{name}{signature(function)}"
        return
    source = inspect.getsource(sys.modules[function.__module__])
    overloads = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__
        if "overload" in map(ast.unparse, node.decorator_list)
    ]
    for node in overloads:
        back = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f"{name}({ast.unparse(node.args)}){back}"


def is_ours(value: Any) -> bool:
    """Return True if this package defines an object, not torch or mmengine."""
    return str(getattr(value, "__module__", "")).split(".")[0] == PACKAGE


def of_class(name: str, cls: type) -> Iterator[str]:
    """Yield the lines of a class: its bases, its call, its fields and methods."""
    bases = [base for base in cls.__mro__[1:] if not is_ours(base)]
    outer = [b for b in bases if not any(b in c.__mro__[1:] for c in bases)]
    names = [f"{b.__module__}.{b.__qualname__}" for b in outer]
    yield f"{name}: class of {', '.join(n.removeprefix('builtins.') for n in names)}"
    if not issubclass(cls, BaseException):
        yield f"{name}{signature(cls)}"
    members: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for each in filter(is_ours, reversed(cls.__mro__)):
        members.update(vars(each))
        fields.update(inspect.get_annotations(each))
    for member in sorted({*members, *fields}):
        if member.startswith("_") and member not in SPECIAL:
            continue
        value, path = members.get(member), f"{name}.{member}"
        if member in fields:
            yield f"{path}: {annotation(fields[member])}"
        elif isinstance(value, property):
            back = inspect.signature(value.fget).return_annotation if value.fget else ""
            text = "" if back is inspect.Signature.empty else f" -> {annotation(back)}"
            yield f"{path}: property{text}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{path}: {type(value).__name__} {signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{path}{signature(value)}"


def of_module(module: ModuleType) -> Iterator[str]:
    """Yield the lines of a module's public names."""
    package = sys.modules[PACKAGE]
    for public in module.__all__:
        value, name = getattr(module, public), f"{module.__name__}.{public}"
        if module is not package and getattr(package, public, None) is value:
            yield f"{name}: {PACKAGE}.{public}"
        elif inspect.isclass(value):
            yield from of_class(name, value)
        elif callable(value):
            yield from of_function(name, value)
        else:
            kind = "module" if inspect.ismodule(value) else type(value).__qualname__
            yield f"{name}: {kind}"


def of_errors(module: ModuleType) -> Iterator[str]:
    """Yield every error and warning, and the classes that catch it."""
    for name, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            yield from of_class(f"errors.{name}", value)


def present() -> list[str]:
    """Return the lines of all importable modules, sorted."""
    modules = [importlib.import_module(name) for name in MODULES]
    lines = [line for module in modules for line in of_module(module)]
    lines += of_errors(importlib.import_module(ERRORS))
    for module, name in RESULTS:
        cls = getattr(importlib.import_module(module), name)
        lines += of_class(f"results.{name}", cls)
    return sorted(lines)


def parse(text: str) -> tuple[list[str], list[str]]:
    """Return the lines of the last release, and the lines recorded as current."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    frozen = [line[2:] for line in lines if line[:2] in ("  ", "- ")]
    return sorted(frozen), sorted(
        line[2:] for line in lines if line[:2] in ("  ", "+ ")
    )


def noted(frozen: Iterable[str], now: Iterable[str]) -> str:
    """Return the text of the file: all lines, with marks on changed lines."""
    old, new = set(frozen), set(now)
    marks = {(True, True): " ", (True, False): "-", (False, True): "+"}
    # A removed line comes before the line that replaces it.
    lines = sorted(old | new, key=lambda line: (name_of(line), line in new, line))
    return HEAD + "".join(f"{marks[x in old, x in new]} {x}\n" for x in lines)


def name_of(line: str) -> str:
    """Return the name in a line, without the package name."""
    return re.split(r"[(:]", line, maxsplit=1)[0].removeprefix(f"{PACKAGE}.")


def changed(frozen: Iterable[str], now: Iterable[str]) -> list[str]:
    """Return the names of changed lines; a new or removed class counts once."""
    old, new = set(frozen), set(now)
    names = {name_of(line) for line in old ^ new}
    whole = {
        name
        for name in names
        if name not in set(map(name_of, old)) or name not in set(map(name_of, new))
    }
    inside = {name for name in names if name.rpartition(".")[0] in whole}
    return sorted(names - inside)


def was_released(changelog: str) -> bool:
    """Return True if a section of CHANGELOG, except the first, has a version."""
    return changelog.count("\n## ") > 1


def interface(changelog: str) -> str:
    """Return the text under "### Interface" in CHANGELOG's first section."""
    first = changelog.split("\n## ")[1] if "\n## " in changelog else ""
    parts = first.split("\n### Interface\n")
    return parts[1].split("\n### ")[0] if len(parts) == 2 else ""


def unnamed(names: Iterable[str], section: str) -> list[str]:
    """Return the names that a section does not quote in backticks."""
    quoted = "\n".join(re.findall(r"`([^`]+)`", section))
    return [n for n in names if not re.search(rf"(?<![\w.]){re.escape(n)}\b", quoted)]


def main(arguments: list[str] | None = None) -> int:
    """Compare or write the file; return 1 if it differs from the code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="mark the changes")
    choice.add_argument("--freeze", action="store_true", help="remove all marks")
    args = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    now = present()
    frozen, recorded = parse(FILE.read_text("utf-8")) if FILE.exists() else ([], [])
    if args.freeze or not was_released((ROOT / "CHANGELOG.md").read_text("utf-8")):
        frozen = now
    if args.write or args.freeze:
        FILE.write_text(noted(frozen, now), encoding="utf-8")
    elif recorded != now:
        names = ", ".join(changed(recorded, now))
        print(f"{FILE.name} must match the code, but these differ: {names}.")
        print("Run scripts/public_api.py --write, and name them in CHANGELOG.md.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
