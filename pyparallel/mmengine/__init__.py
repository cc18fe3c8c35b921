"""The mmengine protocol; with mmengine installed, as subclasses of its classes."""

from .._errors import OptimWarning
from .amp import AmpOptimWrapper
from .optim import OptimWrapper
from .optim_dict import OptimWrapperDict

__all__ = ["AmpOptimWrapper", "OptimWarning", "OptimWrapper", "OptimWrapperDict"]
