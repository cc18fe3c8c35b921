"""The contract of both backends; `_python.py` is its other implementation.

Errors read the same from both. ``TypeError``: an argument is of the wrong kind, also a
tensor that is nested, sparse, quantized, a wrapper (of torch.func, or with a
``__torch_dispatch__``), on the meta device, or has its conjugate or negative bit set.
``ValueError``: it is of the right kind and does not fit. Nothing is written unless all
arguments are good.

Gradients are neither used nor recorded. ``_C_image.pyi``, ``_C_memory.pyi`` and
``_C_transfer.pyi`` are parts of this.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from ._C_image import image_batch as image_batch
from ._C_memory import bound_cache as bound_cache
from ._C_memory import cache_info as cache_info
from ._C_memory import clear_cache as clear_cache
from ._C_memory import empty as empty
from ._C_memory import ring_claim as ring_claim
from ._C_memory import ring_format as ring_format
from ._C_memory import ring_holders as ring_holders
from ._C_memory import ring_pass as ring_pass
from ._C_memory import ring_reclaim as ring_reclaim
from ._C_transfer import RecordedEvent as RecordedEvent
from ._C_transfer import Runtime as Runtime
from ._C_transfer import bound_pinned as bound_pinned
from ._C_transfer import pinned_info as pinned_info
from ._C_transfer import send as send
from ._C_transfer import transfers as transfers

def pad_copy(
    dst: Tensor,
    samples: Sequence[Tensor],
    fills: bytes,
    starts: Sequence[Sequence[int]] | None = None,
    mask: Tensor | None = None,
) -> None:
    """Write samples into their places in ``dst`` and fill the rest.

    The native one writes every byte of ``dst`` and of ``mask`` exactly once. Bits are
    copied, whatever the dtype. Copies above 64 KiB release the GIL; other threads may
    meanwhile call ``set_`` on the samples, but not shrink their storages in place.

    Args:
        dst: contiguous, ``(n, *target)``.
        samples: n tensors with the dtype and device of ``dst``, each of at most shape
            ``target`` in as many dimensions. Any strides; none may overlap ``dst``.
        fills: the bytes of one item, or of one for each sample, in native order.
        starts: for each sample, one start per dimension of ``target``: sample i fills
            ``dst[i][start : start + size]`` in every dimension. None: all start at 0.
        mask: contiguous ``torch.bool`` tensor ``(n, *target[-k:])`` for some k of at
            least 1, on the device of ``dst``; must not overlap ``dst`` or a sample. It
            becomes True where the start and size of sample i in its last k dimensions
            place it, whatever its size in the others, and False elsewhere.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream:
        On a GPU the work is queued on the current stream of the device of ``dst``, and
        the samples may be released at once if they belong to that stream.
    """

def pad_few(
    samples: Sequence[Tensor], pad_dims: int | None, values: Sequence[object]
) -> Tensor | None:
    """Return samples padded at their ends and stacked, or None for `pad_copy` to do it.

    The native one always returns None: its one pass is fast for few samples too. The
    other one takes up to 16 plain contiguous CPU tensors of up to 16384 elements
    together, to be padded with 0 or 1, of which autograd wants nothing.

    Args:
        samples: at least one tensor.
        pad_dims: number of trailing dimensions that may differ, or None.
        values: padding value of every sample.
    """

def stack_equal(samples: Sequence[Tensor]) -> Tensor | None:
    """Return what ``torch.stack(samples)`` does, contiguous, or None.

    None means that there is more to it: `pad_copy`, or torch, must have a look. The
    native one stacks plain contiguous CPU tensors of one shape and dtype of which
    autograd wants nothing, a sixth of torch's time for many small ones. The other one
    stacks whatever torch stacks, but for quantized and meta tensors and freed memory.

    Args:
        samples: any number of anything.

    Raises:
        TypeError: native only; they are not tensors.
    """

class SlabPlan:
    """Where leaves lie in one slab: a frozen value.

    Plans of one backend compare and hash by value, pickle and print. That a plan is
    good is checked when it is made.

    Args:
        offsets: first byte of every leaf, ascending, multiples of 64, so that no leaf
            starts before the one before it ends.
        shapes: of the leaves.
        dtypes: of the leaves; not a quantized one.
        nbytes: size of the slab, a multiple of 64.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        nbytes: int,
    ) -> None: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def nbytes(self) -> int: ...

