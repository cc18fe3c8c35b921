"""BaseModel: the steps that runners call, around the forward pass of a model."""

from __future__ import annotations

import copy
import pkgutil
from abc import ABCMeta, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..core.errors import BatchTypeError, BatchValueError, type_name
from ._steps import optim_context, run_forward
from ._upstream import (
    BaseDataPreprocessorBase,
    BaseModelBase,
    init_module,
    provided,
    provides,
    upstream,
)
from .data_preprocessor import Apply, BaseDataPreprocessor, device_after

_Losses = Mapping[str, torch.Tensor | list[torch.Tensor]]


@provides("MODELS")
class BaseModel(BaseModelBase, metaclass=ABCMeta):
    """A model that preprocesses its batches and updates its parameters.

    A subclass defines ``forward``. It receives the result of ``data_preprocessor`` and
    a ``mode``: ``"loss"`` (return a dict of losses), ``"predict"`` (return a list of
    results) or ``"tensor"``.

    Args:
        data_preprocessor: a module, or None for a `BaseDataPreprocessor`, or a config
            ``dict(type=..., **options)``. The type is a name in mmengine's ``MODELS``;
            without mmengine the name of a preprocessor of this package, a dotted path
            or a class.
        init_cfg: the initialization of the weights; mmengine reads it.

    Raises:
        TypeError: ``data_preprocessor`` is of another type.
        ValueError: without mmengine, an unknown type of ``data_preprocessor``.

    Models written for mmengine's class work with this one unchanged. With mmengine
    installed this class is a subclass of it.
    """

    data_preprocessor: nn.Module

    # mmengine's methods set the device of preprocessors; here `_apply` does.
    to: Any = nn.Module.to
    cuda: Any = nn.Module.cuda
    cpu: Any = nn.Module.cpu

    def __init__(
        self,
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        init_cfg: Any = None,
    ) -> None:
        init_module(BaseModelBase, self)
        self._is_init = False
        self.init_cfg: Any = copy.deepcopy(init_cfg)
        self.data_preprocessor = _build_preprocessor(data_preprocessor)

    @abstractmethod
    def forward(
        self, inputs: Any, data_samples: Any = None, mode: str = "tensor"
    ) -> Any:
        """Return losses, results or features, depending on ``mode``; see the class.

        Args:
            inputs: the entry ``inputs`` of the preprocessed batch.
            data_samples: the annotations, or None.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"``.
        """

    def init_weights(self) -> None:
        """Initialize the weights by ``init_cfg``, once, and those of all children.

        Raises:
            RuntimeError: ``init_cfg`` is set, but mmengine is missing.
        """
        initialize: Any = getattr(super(), "init_weights", None)
        if initialize is not None:  # mmengine's
            initialize()
            return
        if self._is_init:
            return
        if self.init_cfg:
            raise RuntimeError(
                f"{type(self).__name__}: init_cfg must be None without mmengine, which "
                f"reads it, but is {self.init_cfg!r}. Install mmengine, or initialize "
                "the weights in __init__."
            )
        for child in self.children():
            initialize = getattr(child, "init_weights", None)
            if initialize is not None:
                initialize()
        self._is_init = True

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        """Preprocess, compute the losses, and update the parameters.

        Args:
            data: a batch of the loader.
            optim_wrapper: an `OptimWrapper`.

        Returns:
            The losses to log; see `parse_losses`.

        Raises:
            TypeError: ``optim_wrapper`` is another object, such as a torch optimizer.
        """
        with optim_context(optim_wrapper, self):
            data = self.data_preprocessor(data, True)
            losses = self._run_forward(data, mode="loss")
        loss, log_vars = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

    def val_step(self, data: Any) -> Any:
        """Return the predictions for a batch of the loader."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def test_step(self, data: Any) -> Any:
        """Return the predictions for a batch; the same as `val_step`."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def parse_losses(self, losses: _Losses) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss to minimize, and the values to log.

        Args:
            losses: tensors, or lists of tensors, by name. The value of a tensor is its
                mean, the value of a list is the sum of the means of its tensors.

        Returns:
            The sum of all entries whose name contains ``loss``, and an ``OrderedDict``
            of detached values: that sum as ``loss``, followed by every entry. If there
            are several losses and one of them is named ``loss``, it is logged as
            ``loss_own``.

        Raises:
            TypeError: an entry is not a tensor or a list of tensors, or has an integer
                dtype, which has no mean.
            ValueError: no entry is a loss.

        mmengine's method logs an entry named ``loss`` in place of the sum, and its
        logged values keep the graph alive.
        """
        if not isinstance(losses, Mapping):
            raise BatchTypeError(
                "parse_losses: losses must be a dict, as forward returns for "
                f"mode='loss', but is {type_name(losses)}."
            )
        means = {name: _entry_mean(name, value) for name, value in losses.items()}
        entries = [value for name, value in means.items() if "loss" in name]
        total: Any = sum(entries)
        if not isinstance(total, torch.Tensor):
            raise BatchValueError(
                "parse_losses: losses must have a tensor whose name contains 'loss', "
                f"but has {', '.join(map(repr, losses)) or 'nothing'}. Rename the "
                "losses that are to be minimized."
            )
        logged: dict[str, Any] = OrderedDict(loss=total)
        for name, value in means.items():
            if name == "loss":
                if len(entries) == 1:
                    continue
                name = "loss_own"
                while name in means:
                    name += "_"
            logged[name] = value
        return total, OrderedDict(
            (name, value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in logged.items()
        )

    _run_forward = run_forward

    def _set_device(self, device: torch.device | str | int | None) -> None:
        """Set the device of batches; for code that calls mmengine's method.

        Every method that moves the model calls an override.
        """
        if device is not None:
            for preprocessor in self._preprocessors():
                preprocessor._device = torch.device(device)

    def _apply(self, fn: Apply, recurse: bool = True) -> BaseModel:
        """Update the device of mmengine's own preprocessors; ours update themselves."""
        nn.Module._apply(self, fn, recurse)
        preprocessors = self._preprocessors()
        for preprocessor in preprocessors:
            if not isinstance(preprocessor, BaseDataPreprocessor):
                preprocessor._device = device_after(fn, preprocessor._device)
        if type(self)._set_device is not BaseModel._set_device:
            tensors = chain(self.parameters(), self.buffers())
            devices = [each._device for each in preprocessors]
            devices += (each.device for each in tensors)
            self._set_device(devices[0] if devices else torch.device("cpu"))
        return self

    def _preprocessors(self) -> list[Any]:
        """Return all preprocessors of this model, including mmengine's own."""
        modules = self.modules()
        return [each for each in modules if isinstance(each, BaseDataPreprocessorBase)]


