"""Copy batches to the device ahead of the step: ``PreDataLoader``.

A thread (``_thread``) reads a loader. It copies each batch to the device on a copy
stream (``_to_device``) and queues it. ``iterator`` gives the batches to the training
loop, whose stream waits for the copy.
"""

__all__ = ["iterator", "pre_data_loader"]
