"""pad_stack: its arguments, recycled results, and the use of torch's operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pyparallel import ImagePreprocessor, Padded, Padding, collate, pad_stack
from pyparallel.batch import padding_values
from tests.support.processes.backends import both, last, native, needs_native, using
from tests.support.processes.python_steps import steps

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]

RAGGED = [torch.arange(1.0, 3), torch.arange(1.0, 4)]


@both
def test_a_promoted_result_is_written_too(backend: ModuleType) -> None:
    block = torch.empty(2, 3, dtype=torch.float64)
    mixed = [RAGGED[0], RAGGED[1].double()]
    with using(backend):
        assert pad_stack(mixed, padding_value=0.5, out=block) is block
    assert block.tolist() == [[1, 2, 0.5], [1, 2, 3]]


@both
def test_autograd_notices_that_a_saved_out_has_changed(backend: ModuleType) -> None:
    weight, block = torch.ones((), requires_grad=True), torch.zeros(2, 3)
    with using(backend):
        pad_stack(RAGGED, out=block)
        loss = (weight * block).sum()
        pad_stack(RAGGED, out=block)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            assert pad_stack(RAGGED, out=INFERENCE).tolist() == block.tolist()


def batches(one: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    """Return batches that every writing operator of the backend makes."""
    padded: Any = pad_stack([one, other], sizes=True, mask=True, padding_value=3)
    images = ImagePreprocessor(1, 2)([one[None, None], other[None, None]])
    return [*padded.fields(), images, *collate([{"x": other}] * 2).values()]


@both
@pytest.mark.parametrize("record", ["jit.trace", "make_fx"])
@pytest.mark.filterwarnings("ignore")  # that a graph is for one shape
def test_a_recorded_graph_makes_batches_of_new_values(
    backend: ModuleType, record: str
) -> None:
    new = [each * 5 for each in RAGGED]
    padding_values._convert_double.cache_clear()
    with using(backend):
        graph: Any
        if record == "make_fx":
            graph = make_fx(batches)(*RAGGED)
        else:
            graph = torch.jit.trace(batches, tuple(RAGGED), check_trace=False)
        assert all(map(torch.equal, graph(*new), batches(*new)))


def test_tensors_without_values_are_padded() -> None:
    padding_values._convert_double.cache_clear()
    with FakeTensorMode():
        fakes = batches(torch.ones(2), torch.ones(3))
    assert [type(each).__name__ for each in fakes] == ["FakeTensor"] * 5
    expected = batches(*RAGGED)
    assert [each.shape for each in fakes] == [each.shape for each in expected]
    padding_values._convert_double.cache_clear()
    found = torch.func.functionalize(batches)(*RAGGED)
    assert all(map(torch.equal, found, expected))


class Named(torch.Tensor):
    """A subclass that only has another name."""


LARGE = torch.empty(3, 3)
with torch.inference_mode():
    INFERENCE = torch.empty(2, 3)
WRONG_OUTS: list[tuple[Any, list[torch.Tensor], type[Exception], str]] = [
    (torch.empty(2, 4), RAGGED, ValueError,
     "out must have the shape of the result, (2, 3), but has (2, 4)."),
    (torch.empty(2, 3).int(), RAGGED, ValueError,
     "out must have the dtype of the result, torch.float32, but has torch.int32."),
    (torch.empty(2, 3, device="meta"), RAGGED, ValueError,
     "out must have the device of the result, cpu, but has meta."),
    (torch.empty(3, 2).t(), RAGGED, ValueError,
     "out must be contiguous, but has strides (1, 2). Call contiguous()."),
    (torch.empty(2, 3).to_sparse(), RAGGED, ValueError,
     "out must be contiguous, but has torch.sparse_coo. Call contiguous()."),
    ([1], RAGGED, TypeError,
     "out must be a plain tensor with out=, but is of type list and dtype None."),
    (torch.empty(2, 3), [RAGGED[0].as_subclass(Named), RAGGED[1]], TypeError,
     f"samples[0] must be a plain tensor with out=, but is of type {__name__}.Named "
     "and dtype torch.float32."),
    (torch.empty(2, 3), [RAGGED[0], torch.ones(3, requires_grad=True)], ValueError,
     "samples[1] must not require grad with out=, because autograd cannot record it, "
     "but it does. Detach it, or omit out=."),
    (torch.empty(2, 3, requires_grad=True), RAGGED, ValueError,
     "out must not require grad with out=, because autograd cannot record it, but it "
     "does. Detach it, or omit out=."),
    (INFERENCE, RAGGED, ValueError,
     "out must not be an inference tensor outside inference mode, because autograd "
     "could miss the change, but it is. Clone it."),
    (LARGE[:2], [torch.ones(3), LARGE[1]], ValueError,
     "out must not share memory with samples[1], but overlaps it. Clone the sample, or "
     "pass another out."),
]  # fmt: skip


@both
@pytest.mark.parametrize("case", WRONG_OUTS, ids=last)
def test_an_out_that_cannot_be_written_is_refused(
    backend: ModuleType, case: Any
) -> None:
    out, tensors, cls, message = case
    with using(backend), pytest.raises(cls) as caught:
        pad_stack(tensors, out=out)
    assert str(caught.value) == f"pad_stack: {message}"


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (5, {}, TypeError, "samples must be a sequence of tensors, but is int."),
    ("ab", {}, TypeError, "samples must be a sequence of tensors, but is str."),
    ([], {}, ValueError, "samples must have at least one tensor, but is empty."),
    ([RAGGED[0], 5], {}, TypeError,
     "samples[1] must be a tensor or a numeric array, but is int. Convert it with "
     "torch.as_tensor."),
    (RAGGED, {"padding": 32}, TypeError, "padding must be a Padding, but is 32 (int)."),
    (RAGGED, {"padding": Padding(), "mask": True}, TypeError,
     "padding must not be given together with its options, but mask is also given. Put "
     "it into the Padding."),
    ([torch.ones(1, 2), torch.ones(2, 2)], {"pad_dims": 1}, ValueError,
     "samples[1] must match samples[0] outside its last dimension, but has shape "
     "(2, 2) where (1, 2) was expected. Make the samples equal in dimension 0, or pad "
     "it too with pad_dims=2."),
    (RAGGED, {"pad_dims": -1}, ValueError,
     "pad_dims must be None or an integer of 0 or more, but is -1."),
    (RAGGED, {"pad_dims": 1.0}, TypeError,
     "pad_dims must be None or an integer of 0 or more, but is 1.0 (float)."),
    (RAGGED, {"shape": (4, 4)}, ValueError,
     "padding must give shape for 1 padded dimension, but gives (4, 4). Give 1 of "
     "them."),
]  # fmt: skip


@pytest.mark.parametrize("tensors, flags, cls, message", WRONG)
def test_wrong_arguments_are_refused(
    tensors: Any, flags: dict[str, Any], cls: type[Exception], message: str
) -> None:
    with pytest.raises(cls) as caught:
        pad_stack(tensors, **flags)
    name = "" if "must match" in message else "pad_stack: "
    assert str(caught.value) == name + message


@both
def test_tensors_that_are_not_plain_obey_the_options_too(backend: ModuleType) -> None:
    options: dict[str, Any] = {"side": "left", "size_divisor": 4, "mask": True}
    options |= {"sizes": True, "padding_value": 5}
    z = torch.tensor([1 + 2j, 3 - 4j])
    with warnings.catch_warnings(), using(backend):
        warnings.simplefilter("ignore")  # torch calls quantized tensors deprecated
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
        for sample, values in (
            (torch.ones(2).as_subclass(Named), [1, 1]),
            (z.conj(), [1 - 2j, 3 + 4j]),
            (z.conj().imag, [-2, 4]),
            (torch._efficientzerotensor((2,)), [0, 0]),
            (quantized, [1, 1]),
        ):
            got = pad_stack([sample], **options)
            assert type(got) is Padded and type(got.data) is torch.Tensor
            data = got.data.dequantize() if got.data.is_quantized else got.data
            assert data.tolist() == [[5, 5, *values]]
            assert got.mask.tolist() == [[False, False, True, True]]
            assert type(got.mask) is torch.Tensor
            assert got.sizes.tolist() == [[2]]
            unpadded = pad_stack([sample, sample], mask=True)
            assert unpadded.mask.tolist() == [[True, True]] * 2


def test_unequal_leading_dims_pad_by_default() -> None:
    got = pad_stack([torch.ones(1, 2), torch.ones(2, 1)], padding_value=7)
    assert got.tolist() == [[[1, 1], [7, 7]], [[1, 7], [1, 7]]]


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        got = pad_stack(RAGGED, mask=True, sizes=True)
        wide = pad_stack([x.to(torch.complex128) for x in RAGGED], padding_value=2)
    assert wide.tolist() == [[1, 2, 2], [1, 2, 3]]
    assert [each.device.type for each in got.fields()] == ["cpu"] * 3
    assert got.sizes.tolist() == [[2], [3]]
    far = pad_stack([x.to("meta") for x in RAGGED], side="left", mask=True)
    assert [each.device.type for each in far.fields()[::2]] == ["meta"] * 2
    assert far.data.shape == (2, 3)


NORMALIZE: dict[str, Any] = {"mean": 1.5, "std": 2, "size_divisor": 4}


@needs_native
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(pad_stack, id="pad_stack"),
        pytest.param(partial(pad_stack, mask=True, size_divisor=4), id="mask"),
        pytest.param(ImagePreprocessor(**NORMALIZE), id="images"),
        pytest.param(ImagePreprocessor(return_mask=True), id="images with mask"),
    ],
)
def test_no_python_code_runs_for_each_sample(call: Callable[[Any], Any]) -> None:
    ragged = [torch.zeros(3, 5 + i % 3, 7, dtype=torch.uint8) for i in range(60)]
    with using(native):
        call(ragged)  # caches
        assert steps(lambda: call(ragged[:6])) == steps(lambda: call(ragged))
