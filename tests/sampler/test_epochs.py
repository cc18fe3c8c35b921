"""The sampler counts epochs: passes, set_epoch, states and ranks in any order."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import SizeBatchSampler

pytestmark = pytest.mark.one_backend

SIZES = [17 * i % 50 for i in range(47)]
LIMITS: list[dict[str, Any]] = [{"batch_size": 4}, {"max_padded": 170}]


def all_ranks(num_replicas: int, **options: Any) -> list[SizeBatchSampler]:
    options = {"window": 3, **options, "num_replicas": num_replicas}
    return [SizeBatchSampler(SIZES, **options, rank=r) for r in range(num_replicas)]


def in_epoch(epoch: int, num_replicas: int, **options: Any) -> list[Any]:
    """Return the batches of an epoch, step by step, by ``set_epoch`` alone."""
    samplers = all_ranks(num_replicas, **options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return list(zip(*samplers, strict=True))


number = st.integers(0, 4)
#: What a program does. A pass of None batches is complete.
operations = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.none() | st.integers(0, 5)),
        st.tuples(st.just("set_epoch"), number),
        st.tuples(st.just("set_epoch in a pass"), number, st.integers(1, 5)),
        st.tuples(st.just("two passes"), st.integers(1, 5)),
        st.tuples(st.just("resume"), st.integers(1, 3)),
        st.tuples(st.just("resume in a pass"), st.integers(1, 3), st.integers(1, 99)),
    ),
    max_size=8,
)


class Program:
    """Samplers of all ranks beside the expected number of the next epoch."""

    def __init__(self, **options: Any) -> None:
        self.options, self.epoch = options, 0
        self.samplers = all_ranks(2, **options)

    def run(self, name: str, *arguments: Any) -> None:
        method = "leave" if name == "pass" else name.replace(" ", "_")
        getattr(self, method)(*arguments)
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)

    def begin(self) -> tuple[Iterator[Any], list[Any]]:
        """Return the steps of a pass of all ranks, and the expected ones."""
        expected = in_epoch(self.epoch, len(self.samplers), **self.options)
        steps = zip(*[iter(each) for each in self.samplers], strict=True)
        return steps, expected

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)
        self.epoch = epoch

    def resume(self, num_replicas: int) -> None:
        """Continue in samplers of other ranks. The last pass has ended or not begun."""
        state = self.samplers[-1].state_dict()
        if state["step"]:  # the pass was left: begin the next one
            self.set_epoch(self.epoch)
            state = self.samplers[-1].state_dict()
        self.samplers = all_ranks(num_replicas, **self.options)
        for sampler in self.samplers:
            sampler.load_state_dict(json.loads(json.dumps(state)))
            assert sampler.state_dict() == state or not state["step"]

    def resume_in_a_pass(self, num_replicas: int, num_steps: int) -> None:
        """Continue a pass, also one after its last batch."""
        steps, expected = self.begin()
        used = list(itertools.islice(steps, min(num_steps, len(expected))))
        complete = len(used) == len(expected)
        earlier, state = len(self.samplers), self.samplers[-1].state_dict()
        if not used:
            return
        self.samplers = all_ranks(num_replicas, **self.options)
        for sampler in self.samplers:
            sampler.load_state_dict(json.loads(json.dumps(state)))
            assert sampler.state_dict() == state
            assert sampler.epoch == self.epoch
        rest = list(zip(*self.samplers, strict=True))
        if complete:
            assert rest == []
        elif num_replicas == earlier:
            assert rest == expected[len(used) :]
        else:
            self.check_coverage(used, rest)
        self.epoch += 1

    def check_coverage(self, used: list[Any], rest: list[Any]) -> None:
        """Each sample is used once, but those of the last step may be repeated."""
        *whole, last = [*used, *rest]
        found = Counter(i for step in whole for batch in step for i in batch)
        found += Counter({i for batch in last for i in batch})
        assert set(found.values()) == {1}
        if not self.options["drop_last"]:
            assert set(found) == set(range(len(SIZES)))

    def leave(self, num_steps: int | None) -> None:
        steps, expected = self.begin()
        found = list(itertools.islice(steps, num_steps))
        assert found == expected[:num_steps]
        if num_steps != 0:  # a pass begins with its first batch
            self.epoch += 1

    def set_epoch_in_a_pass(self, epoch: int, num_steps: int) -> None:
        steps, expected = self.begin()
        assert list(itertools.islice(steps, num_steps)) == expected[:num_steps]
        for sampler in self.samplers:
            sampler.set_epoch(epoch)
            assert sampler.epoch == epoch
        assert list(steps) == expected[num_steps:]
        self.epoch = epoch

    def two_passes(self, num_steps: int) -> None:
        """Two iterators at once have two epochs, which end in any order."""
        first, expected = self.begin()
        assert list(itertools.islice(first, num_steps)) == expected[:num_steps]
        self.epoch += 1
        second, others = self.begin()
        assert list(itertools.islice(second, num_steps)) == others[:num_steps]
        assert list(first) == expected[num_steps:]
        assert list(second) == others[num_steps:]
        self.epoch += 1


@given(
    program=operations,
    limit=st.sampled_from(LIMITS),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_pass_has_the_expected_epoch(
    program: list[Any], limit: dict[str, Any], shuffle: bool, drop_last: bool
) -> None:
    running = Program(**limit, shuffle=shuffle, drop_last=drop_last)
    for operation in program:
        running.run(*operation)
    running.run("pass", None)
