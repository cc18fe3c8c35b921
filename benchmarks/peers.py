"""Peers: other libraries, if installed, and code written by hand."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree, cpp_extension

#: The import error of each missing package, by its name.
ABSENT: dict[str, str] = {}

COPIER = "multi_tensor_copier"
#: The C++ source of NVIDIA's multi_tensor_copier (ACCV-Lab): a file or a folder.
COPIER_SOURCE = "ACCVLAB_MULTI_TENSOR_COPIER"

#: Of images with values from 0 to 255.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

with warnings.catch_warnings():  # deprecations of the peers and their dependencies
    warnings.simplefilter("ignore")
    try:
        from mmcv.parallel import DataContainer as MmcvContainer
        from mmcv.parallel import collate as mmcv_collate
        from mmcv.parallel import scatter as mmcv_scatter
    except ImportError as error:
        MmcvContainer = mmcv_collate = mmcv_scatter = None
        ABSENT["mmcv"] = str(error)
    try:
        from mmengine.model.utils import stack_batch
    except ImportError as error:
        stack_batch = None
        ABSENT["mmengine"] = str(error)
    try:
        from tensordict import TensorDict
    except ImportError as error:
        TensorDict = None
        ABSENT["tensordict"] = str(error)


def give_mmcv_its_streams() -> None:
    """Fix copies of mmcv 1.7.2 to a GPU: torch no longer accepts its device number."""
    if mmcv_scatter is not None:
        functions = importlib.import_module("mmcv.parallel._functions")
        functions._get_stream = functools.cache(torch.cuda.Stream)


@functools.cache
def multi_tensor_copier() -> Callable[[Any, str], Any] | None:
    """Return ``start_copy`` of NVIDIA's multi_tensor_copier, or note the error.

    The function is compiled if `COPIER_SOURCE` is set, and imported otherwise.
    """
    try:
        path = os.environ.get(COPIER_SOURCE)
        package = f"accvlab.{COPIER}"
        module = _copier(Path(path)) if path else importlib.import_module(package)
        start_copy: Callable[[Any, str], Any] = module.start_copy
    except Exception as error:  # also of a compiler: others can be timed
        first = str(error).strip().partition("\n")[0]
        ABSENT[COPIER] = f"{type(error).__name__}: {first[:200]}"
        return None
    return start_copy


def _copier(path: Path) -> Any:
    """Compile the extension, with the defaults of its Python package."""
    sources = [path] if path.is_file() else sorted(path.rglob("csrc/*.cpp"))
    if not sources:
        raise FileNotFoundError(
            f"{COPIER_SOURCE} must be a C++ file or a folder with csrc/*.cpp, but is "
            f"{path}."
        )
    files = [str(source) for source in sources]
    return cpp_extension.load(
        f"accvlab_{COPIER}", files, extra_cflags=["-O3"], with_cuda=True
    )


def first_chunk(collate: Callable[..., Any], batch: Sequence[Any]) -> Tensor:
    """Return the tensor that a collate function makes of the whole batch."""
    result: Tensor = collate(batch, len(batch)).data[0]
    return result


def pad(sample: Tensor, target: Sequence[int], value: float) -> Tensor:
    """Return a sample padded at the end of its dimensions."""
    margins: list[int] = []
    for have, size in zip(reversed(sample.shape), reversed(target), strict=True):
        margins += [0, size - have]
    return F.pad(sample, margins, value=value)


def pad_then_stack(
    samples: Sequence[Tensor], target: Sequence[int], value: float
) -> Tensor:
    """Pad each sample, then stack: two passes over all data."""
    return torch.stack([pad(sample, target, value) for sample in samples])


def full_then_copy(
    samples: Sequence[Tensor], target: Sequence[int], value: float
) -> Tensor:
    """Fill the batch, then copy the samples in, as detectron2's ImageList does."""
    out = samples[0].new_full((len(samples), *target), value)
    for sample, slot in zip(samples, out, strict=True):
        slot[tuple(map(slice, sample.shape))].copy_(sample)
    return out


def nested_then_padded(
    samples: Sequence[Tensor], target: Sequence[int], value: float
) -> Tensor:
    """Make a nested tensor of the samples, and a padded tensor of it."""
    with warnings.catch_warnings():  # that the API is a prototype
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor(list(samples))
    return torch.nested.to_padded_tensor(nested, value, (len(samples), *target))


def numbers(device: Any) -> tuple[Tensor, Tensor]:
    """Return mean and deviation in a shape that broadcasts over an image."""
    mean, std = (torch.tensor(n, device=device).view(3, 1, 1) for n in (MEAN, STD))
    return mean, std


def normalise_each(
    images: Sequence[Tensor], target: Sequence[int], swap: bool = False
) -> Tensor:
    """Convert and normalise each image, then pad, as mmengine and torchvision do."""
    mean, std = numbers(images[0].device)
    if swap:
        images = [image.flip(0) for image in images]
    floats = [image.float().sub_(mean).div_(std) for image in images]
    return pad_then_stack(floats, target, 0)


@functools.cache
def mmengine_class() -> Any:
    """Return mmengine's preprocessor, or None with the reason in `ABSENT`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("mmengine.model").ImgDataPreprocessor
    except Exception as error:  # any failure with this version of torch
        ABSENT.setdefault("mmengine", f"{type(error).__name__}: {error}")
        return None


def mmengine_preprocessor(
    divisor: int, swap: bool, device: Any = "cpu"
) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Return mmengine's preprocessor of lists of images; None if it is missing."""
    kind = mmengine_class()
    if kind is None:
        return None
    made = kind(MEAN, STD, divisor, bgr_to_rgb=swap).to(device)
    return lambda images: made({"inputs": list(images)})["inputs"]


def contiguous(tree: Any) -> Any:
    """Return nested tensors, made contiguous: a scatter to the host written by hand."""
    if isinstance(tree, Tensor):
        return tree.contiguous()
    if isinstance(tree, dict):
        return {key: contiguous(value) for key, value in tree.items()}
    return type(tree)(map(contiguous, tree)) if isinstance(tree, list | tuple) else tree


def clone_each(tree: Any) -> Any:
    """Return nested tensors, each copied to its own memory."""
    return _pytree.tree_map(torch.clone, tree)


def cat_then_split(tree: Any) -> Any:
    """Return nested tensors, copied with one `torch.cat` for each dtype."""
    leaves, structure = _pytree.tree_flatten(tree)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(i)
    result: list[Any] = [None] * len(leaves)
    for places in by_dtype.values():
        flat = [leaves[i].reshape(-1) for i in places]
        parts = torch.cat(flat).split([part.numel() for part in flat])
        for i, part in zip(places, parts, strict=True):
            result[i] = part.view(leaves[i].shape)
    return _pytree.tree_unflatten(result, structure)


def in_mappings(tree: Any) -> Any:
    """Return nested tensors with lists and tuples as dicts, for a TensorDict."""
    if isinstance(tree, list | tuple):
        tree = {str(i): value for i, value in enumerate(tree)}
    if isinstance(tree, dict):
        return {key: in_mappings(value) for key, value in tree.items()}
    return tree


def out_of_mappings(mapping: Mapping[str, Any], like: Any) -> Any:
    """Undo `in_mappings`, with the containers of ``like``."""
    if isinstance(like, dict):
        return {key: out_of_mappings(mapping[key], like[key]) for key in like}
    if isinstance(like, list | tuple):
        values = [out_of_mappings(mapping[str(i)], x) for i, x in enumerate(like)]
        return type(like)(values)
    return mapping
