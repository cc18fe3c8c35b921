"""Run a model on several devices or in several processes.

``data_parallel`` scatters the arguments, replicates the model (``replicate``), calls
the replicas in threads (``parallel_apply``) and gathers the results; ``_replica_steps``
combines the outputs of training steps. ``parallel_apply`` runs calls on the threads of
``_thread_pool``, each on its own stream of its device (``_device_threads``).
``distributed`` wraps torch's DistributedDataParallel and compares the models of all
ranks first. ``registry`` lists the classes that wrap a module.
"""

__all__ = [
    "data_parallel",
    "distributed",
    "parallel_apply",
    "registry",
    "replicate",
]
