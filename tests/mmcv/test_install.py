"""install(): without mmcv, with packages like mmcv 1.x and 2.x, and with mmcv.

Code that changes the import system runs in a separate process.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

import pyparallel
import pyparallel.mmcv
from tests.support.processes import forkserver
from tests.support.repository.peers import installed

pytestmark = [
    pytest.mark.also_peers,
    pytest.mark.one_backend,
    pytest.mark.filterwarnings("ignore:On January 1, 2023, MMCV"),
]
ROOT = Path(pyparallel.__file__).parents[1]
REAL = bool(installed("mmcv"))
KINDS = ["none", "v1", "v2"] + ["real"] * REAL
WITH_REGISTRY = [kind for kind in KINDS if kind in ("v1", "real")]

# The names that other code imports, by submodule.
NAMES = {
    "": "collate DataContainer MMDataParallel MMDistributedDataParallel scatter "
    "scatter_kwargs is_module_wrapper MODULE_WRAPPERS",
    "._functions": "Scatter scatter get_input_device synchronize_stream _get_stream "
    "Tensor",
    ".collate": "collate",
    ".data_container": "DataContainer assert_tensor_type",
    ".data_parallel": "MMDataParallel scatter_kwargs",
    ".distributed": "MMDistributedDataParallel scatter_kwargs",
    ".distributed_deprecated": "MMDistributedDataParallel",
    ".registry": "MODULE_WRAPPERS",
    ".scatter_gather": "scatter scatter_kwargs ScatterInputs",
    ".utils": "is_module_wrapper",
}

PACKAGES = {
    "none": {},
    "v2": {"__init__.py": "__version__ = '2.1.0'", "utils/__init__.py": ""},
    "v1": {
        "__init__.py": "__version__ = '1.7.2'",
        "utils/__init__.py": """
            class Registry:
                def __init__(self, name, parent=None, scope=None):
                    self.name, self.parent, self.scope = name, parent, scope
                    self.children, self.module_dict = {}, {}
                    if parent is not None:
                        assert isinstance(parent, Registry)
                        parent.children[scope] = self
                def register_module(self, name=None, force=False, module=None):
                    self.module_dict[name or module.__name__] = module
            """,
        "parallel/__init__.py": """
            from ..utils import Registry
            from .collate import collate
            from .old import DataContainer
            MODULE_WRAPPERS = Registry('module wrapper', scope='mmcv')
            """,
        "parallel/collate.py": "def collate(): pass",
        "parallel/old.py": "class DataContainer: pass",
    },
}

# Hides an installed mmcv, and then makes the package of the test importable.
PREAMBLE = """
import importlib, importlib.util, pickle, sys, types, warnings
warnings.filterwarnings('ignore', 'On January 1, 2023, MMCV')

class Hidden:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *args):
        if name.split('.')[0] != 'mmcv':
            return self.finder.find_spec(name, *args)
    def __getattr__(self, name): return getattr(self.finder, name)

KIND = {kind!r}
if KIND == 'none':
    sys.meta_path[:] = map(Hidden, sys.meta_path)
