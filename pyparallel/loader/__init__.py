"""Load batches: ``pyparallel.DataLoader``, its workers, its state and its statistics.

`data_loader` extends torch's loader, and `_iterators` extends torch's two iterators. In
a worker, `_worker` collates the samples of a batch into a slab of the ring (``shm``)
and sends one message. `_batch_receiver` in the parent returns views of that slab.

- `worker_monitor` and `_worker_status` detect workers that died or hang.
- `state_dict` saves and restores the position: `_progress` of the epoch, from
  `_sampler_state`, `_ranks`, `_dataset_state`, `_random_state` and, between two epochs,
  `_loader_state`.
- `sample_errors` skips or replaces samples that raise. Where the dataset is read,
  `_sample_reader` seeds samples and calls it.
- `copies` keeps the arguments of a loader that another library copies.
- `preflight` checks limits of the machine, `stats` measures, `applied` finds the advice
  that was followed, and `tracebacks` makes errors of a dataset readable.
"""

__all__ = [
    "applied",
    "copies",
    "data_loader",
    "preflight",
    "sample_errors",
    "state_dict",
    "stats",
    "tracebacks",
    "worker_monitor",
]
