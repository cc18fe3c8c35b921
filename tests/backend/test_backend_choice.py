"""The choice of the backend: every branch, and real processes with real files."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pyparallel
from pyparallel import backend as backend_module
from pyparallel.backend import build_record
from tests.support.processes import forkserver
from tests.support.processes.backends import check

pytestmark = pytest.mark.one_backend

PACKAGE = Path(pyparallel.__file__).parent
FIT = {"torch": "2.13.0+cpu", "cuda": None}
FIT_CUDA = {"torch": "2.11.0+cu130", "cuda": "13.0"}
CONTRACT = backend_module._CONTRACT
MODULE = SimpleNamespace(**dict.fromkeys(CONTRACT))
RULE = "pyparallel's extension must be built for the torch that runs it"
REBUILD = "Rebuild it in the source folder: pip install --no-build-isolation ."


def never():
    raise AssertionError("the extension must not be loaded")


def broken():
    raise ImportError("undefined symbol: _ZN2at6narrowE")


def choose(
    requested="auto",
    record=FIT,
    torch_version="2.13.0",
    cuda=None,
    load=never,
    others=(),
):
    return backend_module.choose(requested, record, torch_version, cuda, load, others)


@pytest.mark.parametrize("value", ["cuda", "Native", "0", " "])
def test_another_value_is_refused(value):
    rule = "PYPARALLEL_BACKEND must be auto, native or python"
    check(choose, [value], ValueError, f"{rule}, but is {value!r}. Unset it for auto.")


def without(*names):
    """Load an extension without these functions."""
    return lambda: SimpleNamespace(**{n: 0 for n in CONTRACT if n not in names})


def built_for(built, present):
    return f"{RULE}, but it was built for {built} and {present} is installed. {REBUILD}"


ABSENT = "To build one in the source folder: pip install --no-build-isolation ."
NO_RECORD = f"{RULE}, but its build record is missing or cannot be read. {REBUILD}"
OTHER = "_C.cpython-27-x86_64-linux-gnu.so"
#: The arguments of `choose`, and the reason for pure Python.
UNUSABLE = [
    ({"record": None}, f"No extension is installed. {ABSENT}"),
    ({"record": None, "others": [OTHER]},
     f"No extension is installed for this Python, only {OTHER}. {ABSENT}"),
    ({"torch_version": "2.12.1"},
     built_for("torch 2.13.0 (CPU)", "torch 2.12.1 (CPU)")),
    ({"torch_version": "3.13.0", "cuda": "14.1"},
     built_for("torch 2.13.0 (CPU)", "torch 3.13.0 (CUDA 14.1)")),
    ({"torch_version": "2.1.3"}, built_for("torch 2.13.0 (CPU)", "torch 2.1.3 (CPU)")),
    ({"record": FIT_CUDA, "torch_version": "2.11.0", "cuda": "12.8"},
     built_for("torch 2.11.0 (CUDA 13.0)", "torch 2.11.0 (CUDA 12.8)")),
    ({"record": FIT_CUDA, "torch_version": "2.11.0+cpu"},
     built_for("torch 2.11.0 (CUDA 13.0)", "torch 2.11.0 (CPU)")),
    ({"record": {}}, NO_RECORD),
    ({"record": {"torch": ""}}, NO_RECORD),
    ({"record": {"cuda": "13.0"}}, NO_RECORD),
    ({"load": broken},
     "pyparallel's extension must load, but loading it raised ImportError: undefined "
     f"symbol: _ZN2at6narrowE. {REBUILD}"),
    ({"load": without("stack_equal", "views", "build_info")},
     f"pyparallel's extension must define {', '.join(CONTRACT)}, but lacks "
     f"stack_equal, views, build_info. {REBUILD}"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "reason"), UNUSABLE)
def test_without_a_usable_extension_python_runs_or_native_is_an_error(
    arguments, reason
):
    is_broken = arguments.get("load") is broken
    found = choose(**arguments)
    assert (found.name, found.reason) == ("python", reason)
    assert found.warns == (arguments.get("record", FIT) is not None)
    assert isinstance(found.load_error, ImportError) == is_broken
    with pytest.raises(ImportError) as caught:
        choose("native", **arguments)
    assert str(caught.value) == (
        f"PYPARALLEL_BACKEND=native must use the extension, but: {reason}"
    )
    assert isinstance(caught.value.__cause__, ImportError) == is_broken


@pytest.mark.parametrize(
    ("record", "torch_version", "cuda"),
    [
        (FIT, "2.13.0", None),
        (FIT, "2.13.4", None),
        (FIT, "2.13.0+cu130", "13.0"),
        (FIT_CUDA, "2.11.1", "13.2"),
        (FIT, "2.13.0a0+git1234", None),
    ],
)
def test_a_fitting_extension_is_used(record, torch_version, cuda):
    found = choose(
        record=record, torch_version=torch_version, cuda=cuda, load=lambda: MODULE
    )
    reason = f"The extension was built for torch {record['torch']}."
    assert found == ("native", reason, MODULE, None, False)


def test_find_pairs_the_module_of_this_python_with_its_record(tmp_path):
    assert build_record.find(tmp_path) is None
    suffix = build_record.EXTENSION_SUFFIXES[0]
    (tmp_path / "_C.cpython-27-other.so").touch()
    (tmp_path / "_C.cpython-27-other.json").write_text('{"torch": "0.1"}')
    assert build_record.find(tmp_path) is None
    assert build_record.list_other_pythons(tmp_path) == ["_C.cpython-27-other.so"]
    module = tmp_path / f"_C{suffix}"
    module.touch()
    assert build_record.find(tmp_path) == (module, {})
    assert build_record.list_other_pythons(tmp_path) == ["_C.cpython-27-other.so"]
    for text, record in [
        ("{", {}),
        ("[1]", {}),
        ('{"torch": "2.6"}', {"torch": "2.6"}),
    ]:
        module.with_suffix(".json").write_text(text)
        assert build_record.find(tmp_path) == (module, record)


SHOW = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from pyparallel import backend as b
error = type(b.load_error).__name__
texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
print(json.dumps([b.name, b.reason, error, texts]))
"""


