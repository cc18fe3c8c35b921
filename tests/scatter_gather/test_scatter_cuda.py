"""scatter to several targets on a GPU; one GPU may replace several."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import is_tensor
from torch.profiler import ProfilerActivity, profile

from pyparallel import DataContainer as DC
from pyparallel import Padded, Ragged, backend, collate, pad_stack, scatter, to_host
from pyparallel.batch import pytree
from pyparallel.transfer import debug, to_device

pytestmark = pytest.mark.cuda

TARGETS = pytest.mark.parametrize("num", [2, 4])


def samples(num: int) -> list[dict[str, Any]]:
    return [
        {
            "img": DC(torch.full((2, 3 + i, 4), float(i)), stack=True),
            "boxes": DC(torch.full((i % 3, 4), i)),
            "meta": DC({"i": i}, cpu_only=True),
            "label": torch.tensor(i),
        }
        for i in range(num)
    ]


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested dicts and sequences."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if not isinstance(tree, dict | list | tuple):
        return []
    parts = tree.values() if isinstance(tree, dict) else tree
    return [tensor for part in parts for tensor in tensors(part)]


def check(found: list[Any], expected: list[Any]) -> None:
    """Every part is that of the split on the host, and on the GPU."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(tensor.is_cuda for tensor in tensors(mine))
        mine, theirs = tensors(mine), tensors(theirs)
        assert [x.dtype for x in mine] == [x.dtype for x in theirs]
        assert [x.tolist() for x in mine] == [x.tolist() for x in theirs]


def num_copies(call: Any) -> int:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in found.events() if event.device_type == cuda]
    if not names:
        pytest.xfail("the profiler sees no device events on this machine")
    return sum("Memcpy HtoD" in name for name in names)


