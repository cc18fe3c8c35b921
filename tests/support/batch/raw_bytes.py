"""Tensors as arrays of bytes, and the expected results of `pad_copy`."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.batch.samples import DTYPES as DTYPES

LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "channels_last", "offset")


def random_items(rng, shape, dtype):
    """Random bytes of shape (*shape, itemsize); a bool is 0 or 1."""
    high = 2 if dtype == torch.bool else 256
    size = (*shape, dtype.itemsize)
    return rng.integers(0, high, size=size, dtype=np.uint8)


def to_tensor(items, dtype):
    """Return a contiguous tensor of these items."""
    shape = items.shape[:-1]
    flat = torch.from_numpy(np.ascontiguousarray(items).reshape(-1).copy())
    if flat.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    return flat.view(dtype).reshape(shape)


def lay_out(rng, items, dtype, layout):
    """Return a tensor with this layout and its items (``expanded`` changes them)."""
    ndim = items.ndim - 1
    if layout == "transposed":
        order = tuple(reversed(range(ndim)))
        return to_tensor(items.transpose(*order, ndim), dtype).permute(order), items
    if layout == "strided" and ndim:
        wide = random_items(rng, (*items.shape[:-2], items.shape[-2] * 2), dtype)
        wide[..., ::2, :] = items
        return to_tensor(wide, dtype)[..., ::2], items
    if layout == "expanded" and ndim and items.shape[0]:
        items = np.broadcast_to(items[:1], items.shape)
        return to_tensor(items[:1], dtype).expand(items.shape[:-1]), items
    if layout == "channels_last" and ndim:
        last = np.moveaxis(items, 0, ndim - 1)
        return to_tensor(last, dtype).movedim(-1, 0), items
    if layout == "offset":
        numel = int(np.prod(items.shape[:-1]))
        flat = np.concatenate(
            [random_items(rng, (3,), dtype), items.reshape(numel, dtype.itemsize)]
        )
        return to_tensor(flat, dtype)[3:].reshape(items.shape[:-1]), items
    return to_tensor(items, dtype), items


def bytes_of(tensor):
    if tensor.numel() == 0:
        return b""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def poisoned(shape, dtype):
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def padded(target, items, fills, itemsize, starts=None):
    """Return the bytes of a padded batch, computed without the library."""
    if len(fills) == itemsize:
        fills = fills * len(items)
    out = b""
    for index, sample in enumerate(items):
        fill = fills[index * itemsize : (index + 1) * itemsize]
        row = np.empty((*target, itemsize), dtype=np.uint8)
        row[...] = np.frombuffer(fill, dtype=np.uint8)
        row[place(sample.shape[:-1], starts and starts[index])] = sample
        out += row.tobytes()
    return out


def place(shape, start):
    start = start or (0,) * len(shape)
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))


def marked(shape, items, starts=None):
    """Return the bytes of a mask of this shape, computed without the library."""
    mask = np.zeros(shape, dtype=np.uint8)
    ndim = len(shape) - 1
    for index, sample in enumerate(items):
        start = starts and starts[index][-ndim:]
        mask[index][place(sample.shape[:-1][-ndim:], start)] = 1
    return mask.tobytes()
