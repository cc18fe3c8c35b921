"""All private names of torch that the package uses.

No other module imports a private name of torch. Each entry states the use of the name
and its replacement in a torch without the name. With every torch of `versions`,
tests/core/test_torch_private.py looks up each name and runs each replacement.

Names without a replacement are required. If torch lacks one, the import or the call
that needs the name raises an error with the name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import nn
from torch.autograd import forward_ad, profiler

from . import versions
from .process import on_fork

#: The names that come from torch as they are.
__all__ = [
    "BatchNorm",
    "ExceptionWrapper",
    "IterableFetcher",
    "LoaderIter",
    "MapFetcher",
    "TorchLoader",
    "WorkersIter",
    "data_collate",
    "data_worker",
    "pin_memory",
    "pytree",
]

if (_refusal := versions.too_old(torch.__version__)) is not None:
    raise ImportError(_refusal)

_ADVICE = (
    f"Install torch {versions.OLDEST_TORCH} to {versions.NEWEST_TORCH}, or a newer "
    "pyparallel."
)


# ------------------------------------------------------------------------ required
try:
    # Carries errors from workers to the parent.
    from torch._utils import ExceptionWrapper

    # The base class of all batch norms.
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

    # The registry of other libraries' containers.
    from torch.utils import _pytree as pytree

    # default_collate and its table; seeds and the info of a worker; pinning.
    from torch.utils.data._utils import collate as data_collate
    from torch.utils.data._utils import worker as data_worker

    # The profiler measures the fetchers of torch's own iterators.
    from torch.utils.data._utils.fetch import _IterableDatasetFetcher as IterableFetcher
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapFetcher
    from torch.utils.data._utils.pin_memory import pin_memory

    # Other libraries ask whether an iterator is one of torch's.
    from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIter

    # `PreDataLoader` ends waits for the workers of torch's own iterators.
    from torch.utils.data.dataloader import (
        _MultiProcessingDataLoaderIter as WorkersIter,
    )
except ImportError as _error:
    raise ImportError(
        f"pyparallel uses a private name that torch {torch.__version__} lacks: "
        f"{_error}. {_ADVICE}"
    ) from _error


def _torch_loader() -> Any:
    """Return torch's class ``DataLoader``.

    Programs assign another class to both of its names, before or after this import:
    ``torch.utils.data.DataLoader = pyparallel.DataLoader``.
    """
    name = ("torch.utils.data.dataloader", "DataLoader")
    for cls in Generic.__subclasses__():
        if (cls.__module__, cls.__qualname__) == name:
            return cls
    raise ImportError(
        f"pyparallel must find torch's class {'.'.join(name)}, but another object has "
        "its name and torch's class no longer exists. Import pyparallel before that "
        "object is assigned."
    )


if TYPE_CHECKING:
    from torch.utils.data import DataLoader as TorchLoader
else:
    TorchLoader = _torch_loader()

#: Private attributes of torch's classes that subclasses override or use.
ATTRIBUTES: Mapping[Any, Mapping[str, str]] = {
    LoaderIter: {
        "_IterableDataset_len_called": "the length that torch compares",
        "_next_data": "torch's method calls it, if a library replaces that method",
        "_num_yielded": "counted by torch's method",
        "_profile_name": "names the range of a batch",
    },
    WorkersIter: {
        "_data_queue": "read without waiting for a dead worker",
        "_index_queues": "their threads end before the interpreter exits",
        "_persistent_workers": "such workers outlive their epoch",
        "_pin_memory": "whether a thread writes to the queue of the batches",
        "_shutdown": "whether the workers were ended",
        "_try_get_data": "a wait that ends after a stop or a death",
        "_worker_pids_set": "whether torch watches the workers",
        "_worker_result_queue": "closed, to end a wait for half a message",
        "_workers": "the processes",
        "_workers_done_event": "replaced, because a dead worker may hold its lock",
        "_workers_status": "which workers have not ended their epoch",
    },
    TorchLoader: {
        "_auto_collation": "whether batches are made of samples",
        "_dataset_kind": "an attribute of iterators that other libraries read",
        "_IterableDataset_len_called": "the length that was reported",
        "_get_iterator": "returns the package's iterators",
        "_index_sampler": "its state is part of state_dict",
        "_iterator": "the iterator whose workers persist",
    },
    torch.TypedStorage: {
        "_untyped_storage": "sent by workers; `untyped()` warns",
    },
    nn.Module: {
        "_apply": "detects that a model was moved",
        "_buffers": "filled in replicas",
        "_compiled_call_impl": "whether a module was compiled in place",
        "_modules": "filled in replicas",
        "_parameters": "filled in replicas",
        "_replicate_for_data_parallel": "makes a replica without tensors",
    },
    nn.parallel.DistributedDataParallel: {
        "_inside_ddp_forward": "runs train_step as a forward",
        "_post_forward": "prepares the reduction of gradients",
        "_pre_forward": "prepares a forward",
        "_run_ddp_forward": "opens arguments before the model",
    },
}


@functools.cache
def missing(owner: Any) -> tuple[str, ...]:
    """Return the names of ``ATTRIBUTES[owner]`` that this torch does not have.

    A name exists if it is an attribute of the class or occurs in the code of a method.
    """
    known: set[Any] = set()
    for cls in owner.__mro__[:-1]:
        known.update(vars(cls))
        for value in vars(cls).values():
            code = getattr(value, "__code__", None)
            if code is not None:
                known.update(code.co_names, code.co_consts)
    return tuple(name for name in ATTRIBUTES[owner] if name not in known)


def require(who: str, *owners: Any) -> None:
    """Raise ``RuntimeError`` if torch lacks a private name that ``who`` needs."""
    for owner in owners:
        if missing(owner):
            raise RuntimeError(
                f"{who} needs {owner.__name__}.{missing(owner)[0]}, but torch "
                f"{torch.__version__} lacks it. {_ADVICE}"
            )


def _required(owner: Any, name: str, who: str) -> Any:
    """Return a function of torch, or one that raises the error that torch lacks it."""

    def lacks(*args: Any) -> Any:
        raise RuntimeError(
            f"{who} needs {owner.__name__}.{name}, but torch {torch.__version__} "
            f"lacks it. {_ADVICE}"
        )

    return getattr(owner, name, lacks)


#: Return True if the running backward pass will execute a node.
will_execute: Callable[[Any], bool] = _required(
    torch._C, "_will_engine_execute_node", "detect_anomalous_params"
)
#: The number of references to a storage, by its address.
_use_count: Callable[[int], int] = _required(
    torch._C, "_storage_Use_Count", "PYPARALLEL_DEBUG=1"
)


def use_count(storage: Any) -> int:
    """Return the number of torch's references to the memory of a storage."""
    return _use_count(storage._cdata)


