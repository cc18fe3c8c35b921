"""Complete messages of all errors of sending."""

from __future__ import annotations

import pytest
import torch
from backends import check, last, native, needs_native
from host_device import COPIES, MAIN, SIDE, HostStream

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan, needs_native]

LEAF = torch.ones(4)

SLAB = torch.zeros(64, dtype=torch.uint8)
BYTES = torch.zeros(16, dtype=torch.uint8)
FAR = HostStream(0, 0, device_type=1)
SENDS = [
    ({"stream": 3}, TypeError,
     "send: stream must be a torch.Stream, but is of type int."),
    ({"home": None}, TypeError,
     "send: home must be a torch.Stream, but is of type NoneType."),
    ({"stream": HostStream(0, device_type=14)}, NotImplementedError,
     "send: stream must be of a device type in transfers(), but is of 'meta'."),
    ({"home": FAR}, ValueError,
     "send: home must be on cpu, the device of stream, but is on cuda:0."),
    ({"chunk_nbytes": 0}, ValueError,
     "send: chunk_nbytes must be between 1 and 4194304, but is 0."),
    ({"leaves": [3]}, TypeError,
     "send: leaves[0] must be a torch.Tensor, but is of type int."),
    ({"leaves": []}, ValueError,
     "send: leaves must have 1 entries, as planned, but has 0."),
    ({"plan": 3}, TypeError, "send: plan must be a SlabPlan, but is of type int."),
    ({"slab": SLAB[:32]}, ValueError,
     "send: slab must have 64 bytes, as planned, but has 32."),
    ({"slab": SLAB, "leaves": [SLAB[:16].view(torch.float32)]}, ValueError,
     "send: leaves[0] must not share memory with dst, but overlaps it. Clone it "
     "first."),
    ({"targets": [BYTES]}, ValueError,
     "send: targets must have 0 entries, as sources, but has 1."),
    ({"targets": [BYTES], "sources": [LEAF[::2]]}, ValueError,
     "send: sources[0] must be contiguous, but has shape (2,) and strides (2,)."),
    ({"targets": [BYTES], "sources": [LEAF[:2]]}, ValueError,
     "send: targets[0] must have 8 bytes, as its source, but has 16."),
    ({"targets": [BYTES], "sources": [BYTES]}, ValueError,
     "send: sources[0] must not share memory with dst, but overlaps it. Clone it "
     "first."),
    ({"targets": [BYTES], "sources": [BYTES.to("meta")]}, TypeError,
     "send: sources[0] must be a plain strided tensor, but is on the meta device. Give "
     "it data first."),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), SENDS, ids=map(last, SENDS))
def test_bad_arguments_are_named_and_nothing_is_written(changes, error, message):
    good = {
        "slab": SLAB.clone(),
        "leaves": [LEAF],
        "plan": native.plan_slab([LEAF]),
        "targets": [],
        "sources": [],
        "stream": COPIES,
        "home": MAIN,
    }
    native.send(**good)
    good["slab"].zero_()
    check(lambda: native.send(**{**good, **changes}), (), error, message)
    assert not good["slab"].any() and not BYTES.any()


def test_a_sent_batch_refuses_a_stream_of_another_device_type():
    sent = native.send(
        SLAB.clone(), [LEAF], native.plan_slab([LEAF]), [], [], COPIES, MAIN
    )
    assert sent.is_done() and sent.check() is None and sent.wait(SIDE) is None
    check(
        sent.wait,
        (FAR,),
        ValueError,
        "RecordedEvent.wait: stream must be of 'cpu', but is of 'cuda'.",
    )
