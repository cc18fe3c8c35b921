"""Make one batch of a list of samples: ``collate``, ``pad_stack``, containers.

``collate`` walks the samples and makes a column of the values at each path. ``columns``
batches one column. ``plan`` computes the padded shape of a column, ``allocation``
provides the memory, and ``stack`` writes the samples into it by the backend or, where
torch's own rules apply, by ``torch_stack``. ``pad_stack`` starts at ``plan``.

``collate_fields`` makes the same pass with a rule of ``rules`` for each field, and
``padding_free`` adds the arguments of attention without padding.

``container``, ``padding`` and ``ragged`` have the classes of samples and batches, on
``tensor_fields``. ``unpad`` uses the sizes and the mask of a batch on outputs.
``pytree`` walks nested containers for all folders. ``custom_op`` is the operator that
torch.compile sees.
"""

__all__ = [
    "allocation",
    "collate",
    "collate_fields",
    "columns",
    "container",
    "custom_op",
    "options",
    "pad_stack",
    "padding",
    "padding_free",
    "padding_values",
    "plan",
    "pytree",
    "ragged",
    "rules",
    "stack",
    "tensor_fields",
    "torch_stack",
    "unpad",
]