def _entry_mean(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor_mean(value, f"losses[{name!r}]")
    if not isinstance(value, list):
        raise BatchTypeError(
            f"losses[{name!r}] must be a tensor or a list of tensors, but is "
            f"{type_name(value)}."
        )
    return sum(
        _tensor_mean(each, f"losses[{name!r}][{i}]") for i, each in enumerate(value)
    )


def _tensor_mean(value: Any, where: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise BatchTypeError(f"{where} must be a tensor, but is {type_name(value)}.")
    if not (value.is_floating_point() or value.is_complex()):
        raise BatchTypeError(
            f"{where} must have a floating-point dtype, but has {value.dtype}. Convert "
            "it with float()."
        )
    return value.mean()


def _build_preprocessor(config: Any) -> nn.Module:
    """Return the preprocessor from a config, a module or None."""
    if config is None:
        return BaseDataPreprocessor()
    if isinstance(config, nn.Module):
        return config
    if not isinstance(config, dict):
        raise BatchTypeError(
            "BaseModel: data_preprocessor must be a dict, a module or None, but is "
            f"{type_name(config)}."
        )
    models = upstream("MODELS")
    if models is not None:
        built: nn.Module = models.build(config)
        return built
    options = dict(config)
    cls = options.pop("type", None)
    built = (cls if isinstance(cls, type) else _find_class(cls))(**options)
    return built


def _find_class(name: Any) -> Any:
    """Return the class with this name, without mmengine's registry."""
    known = {
        cls.__name__: cls
        for cls in provided["MODELS"]
        if isinstance(cls, type) and issubclass(cls, BaseDataPreprocessorBase)
    }
    scope, _, bare = str(name).rpartition(".")
    if scope in ("", "mmengine", "pyparallel") and bare in known:
        return known[bare]
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise BatchValueError(
            "BaseModel: the type of data_preprocessor must be "
            f"{', '.join(known)}, a dotted path or a class, but is {name!r}."
        ) from error