# ------------------------------------------------------------- with a replacement
def _has_no_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return True
    return False


def _is_subclass(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, nn.Parameter)


def _is_without_memory(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and not tensor.is_meta and tensor.data_ptr() == 0


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _shared_storage(nbytes: int) -> torch.UntypedStorage:
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    storage: torch.UntypedStorage = memory.share_memory_().untyped_storage()
    return storage


@contextmanager
def _without_casts() -> Iterator[None]:
    types = [each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)]
    try:
        for each in types:
            torch.set_autocast_enabled(each, False)
        yield
    finally:
        for each in types:
            torch.set_autocast_enabled(each, True)


def _one() -> int:
    return 1


#: Is a tensor wrapped by a transform of torch.func? Else: has it no storage?
is_wrapped: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", _has_no_storage
)
_keys: Callable[[torch.Tensor], Any] | None = getattr(torch._C, "_dispatch_keys", None)
_PYTHON: Any = getattr(getattr(torch._C, "DispatchKey", None), "Python", None)


def _has_python_key(tensor: torch.Tensor) -> bool:
    keys: Any = _keys
    found: bool = keys(tensor).has(_PYTHON)
    return found


#: Does Python code implement a tensor's operators? Else: is its class a subclass?
runs_in_python: Callable[[torch.Tensor], bool] = (
    _has_python_key if _keys is not None and _PYTHON is not None else _is_subclass
)
#: Does a tensor represent zeros without memory? Else: is its address 0?
is_zero_tensor: Callable[[torch.Tensor], bool] = getattr(
    torch.Tensor, "_is_zerotensor", _is_without_memory
)
#: Sets gradient mode in a quarter of the time. Else: the public function.
set_grad_enabled: Callable[[bool], Any] = getattr(
    torch._C, "_set_grad_enabled", torch.set_grad_enabled
)
#: A block in which operators skip `__torch_function__` of subclasses and modes. Else:
#: they call it.
without_torch_function: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "DisableTorchFunction", nullcontext
)
#: Casts a tensor to a subclass. Else: the method of `Tensor`, which libraries replace.
as_subclass: Callable[[torch.Tensor, type], torch.Tensor] = getattr(
    torch._C, "TensorBase", torch.Tensor
).as_subclass
_disable_autocast: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_DisableAutocast", _without_casts
)
#: Copies many tensors in one call. Else: one call for each tensor.
foreach_copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any] = getattr(
    torch, "_foreach_copy_", _copy_each
)
#: Creates a storage in shared memory. Else: `share_memory_` creates it.
new_shared: Callable[[int], torch.UntypedStorage] = getattr(
    torch.UntypedStorage, "_new_shared", _shared_storage
)
#: Is autocast enabled for any device type? None: callers check each type.
any_autocast: Callable[[], bool] | None = getattr(
    torch._C, "_is_any_autocast_enabled", None
)
#: The number of function modes of this thread. Else: 1, so callers check further.
num_function_modes: Callable[[], int] = getattr(
    torch._C, "_len_torch_function_stack", _one
)
#: The number of dispatch modes of this thread. Else: 1, so callers check further.
num_dispatch_modes: Callable[[], int] = getattr(
    torch._C, "_len_torch_dispatch_stack", _one
)
#: True in a trace of torch.jit.
is_tracing: Callable[[], int] = getattr(torch._C, "_is_tracing", _one)
#: The innermost transform of torch.func in this thread, or None. Else: 1, as in one.
innermost_transform: Callable[[], Any] = getattr(
    torch._C._functorch, "peek_interpreter_stack", _one
)
#: The hooks of saved tensors in this thread; the argument includes those of tracers.
saved_tensor_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", bool
)

