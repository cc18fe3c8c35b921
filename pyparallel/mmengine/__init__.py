"""mmengine's optimizer wrappers, models, preprocessors and distributed wrappers.

The classes work without mmengine. With mmengine installed they are subclasses of its
classes, and pass the ``isinstance`` checks of its runner, hooks and schedulers.

A training step: `pseudo_collate` or `default_collate` makes the batch, a wrapper calls
the data preprocessor of the model, which copies the batch to the device, and the
optimizer wrapper does the backward pass and the update. `install` registers the classes
in mmengine's registries, so that configs can refer to them as ``pyparallel.<Name>``.
`pyparallel.mmengine.join` initializes torch.distributed when a config imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import OptimWarning
from . import _upstream
from ._install import attach as attach
from ._install import install, installed, uninstall
from .amp_optimizer_wrapper import AmpOptimWrapper
from .anomalous_params import detect_anomalous_params
from .base_model import BaseModel
from .collate import default_collate, pseudo_collate, stack_batch
from .data_preprocessor import BaseDataPreprocessor, ImgDataPreprocessor
from .distributed import MODEL_WRAPPERS, MMDistributedDataParallel, is_model_wrapper
from .launchers import init_dist
from .optimizer_wrapper import OptimWrapper
from .optimizer_wrapper_dict import OptimWrapperDict
from .separate_distributed import MMSeparateDistributedDataParallel
from .size_batch_sampler import SizeBatchSampler

if TYPE_CHECKING:
    from .fully_sharded_distributed import MMFullyShard, MMFullyShardedDataParallel
    from .runner import Runner as Runner

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
    "SizeBatchSampler",
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
    """Import on first access what takes a second: torch's FSDP and mmengine's Runner.

    `Runner` exists only with mmengine, so it is not in ``__all__``.
    """
    if name in ("MMFullyShard", "MMFullyShardedDataParallel"):
        from . import fully_sharded_distributed

        return getattr(fully_sharded_distributed, name)
    if name == "Runner" and _upstream.available:
        from .runner import Runner

        return Runner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
