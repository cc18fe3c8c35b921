"""Divide a batch among devices, and bring results back.

``scatter`` flattens a batch; ``split`` divides its leaves, ``move`` copies the parts to
their devices. ``gather`` joins results of several devices, ``to_host`` copies a batch
to the host. ``checks`` compares the structure of results.
"""

__all__ = ["checks", "gather", "move", "scatter", "split", "to_host"]
