"""Storages of views, and the operators beside threads and forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.support.processes.backends import both, native, needs_native
from tests.support.processes.gil import others_run_during
from tests.support.repository.folders import ROOT, python_path

pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.one_backend,
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


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
def test_a_forbidden_tensor_raises_and_its_slab_does_not(backend):
    slab = torch.zeros(64, dtype=torch.uint8)
    plan = backend.plan_slab([torch.ones(3)])
    (ended,), (alive,) = backend.views(slab, plan), backend.views(slab, plan)
    backend.forbid_use([ended], "it has ended")
    for use in (torch.sum, torch.Tensor.tolist, torch.Tensor.data_ptr, repr):
        with pytest.raises(RuntimeError, match=r"^it has ended"):
            use(ended)
    assert alive.tolist() == [0, 0, 0] and slab.sum() == 0
    text = r"forbid_use: tensors\[1\] must be a torch\.Tensor, but is of type int"
    with pytest.raises(TypeError, match=text):
        backend.forbid_use([alive, 3], "it has ended")
    assert alive.sum() == 0


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
    env = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT),
        "PYPARALLEL_BACKEND": "python",
    }
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
    assert others_run_during(lambda: native.stack_equal(samples))


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
