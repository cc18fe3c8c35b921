"""MODULE_WRAPPERS and is_module_wrapper, and where mmengine looks for scope pyparallel.

mmengine imports ``<scope>.registry`` when a config names a type with a scope. Being
imported in a process that has mmengine's registries is therefore what gives them this
scope. ``import pyparallel`` does not import this module, so that mmengine can be the
first who does; whoever imports it before mmengine calls `pyparallel.mmengine.install`.
"""

from __future__ import annotations

import sys

from .parallel.registry import MODULE_WRAPPERS, Registry, is_module_wrapper

__all__ = ["MODULE_WRAPPERS", "Registry", "is_module_wrapper"]

if "mmengine.registry" in sys.modules:
    from .mmengine import attach

    attach()
