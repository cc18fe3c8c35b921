"""The tensors of one target that go in the packed copy, and those that do not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from benchmarks.data import nested_batch
from pyparallel import DataContainer, Ragged, backend, pad_stack, scatter
from pyparallel.batch import pytree
from pyparallel.batch.container import TensorSkeleton
from pyparallel.batch.stack import int64_tensor
from pyparallel.batch.tensor_fields import TensorFields
from pyparallel.scatter_gather import move
from pyparallel.scatter_gather.split import Options, whole_parts
from pyparallel.transfer import to_device
from tests.support.batch import samples
from tests.support.devices.host_device import COPIES
from tests.support.loader.worker_allocations import with_allocations
from tests.support.processes.backends import native, needs_native, reference, using
from tests.support.processes.python_steps import steps

META = torch.device("meta")  # takes tensors, and has no streams of its own


@contextmanager
def sending() -> Iterator[list[list[torch.Tensor]]]:
    """Collect the leaves of copies to a device with streams; the copies are here."""
    copies: list[list[torch.Tensor]] = []

    def send(leaves: list[torch.Tensor], device: torch.device, *_: Any) -> Any:
        plan = backend.plan_slab(leaves)
        copies.append(list(leaves))
        slab = torch.empty(plan.nbytes, dtype=torch.uint8)
        backend.pack(slab, leaves, plan)
        return SimpleNamespace(wait=lambda: backend.views(slab, plan))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_device, "send", send)
        module = SimpleNamespace(Stream=object)
        patch.setattr(torch, "get_device_module", lambda device: module)
        yield copies


@pytest.fixture
def sent() -> Iterator[list[list[torch.Tensor]]]:
    with sending() as copies:
        yield copies


def ids(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(id, tensors))


def test_a_stream_is_used_for_the_target_that_it_is_of(
    sent: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, send = [], to_device.send
    monkeypatch.setattr(
        to_device, "send", lambda *args: (streams.append(args[3]), send(*args))[1]
    )
    ours, theirs = (SimpleNamespace(device=torch.device(n)) for n in ("meta", "cuda:1"))
    plain, odd = torch.ones(2), torch.ones(2, dtype=torch.complex64).conj()
    for stream in (ours, theirs, None):
        move.move([plain], [plain], META, None, stream)
    assert streams == [ours, None, None]
    move.move([plain, odd], [plain, odd], META, None, ours)
    assert streams[3:] == [ours]


@needs_native
def test_a_container_is_sent_on_a_stream_of_its_target(
    sent: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = []

    def send(*_: Any, **options: Any) -> None:
        streams.extend(options.values())

    monkeypatch.setattr(to_device, "send_planned", send)
    ours, theirs = (SimpleNamespace(device=torch.device(n)) for n in ("meta", "cuda:1"))
    for stream in (ours, theirs, None):
        with using(native):
            move.move([DataContainer([SHARED])], [SHARED], META, None, stream)
    assert streams == [ours, None, None]


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.ones(2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.ones(2).as_subclass(type("Named", (torch.Tensor,), {})),
        torch.ones(2, device="meta"),
    ],
    ids=["conjugated", "negated", "sparse", "gradient", "subclass", "elsewhere"],
)
def test_a_tensor_that_is_not_plain_is_copied_alone(
    sent: list[list[torch.Tensor]], odd: torch.Tensor
) -> None:
    first, last = torch.ones(3), torch.ones(4)
    tensors = [first, odd, last]
    moved = move.move(tensors, tensors, META, None)
    assert [ids(queued) for queued in sent] == [ids([first, last])]
    assert [tensor.device.type for tensor in moved] == ["cpu", "meta", "cpu"]
    assert [tensor.shape for tensor in moved] == [(3,), (2,), (4,)]


def test_tangents_and_samples_of_vmap_are_moved_by_torch(
    sent: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_device, "hold_while_read", lambda *_: None)

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        (moved,) = move.move([tensor], [tensor], META, None)
        return moved

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert forward_ad.unpack_dual(to_meta(dual)).tangent is not None
    assert torch.func.vmap(to_meta)(torch.ones(3, 2)).shape == (3, 2)
    assert sent == []


def test_sources_that_torch_reads_in_place_are_kept_alive() -> None:
    done: list[bool] = []
    api: Any = SimpleNamespace(
        is_pinned=lambda tensor: True,
        relaxed=lambda device: nullcontext(),
        fence=lambda device: SimpleNamespace(is_done=lambda: bool(done)),
    )
    odd = torch.ones(2, requires_grad=True)
    source = weakref.ref(odd)
    to_device.MixedCopy([odd], META, api).wait()
    del odd
    assert to_device.release_done() == 1 and source() is not None
    done.append(True)
    assert to_device.release_done() == 0 and source() is None


@pytest.mark.parametrize("values", [[[3, 4], [5, 6], [7, 8]], [3, 4, 5, 6, 7, 8], ()])
def test_integers_for_a_device_are_packed_and_others_are_written_in_place(
    sent: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, values: Any
) -> None:
    shape = (len(values) // 2 if values and values[0] == 3 else len(values), 2)
    here, allocated = with_allocations(
        lambda: int64_tensor(values, shape, torch.device("cpu"))
    )
    assert allocated == [here.untyped_storage().data_ptr()] and sent == []
    assert here.dtype is torch.int64 and here.shape == shape
    assert here.flatten().tolist() == torch.tensor(values).flatten().tolist()
    start = to_device.start_copy
    monkeypatch.setattr(
        to_device, "start_copy", lambda tensors, _: start(tensors, META)
    )
    there = int64_tensor(values, shape, torch.device("cuda", 0))
    ((packed,),) = sent
    assert torch.equal(packed, here) and there.shape == shape


def move_to_device(batch: Any) -> None:
    leaves, _, classes = pytree.flatten_arguments(batch, 1)
    with sending() as copies:
        move.move(leaves, leaves, META, None, classes=classes)
    assert len(copies) == 1


def move_to_host(batch: Any, *targets: Any) -> None:
    (moved,) = scatter(batch, targets)
    assert ids(tensors_in(moved)) == ids(tensors_in(batch))


def take_and_restore(batch: Any) -> None:
    skeleton = TensorSkeleton(batch, lambda tensor: True)
    tensors = skeleton.take_tensors()
    assert ids(tensors_in(skeleton.restore(tensors))) == ids(tensors_in(batch))


@needs_native
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(move_to_device, id="device"),
        pytest.param(lambda batch: move_to_host(batch, -1), id="host"),
        pytest.param(lambda batch: move_to_host(batch, "cpu"), id="cpu"),
        pytest.param(take_and_restore, id="loader"),
    ],
)
@pytest.mark.parametrize("container", [list, tuple])
def test_no_python_code_runs_for_each_leaf(
    call: Callable[[Any], None], container: Callable[[Any], Any]
) -> None:
    few, many = container(nested_batch(66)), container(nested_batch(660))
    with using(native):
        call(many)  # imports and caches
        assert steps(lambda: call(few)) == steps(lambda: call(many))


def plain_leaf() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3)


def padded(*, mask: bool) -> Any:
    return pad_stack([torch.ones(2), torch.arange(3.0)], sizes=True, mask=mask)


SHARED = plain_leaf()
CONJUGATED = torch.ones(2, dtype=torch.complex64).conj()
LEAVES: dict[str, Callable[[], Any]] = {
    "plain": plain_leaf,
    "shared": lambda: SHARED,
    "parameter": lambda: torch.nn.Parameter(plain_leaf(), requires_grad=False),
    "gradient": lambda: plain_leaf().requires_grad_(),
    "transposed": lambda: plain_leaf().T,
    "empty": lambda: torch.empty(0, 3),
    "conjugated": lambda: CONJUGATED,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "subclass": lambda: plain_leaf().as_subclass(Named),
    "listed": lambda: DataContainer([[plain_leaf(), plain_leaf()]]),
    "stacked": lambda: DataContainer([plain_leaf()], stack=True),
    "one": lambda: DataContainer(plain_leaf()),
    "padded": lambda: DataContainer([padded(mask=True)]),
    "unpadded": lambda: DataContainer(padded(mask=False)),
    "listed padded": lambda: DataContainer([[padded(mask=True), plain_leaf()]]),
    "ragged": lambda: DataContainer([Ragged.from_tensors([plain_leaf()] * 2)]),
    "no samples": lambda: DataContainer([[]]),
    "nested": lambda: DataContainer([[[plain_leaf(), SHARED], [], plain_leaf()]]),
    "transposed inside": lambda: DataContainer([[plain_leaf(), plain_leaf().T]]),
    "gradient inside": lambda: DataContainer([[plain_leaf().requires_grad_()]]),
    "subclass inside": lambda: DataContainer([plain_leaf().T.as_subclass(Named)]),
    "conjugated inside": lambda: DataContainer([[torch.ones(2) * 1j, CONJUGATED]]),
    "kept": lambda: DataContainer([plain_leaf().T], cpu_only=True),
    "kept list": lambda: DataContainer([[{"i": 1}, SHARED, []]], cpu_only=True),
    "number": lambda: 5,
    "none": lambda: None,
    "nothing": dict,
}
SIMPLE = ("plain", "shared", "parameter", "transposed", "number", "none", "nothing")


class Named(torch.Tensor):
    pass


def nests(names: Sequence[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.sampled_from(names).map(lambda name: LEAVES[name]()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(st.sampled_from("cab"), inner, max_size=3),
            st.builds(samples.Pair, inner, inner),
        ),
        max_leaves=12,
    )


def describe(value: Any, sources: set[int]) -> Any:
    """Return a result as plain values. A source object is its id."""
    if isinstance(value, dict):
        return dict, [(key, describe(item, sources)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [describe(item, sources) for item in value]
    if isinstance(value, TensorFields):
        return type(value), [describe(item, sources) for item in value.fields()]
    if not isinstance(value, torch.Tensor) or id(value) in sources:
        return value if value is None or type(value) is int else id(value)
    values = None if value.is_meta else value.to_dense().tolist()
    layout = (type(value), value.dtype, value.device, value.layout)
    return *layout, tuple(value.shape), value.requires_grad, values


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, DataContainer):
        return tensors_in(value.data)
    if isinstance(value, TensorFields):
        return tensors_in(value.fields())
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return [tensor for item in items for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@needs_native
@given(
    nests(SIMPLE) | nests(tuple(LEAVES)),
    st.sampled_from([None, torch.device("cpu"), META]),
    st.sampled_from([None, torch.float16]),
    st.booleans(),
)
def test_both_backends_move_the_same_tensors(
    batch: Any, target: torch.device | None, dtype: torch.dtype | None, grads: bool
) -> None:
    sources = set(map(id, tensors_in(batch)))
    found = []
    for module in (native, reference):
        with using(module), sending() as copies, torch.set_grad_enabled(grads):
            leaves, structure, classes = pytree.flatten_arguments(batch, 1)
            parts = whole_parts(leaves, Options(1), "leaf {}".format, classes)
            args = (leaves, parts, target, dtype, None, "leaf {}".format, classes)
            moved = pytree.unflatten(structure, move.move(*args))
            by_value = dtype is not None  # tensors that are cast are new objects
            sent = [[describe(t, sources) for t in each] for each in copies]
            found.append(
                (describe(moved, sources), sent if not by_value else len(sent))
            )
    assert found[0] == found[1]


@contextmanager
def compiled() -> Iterator[list[bool]]:
    """Send by the host's engine; collect which plans it takes."""
    taken: list[bool] = []

    def send(plan: Any, *_: Any, **__: Any) -> Any:
        copy = plan(COPIES, 1 << 20, 8 << 10)
        taken.append("structure" in plan.keywords and copy is not None)
        if copy is not None:
            copy.start(True, False)
        return copy

    with using(native), sending(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_device, "send_planned", send)
        patch.setattr(backend, "plan_copy", native.plan_copy)
        yield taken


