"""Imports run downwards only, and nothing is checked by ``assert``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_backend

PACKAGE = Path(__file__).parent.parent / "pyparallel"

#: From the bottom to the top. Modules of one layer are siblings: none knows another.
LAYERS = [
    ["_errors", "_text", "_versions"],
    ["_torch_private"],
    ["_cpu_time", "_stats", "_stacked", "_storage", "_tensor_fields", "_trace"],
    ["_pipe", "_probe"],
    ["_backend", "_preflight"],
    ["_tree", "padding"],
    ["container"],
    ["_plan", "_image_plan", "_frame"],
    ["_cargo", "_device", "_keeper", "_host_slabs"],
    ["_transfer"],
    ["_debug"],
    ["_slab", "_output", "_shared", "_tracebacks", "memory"],
    ["_by_torch", "_move", "_return_flight", "_ring_memory"],
    ["_ring", "_page_lock", "_integers", "_worker_states"],
    ["_parcel"],
    ["_stack", "_targets", "_seal"],
    ["_images"],
    ["_pad_stack_op"],
    ["_image_op"],
    ["_pad_stack", "ragged", "_packing"],
    ["image"],
    ["_columns", "_split", "_unbatchable"],
    ["_values"],
    ["_random_state", "_sample_seeds", "_order", "_parts"],
    ["_source", "_fetching"],
    ["_dataset_states", "_loader_state"],
    ["_progress"],
    ["_resume"],
    ["_thread_state", "_lent_threads"],
    ["_device_threads"],
    ["_calls", "_dealing"],
    ["_broadcast", "_functions", "_module_wrappers", "_same_model"],
    ["collate", "scatter", "to_host"],
    ["_carry", "_alike"],
    ["_gathering", "_step_outputs"],
    ["replicas", "gather"],
    ["parallel_apply"],
    ["_cut_short", "_forks", "_hand_over"],
    ["_workers"],
    ["_prefetch_thread"],
    ["_prefetch_pass"],
    ["data_parallel", "distributed", "distributed_deprecated", "_loading"],
    ["loader", "prefetch"],
    ["mmcv", "mmengine"],
    ["registry", "_profile"],
    ["profile"],
    ["__init__"],
    ["_doctor"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: The same inside the folder of this name.
INSIDE = {
    "_doctor": [
        ["_problem", "_bandwidth", "_one_process", "_rank"],
        ["_build", "_packages", "_machine", "_text", "_two_processes"],
        ["__init__"],
    ],
    "_profile": [
        ["__init__", "environment", "record", "sitecustomize"],
        ["cut", "drawing", "watch"],
        ["install", "summary"],
        ["advice"],
        ["charts"],
        ["page"],
        ["report"],
        ["command"],
    ],
    "mmengine": [
        ["_upstream", "_accumulation", "_checkpoint", "_clip", "launchers", "stack"],
        ["join", "_cast", "_setting", "anomaly", "model_wrappers", "optim"],
        ["amp", "collate", "optim_dict", "preprocessor"],
        ["_steps"],
        ["distributed", "image", "model"],
        ["fully_sharded", "separate"],
        ["_install"],
        ["__init__"],
    ],
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the name of the module in ``LAYERS`` that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(path: Path, text: str | None = None) -> list[list[str]]:
    """Return the parts of the full names that a file imports, at any depth of code."""
    package = ["pyparallel", *path.relative_to(PACKAGE).parent.parts]
    found: list[str] = []
    for node in ast.walk(ast.parse(text or path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return [name.split(".") for name in found]


def imported(path: Path, text: str | None = None) -> set[str]:
    """Return the modules of the package that a file imports."""
    parts = imported_names(path, text)
    inside = {part[1] for part in parts if part[0] == "pyparallel" and len(part) > 1}
    # A name taken from the package itself is not a module: it comes from __init__.
    return {name if name in LEVEL else "__init__" for name in inside}


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_run_downwards_only(path: Path) -> None:
    module = module_of(path)
    assert module in LEVEL, f"{module} has no layer yet: give it one in LAYERS"
    wrong = {name for name in imported(path) - {module} if LEVEL[name] >= LEVEL[module]}
    assert not wrong, f"{module} must not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("folder", INSIDE)
def test_imports_inside_a_folder_run_downwards_only(folder: str) -> None:
    level = {name: i for i, names in enumerate(INSIDE[folder]) for name in names}
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert sorted(level) == sorted(path.stem for path in files), "one layer for each"
    for path in files:
        names = imported_names(path)
        inside = {part[2] for part in names if part[:2] == ["pyparallel", folder]}
        modules = {name if name in level else "__init__" for name in inside}
        wrong = {name for name in modules if level[name] >= level[path.stem]}
        assert not wrong, f"{folder}/{path.stem} must not import {sorted(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_checked_by_assert(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not lines, f"asserts vanish under python -O: lines {lines}"


def test_the_walk_sees_every_form_of_import() -> None:
    text = "from . import _slab\nfrom ._plan import x\nimport pyparallel.collate\n"
    text += "def f():\n    from pyparallel import _tree, DataContainer\n"
    found = imported(PACKAGE / "imagined.py", text)
    assert found == {"_slab", "_plan", "collate", "_tree", "__init__"}
    below = imported(PACKAGE / "_backend" / "imagined.py", "from .. import _tree\n")
    assert below == {"_tree"}
