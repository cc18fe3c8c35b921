"""Batches in fixed memory: each kind of batch, by both entry points, on each device."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, Padded, PreDataLoader, StaticBatches, scatter
from pyparallel import backend as operators
from pyparallel.batch.container import map_tensors
from pyparallel.transfer import debug
from tests.support.batch.batch_kinds import ALL
from tests.support.loader.loader_sets import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning"),
    pytest.mark.parametrize(
        "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
    ),
]
#: Returns the batch of each step in static memory.
Entry = Callable[[list[Any], str, StaticBatches], Iterator[Any]]

KINDS = ALL | {
    "container": lambda i: DataContainer([[torch.ones(2), torch.ones(i)]]),
    "padded": lambda i: Padded(torch.full((2, 3), i), torch.ones(2, 3).bool()),
    "nested": lambda i: {"a": [DataContainer([torch.full((2,), i)], stack=True)]},
    "cpu_only": lambda i: {"a": torch.ones(2), "m": DataContainer([i], cpu_only=True)},
    "many": lambda i: {str(k): torch.full((k,), i) for k in range(300)},
}
#: The tensor in the error of a kind that has no static form, and its reason.
REFUSED = {
    "conj": ("", "is quantized, conjugated, negated or of torch.func"),
    "negative": ("", "is quantized, conjugated, negated or of torch.func"),
    "leaf": ("[0]", "requires a gradient"),
    "parameter": ("['p']", "requires a gradient"),
    "subclass": ("", "is of type tests.support.loader.loader_sets.Tagged"),
    "sparse": ("[0]", "has the layout torch.sparse_coo"),
    "csr": ("", "has the layout torch.sparse_csr"),
    "meta": ("['a']", "is on meta"),
}
MADE = KINDS | {"meta": lambda i: {"a": torch.ones(2, device="meta")}}


def by_scatter(batches: list[Any], device: str, static: StaticBatches) -> Iterator[Any]:
    for batch in batches:
        yield scatter(batch, [device], out=static)[0]


def by_loader(batches: list[Any], device: str, static: StaticBatches) -> Iterator[Any]:
    with PreDataLoader(batches, device, static=static) as pre:
        yield from pre


ENTRIES = pytest.mark.parametrize("entry", [by_scatter, by_loader])


def tensors_of(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, batch)
    return found


def snapshot(batch: Any) -> Any:
    """Return a copy on the host."""
    return map_tensors(lambda tensor: tensor.cpu().clone(), batch)


def places(batch: Any) -> list[Any]:
    return [(each.data_ptr(), each.stride()) for each in tensors_of(batch)]


@ENTRIES
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_a_batch_has_its_values_at_fixed_addresses(
    entry: Entry, kind: str, device: str
) -> None:
    batches = [KINDS[kind](3) for _ in range(5)]
    without: Any = PreDataLoader(batches, device)
    if entry is by_scatter:
        without = [scatter(batch, [device])[0] for batch in batches]
    static, found = StaticBatches(2), []
    for got, expected in zip(entry(batches, device, static), without, strict=True):
        assert same(snapshot(got), snapshot(expected))
        assert all(tensor.is_contiguous() for tensor in tensors_of(got))
        assert not any(tensor.is_inference() for tensor in tensors_of(got))
        found.append(places(got))
    if found[0]:
        assert static.num_plans == 1 and static.nbytes % 128 == 0
    # An empty tensor has no memory.
    assert found[2:] == found[:-2] or kind == "empty"


@ENTRIES
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_a_static_form_is_named(
    entry: Entry, kind: str, device: str
) -> None:
    good, bad = {"a": torch.ones(3)}, MADE[kind](1)
    static = StaticBatches()
    steps = entry([good, bad], device, static)
    first = next(steps)
    with pytest.raises(TypeError) as caught:
        next(steps)
    place, reason = REFUSED[kind]
    name = "inputs" if entry is by_scatter else "PreDataLoader: batch"
    start = f"{name}{place} must be a dense tensor on the host without gradients to be"
    assert str(caught.value).startswith(f"{start} in a static batch, but {reason}. ")
    assert first["a"].tolist() == [1, 1, 1] and static.num_plans == 1


@ENTRIES
@pytest.mark.parametrize("num_slabs", [1, 2, 3])
def test_a_batch_lives_until_its_slab_is_filled_again(
    entry: Entry, num_slabs: int, device: str
) -> None:
    batches = [{"x": torch.full((4,), k), "y": torch.tensor(k)} for k in range(7)]
    held: list[Any] = []
    pointers = []
    for k, batch in enumerate(entry(batches, device, StaticBatches(num_slabs))):
        held.append(batch)
        pointers.append(batch["x"].data_ptr())
        for back in range(min(num_slabs, k + 1)):
            assert held[k - back]["x"].tolist() == [k - back] * 4
    assert pointers == [pointers[k % num_slabs] for k in range(7)]
    assert len(set(pointers)) == num_slabs


@ENTRIES
def test_each_plan_has_its_own_slabs(entry: Entry, device: str) -> None:
    x = torch.zeros(3)
    plans = [{"x": x}, {"y": x}, {"x": x[:2]}, {"x": x.int()}, [x], {"x": [x]}]
    static = StaticBatches(max_plans=len(plans))
    found = [places(batch)[0][0] for batch in entry(plans * 2, device, static)]
    assert found[len(plans) :] == found[: len(plans)]
    assert len(set(found)) == static.num_plans == len(plans)


@ENTRIES
def test_a_further_plan_is_an_error_until_the_plans_are_cleared(
    entry: Entry, device: str
) -> None:
    static = StaticBatches(max_plans=2)
    kept = [next(entry([torch.ones(n)], device, static)) for n in (1, 2)]
    with pytest.raises(ValueError) as caught:
        next(entry([torch.ones(3)], device, static))
    where = "cpu" if device == "cpu" else "cuda:0"
    assert str(caught.value) == (
        f"StaticBatches: the batches for {where} must have at most 2 plans, but this "
        "one is another, with the shapes (3,). The slabs have 128 bytes. Make fewer "
        "shapes with SizeBatchSampler(size_divisor=...) or Pad(buckets=...), or "
        "increase max_plans."
    )
    assert next(entry([torch.zeros(2)], device, static)).tolist() == [0, 0]
    static.clear()
    assert (static.num_plans, static.nbytes) == (0, 0)
    fresh = next(entry([torch.ones(3)], device, static))
    assert fresh.tolist() == [1, 1, 1] and kept[0].tolist() == [1]


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "operator": lambda x: x + 1,
    "method": lambda x: x.sum(),
    "copy": lambda x: x.cpu().clone(),
    "write": lambda x: x.zero_(),
    "argument": lambda x: torch.stack([x]),
    "repr": repr,
    "address": lambda x: x.data_ptr(),
    "list": lambda x: x.tolist(),
}


@ENTRIES
@pytest.mark.parametrize("use", USES)
def test_debug_mode_refuses_a_batch_after_its_end(
    entry: Entry, use: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "poison_enabled", True)
    batches = [{"x": torch.full((4,), k)} for k in range(3)]
    steps = entry(batches, device, StaticBatches(2))
    ended, alive = next(steps)["x"], next(steps)["x"]
    row = ended[1:]
    address = ended.data_ptr()
    USES[use](ended)
    latest = next(steps)["x"]
    assert alive.tolist() == [1] * 4 and latest.tolist() == [2] * 4
    assert latest.data_ptr() == address
    for tensor in (ended, row) if operators.name == "native" else (ended,):
        with pytest.raises(RuntimeError) as caught:
            USES[use](tensor)
        assert str(caught.value).startswith(
            "a tensor of a static batch must be used before its slab is filled again, "
            "but is used later. Clone it, or increase StaticBatches(num_slabs=...)."
        )
        # The frame of torch's repr switches torch.func off as long as it lives.
        traceback.clear_frames(caught.tb)


@ENTRIES
def test_a_backward_pass_after_the_end_raises(entry: Entry, device: str) -> None:
    steps = entry([torch.ones(3), torch.zeros(3)], device, StaticBatches())
    weight = torch.ones(3, device=device, requires_grad=True)
    loss = (next(steps) * weight).sum()
    next(steps)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parts_for_one_device_do_not_share_slabs(device: str) -> None:
    static = StaticBatches()
    for step in range(3):
        batch = {"x": torch.arange(4).add(step)}
        parts = scatter(batch, [device] * 2, out=static)
        values = [part["x"].tolist() for part in parts]
        assert values == [[step, step + 1], [step + 2, step + 3]]
    assert static.num_plans == 2


def test_no_part_is_copied_before_all_are_checked(device: str) -> None:
    static = StaticBatches(max_plans=1)
    (first, _) = scatter(torch.arange(4), [device] * 2, out=static)
    with pytest.raises(ValueError, match="at most 1 plans"):
        scatter(torch.zeros(3).long(), [device] * 2, out=static)
    assert first.tolist() == [0, 1]


def test_a_cast_is_static_too(device: str) -> None:
    static = StaticBatches()
    for step in range(2):
        (got,) = scatter(
            [torch.full((3,), step + 0.5)], [device], dtype=torch.half, out=static
        )
        assert got[0].dtype == torch.half and got[0].tolist() == [step + 0.5] * 3
    assert static.nbytes == 64


def test_epochs_and_inference_mode_share_the_slabs(device: str) -> None:
    pre = PreDataLoader([torch.ones(3), torch.zeros(3)], device, static=1)
    with torch.inference_mode():
        pointers = {batch.data_ptr() for batch in pre}
    for batch in pre:
        pointers.add(batch.data_ptr())
        weight = torch.ones(3, device=device, requires_grad=True)
        (weight * batch).sum().backward()
    assert len(pointers) == 1


def test_a_pickle_has_the_arguments_without_memory(device: str) -> None:
    static = StaticBatches(2, max_plans=5)
    scatter(torch.ones(3), [device], out=static)
    for other in (pickle.loads(pickle.dumps(static)), copy.deepcopy(static)):
        assert repr(other) == "StaticBatches(num_slabs=2, max_plans=5)"
        assert other.num_plans == 0
    pre = pickle.loads(pickle.dumps(PreDataLoader([1], device, static=3)))
    assert pre.static.num_slabs == 3


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: StaticBatches(0),
            ValueError,
            "StaticBatches: num_slabs must be an integer of 1 or more, but is 0.",
        ),
        (
            lambda: StaticBatches(max_plans="8"),  # type: ignore[arg-type]
            TypeError,
            "StaticBatches: max_plans must be an integer of 1 or more, but is '8' "
            "(str).",
        ),
        (
            lambda: scatter(torch.ones(1), "cpu", out=2),  # type: ignore[call-overload]
            TypeError,
            "scatter: out must be a StaticBatches, but is of type int.",
        ),
        (
            lambda: PreDataLoader([], static=0),
            ValueError,
            "PreDataLoader: static must be an integer of 1 or more, but is 0.",
        ),
        (
            lambda: PreDataLoader([], static=1, transform=repr),
            ValueError,
            "PreDataLoader: static must not come with a transform, whose results have "
            "no fixed memory. Apply the transform in the step.",
        ),
    ],
)
def test_wrong_arguments_are_errors(
    call: Callable[[], Any], error: type[Exception], text: str, device: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
