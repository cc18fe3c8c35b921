"""Copy flat lists of tensors between the host and devices.

This folder knows no container, no ``DataContainer`` and no path of a batch: callers
flatten batches and rebuild them. For a copy to a device, ``layout`` decides which
tensors are packed into one slab and which are copied in place. ``to_device`` queues the
copy through ``engine``, which keeps the sources alive, and returns views on the device.
``static`` copies into memory with fixed addresses instead. ``from_device`` packs on the
device and copies to pinned memory (``pinned_results``). ``between_devices`` makes
differentiable copies. ``device`` is the interface to torch's streams and events.
``debug`` verifies copies with checksums. ``gpu_record`` knows the GPUs on which the
self-test has passed.
"""

__all__ = [
    "between_devices",
    "debug",
    "device",
    "engine",
    "from_device",
    "gpu_record",
    "layout",
    "pinned_results",
    "static",
    "to_device",
]
