"""Make one batch of samples: ``collate``, ``pad_stack``, containers.

``collate`` walks the samples (``pytree``) and makes a column of the values at each path
(``columns``). ``plan`` computes the padded shape of a column, ``allocation`` provides
the memory, and ``stack`` pads and stacks by the backend or, where torch's own rules
apply, by ``torch_stack``. ``container``, ``padding`` and ``ragged`` have the classes of
samples and batches. ``custom_op`` is the operator that torch.compile sees.
"""

__all__ = [
    "allocation",
    "collate",
    "columns",
    "container",
    "custom_op",
    "pad_stack",
    "padding",
    "padding_stats",
    "plan",
    "pytree",
    "ragged",
    "stack",
    "tensor_fields",
    "torch_stack",
]
