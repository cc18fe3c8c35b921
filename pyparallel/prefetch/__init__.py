"""Copy batches to the device ahead of the training step: ``PreDataLoader``.

A thread (`iterator.PrefetchThread`) iterates over the loader. It copies each batch to
the device on a copy stream (``_to_device``) and puts it into a queue.
`iterator.PrefetchIterator` takes batches from the queue for the training loop, whose
current stream waits for the copy. It ends the thread when the epoch ends, when it is
closed, or when it is collected. ``_workers`` ends waits for the workers of the loader.
``_accelerate`` tells accelerate about the batch of the loop, if it has prepared the
loader.
"""

__all__ = ["iterator", "pre_data_loader"]
