"""OptimWrapperDict: several optimizer wrappers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn

from ..core.errors import (
    NoSingleAnswerError,
    OptimWarning,
    SettingTypeError,
    UnknownNameError,
    type_name,
    warn,
)
from ._upstream import OptimWrapperBase, OptimWrapperDictBase
from .optimizer_wrapper import OptimWrapper


class OptimWrapperDict(OptimWrapper, OptimWrapperDictBase):
    """The optimizer wrappers of a model with several optimizers, by name.

    It can be read like a dict. `zero_grad`, the state, the parameter groups, learning
    rates and momenta cover all wrappers, each under its name. The methods of a training
    step must be called on one wrapper, such as ``wrappers["generator"]``; here they
    raise ``NotImplementedError``.

        >>> import torch
        >>> sgd = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        >>> wrappers = OptimWrapperDict(generator=OptimWrapper(sgd))
        >>> wrappers.get_lr()
        {'generator.lr': [0.1]}

    Args:
        **optim_wrappers: the wrappers; with mmengine, also instances of its class.

    Raises:
        TypeError: a value is not an optimizer wrapper (also an ``AssertionError``).

    Equivalent to mmengine's ``OptimWrapperDict``, and passes its ``isinstance`` checks.
    """

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            if not isinstance(wrapper, OptimWrapperBase):
                raise SettingTypeError(
                    f"OptimWrapperDict: {name} must be an OptimWrapper, but is "
                    f"{type_name(wrapper)}."
                )
        self.optim_wrappers = optim_wrappers

    def update_params(
        self,
        loss: torch.Tensor,
        step_kwargs: dict[str, Any] | None = None,
        zero_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Raise an error: call it on one wrapper."""
        self._refuse("update_params")

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> NoReturn:
        """Raise an error: call it on one wrapper."""
        self._refuse("backward")

    def step(self, **kwargs: Any) -> NoReturn:
        """Raise an error: call it on one wrapper."""
        self._refuse("step")

    def optim_context(self, model: nn.Module) -> NoReturn:
        """Raise an error: call it on one wrapper."""
        self._refuse("optim_context")

    def scale_loss(self, loss: torch.Tensor) -> NoReturn:
        """Raise an error: call it on one wrapper."""
        self._refuse("scale_loss")

    def should_update(self) -> NoReturn:
        """Refuse, because each wrapper counts its own micro-steps."""
        self._refuse("should_update")

    def should_sync(self) -> NoReturn:
        """Refuse, because each wrapper counts its own micro-steps."""
        self._refuse("should_sync")

    def end_group(self) -> NoReturn:
        """Refuse, because each wrapper counts its own micro-steps."""
        self._refuse("end_group")

    @property
    def inner_count(self) -> NoReturn:
        """Refuse, because each wrapper counts its own micro-steps."""
        self._refuse("inner_count")

    def initialize_count_status(
        self, model: nn.Module | None, cur_iter: int, max_iters: int
    ) -> None:
        """Do nothing, because only the model decides how often each wrapper steps."""

    def zero_grad(self, **kwargs: Any) -> None:
        """Call ``zero_grad`` of every wrapper."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    # mmengine's contract: a dict of lists, although OptimWrapper returns a list.
    @property
    def param_groups(self) -> dict[str, list[dict[str, Any]]]:  # type: ignore[override]
        """The groups of each wrapper by its name."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    @property
    def defaults(self) -> dict[str, Any]:
        """The ``defaults`` of each wrapper by its name."""
        return {name: wrapper.defaults for name, wrapper in self.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """Return ``get_lr`` of all wrappers as ``name.lr`` and ``name.base_lr``."""
        return self._by_name("get_lr")

    def get_momentum(self) -> dict[str, list[float]]:
        """Return ``get_momentum`` of all wrappers as ``name.momentum``."""
        return self._by_name("get_momentum")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each wrapper by its name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of each wrapper, and warn about wrappers without a state.

        If the state of one wrapper does not fit, no wrapper is changed.

        Raises:
            KeyError: no wrapper has a name of ``state_dict``.
        """
        for name in state_dict:
            self._require(name, "OptimWrapperDict.load_state_dict: state_dict")
        missing = [name for name in self if name not in state_dict]
        if missing:
            warn(
                "[PP303] OptimWrapperDict.load_state_dict: state_dict must have a "
                "state for every wrapper, but has none for "
                f"{', '.join(map(repr, missing))}. These wrappers keep their present "
                "state. Load a complete state.",
                OptimWarning,
            )
        with ExitStack() as stack:
            for name, state in state_dict.items():
                stack.callback(_keep_state(self.optim_wrappers[name]))
                # A copy, because mmengine's wrappers remove keys from their argument.
                self.optim_wrappers[name].load_state_dict(dict(state))
            stack.pop_all()

    def items(self) -> Iterator[tuple[str, OptimWrapper]]:
        """Iterate over names and wrappers."""
        yield from self.optim_wrappers.items()

    def values(self) -> Iterator[OptimWrapper]:
        """Iterate over the wrappers."""
        yield from self.optim_wrappers.values()

    def keys(self) -> Iterator[str]:
        """Iterate over the names."""
        yield from self.optim_wrappers

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return self.keys()

    def __getitem__(self, name: str) -> OptimWrapper:
        """Return the wrapper with this name."""
        self._require(name, "OptimWrapperDict: key")
        return self.optim_wrappers[name]

    def __contains__(self, name: object) -> bool:
        """Return True if a wrapper has this name."""
        return name in self.optim_wrappers

    def __len__(self) -> int:
        """Return the number of wrappers."""
        return len(self.optim_wrappers)

    def __repr__(self) -> str:
        """Show the wrappers as arguments of the constructor."""
        listed = ", ".join(f"{name}={wrapper!r}" for name, wrapper in self.items())
        return f"{type(self).__name__}({listed})"

    def _by_name(self, method: str) -> dict[str, list[float]]:
        return {
            f"{name}.{key}": value
            for name, wrapper in self.items()
            for key, value in getattr(wrapper, method)().items()
        }

    def _require(self, name: str, where: str) -> None:
        if name not in self.optim_wrappers:
            raise UnknownNameError(
                f"{where} must be one of {', '.join(map(repr, self))}, but is {name!r}."
            )

    def _refuse(self, method: str) -> NoReturn:
        one = next(iter(self), "name")
        raise NoSingleAnswerError(
            f"OptimWrapperDict: {method} must be used on one wrapper, but was used on "
            f"{len(self)} together. Write wrappers[{one!r}].{method}."
        )


def _keep_state(wrapper: Any) -> Callable[[], None]:
    """Return a function that undoes ``load_state_dict``; no tensor is copied."""
    nested: Mapping[str, Any] | None = getattr(wrapper, "optim_wrappers", None)
    if nested is not None:
        stack = ExitStack()
        for each in nested.values():
            stack.callback(_keep_state(each))
        return stack.close
    # Loading replaces the state and the groups of an optimizer.
    optimizer, settings = dict(vars(wrapper.optimizer)), wrapper.base_param_settings
    scaler = getattr(wrapper, "loss_scaler", None)
    scale = None if scaler is None else scaler.state_dict()

    def undo() -> None:
        vars(wrapper.optimizer).update(optimizer)
        wrapper.base_param_settings = settings
        if scaler is not None:
            scaler.load_state_dict(scale)

    return undo
