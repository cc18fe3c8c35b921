"""Copy flat lists of tensors between the host and devices.

No container, ``DataContainer`` or path of a batch is known here: callers flatten and
rebuild. On the way to a device, ``layout`` decides which tensors are packed into one
slab and which are copied in place. ``to_device`` queues the copy (``engine``) and
returns views on the device. ``from_device`` packs on the device and copies to pinned
memory (``pinned_results``). ``between_devices`` copies differentiably. ``device`` is
the interface to torch's streams and events, ``debug`` checks sources with checksums.
"""

__all__ = [
    "between_devices",
    "debug",
    "device",
    "engine",
    "from_device",
    "layout",
    "pinned_results",
    "to_device",
]
