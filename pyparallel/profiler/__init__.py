"""Record the steps of a training script, and report where their time goes.

``profile`` records a block of code, ``command`` a whole script. Both use ``hooks``,
which replaces methods of the loaders, so that they call a ``recorder``. Every process
writes its events into a file. ``record`` merges these files into a value with two
forms: JSON, and a trace for Perfetto. ``summary`` divides its steps into parts,
``advice`` recommends changes from the findings of `loader.findings`, which
`LoaderStats` uses too, and ``prediction`` estimates their effect from the measurements
of ``trial``. ``report`` writes the files, and ``charts`` draws with matplotlib.
"""

__all__ = ["command", "hooks", "profile"]