@TARGETS
@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_parts_are_those_of_a_split_on_the_host(num, size):
    batch = collate(samples(size), -(-size // num))
    found, expected = scatter(batch, [0] * num), scatter(batch, ["cpu"] * num)
    check(found, expected)
    assert [part["meta"] for part in found] == [part["meta"] for part in expected]


Point = namedtuple("Point", "x y")
Own = type("Own", (torch.Tensor,), {})
ONE = torch.arange(6.0).view(2, 3)
GRAD = ONE.clone().requires_grad_()
WHOLE = {
    "tensors": [ONE, ONE.t(), torch.zeros(0), torch.nn.Parameter(ONE, False)],
    "other leaves": {"b": [ONE, "x", 3, None], "a": ((), {}, {"i": torch.tensor(1)})},
    "in place": {"x": ONE, "y": torch.arange(1 << 18)},
    "many": [ONE] * 600,
    "container": {"x": ONE, "d": DC([ONE])},
    "containers": {
        "img": DC([ONE.expand(2, 2, 3)], stack=True),
        "boxes": DC([[ONE, ONE[:1].T, torch.zeros(0, 4)]]),
        "nested": DC([[[ONE, []], ONE]]),
        "mask": DC([pad_stack([torch.rand(2), torch.rand(3)], mask=True)]),
        "points": DC([Ragged.from_tensors([torch.rand(2, 3), torch.rand(1, 3)])]),
        "whole": DC(pad_stack([torch.rand(2), torch.rand(3)], sizes=True)),
        "none": DC([[]]),
        "meta": DC([[{"i": 1}, ONE, None]], cpu_only=True),
        "others": ("x", 3, None, torch.tensor(1)),
    },
    "pinned in a container": {"x": DC([torch.arange(1 << 18)], stack=True), "y": ONE},
}
CASTS = {
    f"{name}, cast": (WHOLE[name], {"dtype": torch.float16}, True)
    for name in ("tensors", "other leaves", "many", "container", "containers")
}
# Each with the options of its scatter.
OTHERS = {
    "divided": ({"x": ONE}, {"chunk_sizes": (2,)}),
    "cast of a large tensor": (
        {"x": ONE, "y": torch.ones(1 << 18)},
        {"dtype": torch.float16},
    ),
    "cast to another size of exponent": ([ONE], {"dtype": torch.float8_e5m2}),
    "only metadata": ({"d": DC([ONE], cpu_only=True), "s": "text"}, {}),
    "padded in a list": ({"d": DC([[pad_stack([ONE, ONE], mask=True), ONE]])}, {}),
    "history in a container": ({"d": DC([[ONE, GRAD]])}, {}),
    "subclass in a container": ({"d": DC([ONE.as_subclass(Own)]), "x": ONE}, {}),
    "with history": ({"x": ONE, "y": GRAD}, {}),
    "subclass": ({"x": ONE, "y": ONE.as_subclass(Own)}, {}),
    "conjugated": ([ONE, ONE.to(torch.complex64).conj()], {}),
    "namedtuple": (Point(ONE, [ONE]), {}),
    "no tensor": ({"x": "text"}, {}),
}
SIMPLE = [(WHOLE[name], {}, True) for name in WHOLE]
SIMPLE += [(*OTHERS[name], False) for name in OTHERS]
SIMPLE += CASTS.values()


@pytest.mark.parametrize(
    ("batch", "options", "is_whole"), SIMPLE, ids=[*WHOLE, *OTHERS, *CASTS]
)
@pytest.mark.parametrize("has_stream", [True, False])
def test_one_compiled_call_moves_a_simple_batch(
    batch, options, is_whole, has_stream, monkeypatch
):
    sent_whole = []

    def send(plan, *args, **kwargs):
        copy = send_planned(plan, *args, **kwargs)
        sent_whole.append("structure" in plan.keywords and copy is not None)
        return copy

    send_planned = to_device.send_planned
    monkeypatch.setattr(to_device, "send_planned", send)
    if batch is WHOLE["in place"]:
        batch = {name: each.pin_memory() for name, each in batch.items()}
    if batch is WHOLE["pinned in a container"]:
        batch = {name: each.pin_memory() for name, each in batch.items()}
    stream = torch.cuda.Stream() if has_stream else None
    (found,) = scatter(batch, [0], stream=stream, **options)
    with monkeypatch.context() as patch:
        patch.setattr(to_device, "send_planned", lambda *_, **__: None)
        (stepwise,) = scatter(batch, [0], stream=stream, **options)
    (expected,) = scatter(batch, [-1], **options)
    torch.cuda.synchronize()
    assert described(found) == described(stepwise)
    assert described(found, True) == described(expected, True)
    assert any(sent_whole) == (is_whole and backend.name == "native")


def described(tree: Any, on_host: bool = False) -> str:
    """Return all of a batch, or, to compare with one on the host, its values."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Padded | Ragged):
            return type(value), list(map(leaf, value.fields()))
        if not is_tensor(value):
            return value
        state = value.dtype, value.is_contiguous(), value.requires_grad, value.tolist()
        return state if on_host else (*state, type(value), str(value.device))

    return repr(pytree.map_leaves(leaf, tree))


def test_all_tensors_of_containers_arrive_and_metadata_stays():
    batch = WHOLE["containers"]
    (found,) = scatter(batch, [0])
    assert found["meta"] is batch["meta"].data[0]
    del found["meta"], found["others"]
    moved = [each for each in pytree.flatten(found)[0] if is_tensor(each)]
    assert len(moved) == 12 and all(each.is_cuda for each in moved)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_error_names_the_container_of_a_tensor_without_data(
    is_compiled, monkeypatch
):
    if not is_compiled:
        monkeypatch.setattr(to_device, "send_planned", lambda *_, **__: None)
    batch = {"a": DC([[ONE, ONE]]), "b": DC([[ONE, torch.ones(2, device="meta")]])}
    with pytest.raises(ValueError, match=r"^inputs\['b'\] must have data to be copied"):
        scatter(batch, [0])


@TARGETS
def test_there_is_one_copy_for_each_target(num):
    batch = [torch.full((8, i % 4 + 1), float(i)) for i in range(300)]
    assert num_copies(lambda: scatter(batch, [0] * num)) == num
    two = {"x": batch[0][:2], "y": batch[1][:2]}
    assert num_copies(lambda: scatter(two, [0] * num)) == 2


OPTIONS = [
    {"chunk_sizes": (1, 5)},
    {"chunk_sizes": (5, 1), "max_size": 2},
    {"max_size": 2, "dtype": torch.float16},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_apply_on_the_way(options):
    batch = {"x": torch.arange(12.0).view(6, 2), "n": torch.arange(6)}
    found = scatter(batch, [0, 0], **options)
    check(found, scatter(batch, ["cpu", "cpu"], **options))


@TARGETS
def test_every_part_is_waited_for_while_memory_is_reused(num):
    totals, expected = [], []
    for step in range(200):
        batch = {"x": torch.full((num * 5000 - 1,), float(step))}
        for part in scatter(batch, [0] * num):
            expected.append(len(part["x"]) * float(step))
            torch.cuda._sleep(100_000)
            totals.append(part["x"].double().sum())
        del part
    assert torch.stack(totals).tolist() == expected


def test_a_recorded_stream_keeps_the_memory_of_any_tensor_of_a_batch():
    batch = {"first": torch.ones(1 << 16), "last": torch.full((1 << 16,), 2.0)}
    side = torch.cuda.Stream()
    last = scatter(batch, [0])[0]["last"]
    address = last.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
        total = last.sum()
        read = torch.cuda.Event()
        read.record()
    last.record_stream(side)
    del last
    again = scatter(batch, [0])[0]["last"]
    assert not read.query(), "the memory was read before it was asked for again"
    assert again.data_ptr() != address
    read.synchronize()
    assert total.item() == 2 << 16


@pytest.mark.two_gpus
def test_two_devices_receive_their_parts_on_their_own_streams():
    sides = [torch.cuda.Stream(index) for index in range(2)]
    for step in range(50):
        batch = {"x": torch.arange(9) + step}
        with torch.cuda.stream(sides[0]), torch.cuda.stream(sides[1]):
            first, second = scatter(batch, [0, 1])
        assert (first["x"].get_device(), second["x"].get_device()) == (0, 1)
        for side in sides:
            side.synchronize()
        assert first["x"].tolist() == [step + i for i in range(5)]
        assert second["x"].tolist() == [step + i for i in range(5, 9)]


@pytest.mark.two_gpus
def test_two_devices_receive_the_chunks_of_containers_and_one_has_the_stream():
    batch = collate(samples(5), 3)
    stream = torch.cuda.Stream(1)
    found = scatter(batch, [0, 1], stream=stream)
    check(found, scatter(batch, ["cpu"] * 2))
    for index, part in enumerate(found):
        assert part["meta"] is batch["meta"].data[index]
        moved = [part["img"], part["label"], *part["boxes"]]
        assert {each.get_device() for each in moved} == {index}


def test_parts_share_no_memory():
    first, second = scatter({"x": torch.arange(1000.0)}, [0, 0])
    assert first["x"].untyped_storage()._cdata != second["x"].untyped_storage()._cdata
    first["x"].zero_()
    assert second["x"].tolist() == list(range(500, 1000))


def test_the_host_does_not_wait():
    batch = {"x": torch.ones(1000)}
    scatter(batch, [0] * 4)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    parts = scatter(batch, [0] * 4)
    assert not busy.query(), "the host waited for the device"
    assert [part["x"].sum().item() for part in parts] == [250] * 4


@pytest.mark.parametrize("debug_mode", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_has_the_results_of_a_cast_before_the_copy(
    dtype: torch.dtype, debug_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYPARALLEL_DEBUG", debug_mode)
    debug.reset()
    slab = torch.rand(1 << 14, pin_memory=True)
    batches: dict[str, Any] = {
        "small": {"x": torch.rand(3, 4), "y": torch.arange(5), "z": torch.tensor(0.1)},
        "many": {f"{i:03}": torch.rand(2, i + 1).T for i in range(200)},
        "large": [torch.rand(1 << 21), torch.rand(1 << 19, dtype=torch.float64)],
        "pinned": [torch.rand(1 << 19, pin_memory=True), torch.rand(9)],
        "beside": [
            torch.rand(1 << 19, pin_memory=True),
            torch.arange(9),
            torch.rand(9),
        ],
        "span": [slab[: 1 << 13], slab[1 << 13 :]],
        "others": [torch.rand(3).half(), torch.rand(4), torch.rand(3).bfloat16()],
        "graph": [torch.rand(3, requires_grad=True), torch.rand(4)],
        "fields": [
            DC([pad_stack([torch.rand(2), torch.rand(3)], mask=True)]),
            DC([Ragged.from_tensors([torch.rand(2, 3), torch.rand(1, 3)])]),
            DC([torch.ones(2)], cpu_only=True),
        ],
    }
    for name, batch in batches.items():
        before = to_host(batch)
        expected = scatter(batch, ["cpu"], dtype=dtype)
        found = scatter(batch, [0], dtype=dtype)
        check_fields(found, expected)
        check_fields(before, batch)  # the sources stay as they were
        if name == "graph":
            found[0][0].sum().backward()
            assert batch[0].grad.dtype is torch.float32
    torch.cuda.synchronize()
    monkeypatch.undo()
    debug.reset()


def check_fields(found: Any, expected: Any) -> None:
    """Compare tensors in nests and in their fields."""
    if isinstance(expected, Padded | Ragged):
        check_fields(list(found.fields()), list(expected.fields()))
    elif isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype and torch.equal(found.cpu(), expected)
    elif isinstance(expected, DC):
        check_fields(found.data, expected.data)
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            check_fields(one, other)
    elif isinstance(expected, dict):
        check_fields([found[key] for key in expected], list(expected.values()))