#: A profiler range in C. Else: the public one in Python.
RangeInC: Callable[[str], AbstractContextManager[Any]] = getattr(
    torch._C._profiler, "_RecordFunctionFast", profiler.record_function
)

_forward_ad, _profiler = vars(forward_ad), vars(profiler)


_AS_IT_IS = nullcontext()


def outside_autocast() -> AbstractContextManager[Any]:
    """Return a block in which torch's operators do not cast for autocast.

    Autocast refuses to join some dtypes, such as float16 on the CPU in bfloat16.
    """
    if any_autocast is not None and not any_autocast():
        return _AS_IT_IS
    return _disable_autocast()


def in_forward_ad() -> bool:
    """Return True in forward-mode differentiation, and if torch does not report it."""
    level: int = _forward_ad.get("_current_level", 0)
    return level >= 0


def is_recorded() -> bool:
    """Return True if torch traces or intercepts the operators of this thread.

    Also True if torch does not report it.
    """
    return bool(is_tracing() or num_dispatch_modes())


def is_profiling() -> bool:
    """Return True while a profiler of torch is active, and if torch does not report it.

    ``torch.autograd._profiler_enabled`` only reports the profiler of its own thread.
    """
    enabled: bool = _profiler.get("_is_profiler_enabled", True)
    return enabled


def forget_workers(iterator: Any) -> None:
    """Stop torch from raising an error when a worker of this iterator dies."""
    from torch.utils.data._utils import signal_handling

    forget: Callable[[int], Any] = getattr(signal_handling, "_remove_worker_pids", id)
    forget(id(iterator))
    iterator._worker_pids_set = False


def numpy_seed(base_seed: int, worker: int) -> Any:
    """Return the seed of NumPy in a worker, as torch's workers have it."""
    untyped: Any = data_worker
    return untyped._generate_state(base_seed, worker)


