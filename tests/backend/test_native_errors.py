"""Complete error messages of `pad_copy` and of unsupported tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import both, check, last
from collate_errors import freed

pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.asan,
    # Warnings of torch about the tensors that are refused here.
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


class Wrapper(torch.Tensor):
    """A subclass whose bytes only its own code can reach."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nothing may be asked of it")


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


COMPLEX = torch.ones(2, dtype=torch.complex64)
SLAB = torch.zeros(64, dtype=torch.uint8)
MEMORY = torch.zeros(64)

PLAIN = "must be a plain strided tensor, but is"
DEFECTS = {
    "nested": (nested, "nested. Call unbind() on it first."),
    "sparse": (lambda: torch.ones(2).to_sparse(),
        "sparse or opaque. Call to_dense() on it first."),
    "csr": (lambda: torch.ones(2, 2).to_sparse_csr(),
        "sparse or opaque. Call to_dense() on it first."),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(),
        "sparse or opaque. Call to_dense() on it first."),
    "quantized": (quantized, "quantized. Call dequantize() on it first."),
    "wrapper": (Wrapper, "a wrapper. Unwrap it first."),
    "meta": (lambda: torch.empty(2, device="meta"),
        "on the meta device. Give it data first."),
    "conjugated": (COMPLEX.conj, "conjugated. Call resolve_conj() on it first."),
    "negated": (lambda: COMPLEX.conj().imag,
        "negated. Call resolve_neg() on it first."),
    "zero": (lambda: torch._efficientzerotensor(2),
        "a zero tensor. Call clone() on it first."),
}  # fmt: skip

PAD_COPY = [
    ([1], [], b"", TypeError, "dst must be a torch.Tensor, but is of type list."),
    (torch.ones(2, 2), 3, b"", TypeError,
     "samples must be a sequence of tensors, but is of type int."),
    (torch.ones(2, 2), [torch.ones(2), np.ones(2)], b"", TypeError,
     "samples[1] must be a torch.Tensor, but is of type ndarray."),
    (torch.ones(2, 2), [torch.ones(2)] * 2, "0000", TypeError,
     "fills must be bytes, but is of type str."),
    (torch.ones(2, 2), [torch.ones(2)] * 2, bytearray(4), TypeError,
     "fills must be bytes, but is of type bytearray."),
    (torch.ones(()), [], b"0000", ValueError,
     "dst must have at least 1 dimension, but has 0."),
    (torch.ones(2, 3).T, [torch.ones(2)] * 3, b"0000", ValueError,
     "dst must be contiguous, but has strides (1, 3) for shape (3, 2)."),
    (torch.ones(3, 2), [torch.ones(2)] * 2, b"0000", ValueError,
     "samples must have 3 entries, one for each row of dst, but has 2."),
    (torch.ones(3, 2), [torch.ones(2)] * 3, b"00000", ValueError,
     "fills must have 4 bytes, or 12 for one fill per sample, but has 5."),
    (torch.ones(3, 2), [torch.ones(2)] * 3, b"", ValueError,
     "fills must have 4 bytes, or 12 for one fill per sample, but has 0."),
    (freed(torch.empty(4)), [torch.ones(())] * 4, b"0000", ValueError,
     "dst must lie within its storage, but needs 16 bytes where 0 are left. Copy it "
     "before its storage is released."),
    (torch.ones(2, 2), [torch.ones(2), torch.ones(2).double()], b"0000", TypeError,
     "samples[1] must have the dtype of dst, torch.float32, but has torch.float64. "
     "Convert it first."),
    (torch.ones(1, 2), [torch.ones(1, 2)], b"0000", ValueError,
     "samples[0] must have 1 dimensions, as the rows of dst, but has shape (1, 2)."),
    (torch.ones(1, 2), [torch.ones(())], b"0000", ValueError,
     "samples[0] must have 1 dimensions, as the rows of dst, but has shape ()."),
    (torch.ones(3, 3, 4, 5), [torch.ones(3, 4, 5)] * 2 + [torch.ones(3, 6, 5)], b"0000",
     ValueError,
     "samples[2] must have at most shape (3, 4, 5), but has shape (3, 6, 5)."),
    (torch.ones(1, 4), [torch.ones(5)], b"0000", ValueError,
     "samples[0] must have at most shape (4,), but has shape (5,)."),
    (torch.ones(1, 4), [freed(torch.empty(4))], b"0000", ValueError,
     "samples[0] must lie within its storage, but needs 16 bytes where 0 are left. "
     "Copy it before its storage is released."),
    (torch.ones(1, 4), [freed(torch.empty(100)[10:90:20], 100)], b"0000", ValueError,
     "samples[0] must lie within its storage, but needs 284 bytes where 100 are left. "
     "Copy it before its storage is released."),
    (MEMORY[:8].view(2, 4), [torch.ones(4), MEMORY[7:9]], b"0000", ValueError,
     "samples[1] must not share memory with dst, but overlaps it. Clone it first."),
]  # fmt: skip


