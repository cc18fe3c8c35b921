"""gather on the host: outputs of replicas become the output of one model."""

from __future__ import annotations

import math
import re
from collections import deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel import DataContainer, Padded, Ragged, gather, scatter
from pyparallel.core.errors import Error, type_name
from pyparallel.scatter_gather import gather as gather_module
from tests.support.errors.collate_errors import freed

pytestmark = pytest.mark.cuda_torch


def test_gradients_flow_to_every_output() -> None:
    leaves = [torch.ones(n, requires_grad=True) for n in (2, 1)]
    scalars = [torch.tensor(1.0, requires_grad=True) for _ in leaves]
    outputs = [{"x": x * 2, "loss": s * 3} for x, s in zip(leaves, scalars)]  # noqa: B905
    made = gather(outputs, "cpu")
    (made["x"] * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    (made["loss"] * torch.tensor([5.0, 7.0])).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[2, 4], [6]]  # type: ignore[union-attr]
    assert [leaf.grad.item() for leaf in scalars] == [15, 21]  # type: ignore[union-attr]


def test_sparse_tensors_are_joined() -> None:
    made = gather([torch.eye(2).to_sparse(), torch.ones(1, 2).to_sparse()], "cpu")
    assert made.to_dense().tolist() == [[1, 0], [0, 1], [1, 1]]


def test_outputs_may_have_their_keys_in_another_order() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    made = gather([{"x": x, "y": y}, {"y": y, "x": x}], "cpu")
    assert list(made) == ["x", "y"] and made["x"].tolist() == [1, 1]


def test_equal_numbers_of_several_types_are_the_same() -> None:
    assert gather([{"v": 1}, {"v": 1.0}], "cpu") == {"v": 1}
    assert math.isnan(gather([float("nan"), float("nan")], "cpu"))


class Named(np.ndarray[Any, Any]):
    """An array with another name."""


def test_arrays_are_joined_and_stay_arrays() -> None:
    made = gather([np.zeros((2, 1)), np.ones((1, 1))], "cpu")
    assert type(made) is np.ndarray and made.ravel().tolist() == [0, 0, 1]
    assert gather([np.array(1), np.array(2)], "cpu").tolist() == [1, 2]
    masked = np.ma.array([1, 2], mask=[False, True])
    assert gather([masked, masked], "cpu").tolist() == [1, None, 1, None]
    matrix = np.ones((1, 2)).view(Named)
    assert gather([matrix, matrix], "cpu").shape == (2, 2)


def test_a_deque_keeps_its_limit() -> None:
    made = gather([deque([torch.ones(1)], maxlen=3)] * 2, "cpu")
    assert made.maxlen == 3 and [each.tolist() for each in made] == [[1, 1]]


class Pair(namedtuple("Pair", "left right")):
    """A namedtuple with another constructor."""

    def __new__(cls, both: Any) -> Any:
        return super().__new__(cls, *both)


def test_a_namedtuple_with_another_constructor_keeps_its_type() -> None:
    made = gather([Pair((torch.ones(1), torch.zeros(1)))] * 2, "cpu")
    assert type(made) is Pair and made.left.tolist() == [1, 1]
    assert gather([np.zeros((1, 2)), np.ones((1, 1))], 0 - 1, 1).shape == (1, 3)


def test_flags_and_metadata_are_kept() -> None:
    metas = [{"id": 1}, {"id": 2}, {"id": 3}]
    first = DataContainer(metas[:1], cpu_only=True, pad_dims=None)
    made = gather([first, DataContainer(metas[1:], cpu_only=True)], "cpu")
    assert (made.cpu_only, made.stack, made.pad_dims) == (True, False, None)
    assert all(a is b for a, b in zip(made.data, metas, strict=True))
    same = gather([DataContainer(5, cpu_only=True)] * 2, "cpu")
    assert same.data == 5


