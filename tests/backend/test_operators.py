"""`pad_copy`, `pack` and `views` of both backends, against an oracle over bytes.

test_pad_copy_places.py draws arguments of `pad_copy`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from backends import both, native, needs_native
from gil import others_run_during
from raw_bytes import (
    bytes_of,
    poisoned,
    random_items,
    to_tensor,
)
from repository import ROOT
from torch.multiprocessing.reductions import StorageWeakRef

pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


# ------------------------------------------------------------------------- pad_copy


@both
def test_pad_copy_writes_nothing_outside_dst(backend):
    whole = torch.full((100,), 9, dtype=torch.uint8)
    backend.pad_copy(
        whole[10:90].view(4, 20), [torch.ones(7, dtype=torch.uint8)] * 4, b"\0"
    )
    assert whole[:10].eq(9).all() and whole[90:].eq(9).all()
    assert whole[10:90].sum() == 28


@both
def test_pad_copy_records_no_gradient(backend):
    sample = torch.ones(2, requires_grad=True)
    dst = torch.empty(2, 3)
    backend.pad_copy(dst, [sample, torch.nn.Parameter(torch.ones(3))], bytes(4))
    assert not dst.requires_grad and dst.sum() == 5
    assert torch.is_grad_enabled()


# -------------------------------------------------------------------- pack and views


def planned(backend, leaves, offsets, nbytes):
    shapes = [leaf.shape for leaf in leaves]
    return backend.SlabPlan(offsets, shapes, [leaf.dtype for leaf in leaves], nbytes)


@both
def test_pack_of_large_leaves(backend):
    rng = np.random.default_rng(2)
    items = [random_items(rng, (n,), torch.uint8) for n in (1_000_001, 3, 2_000_003)]
    offsets = [64, 1_000_128, 1_000_192]
    leaves = [to_tensor(each, torch.uint8) for each in items]
    dst = poisoned((3_000_320,), torch.uint8)
    backend.pack(dst, leaves, planned(backend, leaves, offsets, 3_000_320))
    expected = bytearray(3_000_320)
    for offset, each in zip(offsets, items, strict=True):
        expected[offset : offset + len(each)] = each.tobytes()
    assert bytes_of(dst) == bytes(expected)


@both
def test_views_share_the_bytes_of_the_slab_and_have_no_history(backend):
    whole = torch.zeros(160, dtype=torch.uint8)
    dtypes = (torch.float32, torch.int64)
    plan = backend.SlabPlan([64, 128], [(2, 2), [0, 3]], dtypes, 128)
    view, empty = backend.views(whole[32:], plan)
    view.fill_(1)
    assert whole[96:112].view(torch.float32).tolist() == [1.0] * 4
    assert whole.count_nonzero() == 8
    assert view.data_ptr() == whole.data_ptr() + 96
    assert empty.shape == (0, 3)
    assert view.grad_fn is None and not view._is_view()
    assert view.requires_grad_().requires_grad


@both
def test_views_outlive_the_slab(backend):
    slab = torch.full((64,), 3, dtype=torch.uint8)
    (view,) = backend.views(slab, backend.plan_slab([slab]))
    del slab
    assert view.eq(3).all()


@both
def test_every_view_has_its_own_storage_that_cannot_grow(backend):
    leaves = [torch.arange(3.0), torch.arange(200), torch.empty(0, 2)]
    plan = backend.plan_slab(leaves)
    slab = torch.zeros(plan.nbytes, dtype=torch.uint8)
    backend.pack(slab, leaves, plan)
    views = backend.views(slab, plan)
    sizes = [view.untyped_storage().nbytes() for view in views]
    assert sizes == [leaf.nbytes for leaf in leaves]
    assert [view.storage_offset() for view in views] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
        views[0].resize_(4)
    assert torch.arange(200).equal(views[1])


@both
def test_weak_references_to_a_storage_do_not_keep_the_slab(backend):
    plan = backend.plan_slab([torch.ones(3)])
    slab = torch.zeros(64, dtype=torch.uint8)
    (view,) = backend.views(slab, plan)
    weak, whole = (StorageWeakRef(x.untyped_storage()) for x in (view, slab))
    del slab
    assert not whole.expired()
    del view
    assert weak.expired() and whole.expired()


@both
def test_the_memory_of_a_tensor_is_its_slab_or_its_storage(backend):
    leaves = [torch.ones(3), torch.ones(5)]
    plan = backend.plan_slab(leaves)
    whole = torch.zeros(plan.nbytes + 64, dtype=torch.uint8)
    first, last = backend.views(whole[64:], plan)
    for tensor in (first, last, last[2:], whole[70:], whole):
        memory = backend.memory_of(tensor)
        assert memory.dtype == torch.uint8 and memory.shape == whole.shape
        assert memory.data_ptr() == whole.data_ptr()
    assert backend.memory_of(leaves[1][2:]).data_ptr() == leaves[1].data_ptr()
    assert backend.memory_of(torch.empty(0, 2)).shape == (0,)
    moved = last.share_memory_()  # torch gives its storage other memory
    assert backend.memory_of(moved).data_ptr() == moved.data_ptr()
    assert backend.memory_of(moved).shape == (20,)
    with pytest.raises(TypeError, match=r"memory_of: tensor must be a torch\.Tensor"):
        backend.memory_of(3)
    with pytest.raises(TypeError, match="memory_of: tensor must be a plain strided"):
        backend.memory_of(torch.ones(2).to_sparse())


# ------------------------------------------------------------- processes and threads

FORK = """
import os, signal, torch
from pyparallel.backend import _C
samples = [torch.arange(900_000.0).reshape(3, 500, 600)] * 4
strided = [each.transpose(1, 2) for each in samples]
dst = torch.empty(4, 3, 600, 700)
def work():
    for each in (samples, strided):
        dst.fill_(5)
        _C.pad_copy(dst, each, bytes(4))
        for row, sample in zip(dst, each):
            h, w = sample.shape[1:]
            assert torch.equal(row[:, :h, :w], sample), "wrong samples"
            assert row.sum() == sample.sum() or row[:, h:].count_nonzero() == 0
torch.set_num_threads(2)
work()
child = os.fork()
if child == 0:
    signal.alarm(20)
    torch.set_num_threads = None
    _C.pad_copy(dst, samples, bytes(4))
    _C.pad_copy(dst, strided, bytes(4))
    same = dst[0, 2, 7, 11].item() == strided[0][2, 7, 11].item()
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
work()
"""


def run_python(code):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYPARALLEL_BACKEND": "python"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@needs_native
def test_a_forked_child_pads_after_its_parent_used_threads():
    done = run_python(FORK)
    assert done.returncode == 0, done.stderr


@needs_native
def test_large_copies_release_the_gil():
    samples = [torch.ones(8_000_000) for _ in range(4)]
    dst = torch.empty(4, 8_000_003)
    assert others_run_during(lambda: native.pad_copy(dst, samples, bytes(4)))


@needs_native
def test_samples_that_another_thread_sets_are_copied_whole():
    ones, twos = (torch.full((300, 400), float(value)) for value in (1, 2))
    samples = [torch.empty(0).set_(ones) for _ in range(8)]
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            for sample in samples:
                sample.set_(torch.full((300, 400), 1.0))
                sample.set_(twos)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(200):
            dst = torch.empty(8, 300, 401)
            native.pad_copy(dst, samples, bytes(4))
            for row in dst:
                assert row[0, 0] in (1, 2) and row[:, :400].eq(row[0, 0]).all()
    finally:
        stop.set()
        thread.join()
