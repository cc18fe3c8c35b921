"""Where a step's time goes: recorded in all processes of a script, summed, drawn.

``watch`` runs inside the script and writes down when what happened; ``record`` makes
one value of all that; ``summary`` and ``advice`` say what it means; ``drawing``,
``charts`` and ``page`` show it; ``report`` and ``command`` put that together.
"""
