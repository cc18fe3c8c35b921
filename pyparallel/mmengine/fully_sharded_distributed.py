"""Models with parameters sharded over the ranks, by torch's FSDP and FSDP2."""

from __future__ import annotations

import contextlib
import enum
import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ..core.errors import (
    SettingTypeError,
    SettingValueError,
    UnknownNameError,
    type_name,
)
from ._shards import check_present, is_right_in_torch, learn_shards, note_replaced
from ._steps import ForwardSteps
from ._upstream import provides, upstream
from .optimizer_wrapper import OptimWrapper

_Enum = TypeVar("_Enum", bound=enum.Enum)

if TYPE_CHECKING:  # mypy cannot check a base that is chosen at run time
    _Base = FullyShardedDataParallel
else:
    _Base = upstream("MMFullyShardedDataParallel") or FullyShardedDataParallel


class _ShardedSteps(ForwardSteps):
    """The steps of a sharded model, which check the optimizer wrapper."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        """Preprocess, compute the losses, and update the parameters.

        Args:
            data: a batch of the loader.
            optim_wrapper: an `OptimWrapper`. One of mmengine may be used if it does not
                clip, or if torch's functions clip these parameters correctly.

        Returns:
            The values to log, from ``parse_losses`` of the model.

        Raises:
            TypeError: mmengine's wrapper would clip wrongly; the preprocessor returned
                neither a mapping nor a list or tuple.
            RuntimeError: the optimizer was created before the model was sharded, and
                would not train it.
        """
        if not isinstance(optim_wrapper, OptimWrapper):
            _check_foreign(optim_wrapper, type(self).__name__)
        return super().train_step(data, optim_wrapper)


def _check_foreign(optim_wrapper: Any, where: str) -> None:
    """Raise if a wrapper of mmengine would train a sharded model wrongly."""
    optimizer = getattr(optim_wrapper, "optimizer", None)
    if optimizer is None:
        return
    check_present(optimizer.param_groups)
    arguments = getattr(optim_wrapper, "clip_grad_kwargs", None)
    if not arguments:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    function: Any = getattr(optim_wrapper, "clip_func", None)
    if not is_right_in_torch(function, parameters, arguments):
        raise SettingTypeError(
            f"{where}: optim_wrapper must clip the gradients of the whole model, but "
            f"{type_name(optim_wrapper)} calls torch's {function.__name__}, which is "
            "not made for these shards. Use OptimWrapper or AmpOptimWrapper of "
            "pyparallel.mmengine."
        )


@provides("MODEL_WRAPPERS")
class MMFullyShardedDataParallel(_ShardedSteps, _Base):
    """``FullyShardedDataParallel`` with settings from a config, and with the steps.

    Args:
        module: a `BaseModel`.
        process_group: an argument of torch's class.
        sharding_strategy: a ``ShardingStrategy`` or its name, such as ``"FULL_SHARD"``.
        cpu_offload: a ``CPUOffload``, or True to offload the parameters.
        auto_wrap_policy: a function, its name in mmengine's ``FUNCTIONS``, its dotted
            path, or a dict with one of these as ``type`` and further arguments.
        backward_prefetch: a ``BackwardPrefetch`` or its name; None for no prefetching.
        mixed_precision: a ``MixedPrecision``, or a dict of its arguments in which
            dtypes may be names.
        param_init_fn: as ``auto_wrap_policy``.
        use_orig_params: an argument of torch's class, with True as default.
        **kwargs: further arguments of torch's class. ``device_id`` may be ``"cpu"``.
            ``ignored_modules`` and ``ignored_parameters`` may contain names; torch
            calls the latter ``ignored_states``.

    Raises:
        TypeError, ValueError, KeyError: a setting has the wrong type or an unknown
            value.
        RuntimeError: there is no accelerator, and ``device_id`` is not the CPU.

    The arguments are not changed. Every micro-step reduces gradients, also within
    `OptimWrapper.optim_context`: FSDP evaluates ``no_sync`` in the backward pass, which
    runs outside that context. The accumulated gradients are correct.

    Equivalent to mmengine's ``MMFullyShardedDataParallel``, which fails for a dict as
    ``param_init_fn`` and for ``ignored_parameters``.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: str | ShardingStrategy | None = None,
        cpu_offload: bool | CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: str | BackwardPrefetch | None = None,
        mixed_precision: Mapping[str, Any] | MixedPrecision | None = None,
        param_init_fn: Any = None,
        use_orig_params: bool = True,
        **kwargs: Any,
    ) -> None:
        where = f"{type(self).__name__}: "
        if isinstance(cpu_offload, bool):
            cpu_offload = CPUOffload(offload_params=cpu_offload)
        _checked(
            cpu_offload,
            CPUOffload | None,
            "a bool, a CPUOffload or None",
            where + "cpu_offload",
        )
        settings = {
            "sharding_strategy": resolve_enum(
                sharding_strategy, ShardingStrategy, where + "sharding_strategy"
            ),
            "cpu_offload": cpu_offload,
            "auto_wrap_policy": resolve_function(
                auto_wrap_policy, where + "auto_wrap_policy"
            ),
            "backward_prefetch": resolve_enum(
                backward_prefetch, BackwardPrefetch, where + "backward_prefetch"
            ),
            "mixed_precision": resolve_dtypes(
                mixed_precision, MixedPrecision, where + "mixed_precision"
            ),
            "param_init_fn": resolve_function(param_init_fn, where + "param_init_fn"),
        }
        for option, key, named in (
            ("ignored_modules", "ignored_modules", module.named_modules()),
            ("ignored_states", "ignored_parameters", module.named_parameters()),
        ):
            if key in kwargs:
                ignored = resolve_names(kwargs.pop(key), dict(named), where + key)
                kwargs[option] = ignored
        if isinstance(kwargs.get("device_id"), str):
            kwargs["device_id"] = torch.device(kwargs["device_id"])
        if kwargs.get("device_id") is None and not torch.accelerator.is_available():
            raise RuntimeError(
                f"{where}there must be an accelerator, but torch {torch.__version__} "
                "sees none. Pass device_id='cpu' to shard on the CPU."
            )
        before = list(module.parameters())
        FullyShardedDataParallel.__init__(
            self,
            module,
            process_group=process_group,
            use_orig_params=use_orig_params,
            **settings,
            **kwargs,
        )
        note_replaced(before, module, type(self).__name__)
        if "_modules" in vars(self):  # not if a test replaces torch's constructor
            learn_shards(self)


