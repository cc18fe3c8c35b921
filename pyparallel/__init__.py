"""pyparallel: ragged samples go to the device in one copy.

`DataContainer` says how a field is batched, `collate` makes the batch, `scatter` sends
it, and the wrappers run the training step on it. ``pyparallel doctor`` tells which
backend is in use and why.
"""

from importlib import metadata as _metadata

from . import memory
from ._errors import BatchWarning, Error, LoaderWarning
from ._module_wrappers import MODULE_WRAPPERS, is_module_wrapper
from ._pad_stack import pad_stack
from ._profile.install import install_if_asked as _watch_if_asked
from ._stats import LoaderStats
from .collate import collate
from .container import DataContainer
from .data_parallel import MMDataParallel
from .distributed import MMDistributedDataParallel
from .gather import gather
from .image import ImagePreprocessor
from .loader import DataLoader
from .padding import Padded, Padding
from .parallel_apply import parallel_apply
from .prefetch import PreDataLoader
from .profile import profile
from .ragged import Ragged
from .replicas import replicate
from .scatter import scatter, scatter_kwargs
from .to_host import HostCopy, start_to_host, to_host

try:
    __version__ = _metadata.version("pyparallel-torch")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

_watch_if_asked()

__all__ = [
    "MODULE_WRAPPERS",
    "BatchWarning",
    "DataContainer",
    "DataLoader",
    "Error",
    "HostCopy",
    "ImagePreprocessor",
    "LoaderStats",
    "LoaderWarning",
    "MMDataParallel",
    "MMDistributedDataParallel",
    "Padded",
    "Padding",
    "PreDataLoader",
    "Ragged",
    "collate",
    "gather",
    "is_module_wrapper",
    "memory",
    "pad_stack",
    "parallel_apply",
    "profile",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "start_to_host",
    "to_host",
]


def __dir__() -> list[str]:
    """Offer what is public, also to completion; modules inside keep their names."""
    imported = {"mmcv", "mmengine"}.intersection(globals())
    return sorted([*__all__, *imported, *(n for n in globals() if n[:2] == "__")])
