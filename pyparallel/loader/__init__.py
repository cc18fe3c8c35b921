"""Load batches: ``pyparallel.DataLoader``, its workers, its state and its statistics.

``data_loader`` is torch's loader with our iterators (``_iterators``). A worker collates
into shared memory (``_worker``); ``worker_monitor`` reports workers that die or hang.
``state_dict`` saves and restores the position, from the states of the sampler
(``_sampler_state``) and the dataset (``_dataset_state``). ``preflight`` checks limits
of the machine before workers start, ``stats`` measures.
"""

__all__ = [
    "data_loader",
    "preflight",
    "state_dict",
    "stats",
    "tracebacks",
    "worker_monitor",
]
