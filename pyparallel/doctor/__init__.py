"""The command ``pyparallel doctor``: report the installation and test it.

``command`` collects the sections and prints the report. ``build``, ``packages`` and
``machine`` each return facts and problems. ``_one_process`` and ``_two_processes`` test
the installation, the second one by starting ``_rank`` twice. ``report`` formats values.
"""

__all__ = ["command"]
