"""The operators on the leaves of a batch, in both backends."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.errors.collate_errors import freed
from tests.support.processes.backends import both, check

pytestmark = [pytest.mark.asan, pytest.mark.one_backend]

ONE = torch.ones(2, 3)
PARAMETER = torch.nn.Parameter(torch.ones(2), requires_grad=False)


class Named(torch.Tensor):
    pass


def same(one: list[Any], other: list[Any]) -> bool:
    return list(map(id, one)) == list(map(id, other))


@both
def test_only_exact_tensors_are_chosen_and_replaced(backend: ModuleType) -> None:
    odd = ONE.as_subclass(Named)
    leaves = (ONE, "text", odd, PARAMETER, None, ONE, {})
    assert same(backend.select_tensors(leaves), [ONE, PARAMETER, ONE])
    replaced = backend.replace_tensors(leaves, [1, 2, 3])
    assert same(replaced, [1, "text", odd, 2, None, 3, leaves[-1]])
    assert backend.select_tensors([]) == backend.replace_tensors([], ()) == []


@both
@pytest.mark.parametrize("num", [0, 1, 3])
def test_the_number_of_tensors_must_be_right(backend: ModuleType, num: int) -> None:
    message = (
        "replace_tensors: tensors must have 2 entries, as leaves has tensors, but has "
        f"{num}."
    )
    arguments = ([ONE, 5, ONE], [ONE] * num)
    check(backend.replace_tensors, arguments, ValueError, message)


@both
def test_tensors_with_more_than_bytes_cannot_be_packed(backend: ModuleType) -> None:
    packable = [ONE, ONE.T, PARAMETER, torch.empty(0, 2), ONE[1:, ::2], ONE.bool()]
    imaginary = torch.ones(2, dtype=torch.complex64).conj()
    odd = [
        imaginary,
        imaginary.imag,
        ONE.to_sparse(),
        ONE.as_subclass(Named),
        torch.ones(2, device="meta"),
    ]
    needs_grad = torch.ones(2, requires_grad=True)
    tensors = [*packable, *odd, needs_grad]
    indices = list(range(len(packable), len(tensors)))
    assert backend.find_unpackable(tensors) == indices
    with torch.no_grad():
        assert backend.find_unpackable(tensors) == indices[:-1]
    message = "find_unpackable: tensors[1] must be a torch.Tensor, but is of type int."
    check(backend.find_unpackable, [[ONE, 5]], TypeError, message)


@both
def test_tensors_on_one_device_are_plain_ones(backend: ModuleType) -> None:
    meta = torch.ones(2, device="meta")
    imaginary = torch.ones(2, dtype=torch.complex64).conj()
    plain = [ONE, ONE.T, PARAMETER, torch.empty(0, 2), ONE[1:, ::2]]
    plain.append(torch.ones(2, requires_grad=True))
    assert backend.are_on_one_device(plain)
    odd = [imaginary, imaginary.imag, ONE.to_sparse(), ONE.as_subclass(Named), meta]
    for tensors in ([], [meta], *([ONE, each] for each in odd)):
        assert not backend.are_on_one_device(tensors)
    wrapped: list[bool] = []

    def look(sample: torch.Tensor) -> torch.Tensor:
        wrapped.append(backend.are_on_one_device([sample]))
        return sample

    torch.func.vmap(look)(ONE)
    assert wrapped == [False]
    message = (
        "are_on_one_device: tensors[1] must be a torch.Tensor, but is of type int."
    )
    check(backend.are_on_one_device, [[ONE, 5]], TypeError, message)


@both
def test_compact_tensors_are_contiguous_and_have_their_memory(
    backend: ModuleType,
) -> None:
    needs_grad = torch.ones(2, requires_grad=True)
    compact = [ONE, 5, PARAMETER, ONE[1], torch.empty(0, 2), needs_grad, needs_grad * 1]
    for on_cpu in (True, False):
        assert backend.are_compact(compact, on_cpu=on_cpu)
        assert not backend.are_compact([*compact, ONE.T], on_cpu=on_cpu)
    for odd in (freed(torch.ones(3)), ONE.to_sparse(), ONE.to("meta")):
        assert not backend.are_compact([*compact, odd], on_cpu=True)
