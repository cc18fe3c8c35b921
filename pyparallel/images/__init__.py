"""Make one normalised batch of images of different sizes, on the device.

``preprocessor`` has the public module: it checks the images and copies them to the
device. ``_batch`` computes sizes and constants and runs the kernel of the backend, or
torch's operators for images that need gradients. ``_custom_op`` is the operator that
torch.compile sees.
"""

__all__ = ["preprocessor"]
