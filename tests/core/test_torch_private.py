"""The private names of torch that the package uses exist in the installed torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, profiler

import pyparallel
from pyparallel.core import torch_private as private
from tests.support.processes import forkserver

pytestmark = [pytest.mark.one_backend, pytest.mark.cuda_torch]

PACKAGE = Path(pyparallel.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
#: Private names of Python's library: of tuples and processes, frames and locks.
OF_PYTHON = {
    "_replace",
    "_fields",
    "_asdict",
    "_make",
    "_exit",
    "_getframe",
    "_cond",
    "_flag",
}
OF_PYTHON |= {"_popen", "_extra_reducers", "_writer"}  # of multiprocessing
OF_PYTHON |= {"_target", "_is_gil_enabled", "_current_frames"}  # of threads and sys
#: Of NumPy's global generator, and the package's own marks on objects of torch.
OF_OTHERS = {"_rand", "_bit_generator", "_former_parameters", "_profiled_epoch"}
#: Names with a replacement: the object that has each.
REPLACED = [
    (torch._C, "_dispatch_keys"),
    (torch._C, "_set_grad_enabled"),
    (torch._C, "DisableTorchFunction"),
    (torch._C, "TensorBase"),
    (torch._C, "_DisableAutocast"),
    (torch._C, "_is_any_autocast_enabled"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_is_tracing"),
    (torch._C._autograd, "_top_saved_tensors_default_hooks"),
    (torch._C._functorch, "is_functorch_wrapped_tensor"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (torch, "_foreach_copy_"),
    (torch.Tensor, "_is_zerotensor"),
    (torch.UntypedStorage, "_new_shared"),
    (torch.cuda, "_initialization_lock"),
    (torch.mtia, "_initialization_lock"),
    (torch.xpu, "_initialization_lock"),
    (torch._C._profiler, "_RecordFunctionFast"),
    (forward_ad, "_current_level"),
    (profiler, "_is_profiler_enabled"),
]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes(tree: ast.AST) -> Iterator[str]:
    """Return the private attributes that a module reads, also by getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            constants = (arg for arg in node.args if isinstance(arg, ast.Constant))
            if node.func.id in ("getattr", "hasattr", "setattr"):
                yield from (str(c.value) for c in constants if is_private(str(c.value)))