def set_worker_info(worker: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Set the result of ``get_worker_info()`` in this process."""
    untyped: Any = data_worker
    untyped._worker_info = _worker_info(worker, num_workers, seed, dataset)


def _worker_info(worker: int, num_workers: int, seed: int, dataset: Any) -> Any:
    untyped: Any = data_worker
    return untyped.WorkerInfo(
        id=worker, num_workers=num_workers, seed=seed, dataset=dataset
    )


class _InThread(threading.local):
    """The worker info of this thread, None if it is no worker."""

    info: Any = None


_in_thread = _InThread()


def in_worker_thread() -> bool:
    """Return True in a worker of a loader that is a thread."""
    return _in_thread.info is not None


class _ThreadReplacements:
    """Replaces parts of torch while workers that are threads exist.

    ``get_worker_info()`` reads a global of its module, which threads share. Programs
    import the function by its name. So its code is replaced, and reads a thread-local
    value first. The entry of the public ``default_collate_fn_map`` is replaced as in
    worker processes: torch's function would allocate shared memory in a worker.
    """

    def __init__(self) -> None:
        self._lock, self._num_threads = threading.RLock(), 0
        self._code = data_worker.get_worker_info.__code__
        self._collate: Any = None

    def enter(self, collate: Any) -> None:
        with self._lock:
            self._num_threads += 1
            if self._num_threads > 1:
                return
            untyped: Any = data_worker
            untyped._pyparallel_thread = _in_thread
            data_worker.get_worker_info.__code__ = _get_worker_info.__code__
            functions = data_collate.default_collate_fn_map
            if functions.get(torch.Tensor) is data_collate.collate_tensor_fn:
                self._collate = functions[torch.Tensor] = collate

    def leave(self) -> None:
        with self._lock:
            self._num_threads -= 1
            if self._num_threads == 0:
                self._restore()

    def _restore(self) -> None:
        data_worker.get_worker_info.__code__ = self._code
        functions = data_collate.default_collate_fn_map
        if functions.get(torch.Tensor) is self._collate is not None:
            functions[torch.Tensor] = data_collate.collate_tensor_fn
        self._collate = None

    def forget(self) -> None:
        """Restore torch in a child of a fork, which has none of these threads."""
        self._lock = threading.RLock()
        _in_thread.info = None  # of a worker that forked
        if self._num_threads:
            self._num_threads = 0
            self._restore()


def _get_worker_info() -> Any:
    found = _pyparallel_thread.info  # type: ignore[name-defined]  # noqa: F821
    return _worker_info if found is None else found  # of torch's module


_replacements = _ThreadReplacements()
on_fork(in_child=_replacements.forget)


@contextmanager
def worker_thread(
    worker: int, num_workers: int, seed: int, dataset: Any, collate: Any
) -> Iterator[None]:
    """Make this thread a worker of a loader for the length of a block.

    ``collate`` stacks tensors in place of torch's ``collate_tensor_fn``. The other
    arguments are those of `set_worker_info`.
    """
    _replacements.enter(collate)
    _in_thread.info = _worker_info(worker, num_workers, seed, dataset)
    try:
        yield
    finally:
        _in_thread.info = None
        if _replacements is not None:  # else the interpreter exits
            _replacements.leave()


def is_split_along_rows(nested: Any) -> bool:
    """Return True if the first dimension of a jagged tensor is the ragged one."""
    return bool(getattr(nested, "_ragged_idx", None) == 1)


_PARTS: Mapping[torch.layout, tuple[str, ...]] = {
    # The public methods need a coalesced tensor.
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose memory a tensor uses: itself, unless it is sparse."""
    names = _PARTS.get(tensor.layout)
    if names is None:
        return [tensor]
    tensor = tensor.detach()
    return [getattr(tensor, name)() for name in names]


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    return tensor._version


def compiled_from(module: Any) -> Any:
    """Return the module that was passed to ``torch.compile``, or None."""
    return getattr(module, "_orig_mod", None)


def ignored_by_ddp(module: nn.Module) -> set[str]:
    """Return the names of the tensors that DDP ignores."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def without_recorded_graph(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a copied DDP, which has to record its static graph.

    torch copies the mark of a recorded graph, so the copy would reduce nothing.
    """
    return {**state, "_static_graph_delay_allreduce_enqueued": False}


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return True for a parameter of ``FullyShardedDataParallel``."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def flattened_in(
    module: nn.Module,
) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
    """Return the parameters that a module of ``FullyShardedDataParallel`` flattened.

    Returns:
        Its parameters, but not those of submodules of this class; the process group
        over which they are sharded, in a tuple that is empty without shards; the group
        whose ranks have the same shards, as a tuple.
    """
    handle: Any = vars(module).get("_handle")
    if getattr(handle, "flat_param", None) is None:
        return [], (), ()
    try:
        flat, is_sharded = handle.flat_param, handle.uses_sharded_strategy
        found = [flat, *(flat._params or ()), *(flat._shared_params or ())]
        shards = (handle.process_group,) if is_sharded else ()
    except AttributeError as error:
        raise RuntimeError(
            f"clip_grad needs {error.name} of FullyShardedDataParallel, but torch "
            f"{torch.__version__} lacks it. {_ADVICE}"
        ) from error
    replicas = vars(module).get("_inter_node_pg")
    return found, shards, () if replicas is None or not shards else (replicas,)


def seed_locks() -> list[Any]:
    """Return the Python locks that ``torch.manual_seed`` acquires.

    A fork during ``torch.manual_seed`` in another thread may leave one locked in the
    child, unless the forking thread holds them.
    """
    modules = (torch.cuda, torch.mtia, torch.xpu)
    locks = [getattr(module, "_initialization_lock", None) for module in modules]
    return [lock for lock in locks if lock is not None]
