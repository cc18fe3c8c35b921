"""The functions of ``mmcv.parallel._functions``, for code that calls or patches them.

pyparallel itself does not use them, because its `scatter` copies packed slabs. Existing
code imports them, and replaces ``Scatter.forward`` or ``_get_stream`` to repair mmcv on
recent versions of torch. Such a replacement still works here, but is not necessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend.plain import check_storage
from ..core.errors import BatchTypeError, BatchValueError, type_name
from ..scatter_gather.split import partition
from ..transfer.device import torch_device


def _get_stream(device: torch.device | int) -> Any:
    """Return the background copy stream of a device; None for the host."""
    device = _device(device)
    return None if device.type == "cpu" else torch_device.copy_stream(device)


def get_input_device(input: Any) -> int:
    """Return the index of the device of the first device tensor, or -1 without one.

    Raises:
        TypeError: ``input`` is neither a tensor nor a list (mmcv: ``Exception``).
    """
    if isinstance(input, list):
        for item in input:
            device = get_input_device(item)
            if device != -1:
                return device
        return -1
    if isinstance(input, Tensor):
        return input.get_device()
    raise _unknown_type_error(input)


def scatter(
    input: Any, devices: Sequence[int], streams: Sequence[Any] | None = None
) -> Any:
    """Copy a tensor to ``devices[0]``, or split a list evenly between the devices.

    Args:
        input: a tensor or a nest of lists of tensors.
        devices: CUDA indices; ``[-1]`` is the host.
        streams: one copy stream for each device, or None for the current streams.

    Returns:
        The tensor on its device, or the list of items on their devices.

    Raises:
        TypeError: ``input`` contains anything but tensors and lists (mmcv:
            ``Exception``).
        ValueError: no devices, another number of streams, or a tensor without memory.

    Stream: copies are queued on ``streams``; see `synchronize_stream`.
    """
    if streams is None:
        streams = [None] * len(devices)
    _check_streams("scatter", devices, streams)
    if isinstance(input, list):
        return [
            scatter(item, [devices[part]], [streams[part]])
            for item, part in _assign_parts(input, len(devices))
        ]
    if not isinstance(input, Tensor):
        raise _unknown_type_error(input)
    check_storage(input, lambda: "scatter: input")
    output = input.contiguous()
    if list(devices) == [-1]:
        return output
    device = _device(devices[0])
    if streams[0] is None or not output.numel():
        return output.to(device, non_blocking=True)
    with torch.get_device_module(device).stream(streams[0]):
        return output.to(device, non_blocking=True)


def synchronize_stream(
    output: Any, devices: Sequence[int], streams: Sequence[Any]
) -> None:
    """Make the current stream of every device wait for its copies.

    The items of a list are assigned to the devices as in `scatter`. mmcv does not
    synchronize the last items.

    Raises:
        TypeError: ``output`` contains anything but tensors and lists (mmcv:
            ``Exception``).
        ValueError: no devices, or another number of streams.
    """
    _check_streams("synchronize_stream", devices, streams)
    if isinstance(output, list):
        for item, part in _assign_parts(output, len(devices)):
            synchronize_stream(item, [devices[part]], [streams[part]])
    elif isinstance(output, Tensor):
        if output.numel() and streams[0] is not None:
            device = _device(devices[0])
            current = torch.get_device_module(device).current_stream(device)
            current.wait_stream(streams[0])
            output.record_stream(current)
    else:
        raise _unknown_type_error(output)


class Scatter:
    """Copies the chunks of a DataContainer to devices, on background streams."""

    @staticmethod
    def forward(target_gpus: Sequence[int], input: Any) -> tuple[Any, ...]:
        """Return the chunks on their devices, as a tuple.

        Args:
            target_gpus: CUDA indices; ``[-1]`` is the host.
            input: a list with one chunk for each device, or one tensor.
        """
        streams = None
        if get_input_device(input) == -1 and list(target_gpus) != [-1]:
            streams = [_get_stream(_device(device)) for device in target_gpus]
        outputs = scatter(input, target_gpus, streams)
        if streams is not None:
            synchronize_stream(outputs, target_gpus, streams)
        return tuple(outputs) if isinstance(outputs, list) else (outputs,)


def _device(device: torch.device | int) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else device


def _assign_parts(items: Sequence[Any], num_parts: int) -> Iterator[tuple[Any, int]]:
    """Yield every item with the index of its part."""
    start = 0
    for part, size in enumerate(partition(len(items), num_parts)):
        for item in items[start : start + size]:
            yield item, part
        start += size


def _check_streams(where: str, devices: Sequence[Any], streams: Sequence[Any]) -> None:
    if not devices or len(streams) != len(devices):
        raise BatchValueError(
            f"{where}: devices and streams must have the same length, at least 1, but "
            f"have {len(devices)} and {len(streams)}."
        )


def _unknown_type_error(value: Any) -> BatchTypeError:
    return BatchTypeError(
        f"Unknown type {type_name(value)}: a chunk of a DataContainer must be made of "
        "tensors and lists. Use DataContainer(..., cpu_only=True) for other values."
    )
