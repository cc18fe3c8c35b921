"""MMDistributedDataParallel: DDP that opens DataContainers and runs training steps.

Note: [models that differ]
The ranks' models are compared before the first tensor is sent. DDP compares only the
shapes of parameters with those of rank 0, and only the rank that differs raises an
error; the other ranks lose the connection or notice nothing. DDP does not compare
dtypes and buffers. If the sizes in bytes differ, gloo aborts the process that receives
more than it expects. If they are equal, the bytes are read with the wrong dtype.

Here one small reduction finds on every rank whether all models are equal. Only if they
are not, two more reductions find the first difference, and a gather describes it.

Note: [backward in the step]
DDP expects a backward pass after its forward. In the first forward it takes no notice
of gradients, so those of a backward pass inside of it stay different. The ranks' models
would differ from the first update on, without an error.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..batch import pytree
from ..batch.container import DataContainer
from ..core.devices import HOST, current_device
from ..core.errors import ModelsDifferError, OptimWarning, warn_once
from ..core.torch_private import (
    ignored_by_ddp,
    outside_autocast,
    require,
    without_recorded_graph,
)
from ..core.tracing import span
from ..scatter_gather.scatter import first_arguments, scatter_kwargs
from ._replica_steps import forbid_backward

_TEXT = 256  # bytes of a description that are sent
_BUCKET = 25 * 1024 * 1024  # bytes; the bucket size of DDP
_HOST = -1
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)


class MMDistributedDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` for batches made by `collate`, with the step API.

    The arguments are those of torch's class. `train_step` and `val_step` run between
    torch's preparation and completion of a forward. So ``static_graph``,
    ``find_unused_parameters``, ``no_sync``, ``join``, buffer broadcast and the logger
    work as for ``forward``. With ``static_graph`` the first pass reduces also within
    ``no_sync``; torch's class fails there. Averaging a gradient again changes nothing.

    DataContainers are opened for CPU modules (``device_ids=None``, gloo) too. Such a
    module gets arguments without containers as they are, as in torch. Data that is
    ``cpu_only`` stays on the host.

    If the ranks' models differ in shapes, dtypes or frozen parameters, every rank
    raises a `ModelsDifferError` that names the tensor, before any tensor changes. With
    ``init_sync=False`` the models are not compared, as in torch. As in torch,
    parameters that are frozen at construction stay out of all reductions. If one of
    them requires a gradient later, a warning names it.

    Subclasses may override ``scatter``, ``to_kwargs`` and ``_run_ddp_forward``. From
    mmcv 1.x ``MMDistributedDataParallel``.
    """

    _is_checked = False  # by a first step, see Note [backward in the step]
    _is_recorded = False  # a static graph
    _frozen: Sequence[tuple[str, nn.Parameter]] = ()

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        require(type(self).__name__, DistributedDataParallel)
        self._check_same_model(module, *args, **kwargs)
        super().__init__(module, *args, **kwargs)
        self._frozen = frozen_parameters(module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy, which has recorded no graph yet."""
        super().__setstate__(without_recorded_graph(state))  # type: ignore[no-untyped-call]
        self._is_recorded = False

    def _check_same_model(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Compare the ranks' models if torch is about to compare them."""
        bound = _SIGNATURE.bind(self, module, *args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        group, mesh = options["process_group"], options["device_mesh"]
        if group is None and mesh is not None:
            group = mesh.get_group(mesh_dim=0)
        # Without a group, or on a rank outside of it, torch raises the error.
        ready = dist.is_initialized() and dist.get_rank(group) >= 0
        if ready and options["init_sync"]:
            # Since torch 2.13, `forward_sync_buffers` makes DDP send buffers too.
            buffers = options["broadcast_buffers"] in (None, True)
            buffers = buffers or options.get("forward_sync_buffers") is not None
            check_same_model(type(self).__name__, module, group, buffers=buffers)

    def to_kwargs(
        self, inputs: Any, kwargs: Any, device_id: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Open the arguments for one device; see `scatter_kwargs`."""
        return self._scatter_arguments(inputs, kwargs, [device_id])

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Open the arguments for several devices; see `scatter_kwargs`."""
        return self._scatter_arguments(inputs, kwargs, device_ids)

    def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.train_step`` of the opened arguments, as a forward of DDP.

        Runners call it as ``train_step(data_batch, optimizer, **kwargs)``. The backward
        pass of its result reduces the gradients.

        Raises:
            ValueError: with several ranks, the first step that reduces gradients runs a
                backward pass itself, whose gradients DDP would not reduce. No parameter
                has changed. A step may run passes if it gets ``reducer`` as an argument
                and calls ``prepare_for_backward`` before each, as in mmcv 1.x.
        """
        has_reducer = any(x is self.reducer for x in (*inputs, *kwargs.values()))
        if self._is_checked or has_reducer or not self._reduces():
            return self._step("train_step", inputs, kwargs)
        refusal = (
            f"{type(self).__name__}.train_step must leave the backward pass to its "
            "caller on several ranks, but runs one itself, whose gradients DDP does "
            "not reduce. Return the loss. For models of mmengine's protocol use "
            "MMDistributedDataParallel of pyparallel.mmengine."
        )
        with forbid_backward(self.module, refusal):
            output = self._step("train_step", inputs, kwargs)
        self._is_checked = True
        return output

    def val_step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module.val_step`` of the opened arguments; see `train_step`."""
        return self._step("val_step", inputs, kwargs)

    def _reduces(self) -> bool:
        """Return True if a backward pass after this forward must reduce gradients."""
        is_on = torch.is_grad_enabled() and self.require_backward_grad_sync
        return is_on and dist.get_world_size(self.process_group) > 1

    def _step(self, name: str, inputs: Any, kwargs: Any) -> Any:
        device_ids = self.device_ids or [_HOST]
        with span("pyparallel.step"):
            inputs, kwargs = first_arguments(self.scatter(inputs, kwargs, device_ids))
            step = getattr(self.module, name)
            self._prepare()
            with self._inside_ddp_forward():
                output = step(*inputs, **kwargs)
            # torch's methods have no types, here and below.
            return self._post_forward(output)  # type: ignore[no-untyped-call]

    def _prepare(self) -> None:
        """Run torch's preparation of a forward without moving the arguments.

        torch would copy every tensor to the device, including those of ``cpu_only``
        containers, and would fail for a ``defaultdict`` or without arguments. So it
        gets a placeholder, which it does not change.
        """
        if self.static_graph and not self._is_recorded and torch.is_grad_enabled():
            # torch records the graph in the first pass, and fails if `no_sync` keeps it
            # from reducing. At its end, `no_sync` restores this attribute.
            self.require_backward_grad_sync = self._is_recorded = True
        if self._frozen and self._reduces():
            check_frozen(type(self).__name__, self._frozen)
        super()._pre_forward(None)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepare a forward and, on the host, open its arguments."""
        if not self.device_ids:
            inputs, kwargs = self._open_arguments(inputs, kwargs)
        self._prepare()
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model; on a device, open the arguments first.

        Methods that override this one open them by `to_kwargs`, as in mmcv 1.x. On the
        host they are open already, and opening them again has no effect.
        """
        if self.device_ids:
            inputs, kwargs = self._open_arguments(inputs, kwargs)
        result = super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        return result

    def _open_arguments(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        device_id = self.device_ids[0] if self.device_ids else _HOST
        return first_arguments(self.to_kwargs(inputs, kwargs, device_id))

    def _scatter_arguments(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        precision = self.mixed_precision
        dtype = None if precision is None else precision.param_dtype
        parts = scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim, dtype=dtype)
        if dtype is None and list(device_ids) == [_HOST] and (inputs or kwargs):
            leaves, _ = pytree.flatten((inputs, kwargs))
            if not any(isinstance(leaf, DataContainer) for leaf in leaves):
                return (inputs,), (kwargs,)  # `scatter_kwargs` has checked them
        return parts


def frozen_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that DDP leaves out because they require no gradient."""
    ignored = ignored_by_ddp(module)
    return [
        (name, each)
        for name, each in module.named_parameters()
        if not each.requires_grad and name not in ignored
    ]


def check_frozen(where: str, frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Warn once if a parameter that DDP leaves out requires a gradient now."""
    for name, parameter in frozen:
        if parameter.requires_grad:
            warn_once(
                "PP305",
                f"{where}: {name} must require no gradient, as in the constructor, but "
                "requires one now. DDP does not reduce it, so each rank trains this "
                "parameter alone. Wrap the module again after requires_grad_().",
                OptimWarning,
            )


class TensorForm(NamedTuple):
    """A tensor of a model.

    Attributes:
        form: its kind, shape and dtype, which must be equal on all ranks.
        name: its name, which may differ.
    """

    form: str
    name: str


def check_same_model(
    wrapper: str, module: nn.Module, group: Any, buffers: bool
) -> None:
    """Compare the shapes and dtypes of the tensors that DDP will send, in their order.

    All ranks of the group must call this. Names may differ, as in torch.

    Args:
        wrapper: the name of the class, for the message.
        module: the model, without tensors in ``_ddp_params_and_buffers_to_ignore``.
        group: a process group; None for all ranks.
        buffers: compare buffers too.

    Raises:
        ModelsDifferError: on every rank. The group can still be used.
    """
    ignored = ignored_by_ddp(module)
    tensors = [each for each in module.named_parameters() if each[0] not in ignored]
    forms = [_describe(*each) for each in tensors]
    if buffers:
        found = module.named_buffers()
        forms += [_describe(*each) for each in found if each[0] not in ignored]
    device = _device([tensor for _, tensor in tensors], group)
    index = _first_difference(forms, group, device)
    if index is None:
        return
    texts = _gather_texts(_text(forms, index), group, device)
    ranks: dict[str, list[str]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True):
        ranks.setdefault(text, []).append(str(rank))
    parts = [
        f"{text} on rank{'s' * (len(found) > 1)} {', '.join(found)}"
        for text, found in ranks.items()
    ]
    raise ModelsDifferError(
        f"{wrapper}: the models of all ranks must have equal tensors, but tensor "
        f"{index} is {', but '.join(parts)}. Build the same model on every rank."
    )


def _device(parameters: Sequence[torch.Tensor], group: Any) -> torch.device:
    """Return the device of torch's own comparison.

    A rank without parameters takes part too, on a device that the backend can reduce.
    """
    trained = [each for each in parameters if each.requires_grad]
    if parameters:
        return (trained or parameters)[0].device
    return HOST if dist.get_backend(group) == "gloo" else current_device()


def _describe(name: str, tensor: torch.Tensor) -> TensorForm:
    kind = "a buffer"
    if isinstance(tensor, nn.Parameter):
        kind = "a parameter" if tensor.requires_grad else "a frozen parameter"
    if is_lazy(tensor):
        return TensorForm(f"{kind} without a shape", name)
    return TensorForm(f"{kind} of shape {tuple(tensor.shape)}, {tensor.dtype}", name)


def _text(forms: Sequence[TensorForm], index: int) -> str:
    if index >= len(forms):
        return "missing"
    # The form comes first, so that a long name does not cut it off.
    return f"{forms[index].form}, named {forms[index].name!r}"


def _first_difference(
    tensors: Sequence[TensorForm], group: Any, device: torch.device
) -> int | None:
    """Return the first index at which the ranks have tensors of different forms."""
    digests = [_digest(each.form) for each in tensors]
    whole = _digest(repr(digests))
    high, low, longest = _largest([whole, -whole, len(digests)], group, device)
    if high == -low:
        return None
    digests += [0] * (longest - len(digests))
    highs = _largest(digests, group, device)
    lows = _largest([-digest for digest in digests], group, device)
    pairs = zip(highs, lows, strict=True)
    return next(i for i, (high, low) in enumerate(pairs) if high != -low)


def _digest(text: str) -> int:
    """Return a hash that is not 0; it and its negative fit into int64."""
    content = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(content[:8], "little") >> 1) | 1


def _largest(numbers: list[int], group: Any, device: torch.device) -> list[int]:
    """Return the largest number of all ranks at each index."""
    largest = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    found: list[int] = largest.tolist()
    return found


def _gather_texts(text: str, group: Any, device: torch.device) -> list[str]:
    """Return the texts of all ranks, each cut to `_TEXT` bytes."""
    content = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
    own = torch.tensor(list(content), dtype=torch.uint8, device=device)
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, own, group=group)
    texts = [bytes(each.tolist()).rstrip(b"\0") for each in received]
    return [each.decode(errors="replace") for each in texts]


def broadcast_from_first(
    tensors: Iterable[torch.Tensor], group: Any = None, max_nbytes: float = _BUCKET
) -> None:
    """Overwrite tensors with those of the first rank of a group.

    Args:
        tensors: tensors of any shapes and dtypes, which are equal on all ranks.
        group: a process group; None for all ranks.
        max_nbytes: approximate size of one broadcast in bytes.
    """
    for bucket in _buckets(tensors, max_nbytes):
        with outside_autocast():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        # As bytes, because gloo refuses some dtypes, such as int16 and float8.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def _buckets(
    tensors: Iterable[torch.Tensor], max_nbytes: float
) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one dtype into buckets of about ``max_nbytes``, in order."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        dtype = tensor.dtype
        open_buckets[dtype].append(tensor)
        sizes[dtype] += tensor.nbytes
        if sizes[dtype] >= max_nbytes:
            yield open_buckets.pop(dtype)
            sizes.pop(dtype)
    yield from open_buckets.values()