@pytest.mark.parametrize("wrap", [lambda x: x, DataContainer], ids=["bare", "in"])
def test_ragged_samples_are_concatenated(wrap: Any) -> None:
    samples = [torch.full((n, 2), float(n)) for n in (2, 0, 3, 1)]
    parts = [samples[:2], samples[2:3], samples[3:]]
    made = gather([wrap(Ragged.from_tensors(part)) for part in parts], "cpu", 1)
    made = made.data if isinstance(made, DataContainer) else made
    assert type(made) is Ragged and made.offsets.tolist() == [0, 2, 2, 5, 6]
    assert all(map(torch.equal, made.unbind(), samples))


def test_padded_samples_are_joined_with_their_sizes() -> None:
    one = Padded(torch.zeros(2, 3), torch.tensor([[3], [1]]), None)
    other = Padded(torch.ones(1, 3), torch.tensor([[2]]), None)
    for dim in (0, 1):
        made = gather([one, other], "cpu", dim)
        assert type(made) is Padded and made.mask is None
        assert made.data.shape == (3, 3) and made.sizes.tolist() == [[3], [1], [2]]


# Errors

ONE, NONE = torch.ones(1), None
FIX = "Return a value of the same type on every replica."


@dataclass
class Result:
    boxes: Any


NO_LIST = "gather: outputs must be a list with one output for each replica, but is"

