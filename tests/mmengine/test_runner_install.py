"""Scope ``pyparallel`` in mmengine's registries: its registration and its names."""

from __future__ import annotations

import importlib.util
import io
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel import mmengine as ours
from pyparallel.mmengine import _install, _upstream
from tests.support.mmengine.optim_runs import refuses
from tests.support.processes.python_runs import run

pytestmark = [pytest.mark.also_peers, pytest.mark.one_backend, pytest.mark.slow]

beside_mmengine = pytest.mark.skipif(
    not _upstream.available, reason="mmengine is not installed"
)
NAMES = {
    "MODEL_WRAPPERS": [
        "MMDistributedDataParallel",
        "MMSeparateDistributedDataParallel",
        "MMFullyShardedDataParallel",
        "MMFullyShard",
    ],
    "MODELS": ["BaseModel", "BaseDataPreprocessor", "ImgDataPreprocessor"],
    "OPTIM_WRAPPERS": ["OptimWrapper", "AmpOptimWrapper"],
    "FUNCTIONS": ["pseudo_collate", "default_collate"],
    "DATA_SAMPLERS": ["SizeBatchSampler"],
    "RUNNERS": ["Runner"],
}
WITHOUT = (
    "pyparallel.mmengine.install: pyparallel's classes must be subclasses of "
    "mmengine's, but are not."
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    if _upstream.available:
        ours.uninstall()


def root(name: str) -> Any:
    return getattr(importlib.import_module("mmengine.registry"), name)


def state() -> Any:
    """Return everything that installing may change."""
    registries = _install._root_registries()
    return (
        {name: dict(each.module_dict) for name, each in registries.items()},
        {name: dict(each.children) for name, each in registries.items()},
        sorted(map(_install._global_name, torch.serialization.get_safe_globals())),
    )


@beside_mmengine
@pytest.mark.parametrize("installs", ["the first name", "a call"])
@pytest.mark.parametrize("registry", NAMES)
def test_a_name_is_ours_with_the_scope_and_mmengines_without(
    registry: str, installs: str
) -> None:
    if installs == "a call":
        ours.install()
    for name in NAMES[registry]:
        bare, mine = root(registry).module_dict.get(name), getattr(ours, name)
        for prefix in ("pyparallel", "pyparallel.mmengine"):
            assert root(registry).get(f"{prefix}.{name}") is mine
        assert root(registry).module_dict.get(name) is bare is not mine
    assert root("FUNCTIONS").get("pyparallel.collate") is pyparallel.collate
    path = "pyparallel.mmengine.distributed.MMDistributedDataParallel"
    assert root("MODEL_WRAPPERS").get(path) is ours.MMDistributedDataParallel


@beside_mmengine
def test_other_names_mean_classes_of_mmengine() -> None:
    ours.install()
    importlib.import_module("mmengine.hooks")
    hooks = root("HOOKS")
    found = {hooks.get(f"{at}IterTimerHook") for at in ("", "mmengine.", "pyparallel.")}
    assert found == {hooks.module_dict["IterTimerHook"]}
    assert root("MODELS").get("pyparallel.nothing") is None
    assert root("MODELS").get("pyparallel.mmengine.nothing") is None
    wrapper = root("MODEL_WRAPPERS").module_dict["MMDistributedDataParallel"]
    assert wrapper is not ours.MMDistributedDataParallel
    inside = root("MODEL_WRAPPERS").children["pyparallel"]  # with it as default scope
    for name in ("MMDistributedDataParallel", "mmengine.MMDistributedDataParallel"):
        assert inside.get(name) is ours.MMDistributedDataParallel
    for name in ("mmengine.model.MMDistributedDataParallel", wrapper.__name__):
        assert root("MODEL_WRAPPERS").get(name) is wrapper
    for registry in (root("MODEL_WRAPPERS"), inside):
        with pytest.raises(TypeError, match=r"^The key argument of `Registry.get`"):
            registry.get(wrapper)


@beside_mmengine
def test_installing_twice_is_once_and_uninstalling_undoes_it() -> None:
    from mmengine.model import is_model_wrapper

    wrapper = ours.MMFullyShard.__new__(ours.MMFullyShard)
    torch.nn.Module.__init__(wrapper)
    before = state()
    assert not is_model_wrapper(wrapper)
    with pytest.raises(KeyError), ours.installed():
        assert state() != before
        raise KeyError
    assert state() == before
    ours.install()
    installed = state()
    ours.install()
    with ours.installed():
        assert is_model_wrapper(wrapper)
    assert state() == installed != before
    assert installed[0] == before[0]  # the registries' own names
    ours.uninstall()
    ours.uninstall()
    assert state() == before


@beside_mmengine
def test_safe_globals_of_others_outlive_an_uninstall() -> None:
    class Mine:
        pass

    history = _install.safe_globals()[0]
    torch.serialization.add_safe_globals([Mine, history])
    try:
        ours.install()
        ours.uninstall()
        assert {Mine, history} <= {*torch.serialization.get_safe_globals()}
    finally:
        others = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        kept = [each for each in others if each not in (Mine, history)]
        torch.serialization.add_safe_globals(kept)


@beside_mmengine
def test_threads_that_install_together_install_once() -> None:
    start = threading.Barrier(8)

    def work(number: int) -> Any:
        start.wait()
        if number % 2:
            ours.install()
        return root("FUNCTIONS").get("pyparallel.collate")

    with ThreadPoolExecutor(8) as pool:
        ours.install()
        once = state()
        for _ in range(20):
            ours.uninstall()
            assert [*pool.map(work, range(8))] == [pyparallel.collate] * 8
            # The children are new ones, but there are as many.
            assert state()[::2] == once[::2]


@beside_mmengine
def test_a_scope_of_another_package_is_refused_without_a_change() -> None:
    hooks = root("HOOKS")
    theirs = type(hooks)("my hooks", parent=hooks, scope="pyparallel")
    try:
        before = state()
        with refuses(
            "pyparallel.mmengine.install: scope 'pyparallel' of mmengine's HOOKS must "
            "be free, but a registry named 'my hooks' has it. Give that "
            "registry another scope.",
            RuntimeError,
        ):
            ours.install()
        assert state() == before and hooks.children["pyparallel"] is theirs
    finally:
        del hooks.children["pyparallel"]


# --------------------------------------------------------------------- checkpoints
def history() -> Any:
    from mmengine.logging import HistoryBuffer

    buffer = HistoryBuffer()
    for value in (3.0, 1.0):
        buffer.update(value)
    return buffer


@beside_mmengine
def test_checkpoints_with_histories_and_numbers_of_numpy_load() -> None:
    import numpy

    numbers = [numpy.float64(0.5), numpy.int64(7), numpy.float32(1), numpy.bool_(True)]
    file = io.BytesIO()
    torch.save({"loss": history(), "best": numbers, "none": numpy.zeros(0)}, file)
    with ours.installed():
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    assert loaded["best"] == numbers and loaded["none"].shape == (0,)
    assert loaded["loss"].data[0].tolist() == [3.0, 1.0]
    assert loaded["loss"].statistics("min") == 1.0
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)