@both
@pytest.mark.parametrize("case", PAD_COPY, ids=last)
def test_pad_copy_refuses(backend, case):
    *args, error, message = case
    check(backend.pad_copy, args, error, f"pad_copy: {message}")


@both
@pytest.mark.parametrize("name", DEFECTS)
def test_every_tensor_must_be_plain(backend, name):
    make, words = DEFECTS[name]
    bad, good = make(), torch.ones(1, 2)
    message = f"{PLAIN} {words}"
    check(backend.pad_copy, (bad, [], b""), TypeError, f"pad_copy: dst {message}")
    args = (good, [bad], bytes(4))
    check(backend.pad_copy, args, TypeError, f"pad_copy: samples[0] {message}")
    plan = backend.plan_slab([good])
    check(backend.plan_slab, [[bad]], TypeError, f"plan_slab: leaves[0] {message}")
    check(backend.pack, (bad, [good], plan), TypeError, f"pack: dst {message}")
    check(backend.pack, (SLAB, [bad], plan), TypeError, f"pack: leaves[0] {message}")
    check(backend.views, (bad, plan), TypeError, f"views: slab {message}")


@both
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 4])
def test_a_tensor_reaches_to_the_last_byte_of_its_storage(backend, turned, missing):
    sample = torch.arange(20.0).view(4, 5)
    expected = (sample.t() if turned else sample).clone()
    if turned:
        sample.t_()
    plan = backend.plan_slab([sample])
    sample.untyped_storage().resize_(80 - missing)
    dst, slab = torch.zeros(1, *sample.shape), torch.zeros(plan.nbytes).byte()
    if not missing:
        backend.pad_copy(dst, [sample], bytes(4))
        assert dst[0].equal(expected)
        backend.pack(slab, [sample], plan)
        assert backend.views(slab, plan)[0].equal(expected)
        return
    message = (
        f"must lie within its storage, but needs 80 bytes where {80 - missing} are "
        "left. Copy it before its storage is released."
    )
    args = (dst, [sample], bytes(4))
    check(backend.pad_copy, args, ValueError, f"pad_copy: samples[0] {message}")
    args = (slab, [sample], plan)
    check(backend.pack, args, ValueError, f"pack: leaves[0] {message}")
    assert dst.eq(0).all() and slab.eq(0).all()


@both
def test_tensors_under_vmap_are_refused(backend):
    def inner(sample):
        backend.pad_copy(torch.ones(1, 2), [sample], bytes(4))
        return sample

    with pytest.raises(TypeError) as caught:
        torch.vmap(inner)(torch.ones(3, 2))
    text = f"pad_copy: samples[0] {PLAIN} a wrapper. Unwrap it first."
    assert str(caught.value) == text


@both
def test_an_error_of_the_sequence_itself_is_passed_on(backend):
    def broken():
        yield torch.ones(2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        backend.pad_copy(torch.ones(1, 2), broken(), bytes(4))