CASES: dict[str, tuple[type[Exception], Any, str]] = {
    "kinds": (TypeError, [{"a": ONE}, {"a": NONE}],
        "gather: outputs[1]['a'] must be of type torch.Tensor like outputs[0]['a'], "
        f"but is None. {FIX}"),
    "in a container": (TypeError, [DataContainer([ONE]), DataContainer(ONE)],
        "gather: outputs[1].data must be of type list like outputs[0].data, but is "
        f"torch.Tensor. {FIX}"),
    "a missing key": (ValueError, [{"a": {"x": ONE, "y": ONE}}, {"a": {"x": ONE}}],
        "gather: outputs[1]['a'] must have the keys of outputs[0]['a'], but lacks "
        "'y'. Return the same keys on every replica."),
    "another key": (ValueError, [{"x": ONE}, {"x": ONE, "y": ONE}],
        "gather: outputs[1] must have the keys of outputs[0], but has 'y' too. Return "
        "the same keys on every replica."),
    "lengths": (ValueError, [{"boxes": [ONE, ONE]}, {"boxes": [ONE]}],
        "gather: outputs[1]['boxes'] must have the same number of items as "
        "outputs[0]['boxes'], but has 1 where 2 was expected. Put a list with one item "
        "for each sample into a DataContainer: such lists are joined."),
    "shapes": (ValueError, [Result([torch.ones(2, 3)]), Result([torch.ones(2, 4)])],
        "gather: outputs[1].boxes[0] must match outputs[0].boxes[0] outside dimension "
        "0, but has shape (2, 4) where (2, 3) was expected. Pad them to one shape, or "
        "put a list of them into a DataContainer."),
    "dtypes": (ValueError, [{"x": ONE}, {"x": ONE.double()}],
        "gather: outputs[1]['x'] must be of the dtype of outputs[0]['x'], but is "
        "torch.float64 where torch.float32 was expected."),
    "freed memory": (ValueError, [{"x": ONE}, {"x": freed(torch.ones(1))}],
        "gather: outputs[1]['x'] must lie within its storage, but needs 4 bytes where "
        "0 are left. Use it before its storage is resized."),
    "dtypes of arrays": (ValueError, [np.ones(1), np.ones(1, dtype=np.float32)],
        "gather: outputs[1] must be of the dtype of outputs[0], but is float32 where "
        "float64 was expected."),
    "values": (ValueError, [{"name": "a"}, {"name": "b"}],
        "gather: outputs[1]['name'] must equal outputs[0]['name'], but is 'b' where "
        "'a' was expected. Return a tensor, or a list with one entry for each sample."),
    "values in cpu_only": (ValueError,
        [DataContainer("a", cpu_only=True), DataContainer("b", cpu_only=True)],
        "gather: outputs[1].data must equal outputs[0].data, but is 'b' where 'a' was "
        "expected. Return a tensor, or a list with one entry for each sample."),
    "ragged values": (ValueError,
        [Ragged.from_tensors([torch.ones(1, n)]) for n in (2, 3)],
        "gather: outputs[1].values must match outputs[0].values outside dimension 0, "
        "but has shape (1, 3) where (1, 2) was expected. Pad them to one shape, or put "
        "a list of them into a DataContainer."),
    "no outputs": (ValueError, [],
        "gather: outputs must have at least one output, but is empty."),
    "a tensor as outputs": (TypeError, ONE, f"{NO_LIST} torch.Tensor."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_output_that_does_not_fit_is_named_with_its_replica(name: str) -> None:
    error, outputs, message = CASES[name]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        gather(outputs, "cpu")


def test_a_dimension_that_is_not_there() -> None:
    message = (
        "gather: outputs[0]['x'] must have a dimension 1 to be joined along, but has "
        "shape (1,)."
    )
    for error in (ValueError, IndexError):  # torch raised the second
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            gather([{"x": ONE}, {"x": ONE}], "cpu", 1)


@pytest.mark.parametrize("dim", [1.0, "0", None])
def test_a_dimension_is_an_integer(dim: Any) -> None:
    rule = f"dim must be an integer, but is {dim!r} ({type_name(dim)})."
    for who, call in (
        ("gather", lambda: gather([ONE, ONE], "cpu", dim)),
        ("scatter", lambda: scatter(ONE, "cpu", dim)),
    ):
        with pytest.raises(Error, match=f"^{re.escape(f'{who}: {rule}')}$"):
            call()


def test_an_invalid_target_is_refused() -> None:
    message = "gather: a target_device must be -1 or name a device, but is 'nowhere'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gather([ONE], "nowhere")


def test_an_output_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [ONE]
    loop.append((loop,))
    with pytest.raises(ValueError, match="nest"):
        gather([loop, loop], "cpu")


class Strange:
    """Refuses to be compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = object.__hash__


def test_values_without_comparison_are_equal_only_as_one_object() -> None:
    one = Strange()
    assert gather([one, one], "cpu") is one
    with pytest.raises(ValueError, match="must equal"):
        gather([one, Strange()], "cpu")


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the copies from a meta device to the host."""
    calls: list[Any] = []

    def copy(tensors: Any, device: Any) -> Any:
        calls.append((len(tensors), tensors[0].device.type, device))
        return [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]

    monkeypatch.setattr(gather_module, "copy_with_separate_nodes", copy)
    return calls


def test_all_tensors_of_one_device_but_cpu_only_move_at_once(
    carried: list[Any],
) -> None:
    def output(x: torch.Tensor) -> dict[str, Any]:
        boxes, meta = DataContainer([x]), DataContainer([x], cpu_only=True)
        return {"x": x, "losses": [torch.ones_like(x[0])], "boxes": boxes, "meta": meta}

    far = output(torch.ones(2, device="meta"))
    made = gather([far, output(ONE), far], "cpu")
    assert carried == [(6, "meta", torch.device("cpu"))]
    assert made["x"].tolist() == [0, 0, 1, 0, 0]
    assert made["losses"][0].tolist() == [0, 1, 0]
    assert [each.tolist() for each in made["boxes"].data] == [[0, 0], [1], [0, 0]]
    assert made["meta"].data[0] is far["x"]


def test_none_is_the_device_of_the_first_tensor(carried: list[Any]) -> None:
    gather([{"x": ONE}, {"x": ONE.to("meta")}], None)
    assert carried == [(1, "meta", torch.device("cpu"))]


def test_nothing_moves_before_all_is_checked(carried: list[Any]) -> None:
    far = torch.ones(1, device="meta")
    with pytest.raises(ValueError, match="must equal"):
        gather([{"a": far, "b": 1}, {"a": far, "b": 2}], "cpu")
    assert carried == []
