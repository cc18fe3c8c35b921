"""Send batches from workers to their parent process in shared memory.

`messages.pack` makes one short message of a batch. The tensors of a small batch are in
the message. Those of a larger one are in a slab of the loader's ring (``ring``), or in
new shared memory (``memfd``) if no slab is free. In the parent, `messages.unpack`
creates tensors over the slab, which is free again when they are gone. ``pinning`` pins
the slabs, so that copies to a device read them in place.
"""

__all__ = ["memfd", "messages", "pinning", "ring"]