@provides("MODEL_WRAPPERS")
class MMFullyShard(_ShardedSteps, nn.Module):
    """A model under ``torch.distributed.fsdp.fully_shard`` (FSDP2), with the steps.

    Also works on the CPU with gloo. Create the optimizer after this wrapper, because
    the parameters become ``DTensor``s. The model is changed in place, and the keys of
    its ``state_dict`` begin with ``module.``.

    Args:
        module: a `BaseModel`.
        shard: the submodules that become groups of their own, besides the model: names
            of submodules or of their classes, or a function that returns True for them.
        mixed_precision: a ``MixedPrecisionPolicy``, or a dict of its arguments in which
            dtypes may be names.
        cpu_offload: True to offload the parameters.
        ignored_parameters: parameters, or their names, that are not sharded.
        **kwargs: arguments of ``fully_shard``: ``mesh``, ``reshard_after_forward``...

    Raises:
        TypeError, ValueError, KeyError: a setting has the wrong type or an unknown
            value.
    """

    def __init__(
        self,
        module: nn.Module,
        shard: Iterable[str] | Callable[[nn.Module], bool] = (),
        mixed_precision: Mapping[str, Any] | MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        ignored_parameters: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        where = f"{type(self).__name__}: "
        policy = resolve_dtypes(
            mixed_precision, MixedPrecisionPolicy, where + "mixed_precision"
        )
        ignored = resolve_names(
            ignored_parameters,
            dict(module.named_parameters()),
            where + "ignored_parameters",
        )
        settings = dict(kwargs)
        if policy is not None:
            settings["mp_policy"] = policy
        if cpu_offload:
            settings["offload_policy"] = CPUOffloadPolicy()
        if ignored is not None:
            settings["ignored_params"] = set(ignored)
        before = list(module.parameters())
        groups = (*reversed(_shard_groups(module, shard, where)), module)
        sharded: list[Any] = [fully_shard(each, **settings) for each in groups]
        tensors = (each for each in module.parameters() if isinstance(each, DTensor))
        if any(each.device_mesh.device_type == "cpu" for each in tensors):
            # Gloo of torch 2.8 returns the sum of the gradients for their mean.
            for each in sharded:
                each.set_force_sum_reduction_for_comms(True)
        note_replaced(before, module, type(self).__name__)
        self.module: Any = module
        self._syncs = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, and set whether its backward pass reduces gradients."""
        self.module.set_requires_gradient_sync(self._syncs)
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            # torch reshards the root in the backward pass, which does not follow here.
            self.module.reshard()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable the reduction of gradients, as in DDP.

        This applies to forward passes within the context. Their gradients stay
        unsharded on their rank; the next reduction includes them.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before


def _shard_groups(module: nn.Module, shard: Any, where: str) -> list[nn.Module]:
    """Return the submodules to shard, each before its own submodules."""
    found = [
        (name, each) for name, each in module.named_modules() if each is not module
    ]
    if callable(shard):
        return [each for _, each in found if shard(each)]
    names = {shard} if isinstance(shard, str) else set(shard)
    known = {name for name, _ in found} | {type(each).__name__ for _, each in found}
    resolve_names(sorted(names), dict.fromkeys(known), where + "shard")
    return [
        each for name, each in found if name in names or type(each).__name__ in names
    ]


def _checked(value: Any, kinds: Any, rule: str, where: str) -> Any:
    """Return a setting, or raise an error if it is of none of these kinds."""
    if not isinstance(value, kinds):
        raise SettingTypeError(f"{where} must be {rule}, but is {type_name(value)}.")
    return value


def resolve_enum(value: Any, cls: type[_Enum], where: str) -> _Enum | None:
    """Return the member of the enum ``cls`` from a member, its name, or None."""
    if isinstance(value, str):
        if value not in cls.__members__:
            names = ", ".join(cls.__members__)
            raise UnknownNameError(f"{where} must be one of {names}, but is {value!r}.")
        return cls[value]
    rule = f"a {cls.__name__}, its name or None"
    member: _Enum | None = _checked(value, cls | None, rule, where)
    return member


def resolve_function(value: Any, where: str) -> Any:
    """Return a function from a function, its name, a dict, or None.

    The name is one of mmengine's ``FUNCTIONS``, or a dotted path. A dict has one of
    these as ``type``, and arguments.
    """
    if isinstance(value, str):
        return _find_function(value, where)
    if value is None or callable(value):
        return value
    if isinstance(value, Mapping) and "type" in value:
        arguments = dict(value)
        function = resolve_function(arguments.pop("type"), f"{where}['type']")
        return functools.partial(function, **arguments)
    raise SettingTypeError(
        f"{where} must be a function, its name, a dict with 'type' or None, but is "
        f"{value!r} ({type_name(value)})."
    )


def _find_function(name: str, where: str) -> Any:
    functions = upstream("FUNCTIONS")
    found = None if functions is None else functions.get(name)
    if found is None:
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            found = pkgutil.resolve_name(name)
    if not callable(found):
        raise SettingValueError(
            f"{where} must be the name of a function, but is {name!r}. Write its "
            "dotted path, or register it in mmengine's FUNCTIONS."
        )
    return found


def resolve_dtypes(value: Any, cls: Any, where: str) -> Any:
    """Return an object of ``cls`` from a dict in which dtypes may be names, or None."""
    if value is None or isinstance(value, cls):
        return value
    _checked(value, Mapping, f"a {cls.__name__}, a dict or None", where)
    arguments = dict(value)
    for key, each in value.items():
        if key.endswith("_dtype"):
            arguments[key] = _resolve_dtype(each, f"{where}[{key!r}]")
    try:
        return cls(**arguments)
    except TypeError as error:
        raise SettingTypeError(
            f"{where} must hold arguments of {cls.__name__}, but is {dict(value)!r}: "
            f"{error}."
        ) from error


def _resolve_dtype(value: Any, where: str) -> torch.dtype | None:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if isinstance(value, str) and not isinstance(found, torch.dtype):
        raise SettingValueError(f"{where} must be a dtype, but is {value!r}.")
    dtype: torch.dtype | None = _checked(
        found, torch.dtype | None, "a torch.dtype, its name or None", where
    )
    return dtype


def resolve_names(
    values: Iterable[Any] | None, named: Mapping[str, Any], where: str
) -> list[Any] | None:
    """Return a list of parameters or modules, from themselves or their names."""
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SettingTypeError(f"{where} must be a list, but is {values!r}.")
    found = []
    for each in values:
        if isinstance(each, str):
            if each not in named:
                raise UnknownNameError(
                    f"{where} must be names of the model, but has {each!r}."
                )
            each = named[each]
        elif not isinstance(each, nn.Parameter | nn.Module):
            raise SettingTypeError(
                f"{where} must hold names, parameters or modules, but has "
                f"{type_name(each)}."
            )
        found.append(each)
    return found