def defined(tree: ast.AST) -> Iterator[str]:
    """Return the names that a module defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "result"):
                yield node.attr


def test_no_other_module_imports_a_private_name_of_torch() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            for name in names:
                root, *rest = name.split(".")
                if root == "torch" and any(map(is_private, rest)):
                    found.append(f"{path.relative_to(PACKAGE)}: {name}")
    here = [name for name in found if name.startswith("core/torch_private.py: ")]
    assert len(here) > 10
    assert [name for name in found if name not in here] == []


def test_every_private_attribute_is_the_packages_own_or_is_listed() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    known = {name for tree in trees.values() for name in defined(tree)}
    known |= {name for names in private.ATTRIBUTES.values() for name in names}
    known |= {path.stem for path in FILES} | OF_PYTHON | OF_OTHERS
    used = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        if path.name != "torch_private.py"
        for name in attributes(tree)
        if name not in known
    }
    assert used == set()


@pytest.mark.parametrize("owner", private.ATTRIBUTES, ids=lambda cls: cls.__name__)
def test_this_torch_has_the_attributes(owner: Any) -> None:
    assert private.missing(owner) == ()


@pytest.mark.parametrize(("owner", "name"), REPLACED)
def test_this_torch_needs_no_replacement(owner: Any, name: str) -> None:
    assert hasattr(owner, name)


def test_a_class_without_a_name_is_found_and_named() -> None:
    class Base:
        def __init__(self) -> None:
            self._first = 1

    class Child(Base):
        def _second(self) -> None:
            pass

    names = {"_first": "", "_second": "", "_third": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "ATTRIBUTES", {Child: names})
        assert private.missing(Child) == ("_third",)
        with pytest.raises(RuntimeError) as caught:
            private.require("replicate", Child)
    assert str(caught.value) == (
        f"replicate needs Child._third, but torch {torch.__version__} lacks it. "
        "Install torch 2.8 to 2.15, or a newer pyparallel."
    )


@pytest.fixture
def without() -> Any:
    """Import the module for a torch that lacks every private name with a fallback."""
    fresh = importlib.util.spec_from_file_location(
        "pyparallel.core._torch_private_without", private.__file__
    )
    assert fresh is not None and fresh.loader is not None
    module: Any = importlib.util.module_from_spec(fresh)
    hidden = {name for _, name in REPLACED}

    def getattr_without(owner: Any, name: str, *default: Any) -> Any:
        return default[0] if name in hidden else getattr(owner, name, *default)

    module.getattr = getattr_without
    fresh.loader.exec_module(module)
    module._forward_ad = module._profiler = {}
    return module


class InPython(torch.Tensor):
    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", ["torch", "without"])
class TestWithAndWithoutTheName:
    @pytest.fixture
    def module(self, which: str, without: Any) -> Any:
        return private if which == "torch" else without

    def test_is_wrapped(self, module: Any) -> None:
        answers: list[bool] = []

        def look(each: torch.Tensor) -> torch.Tensor:
            answers.append(module.is_wrapped(each))
            return each

        torch.vmap(look)(torch.ones(2, 3))
        torch.func.grad(lambda each: look(each).sum())(torch.ones(2))
        assert answers == [True, True]
        for plain in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(0)):
            assert not module.is_wrapped(plain)

    def test_is_zero_tensor(self, module: Any) -> None:
        assert module.is_zero_tensor(torch._efficientzerotensor((2, 3)))
        for plain in (torch.zeros(2), torch.zeros(0), torch.zeros(2, device="meta")):
            assert not module.is_zero_tensor(plain)

    def test_runs_in_python(self, module: Any) -> None:
        assert module.runs_in_python(torch.ones(2).as_subclass(InPython))
        assert not module.runs_in_python(torch.ones(2))
        assert not module.runs_in_python(nn.Parameter(torch.ones(2)))

    def test_foreach_copy(self, module: Any) -> None:
        to = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
        module.foreach_copy(to, [torch.ones(2), torch.full((3,), 7)])
        assert [each.tolist() for each in to] == [[1, 1], [7, 7, 7]]

    def test_new_shared(self, module: Any) -> None:
        storage = module.new_shared(64)
        assert storage.is_shared() and storage.nbytes() == 64

    def test_gradient_mode(self, module: Any) -> None:
        try:
            module.set_grad_enabled(False)
            assert not torch.is_grad_enabled()
        finally:
            module.set_grad_enabled(True)
        assert torch.is_grad_enabled()
        with module.without_torch_function():
            pass

    def test_as_subclass(self, module: Any) -> None:
        again = module.as_subclass(nn.Parameter(torch.ones(2)), torch.Tensor)
        assert type(again) is torch.Tensor and again.requires_grad

    def test_autocast(self, module: Any) -> None:
        halves = [torch.ones(1, dtype=torch.float16)] * 2
        for _ in range(2):  # autocast is enabled again afterwards
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.is_autocast_enabled("cpu")
                with pytest.raises(RuntimeError):
                    torch.cat(halves)
                with module.outside_autocast():
                    assert torch.cat(halves).dtype == torch.float16
        with module.outside_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")


def test_without_a_name_the_slow_way_is_always_taken(without: Any) -> None:
    assert (without.any_autocast, without.num_function_modes()) == (None, 1)
    assert without.num_dispatch_modes() == 1 and without.saved_tensor_hooks(True)
    assert (without.innermost_transform(), without.is_tracing()) == (1, 1)
    assert (private.innermost_transform(), private.is_tracing()) == (None, False)
    assert without.in_forward_ad() and without.is_profiling()
    assert without.is_recorded() and not private.is_recorded()
    assert private.any_autocast is not None and not private.any_autocast()
    assert not private.in_forward_ad() and not private.is_profiling()
    with forward_ad.dual_level(), profiler.profile():
        assert private.in_forward_ad() and private.is_profiling()


def test_the_error_for_a_missing_name_names_its_user() -> None:
    lacks: Callable[..., Any] = private._required(
        torch._C, "_none", "PYPARALLEL_DEBUG=1"
    )
    with pytest.raises(RuntimeError) as caught:
        lacks(1)
    assert str(caught.value) == (
        f"PYPARALLEL_DEBUG=1 needs torch._C._none, but torch {torch.__version__} lacks "
        "it. Install torch 2.8 to 2.15, or a newer pyparallel."
    )


def run_with(before: str) -> str:
    """Return the last line that an import of the package prints after some code."""
    code = f"import torch\n{before}\nimport pyparallel\n"
    exit_code, output = forkserver.run(code, [str(PACKAGE.parent)])
    assert exit_code == 1, output
    return output.splitlines()[-1]


def test_an_import_error_lists_the_missing_names_of_torch() -> None:
    text = run_with("import torch._utils\ndel torch._utils.ExceptionWrapper")
    start = (
        f"ImportError: pyparallel uses a private name that torch {torch.__version__}"
    )
    assert text.startswith(f"{start} lacks: cannot import name 'ExceptionWrapper' from")
    assert text.endswith("Install torch 2.8 to 2.15, or a newer pyparallel.")


def test_an_old_torch_is_refused_at_import() -> None:
    text = run_with("torch.__version__ = '2.7.1+cpu'")
    assert text == (
        "ImportError: pyparallel needs torch 2.8 or newer, but torch 2.7.1+cpu is "
        'installed. Type: pip install "torch>=2.8"'
    )
