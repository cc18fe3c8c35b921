"""The mmengine protocol; with mmengine installed, as subclasses of its classes."""

from .._errors import OptimWarning
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
from .stack import stack_batch

__all__ = [
    "MODEL_WRAPPERS",
    "AmpOptimWrapper",
    "BaseDataPreprocessor",
    "BaseModel",
    "ImgDataPreprocessor",
    "MMDistributedDataParallel",
    "OptimWarning",
    "OptimWrapper",
    "OptimWrapperDict",
    "default_collate",
    "detect_anomalous_params",
    "init_dist",
    "is_model_wrapper",
    "pseudo_collate",
    "stack_batch",
]
