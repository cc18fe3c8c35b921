"""Facts and helpers that every other folder uses.

- ``errors``: error and warning classes, and helpers that format their messages.
- ``devices``: converts the devices that callers name to ``torch.device``.
- ``process``: runs functions at forks and at the exit of the interpreter.
- ``signals``: lets signal handlers wait while threads and processes start and end.
- ``fork_locks``: frees locks in forked processes.
- ``thread_state``: copies torch's modes from the caller's thread to another thread.
- ``torch_private``: every private name of torch that the package uses.
- ``versions``: the supported versions of Python and torch.
- ``tracing``: named ranges for profilers.
- ``stateful``: the protocol of states, for loaders and samplers.
- ``text``: numbers, times and sizes as text.
- ``cpu_time``: CPU time of processes, and the time that threads wait for a core.
- ``rlimits``: the limits of the process, or none on Windows.
"""

__all__ = [
    "cpu_time",
    "devices",
    "errors",
    "fork_locks",
    "process",
    "rlimits",
    "signals",
    "standard_streams",
    "stateful",
    "text",
    "thread_state",
    "torch_private",
    "tracing",
    "versions",
]
