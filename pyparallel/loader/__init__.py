"""Load batches: ``pyparallel.DataLoader``, its iterator, its state and its statistics.

The path of a batch, from the sampler to the loop:

1. `epoch.Epoch` is the iterator, for all kinds of workers. It draws the indices of a
   batch from the sampler and sends them as a task, so that each worker always has
   ``prefetch_factor`` of them. With ``num_workers=0`` it sends one task at a time.
2. ``workers`` takes the task to a worker process, in a socket of its own, or keeps it
   for the calling thread. It knows nothing about batches.
3. In the worker, `reader.Reader` runs the task. A fetcher of `fetchers` reads the
   samples: by index, or the next ones of a stream. It seeds each sample
   (``sample_seeds``), and `sample_errors` skips or replaces those that raise. Then the
   reader calls ``collate_fn``. Its answer is a batch, an error or the end of the data.
4. `messages` makes bytes of the answer. A small batch is in the message itself. The
   tensors of a large one are in a slab of the ring (``shm``), into which ``collate``
   has written them. `errors` packs an exception with its class and its attributes.
5. ``workers`` takes the bytes to the training process. For threads, `thread_reader`
   replaces steps 4 and 5: their tensors stay where they were written.
6. `epoch` takes the answers in the order of the tasks. `messages` makes the batch. Its
   large tensors are views of the slab, which is free again when they are gone.
7. Before the loop gets the batch, `_batch_receiver` counts it for `stats` and warns
   of a missed ring, and `_progress` notes the new position.

`state_dict` saves and restores this position: `_progress` of the epoch, from
`_sampler_state`, `_ranks`, `_dataset_state`, `_random_state` and, between two epochs,
`_loader_state`. `copies` keeps the arguments of a loader that another library copies.
`sample_random` has the generators of the sample that a thread reads.
`preflight` checks limits of the machine, `applied` finds the advice that was followed,
and `tracebacks` makes errors of a dataset readable.
"""

__all__ = [
    "applied",
    "copies",
    "data_loader",
    "epoch",
    "errors",
    "fetchers",
    "preflight",
    "reader",
    "sample_errors",
    "sample_random",
    "state_dict",
    "stats",
    "thread_reader",
    "tracebacks",
]
