"""Add the scope ``pyparallel`` to mmengine's registries, for types in configs.

Note: [names in scope pyparallel]
mmengine splits ``pyparallel.mmengine.OptimWrapper`` at its first dot, and looks up
``mmengine.OptimWrapper`` in the child registry of scope ``pyparallel``. A plain child
registry reads that as a name of scope ``mmengine``, and returns mmengine's own class
without a warning. So the children are instances of a subclass, which looks up a name
first among the registered objects, then at ``pyparallel.<name>``, then in mmengine.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..batch.collate import collate
from . import _upstream

SCOPE = "pyparallel"
#: Protects the changes to registries. No code imports a module while it holds the lock.
_lock = threading.RLock()
_children: dict[str, Any] = {}  # child registries by the name of their parent
_added_globals: list[Any] = []
_filled = threading.Event()  # set while the children hold the classes
_STATISTICS = ("current", "max", "mean", "min")  # of a HistoryBuffer
_DTYPE_CODES = "? b B h H i I l L q Q e f d"  # numpy's characters for its numbers


def install() -> None:
    """Register the classes and functions in mmengine, in scope ``pyparallel``.

    Every registry of mmengine gets a child of this scope. A ``Runner`` then accepts
    ``type="pyparallel.MMDistributedDataParallel"``, for wrappers, preprocessors,
    models, optimizer wrappers, samplers and collate functions (``pyparallel.collate``,
    ``pyparallel.pseudo_collate``, ``pyparallel.default_collate``), and
    ``runner_type="pyparallel.Runner"``. mmengine's own names keep their meaning. A
    second call does nothing.

    mmengine calls this function at the first name of the scope. Call it yourself in a
    script that imports ``pyparallel.registry`` before mmengine, or that resumes a run
    without any name of the scope.

    To resume, ``torch.load`` must read a checkpoint of mmengine 0.10. Since torch 2.6
    it refuses them, because they contain classes outside its list of safe ones. This
    function adds the classes with ``torch.serialization.add_safe_globals``: mmengine's
    ``HistoryBuffer``, and numpy's classes of arrays and numbers. They only hold data
    and call no other code.

    Raises:
        RuntimeError: mmengine cannot be imported, or ``PYPARALLEL_MMENGINE=off`` is
            set, or another registry has the scope. Nothing is changed then.
    """
    if _filled.is_set():
        return
    if not _upstream.available:
        raise RuntimeError(
            "pyparallel.mmengine.install: pyparallel's classes must be subclasses of "
            f"mmengine's, but are not. {_upstream.reason} Start a new process where "
            "mmengine can be imported, with PYPARALLEL_MMENGINE unset."
        )
    # Their imports add to `provided`.
    from . import fully_sharded_distributed, runner  # noqa: F401

    safe = safe_globals()
    with _lock:
        attach()
        functions: list[Any] = [*_upstream.provided["FUNCTIONS"], collate]
        items_of = {**_upstream.provided, "FUNCTIONS": functions}
        for name, items in items_of.items():
            # register_module would raise if another thread has registered the class.
            _children[name].module_dict.update({it.__name__: it for it in items})
        known = torch.serialization.get_safe_globals()
        names = {_global_name(each) for each in known}
        _added_globals.extend(each for each in safe if _global_name(each) not in names)
        torch.serialization.add_safe_globals(_added_globals)
        _filled.set()


def attach() -> None:
    """Add empty children to mmengine's registries; their first lookup installs.

    Raises:
        RuntimeError: another registry has the scope in one of them.
    """
    roots = _root_registries()
    with _lock:
        for name, root in roots.items():
            taken = root.children.get(SCOPE)
            if taken is not None and taken is not _children.get(name):
                raise RuntimeError(
                    f"pyparallel.mmengine.install: scope {SCOPE!r} of mmengine's "
                    f"{name} must be free, but a registry named {taken.name!r} has it. "
                    "Give that registry another scope."
                )
        scoped = _scoped_registry()
        for name, root in roots.items():
            if SCOPE not in root.children:
                _children[name] = scoped(root.name, parent=root, scope=SCOPE)


def uninstall() -> None:
    """Undo `install`, except for objects that mmengine has already built.

    The next name of the scope in a config installs again.
    """
    roots = _root_registries() if _children else {}
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
    # mmengine imports pyparallel.registry for this scope; the import calls `attach`.
    sys.modules.pop(f"{SCOPE}.registry", None)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install for the time of a ``with`` block, and undo it also after an error."""
    with contextlib.ExitStack() as stack:
        if not _filled.is_set():
            stack.callback(uninstall)
        install()
        yield


def _global_name(safe: Any) -> str:
    """Return the name under which checkpoints refer to an item of safe globals."""
    if isinstance(safe, tuple):
        return str(safe[1])
    return f"{safe.__module__}.{safe.__qualname__}"


def _root_registries() -> dict[str, Any]:
    """Return mmengine's root registries by name."""
    module = importlib.import_module("mmengine.registry")
    return {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, module.Registry) and each.parent is None
    }


def _scoped_registry() -> Any:
    """Return the class of the child registries, a subclass of mmengine's."""
    base: Any = importlib.import_module("mmengine.registry").Registry
    find: Any = importlib.import_module("mmengine.utils").get_object_from_string

    def get(self: Any, key: str) -> Any:
        """Look up a name of a config; see Note: [names in scope pyparallel]."""
        install()
        if not isinstance(key, str):
            return base.get(self, key)  # raises mmengine's error
        name = key.removeprefix(f"{SCOPE}.")
        found = self.module_dict.get(name)
        if found is None and "." in name:
            found = find(f"{SCOPE}.{name}")
        return base.get(self, key) if found is None else found

    return type("ScopedRegistry", (base,), {"get": get, "__module__": __name__})


def safe_globals() -> list[Any]:
    """Return items for ``add_safe_globals`` with which checkpoints of mmengine load.

    Such a checkpoint holds the message hub of the run. Its ``HistoryBuffer`` objects
    keep numpy arrays, and the functions ``min``, ``max``, ``mean`` and ``current`` of
    their class, which Python pickles as calls of ``getattr``. For ``getattr`` and
    ``bytes``, torch gets functions that return only a statistic of ``HistoryBuffer``
    and empty bytes. A checkpoint cannot use them to run its own code.
    """
    numpy = importlib.import_module("numpy")
    buffer = importlib.import_module("mmengine.logging").HistoryBuffer

    def get_statistic(owner: Any, name: Any) -> Any:
        if owner is not buffer or name not in _STATISTICS:
            raise pickle.UnpicklingError(
                "torch.load: a checkpoint must use getattr only for "
                f"{', '.join(_STATISTICS)} of HistoryBuffer, but uses it for {name!r} "
                f"of {owner!r}. Load it with weights_only=False if you trust it."
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
