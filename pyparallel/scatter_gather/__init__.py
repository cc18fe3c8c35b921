"""Divide a batch among devices, and bring results back.

``scatter`` flattens a nested batch into leaves. ``split`` divides the leaves among the
targets. ``move`` starts all copies through ``transfer``, and then ``scatter`` rebuilds
the batch for each target. ``gather`` does the opposite: it checks that the outputs of
all replicas have one structure (``checks``), copies them to one device and joins them.
``to_host`` copies a nested batch to the host in one copy per device.
"""

__all__ = ["checks", "gather", "move", "scatter", "split", "to_host"]
