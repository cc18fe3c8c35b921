"""Send batches from workers to their parent process in shared memory.

``ring`` holds the slabs of a loader. A worker claims a free slab, and ``serialization``
writes the tensors of a batch into it and pickles the rest. One short message names the
slab. The parent creates tensors over the slab, which is free again when they are gone.
``memfd`` creates shared memory without a file name. ``pinning`` pins the slabs, so that
copies to a device read them in place.
"""

__all__ = ["memfd", "pinning", "ring", "serialization"]