def plan_slab(leaves: Sequence[Tensor]) -> SlabPlan:
    """Plan the smallest slab for leaves of these shapes and dtypes.

    Args:
        leaves: tensors on any device, of any strides.
    """

def pack(dst: Tensor, leaves: Sequence[Tensor], plan: SlabPlan) -> None:
    """Write the bytes of leaves, in row-major order, into one slab on their device.

    All other bytes of the slab become zero. The GIL: as for `pad_copy`.

    Args:
        dst: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)``; on a GPU, the native
            one wants it at a multiple of 16 bytes.
        leaves: tensors on the device of ``dst`` with the shapes and dtypes of the plan,
            of any strides; none may overlap ``dst``.
        plan: where they go.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream:
        As for `pad_copy`. Natively one kernel packs the leaves (more from 169 leaves
        on, or 1363 where launches carry so much), behind one more for each leaf that is
        not contiguous.
    """

def views(slab: Tensor, plan: SlabPlan) -> list[Tensor]:
    """Return contiguous tensors on the bytes of ``slab``.

    They have no autograd history, and each that is not empty keeps the whole slab
    alive. On the CPU every tensor has a storage of its own, of its own size and not
    resizable. On other devices they share the storage of ``slab``, because
    ``Tensor.record_stream`` ignores every other storage. In pure Python they also share
    it on pinned memory of torch's allocator.

    Args:
        slab: contiguous ``torch.uint8`` tensor ``(plan.nbytes,)`` on any device.
        plan: the places of the tensors.
    """

def memory_of(tensor: Tensor) -> Tensor:
    """Return all bytes of the memory of a tensor as ``torch.uint8`` ``(nbytes,)``.

    The memory is the slab of a tensor that `views` returned, and else the storage.
    """

def columns(dicts: list[Any], stack: bool) -> dict[Any, list[Any] | Tensor] | None:
    """Return for every key the values of all dicts, or None.

    None means that somebody must have a closer look. The native one takes dicts (of
    exactly that class) with the same keys in the same order. The other one takes none.

    Args:
        dicts: exactly a list.
        stack: whether values that `stack_equal` takes, up to 64 KiB of them, are to be
            stacked at once: then there is a tensor in place of their list.

    Raises:
        TypeError: native only; ``dicts`` is not a list.
    """

class Structure:
    """The containers of a nest: a frozen value. Native only.

    Structures compare, hash and print by value; the order in which keys were inserted
    into dicts is kept, but does not count.
    """

    @property
    def num_leaves(self) -> int: ...
    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Return new containers around leaves, with keys in the order of insertion.

        Raises:
            ValueError: there are not `num_leaves` of them.
        """

def flatten(
    tree: Any, leaf_types: AbstractSet[type]
) -> tuple[list[Any], Structure] | None:
    """Return the leaves of a nest and its structure, or None.

    None means that optree must do it. The native one walks dicts in the order of their
    sorted keys. It takes nests whose containers are all exactly dict (with keys that
    are all exactly str, or all exactly int), list or tuple, at most 200 deep. The other
    one takes none.

    Args:
        tree: anything.
        leaf_types: a set of the classes that are leaves. An object of another class
            might be a container.

    Raises:
        TypeError: native only; ``leaf_types`` is not a set.
    """

def devices() -> tuple[str, ...]:
    """Return the device types that this build has kernels for, ``"cpu"`` first.

    Native only, as are `transfers` and `build_info`.
    """

def build_info() -> dict[str, str]:
    """Return what the extension was built with.

    Keys: ``version``, ``torch``, ``cuda`` (empty in a CPU build), ``compiler``,
    ``cxx_standard`` (``"17"``), ``archs``, ``sanitize`` (empty but in tests).
    """
