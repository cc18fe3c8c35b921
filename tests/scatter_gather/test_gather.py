"""gather on the host: outputs of replicas become the output of one model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel import DataContainer, Padded, Ragged, gather

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
    made = gather(
        [
            {"x": torch.ones(1), "y": torch.zeros(1)},
            {"y": torch.zeros(1), "x": torch.ones(1)},
        ],
        "cpu",
    )
    assert list(made) == ["x", "y"] and made["x"].tolist() == [1, 1]


def test_equal_numbers_of_several_types_are_the_same() -> None:
    assert gather([{"v": 1}, {"v": 1.0}], "cpu") == {"v": 1}
    assert math.isnan(gather([float("nan"), float("nan")], "cpu"))


def test_arrays_are_joined_and_stay_arrays() -> None:
    made = gather([np.zeros((2, 1)), np.ones((1, 1))], "cpu")
    assert type(made) is np.ndarray and made.ravel().tolist() == [0, 0, 1]
    assert gather([np.array(1), np.array(2)], "cpu").tolist() == [1, 2]
    assert gather([np.zeros((1, 2)), np.ones((1, 1))], 0 - 1, 1).shape == (1, 3)


def test_flags_and_metadata_are_kept() -> None:
    metas = [{"id": 1}, {"id": 2}, {"id": 3}]
    made = gather(
        [
            DataContainer(metas[:1], cpu_only=True, pad_dims=None),
            DataContainer(metas[1:], cpu_only=True),
        ],
        "cpu",
    )
    assert (made.cpu_only, made.stack, made.pad_dims) == (True, False, None)
    assert all(a is b for a, b in zip(made.data, metas, strict=True))
    same = gather([DataContainer(5, cpu_only=True)] * 2, "cpu")
    assert same.data == 5


@pytest.mark.parametrize("wrap", [lambda x: x, DataContainer], ids=["bare", "in"])
def test_ragged_samples_are_concatenated(wrap: Any) -> None:
    samples = [torch.full((n, 2), float(n)) for n in (2, 0, 3, 1)]
    made = gather(
        [
            wrap(Ragged.from_tensors(samples[:2])),
            wrap(Ragged.from_tensors(samples[2:3])),
            wrap(Ragged.from_tensors(samples[3:])),
        ],
        "cpu",
        1,
    )
    made = made.data if isinstance(made, DataContainer) else made
    assert type(made) is Ragged and made.offsets.tolist() == [0, 2, 2, 5, 6]
    for one, other in zip(made.unbind(), samples, strict=True):
        assert torch.equal(one, other)


def test_padded_samples_are_joined_with_their_sizes() -> None:
    one = Padded(torch.zeros(2, 3), torch.tensor([[3], [1]]), None)
    other = Padded(torch.ones(1, 3), torch.tensor([[2]]), None)
    for dim in (0, 1):
        made = gather([one, other], "cpu", dim)
        assert type(made) is Padded and made.mask is None
        assert made.data.shape == (3, 3) and made.sizes.tolist() == [[3], [1], [2]]
