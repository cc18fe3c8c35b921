"""MODULE_WRAPPERS and is_module_wrapper, and the scope "pyparallel" for mmengine.

mmengine imports ``<scope>.registry`` when a config names a type with a scope. If
mmengine's registries are loaded, the import of this module adds the scope to them.
``import pyparallel`` does not import this module, so that mmengine can import it later.
Programs that import it before mmengine call `pyparallel.mmengine.install`.
"""

from __future__ import annotations

import sys

from .parallel.registry import MODULE_WRAPPERS, Registry, is_module_wrapper

__all__ = ["MODULE_WRAPPERS", "Registry", "is_module_wrapper"]

if "mmengine.registry" in sys.modules:
    from .mmengine import attach

    attach()
