"""The part of the contract of ``_C.pyi`` that is about images."""

from collections.abc import Sequence

from torch import Tensor

def image_batch(
    dst: Tensor,
    images: Sequence[Tensor],
    mask: Tensor | None,
    mean: Sequence[float],
    std: Sequence[float],
    fill: Sequence[float],
    swap_channels: bool,
    exact: bool,
) -> None:
    """Write images into the low corners of ``dst``, normalised, and fill the rest.

    Of image i, channel c of ``dst[i]`` becomes ``(image[k] - mean[c]) / std[c]`` in
    float32, rounded to the dtype of ``dst`` (to the nearest, ties to even), where k is
    c, or C - 1 - c with ``swap_channels``. Everywhere else it becomes ``fill[c]``,
    rounded alike. All numbers are rounded to float32 first.

    Args:
        dst: ``(n, C, H, W)`` with C of 1 to 4, float32, float16 or bfloat16, contiguous
            or of the channels_last format.
        images: n tensors ``(C, h, w)``, h and w at most H and W, all uint8 or all
            float32, on the device of ``dst``. Each is contiguous, or a permuted view of
            a contiguous ``(h, w, C)``; none may overlap ``dst``.
        mask: contiguous ``torch.bool`` tensor ``(n, H, W)`` on the device of ``dst``,
            or None; must not overlap ``dst`` or an image. It becomes True where the
            images are and False elsewhere.
        mean: of every channel of ``dst``.
        std: of every channel of ``dst``.
        fill: of every channel of ``dst``.
        swap_channels: whether channels are read in the opposite order.
        exact: whether results have the very bits of torch's subtraction and division.
            Otherwise it is ``x * scale + bias`` (fused, or rounded in between), with
            ``scale = 1 / std`` and ``bias = -mean / std`` computed in float64 and
            rounded to float32: in float32 at most
            ``2**-22 * (abs(x) + abs(mean)) / abs(std)`` from the exact value.

    Raises:
        NotImplementedError: native only; ``dst`` is on a device not in `devices`.

    Stream: as `pad_copy`.
    """
