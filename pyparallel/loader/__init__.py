"""Load batches: ``pyparallel.DataLoader``, its iterator, its state and its statistics.

The path of a batch, from the sampler to the loop:

1. `epoch.Epoch`, the iterator for all kinds of workers, draws the indices of a batch.
   It sends them as a task, so that each worker always has ``prefetch_factor`` of them.
2. ``workers`` takes the task to a process or a thread, or keeps it for the caller.
3. There, `reader.Reader` runs the task. A fetcher of `fetchers` reads the samples, and
   `sample_errors` skips or replaces those that raise. ``collate_fn`` makes the batch.
4. `messages` makes bytes of it. A small batch is in the message itself. The tensors of
   a large one are in a slab of the ring (``shm``), into which ``collate`` wrote them.
   `errors` packs an exception. The batches of a thread stay as they are
   (`thread_reader`).
5. ``workers`` takes the bytes back, and `messages` makes the batch of them. Its large
   tensors are views of the slab, which is free again when they are gone.
6. `epoch` delivers the answers in the order of the tasks. `_batch_receiver` counts each
   batch for `stats`, and `_progress` notes the new position.

`state_dict` saves and restores this position: `_progress` of the epoch, from
`_sampler_state`, `_ranks`, `_dataset_state`, `_random_state` and, between two epochs,
`_loader_state`. `_passes` watches subclasses that may read ahead of the loop. `copies`
keeps the arguments of a loader that another library copies. `sample_random` has the
generators of the sample that a thread reads. `preflight` checks limits of the machine,
`findings` finds the reason why batches come late, for the texts of `stats` and of the
profiler, and `applied` the advice that was followed. `tracebacks` makes errors of a
dataset readable. `draws` finds the batches with which a loader draws random numbers.
"""

__all__ = [
    "applied",
    "copies",
    "data_loader",
    "draws",
    "epoch",
    "errors",
    "fetchers",
    "findings",
    "preflight",
    "reader",
    "sample_errors",
    "sample_random",
    "state_dict",
    "stats",
    "thread_reader",
    "tracebacks",
]
