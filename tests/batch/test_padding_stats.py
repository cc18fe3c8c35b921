"""PaddingCounter counts the bytes of stacked tensors and of their padding.

The expected counts come from the result: samples are ones, padding is seven.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, collate, pad_stack
from pyparallel.batch.stack import PaddingCounter


def field(*shape: int, pad_dims: int | None = 2, **options: Any) -> DataContainer:
    return DataContainer(torch.ones(shape, **options), True, 7, pad_dims=pad_dims)


def counted(body: Any) -> tuple[int, int]:
    with PaddingCounter() as stacked:
        body()
    return stacked.stacked_nbytes, stacked.padding_nbytes


def obvious(result: torch.Tensor) -> tuple[int, int]:
    sevens = int((result == 7).sum())
    return result.nbytes, sevens * result.element_size()


COLUMNS = {
    "two small ones": [field(1, 2, 3), field(1, 4, 2)],
    "one pass": [field(3, 50, i + 1) for i in range(40)],
    "equal": [field(1, 2, 3)] * 3,
    "mixed": [field(1, 2, 3, dtype=torch.uint8), field(1, 4, 2)],
    "no padded dims": [field(2, dtype=torch.int16, pad_dims=None)] * 2,
    "autograd": [field(1, i, i, requires_grad=True) for i in (2, 3)],
}


@pytest.mark.parametrize("samples", COLUMNS.values(), ids=COLUMNS)
def test_a_column_is_counted_whatever_way_it_takes(samples):
    made = []
    found = counted(lambda: made.append(collate(samples, len(samples)).data[0]))
    assert found == obvious(made[0])
    assert found[0] > 0


def test_plain_tensors_and_arrays_are_stacked_without_padding():
    batch = [{"x": torch.ones(5), "y": torch.ones(2, 2).numpy(), "n": 1}] * 3
    assert counted(lambda: collate(batch)) == (3 * 5 * 4 + 3 * 4 * 4, 0)
    # Other keys in another order keep the columns from being made at once.
    batch[1] = dict(reversed(batch[1].items()))
    assert counted(lambda: collate(batch)) == (3 * 5 * 4 + 3 * 4 * 4, 0)


def test_other_threads_and_later_calls_are_not_counted():
    samples = [torch.ones(2), torch.ones(3)]
    with PaddingCounter() as mine:
        thread = threading.Thread(target=pad_stack, args=(samples,))
        thread.start()
        thread.join()
    pad_stack(samples)
    assert (mine.stacked_nbytes, mine.padding_nbytes) == (0, 0)
