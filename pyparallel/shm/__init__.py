"""Send batches from workers to their parent in shared memory.

``ring`` has the slabs of a loader, and ``ring_memory`` their memory and their owners. A
worker writes the tensors of a batch into one slab and pickles the rest
(``serialization``). The parent makes tensors over the slab. ``memfd`` makes memory
without a file, ``pinning`` pins it for copies to a device.
"""

__all__ = ["memfd", "pinning", "ring", "ring_memory", "serialization"]
