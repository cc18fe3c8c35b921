"""Run a program on tasks, in the calling thread, in threads or in worker processes.

`interface` is the common part of all kinds, and the calling thread as a worker.
`threads` has two queues for each worker, and `processes` has one socket for each. A
worker answers its tasks one by one, in the order in which they were sent. So an answer
needs no number, and the pending tasks of a loader are one queue of worker numbers.

A task of a process passes `processes` (pickled in the caller's thread), `_channel` (a
framed message with descriptors), and `_run` in the worker. The answer returns the same
way. `descriptors` pickles objects that own descriptors, `_start` starts processes and
leaves nothing open if that fails, and `deaths` describes workers that died or hang.
"""

__all__ = ["deaths", "descriptors", "interface", "processes", "threads"]
