"""A replacement of ``mmcv.parallel`` 1.x, for code that imports it.

`install` makes ``mmcv.parallel`` and its submodules importable, with the classes and
functions of pyparallel. Call it once, before other modules import ``mmcv.runner``.
``_functions`` and ``distributed_deprecated`` are the submodules of ``mmcv.parallel``
whose content exists nowhere else in pyparallel.
"""

from ._install import assert_tensor_type as assert_tensor_type
from ._install import collate as collate
from ._install import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
