"""The command ``pyparallel doctor``: report the installation and test it.

``command`` collects the sections and prints them. ``build``, ``packages`` and
``machine`` return facts and problems. ``self_test`` runs the library in this process
and in two others. ``report`` formats the sections and the problems.
"""

__all__ = ["command"]
