"""The mmengine protocol; with mmengine installed, as subclasses of its classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import OptimWarning
from ._install import attach as attach
from ._install import install, installed, uninstall
from .amp import AmpOptimWrapper
from .anomaly import detect_anomalous_params
from .collate import default_collate, pseudo_collate
from .distributed import MMDistributedDataParallel
from .image import ImgDataPreprocessor
from .launchers import init_dist
from .model import BaseModel
from .model_wrappers import MODEL_WRAPPERS, is_model_wrapper
from .optim import OptimWrapper
from .optim_dict import OptimWrapperDict
from .preprocessor import BaseDataPreprocessor
from .separate import MMSeparateDistributedDataParallel
from .stack import stack_batch

if TYPE_CHECKING:
    from .fully_sharded import MMFullyShard, MMFullyShardedDataParallel

__all__ = [
    "MODEL_WRAPPERS",
    "AmpOptimWrapper",
    "BaseDataPreprocessor",
    "BaseModel",
    "ImgDataPreprocessor",
    "MMDistributedDataParallel",
    "MMFullyShard",
    "MMFullyShardedDataParallel",
    "MMSeparateDistributedDataParallel",
    "OptimWarning",
    "OptimWrapper",
    "OptimWrapperDict",
    "default_collate",
    "detect_anomalous_params",
    "init_dist",
    "install",
    "installed",
    "is_model_wrapper",
    "pseudo_collate",
    "stack_batch",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Import what is sharded when it is asked for: torch's part takes a second."""
    if name not in ("MMFullyShard", "MMFullyShardedDataParallel"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import fully_sharded

    return getattr(fully_sharded, name)
