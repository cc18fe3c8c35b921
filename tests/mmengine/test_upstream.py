"""The detection of mmengine: absent, switched off, broken, complete."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

import pyparallel
from pyparallel.mmengine import _upstream
from tests.support.mmengine.optim_runs import refuses
from tests.support.processes import forkserver

pytestmark = [pytest.mark.also_peers, pytest.mark.one_backend]

ROOT = Path(pyparallel.__file__).parents[1]


NAMES = {
    "mmengine.optim": ["OptimWrapper", "AmpOptimWrapper", "OptimWrapperDict"],
    "mmengine.model": [
        *("BaseModel", "BaseDataPreprocessor", "ImgDataPreprocessor"),
        *("MMDistributedDataParallel", "MMSeparateDistributedDataParallel"),
        "MMFullyShardedDataParallel",
    ],
    "mmengine.structures": ["BaseDataElement"],
    "mmengine.logging": ["MessageHub", "print_log"],
    "mmengine.registry": ["OPTIM_WRAPPERS", "MODELS", "MODEL_WRAPPERS", "FUNCTIONS"],
}


def never(name: str) -> Any:
    raise AssertionError(f"{name} was imported")


def whole(name: str) -> Any:
    return types.SimpleNamespace(**{each: f"{name}.{each}" for each in NAMES[name]})


def test_an_mmengine_that_is_off_or_not_installed_is_no_news() -> None:
    def load(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="mmengine")

    found = _upstream.find("off", never)
    assert found == (False, "PYPARALLEL_MMENGINE=off is set.", {}, False)
    found = _upstream.find("auto", load)
    assert found == (False, "mmengine is not installed.", {}, False)


def test_all_used_names_exist_in_mmengine() -> None:
    found = _upstream.find("auto", whole)
    assert found[:2] == (True, "mmengine is installed.") and not found.warns
    assert found.names["OptimWrapper"] == "mmengine.optim.OptimWrapper"
    assert found.names["BaseDataElement"] == "mmengine.structures.BaseDataElement"
    assert len(found.names) == 16


def test_a_broken_mmengine_is_reported_with_its_error() -> None:
    def without_yapf(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'yapf'", name="yapf")

    def too_old(name: str) -> Any:
        module = whole(name)
        vars(module).pop("FUNCTIONS", None)
        return module

    found = _upstream.find("auto", without_yapf)
    reason = (
        "mmengine must be importable, but importing it raised ModuleNotFoundError: No "
        "module named 'yapf'. Repair it, or set PYPARALLEL_MMENGINE=off."
    )
    assert found == (False, reason, {}, True)
    found = _upstream.find("auto", too_old)
    assert not found.available and found.warns
    assert "AttributeError: " in found.reason and "FUNCTIONS" in found.reason


def test_another_value_of_the_variable_is_refused() -> None:
    message = "PYPARALLEL_MMENGINE must be auto or off, but is 'on'. Unset it for auto."
    with refuses(message, ValueError):
        _upstream.find("on", never)


def test_an_unlisted_name_is_an_error_with_and_without_mmengine() -> None:
    with pytest.raises(KeyError, match="HOOKS must be one of the names"):
        _upstream.upstream("HOOKS")


def test_importing_pyparallel_imports_no_part_of_it() -> None:
    code = "import pyparallel, sys\nprint([m for m in sys.modules if 'mmengine' in m])"
    assert forkserver.run(code, [str(ROOT)]) == (0, "[]\n")


def test_a_broken_mmengine_warns_once_and_our_bases_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mmengine").mkdir()
    broken = "raise RuntimeError('built for another torch')"
    (tmp_path / "mmengine" / "__init__.py").write_text(broken)
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import pyparallel.mmengine
    from pyparallel.mmengine import _upstream, OptimWrapper
print(len(caught), caught[0].category.__name__)
print(caught[0].message)
print(OptimWrapper.__mro__[-2].__module__, _upstream.available)
"""
    paths = [str(tmp_path), str(ROOT)]
    monkeypatch.setenv("PYPARALLEL_MMENGINE", "auto")
    exit_code, output = forkserver.run(code, paths)
    assert (exit_code, output.splitlines()) == (
        0,
        [
            "1 RuntimeWarning",
            "[PP002] mmengine must be importable, but importing it raised "
            "RuntimeError: built for another torch. Repair it, or set "
            "PYPARALLEL_MMENGINE=off.",
            "Until then, pyparallel's classes are not subclasses of mmengine's.",
            "pyparallel.mmengine._upstream False",
        ],
    )
    monkeypatch.setenv("PYPARALLEL_MMENGINE", "off")
    assert forkserver.run("import pyparallel.mmengine", paths) == (0, "")
