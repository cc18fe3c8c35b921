"""Old code for ``mmcv.parallel`` 1.x: ``import pyparallel.mmcv`` and ``install()``.

``install`` (``_install``) makes ``mmcv.parallel`` and its submodules importable from
pyparallel. ``_functions`` and ``distributed_deprecated`` are the modules of mmcv that
have no other counterpart here.
"""

from ._install import assert_tensor_type as assert_tensor_type
from ._install import collate as collate
from ._install import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
