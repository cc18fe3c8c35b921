"""Run a model on several devices or in several processes.

``data_parallel`` scatters inputs, copies the model (``replicate``), runs the copies in
threads (``parallel_apply``, ``_device_threads``, ``_thread_pool``) and gathers the
results. ``distributed`` wraps torch's DistributedDataParallel. ``registry`` has the
classes of module wrappers.
"""

__all__ = [
    "broadcast",
    "data_parallel",
    "distributed",
    "parallel_apply",
    "registry",
    "replicate",
]