import pyparallel, pyparallel.mmcv
"""


@pytest.fixture
def run(tmp_path):
    def run(kind: str, code: str) -> str:
        for name, text in PACKAGES.get(kind, {}).items():
            file = tmp_path / "mmcv" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        program = PREAMBLE.format(kind=kind) + textwrap.dedent(code)
        exit_code, output = forkserver.run(program, [str(tmp_path), str(ROOT)])
        assert exit_code == 0, output
        return output

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_of_every_submodule_is_ours(run, kind):
    run(
        kind,
        f"""
        pyparallel.mmcv.install()
        pyparallel.mmcv.install()
        NAMES = {NAMES}
        for end, names in NAMES.items():
            module = importlib.import_module('mmcv.parallel' + end)
            assert importlib.util.find_spec('mmcv.parallel' + end) is not None
            for name in names.split():
                value = getattr(module, name)
                if name not in ('Tensor', 'ScatterInputs', 'MODULE_WRAPPERS'):
                    assert value.__module__.split('.')[0] == 'pyparallel', (end, name)
        import mmcv.parallel
        assert sorted(mmcv.parallel.__all__) == sorted(NAMES[''].split())
        from mmcv.parallel import *
        from mmcv.parallel import DataContainer as DC, utils
        from mmcv.parallel._functions import Scatter
        assert DC is DataContainer is pyparallel.DataContainer
        assert collate is pyparallel.mmcv.collate is mmcv.parallel.collate
        assert mmcv.parallel.distributed_deprecated.MMDistributedDataParallel \\
            is not MMDistributedDataParallel
        """,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_uninstall_restores_the_modules_that_were_importable_before(run, kind):
    run(
        kind,
        """
        def state():
            names = {n: m for n, m in sys.modules.items() if n.split('.')[0] == 'mmcv'}
            return names, vars(names['mmcv']).get('parallel') if names else None

        if KIND in ('v1', 'real'):
            import mmcv.utils, mmcv.parallel
        elif KIND == 'v2':
            import mmcv.utils
        before = state()
        registries = list(pyparallel.parallel.registry.registries)
        for _ in range(2):
            try:
                with pyparallel.mmcv.installed():
                    from mmcv.parallel import collate, data_container
                    assert collate is pyparallel.mmcv.collate
                    with pyparallel.mmcv.installed():
                        pass
                    assert 'mmcv.parallel' in sys.modules
                    raise KeyError('from the block')
            except KeyError as error:
                assert error.args == ('from the block',)
            assert state() == before
            assert pyparallel.parallel.registry.registries == registries
        pyparallel.mmcv.uninstall()
        assert state() == before
        if KIND in ('none', 'v2'):
            try:
                import mmcv.parallel
            except ImportError as error:
                assert 'pyparallel' not in str(error)
            else:
                raise AssertionError('mmcv.parallel is still there')
        else:
            import mmcv.parallel
            assert mmcv.parallel.collate is not pyparallel.mmcv.collate
        """,
    )


@pytest.mark.parametrize("kind", WITH_REGISTRY)
def test_a_child_registry_of_mmcv_is_seen(run, kind):
    run(
        kind,
        """
        pyparallel.mmcv.install()
        from mmcv.parallel import MODULE_WRAPPERS, is_module_wrapper
        from mmcv.parallel.registry import MODULE_WRAPPERS as same
        from mmcv.utils import Registry
        import torch
        assert isinstance(MODULE_WRAPPERS, Registry) and same is MODULE_WRAPPERS
        child = Registry('module wrapper', parent=MODULE_WRAPPERS, scope='child')

        class Wrapper(torch.nn.Module):
            pass

        assert not is_module_wrapper(Wrapper())
        child.register_module(module=Wrapper)
        assert is_module_wrapper(Wrapper())
        assert pyparallel.is_module_wrapper(Wrapper())
        assert is_module_wrapper(torch.nn.DataParallel(torch.nn.Linear(1, 1)))
        pyparallel.mmcv.uninstall()
        assert not pyparallel.is_module_wrapper(Wrapper())
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_the_name_of_the_wrapper_can_be_registered(run, kind):
    run(
        kind,
        """
        pyparallel.mmcv.install()
        import torch
        from mmcv.parallel import (
            MODULE_WRAPPERS, MMDistributedDataParallel, is_module_wrapper
        )
        from mmcv.parallel.distributed_deprecated import (
            MMDistributedDataParallel as Deprecated
        )
        assert 'MMDistributedDataParallel' not in MODULE_WRAPPERS.module_dict
        MODULE_WRAPPERS.register_module(module=MMDistributedDataParallel)
        Deprecated._sync_params = lambda self: None
        assert is_module_wrapper(Deprecated(torch.nn.Linear(1, 1)))
        """,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_REGISTRY)
def test_install_is_refused_if_a_module_has_old_objects(run, kind):
    run(
        kind,
        """
        from mmcv import parallel
        old = [parallel.collate, parallel.DataContainer, parallel.MODULE_WRAPPERS]
        old.append(parallel)
        del parallel
        runner = sys.modules['mmcv.runner'] = types.ModuleType('mmcv.runner')
        while old:
            runner.taken = old.pop()
            try:
                pyparallel.mmcv.install()
            except RuntimeError as error:
                assert str(error) == (
                    'pyparallel.mmcv.install() must run before other modules import '
                    'from mmcv.parallel, but mmcv.runner already did. Call it first in '
                    'the main script.'
                ), error
            else:
                raise AssertionError('installed')
            import mmcv.parallel
            assert mmcv.parallel.collate is not pyparallel.mmcv.collate
        del runner.taken
        pyparallel.mmcv.install()
        """,
    )


def test_the_stand_in_module_names_mmcv_as_missing(run):
    run(
        "none",
        """
        pyparallel.mmcv.install()
        import mmcv
        try:
            mmcv.Config
        except AttributeError as error:
            assert str(error) == (
                "module 'mmcv' has no attribute 'Config': mmcv is not installed, and "
                "pyparallel.mmcv.install() provides only mmcv.parallel."
            )
        for missing in ('mmcv.runner', 'mmcv.parallel.foo'):
            try:
                importlib.import_module(missing)
            except ModuleNotFoundError as error:
                assert error.name == missing
            else:
                raise AssertionError(missing)
        """,
    )


def test_the_import_error_of_a_broken_mmcv_is_unchanged(run, tmp_path):
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("import no_such_dependency")
    run(
        "broken",
        """
        try:
            pyparallel.mmcv.install()
        except ModuleNotFoundError as error:
            assert error.name == 'no_such_dependency'
        else:
            raise AssertionError('installed')
        assert not any(name.startswith('mmcv') for name in sys.modules)
        """,
    )


def test_assert_tensor_type_guards_methods():
    class Holder:
        datatype = list

        def __init__(self, data):
            self.data = data

        @pyparallel.mmcv.assert_tensor_type
        def total(self, scale):
            """Its own text."""
            return self.data.sum() * scale

    assert Holder(torch.ones(2)).total(3) == 6
    assert Holder.total.__doc__ == "Its own text."
    with pytest.raises(
        AttributeError, match=r"^Holder has no attribute total for type <class 'list'>$"
    ):
        Holder([1]).total(3)
