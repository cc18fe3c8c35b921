"""Make one normalised batch of images of different sizes, on the device.

``preprocessor`` checks the images and copies them to the device. ``_plan`` computes
sizes and constants. ``_batch`` runs the kernel of the backend, ``_custom_op`` is the
operator that torch.compile sees.
"""

__all__ = ["preprocessor"]
