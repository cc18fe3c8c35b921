"""install: scope ``pyparallel`` in mmengine's registries, for types in configs.

Note: [names in scope pyparallel]
mmengine cuts ``pyparallel.mmengine.OptimWrapper`` at its first dot and asks the child
of scope ``pyparallel`` for ``mmengine.OptimWrapper``. A plain child registry takes that
for a name of scope ``mmengine`` and returns mmengine's own class, silently. Hence our
children are of a class of their own: a name is what is registered here, or else what is
found at ``pyparallel.<name>``, and only then mmengine's affair.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..batch.collate import collate
from . import _upstream

SCOPE = "pyparallel"
#: Only additions and removals; nothing is imported while it is held.
_lock = threading.RLock()
_children: dict[str, Any] = {}  # by the name of the registry above
_added_globals: list[Any] = []
_filled = threading.Event()
_STATISTICS = ("current", "max", "mean", "min")  # of a HistoryBuffer
_DTYPE_CODES = "? b B h H i I l L q Q e f d"  # numpy's characters for its numbers


def install() -> None:
    """Let configs of mmengine name what is here, in scope ``pyparallel``.

    Every registry of mmengine gets a child of this scope. Then a ``Runner`` understands
    ``type="pyparallel.MMDistributedDataParallel"``, for wrappers, preprocessors,
    models, optimizer wrappers and collate functions (``pyparallel.collate``,
    ``pyparallel.pseudo_collate``, ``pyparallel.default_collate``). mmengine's own names
    stay what they are. Installing twice is the same as once.

    mmengine does it by itself when it meets the first name of this scope; a call is
    only needed to have the following before that.

    ``torch.load`` refuses checkpoints of mmengine 0.10 since torch 2.6, because they
    hold numbers in classes that it does not know. They are made known to it by
    ``torch.serialization.add_safe_globals``: mmengine's ``HistoryBuffer``, and what
    numpy makes arrays and numbers of. They hold data and call nothing. A run can then
    be resumed.

    Raises:
        RuntimeError: there is no mmengine, or ``PYPARALLEL_MMENGINE=off`` asks to go
            without it; or somebody else has taken the scope. Nothing is changed then.
    """
    if _filled.is_set():
        return
    if not _upstream.available:
        raise RuntimeError(
            "pyparallel.mmengine.install: mmengine must be what our classes derive "
            f"from, but they do without it. {_upstream.reason} Start again where "
            "mmengine can be imported, with PYPARALLEL_MMENGINE unset."
        )
    from . import fully_sharded_distributed  # noqa: F401  # its classes are noted when it is imported

    safe = safe_globals()
    with _lock:
        attach()
        for name, items in _items().items():
            # Not register_module: a second thread may have been here.
            _children[name].module_dict.update({it.__name__: it for it in items})
        known = torch.serialization.get_safe_globals()
        names = {_path(each) for each in known}
        _added_globals.extend(each for each in safe if _path(each) not in names)
        torch.serialization.add_safe_globals(_added_globals)
        _filled.set()


def attach() -> None:
    """Give mmengine's registries children that `install` when they are asked.

    Raises:
        RuntimeError: somebody else has taken the scope in one of them.
    """
    roots = _roots()
    with _lock:
        for name, root in roots.items():
            taken = root.children.get(SCOPE)
            if taken is not None and taken is not _children.get(name):
                raise RuntimeError(
                    f"pyparallel.mmengine.install: scope {SCOPE!r} of mmengine's "
                    f"{name} must be free, but a registry named {taken.name!r} has it. "
                    "Give that one another scope."
                )
        scoped = _scoped_registry()
        for name, root in roots.items():
            if SCOPE not in root.children:
                _children[name] = scoped(root.name, parent=root, scope=SCOPE)


def uninstall() -> None:
    """Undo `install`. A name of this scope in a config that is built later installs.

    What has been built stays.
    """
    roots = _roots() if _children else {}
    with _lock:
        for name in _children:
            roots[name].children.pop(SCOPE)
        _children.clear()
        _filled.clear()
        if _added_globals:
            others = torch.serialization.get_safe_globals()
            torch.serialization.clear_safe_globals()
            kept = [each for each in others if each not in _added_globals]
            torch.serialization.add_safe_globals(kept)
            _added_globals.clear()
    sys.modules.pop(f"{SCOPE}.registry", None)  # mmengine's next import of it attaches


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install within a ``with`` block, and undo it at the end, also after an error."""
    with contextlib.ExitStack() as stack:
        if not _filled.is_set():
            stack.callback(uninstall)
        install()
        yield