class Calls:
    """A pickle of it is a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@beside_mmengine
def test_a_checkpoint_gets_nothing_else() -> None:
    import numpy

    cases = {
        f"of HistoryBuffer, but uses it for {name!r} of": Calls(
            getattr, type(history()), name
        )
        for name in ("__init__", "__class__", "register_statistics")
    }
    cases["Weights only load failed"] = numpy.array([None, 1], dtype=object)
    for text, content in cases.items():
        file = io.BytesIO()
        torch.save(content, file)
        file.seek(0)
        with ours.installed(), pytest.raises(pickle.UnpicklingError) as caught:
            torch.load(file, weights_only=True)
        assert text in str(caught.value)


# ------------------------------------------------------------- processes of their own
@beside_mmengine
def test_a_plain_import_leaves_room_for_the_scope() -> None:
    code = """
import sys, pyparallel
print({"mmengine", "pyparallel.mmengine", "pyparallel.registry"} & {*sys.modules})
from mmengine.registry import MODELS
from pyparallel.registry import MODULE_WRAPPERS
print([*MODELS.children], MODULE_WRAPPERS is pyparallel.MODULE_WRAPPERS)
"""
    done = run(code)
    assert done.stdout.splitlines() == ["set()", "['pyparallel'] True"]


@beside_mmengine
def test_without_mmengine_a_config_with_our_names_is_an_error_with_a_reason() -> None:
    code = """
from mmengine.registry import MODELS
for name in ("BaseModel", "mmengine.BaseModel"):
    try:
        print(MODELS.get(f"pyparallel.{name}"))
    except RuntimeError as error:
        print(error)
"""
    done = run(code, PYPARALLEL_MMENGINE="off")
    message = (
        f"{WITHOUT} PYPARALLEL_MMENGINE=off is set. Start a new process where mmengine "
        "can be imported, with PYPARALLEL_MMENGINE unset."
    )
    assert done.stdout.splitlines() == [message, message], done.stderr


def test_without_mmengine_installing_is_an_error() -> None:
    code = """
import sys
sys.modules["mmengine"] = None
import pyparallel.mmengine, pyparallel.registry
try:
    pyparallel.mmengine.install()
except RuntimeError as error:
    print(error)
pyparallel.mmengine.uninstall()
"""
    done = run(code)
    assert done.stdout.startswith(WITHOUT), done.stderr