def moved_by(
    context: Any,
    batch: Any,
    target: torch.device | None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a batch that is moved in this context, as plain values."""
    with context as found:
        leaves, structure, classes = pytree.flatten_arguments(batch, 1)
        parts = whole_parts(leaves, Options(1), "leaf {}".format, classes)
        naming = {"name": "leaf {}".format, "classes": classes}
        moved = move.move(leaves, parts, target, dtype, **naming)
        tree = pytree.unflatten(structure, moved)
        return describe(tree, set(map(id, tensors_in(batch)))), found


@needs_native
@given(nests(tuple(LEAVES)), st.sampled_from([None, torch.device("cpu"), META]))
def test_one_call_moves_containers_as_python_does(
    batch: Any, target: torch.device | None
) -> None:
    with using(reference):
        expected, _ = moved_by(sending(), batch, target)
    found, _ = moved_by(compiled(), batch, target)
    assert found == expected


PLAIN_INSIDE = ("listed", "stacked", "one", "padded", "unpadded", "ragged", "nested")
PLAIN_INSIDE += ("transposed inside",)


@needs_native
@pytest.mark.parametrize("name", [*PLAIN_INSIDE, "gradient inside", "listed padded"])
@pytest.mark.parametrize("beside", ["no samples", "kept", "kept list", "plain"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_one_compiled_call_moves_containers_of_plain_tensors(
    name: str, beside: str, dtype: torch.dtype | None
) -> None:
    batch = {"b": LEAVES[name](), "a": [LEAVES[beside](), "text", None]}
    found, taken = moved_by(compiled(), batch, META, dtype)
    assert any(taken) == (name in PLAIN_INSIDE)
    assert found == moved_by(sending(), batch, META, dtype)[0]


@needs_native
def test_a_cast_by_one_call_names_a_freed_tensor() -> None:
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    batch = {"b": plain_leaf(), "c": DataContainer([[SHARED, freed]])}
    with pytest.raises(ValueError) as caught:
        moved_by(compiled(), batch, META, torch.float16)
    assert str(caught.value) == (
        "leaf 1 must lie within its storage, but needs 8 bytes where 0 are left. Use "
        "it before its storage is resized."
    )


@needs_native
@pytest.mark.parametrize(
    ("target", "dtype"),
    [(-1, None), ("cpu", None), (META, None), (META, torch.float16)],
)
def test_no_python_code_runs_for_each_tensor_of_a_container(
    target: Any, dtype: torch.dtype | None
) -> None:
    def call(batch: Any) -> None:
        if target is not META:
            scatter(batch, [target])
            return
        leaves, _, classes = pytree.flatten_arguments(batch, 1)
        parts = whole_parts(leaves, Options(1), "leaf {}".format, classes)
        move.move(leaves, parts, META, dtype, classes=classes)

    few, many = (
        {
            "boxes": DataContainer([[torch.ones(i, 4) for i in range(num)]]),
            "labels": DataContainer([[torch.ones(i) for i in range(num)]]),
            "meta": DataContainer([[{"i": i} for i in range(num)]], cpu_only=True),
            "img": DataContainer([torch.ones(num, 3)], stack=True),
        }
        for num in (6, 60)
    )
    with compiled():
        call(many)  # imports and caches
        assert steps(lambda: call(few)) == steps(lambda: call(many))


@pytest.mark.parametrize("target", [-1, "cpu"])
@pytest.mark.parametrize("make", [lambda: [SHARED], lambda: padded(mask=True)])
def test_a_part_on_the_host_is_a_new_object_with_the_same_tensors(
    target: Any, make: Any
) -> None:
    chunk = make()
    (found,) = scatter({"x": DataContainer([chunk])}, [target])
    assert type(found["x"]) is type(chunk) and found["x"] is not chunk
    assert ids(tensors_in(found)) == ids(tensors_in(chunk))


@needs_native
@pytest.mark.parametrize("target", [-1, "cpu"])
def test_a_freed_tensor_in_a_container_is_named_as_in_python(target: Any) -> None:
    freed = torch.ones(2, 3).T
    freed.untyped_storage().resize_(0)
    kept = DataContainer([1], cpu_only=True)
    batch = {"a": kept, "b": plain_leaf(), "c": DataContainer([[SHARED, freed]])}
    for module in (native, reference):
        with using(module), pytest.raises(ValueError) as caught:
            scatter(batch, [target])
        assert str(caught.value) == (
            "inputs['c'] must lie within its storage, but needs 24 bytes where 0 are "
            "left. Use it before its storage is resized."
        )


@needs_native
def test_one_call_refuses_a_freed_tensor_in_a_container_as_any_copy_does() -> None:
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    batch = {"b": plain_leaf(), "c": DataContainer([[SHARED, freed]])}
    messages = []
    for call in (
        lambda: moved_by(compiled(), batch, META),
        lambda: native.plan_copy([plain_leaf(), SHARED, freed], COPIES, 1, 1),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    assert messages[0] == messages[1] != ""