def _path(safe: Any) -> str:
    """Return the name by which a checkpoint asks for what is safe."""
    if isinstance(safe, tuple):
        return str(safe[1])
    return f"{safe.__module__}.{safe.__qualname__}"


def _items() -> dict[str, list[Callable[..., Any]]]:
    """Return what configs may name, by the name of mmengine's registry."""
    functions = [*_upstream.provided["FUNCTIONS"], collate]
    return {**_upstream.provided, "FUNCTIONS": functions}


def _roots() -> dict[str, Any]:
    """Return mmengine's registries by name."""
    module = importlib.import_module("mmengine.registry")
    return {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, module.Registry) and each.parent is None
    }


def _scoped_registry() -> Any:
    """Return the class of our children of mmengine's registries."""
    base: Any = importlib.import_module("mmengine.registry").Registry
    find: Any = importlib.import_module("mmengine.utils").get_object_from_string

    def get(self: Any, key: str) -> Any:
        """Return what a config names; see Note: [names in scope pyparallel]."""
        install()
        name = key.removeprefix(f"{SCOPE}.")
        found = self.module_dict.get(name)
        if found is None and "." in name:
            found = find(f"{SCOPE}.{name}")
        return base.get(self, key) if found is None else found

    return type("ScopedRegistry", (base,), {"get": get, "__module__": __name__})


def safe_globals() -> list[Any]:
    """Return the classes and functions that checkpoints of mmengine 0.10 refer to.

    Such a checkpoint holds the message hub of the run. Its ``HistoryBuffer`` objects
    keep numpy arrays, and the functions ``min``, ``max``, ``mean`` and ``current`` of
    their class, which Python pickles as calls of ``getattr``.

    Everything returned only creates values: arrays and numbers of numpy, histories. For
    ``getattr`` and ``bytes``, torch gets functions that return only a statistic of
    ``HistoryBuffer`` and empty bytes. A checkpoint cannot use them to run its own code.

    Returns:
        Items for ``torch.serialization.add_safe_globals``: a class or a function, or a
        tuple of a function and the name under which checkpoints refer to it.
    """
    numpy = importlib.import_module("numpy")
    buffer = importlib.import_module("mmengine.logging").HistoryBuffer

    def get_statistic(owner: Any, name: Any) -> Any:
        if owner is not buffer or name not in _STATISTICS:
            raise pickle.UnpicklingError(
                "torch.load: a checkpoint may take from HistoryBuffer "
                f"{', '.join(_STATISTICS)} by getattr, but takes {name!r} from "
                f"{owner!r}. Load it with weights_only=False if you trust it."
            )
        return getattr(buffer, name)

    def empty_bytes() -> bytes:
        return b""  # the data of an array without elements

    dtype_classes = {type(numpy.dtype(code)) for code in _DTYPE_CODES.split()}
    # The functions by which pickle rebuilds an array and a number of numpy.
    make_array = numpy.zeros(1).__reduce__()[0]
    make_number = numpy.float64(1).__reduce__()[0]
    return [
        *(buffer, numpy.ndarray, numpy.dtype, make_array, make_number),
        *((get_statistic, "builtins.getattr"), (empty_bytes, "builtins.bytes")),
        *sorted(dtype_classes, key=repr),
    ]