@pytest.mark.parametrize(
    ("cuda", "error"), [(torch.version.cuda, "ImportError"), ("9.0", "NoneType")]
)
def test_a_process_with_a_bad_extension_warns_once(tmp_path, monkeypatch, cuda, error):
    """A broken module is loaded; one whose record does not fit is not."""
    ignore = shutil.ignore_patterns("_C.*.so", "_C.*.json", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "pyparallel", ignore=ignore)
    suffix = build_record.EXTENSION_SUFFIXES[0]
    module = tmp_path / "pyparallel" / "backend" / f"_C{suffix}"
    module.write_bytes(b"no shared library")
    record = {"torch": torch.__version__, "cuda": cuda}
    module.with_suffix(".json").write_text(json.dumps(record))
    monkeypatch.setenv("PYPARALLEL_BACKEND", "auto")
    exit_code, output = forkserver.run(SHOW, [str(tmp_path)])
    assert exit_code == 0, output
    name, reason, found, texts = json.loads(output)
    assert (name, found) == ("python", error)
    assert (f"{module}: file too short" in reason) is (error == "ImportError")
    assert texts == [f"[PP001] {reason}\nUntil then, pure Python runs."]


def test_the_stub_lists_the_operators_of_pure_python() -> None:
    stub = ast.parse((PACKAGE / "backend" / "_C.pyi").read_text(encoding="utf-8"))
    listed = next(each for each in stub.body if isinstance(each, ast.Assign))
    assert ast.literal_eval(listed.value) == list(backend_module._OPERATORS)
    defined = {getattr(each, "name", None) for each in stub.body}
    assert defined.issuperset(CONTRACT)
