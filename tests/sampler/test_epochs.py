"""The sampler counts epochs: passes, set_epoch, states and ranks in any order."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import DataLoader, PreDataLoader, SizeBatchSampler

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
#: The operations of a program. A pass of None batches is complete.
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
            assert sampler.state_dict() == state

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


# ----------------------------------------------------------------------------- loaders
#: Loaders by name: the arguments of `DataLoader`, and whether a thread reads ahead.
LOADERS: dict[str, tuple[dict[str, Any], bool]] = {
    "no workers": ({}, False),
    "workers": ({"num_workers": 1}, False),
    "persistent": ({"num_workers": 1, "persistent_workers": True}, False),
    "prefetch": ({}, True),
    "prefetch, workers": ({"num_workers": 1}, True),
}
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) if "num_workers" in options else name
    for name, (options, _) in LOADERS.items()
]
#: The passes before the one that is resumed: left after 2 batches, or complete.
PASSES = [[], ["complete"], ["left"], ["left", "complete"], ["complete", "left"]]
#: When the state is taken: the number of batches, or the end.
POSITIONS = [0, 1, 5, 6, "end"]


class Run:
    """A loader that a program iterates, with or without ``set_epoch``."""

    def __init__(self, name: str, *, sets: bool) -> None:
        self.name, self.sets, self.epoch = name, sets, 0
        self.make()

    def make(self) -> None:
        options, is_ahead = LOADERS[self.name]
        self.sampler = SizeBatchSampler(range(23), 4, window=3)
        loader: Any = DataLoader(
            range(23), batch_sampler=self.sampler, collate_fn=list, **options
        )
        self.loader: Any = PreDataLoader(loader) if is_ahead else loader

    def start(self) -> Any:
        """Begin a pass. The programs that call ``set_epoch`` count from 10."""
        if self.sets:
            self.sampler.set_epoch(10 + self.epoch)
        self.epoch += 1
        return iter(self.loader)

    def run(self, passes: list[str], position: Any, *, resumes: bool) -> list[Any]:
        """Return the batches of a pass after a position, and of the next two."""
        for kind in passes:
            batches = self.start()
            list(batches if kind == "complete" else itertools.islice(batches, 2))
        batches = self.start()
        for _ in range(6 if position == "end" else position):
            next(batches)
        if position == "end":
            assert list(batches) == []
        if resumes:
            state = json.loads(json.dumps(self.loader.state_dict()))
            del batches
            self.make()
            self.loader.load_state_dict(state)
            if position == "end":
                batches = iter(())
            else:
                self.epoch -= 1
                batches = self.start()
        return [list(batches), list(self.start()), list(self.start())]


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("sets", [False, True])
def test_a_loader_resumes_the_pass_and_the_count(name: str, sets: bool) -> None:
    cases = list(itertools.product(PASSES, POSITIONS))
    if "num_workers" in LOADERS[name][0]:  # each case takes half a second
        cases = [(["left"], 0), (["complete", "left"], 1), (["left"], 6), ([], "end")]
    for passes, position in cases:
        whole = Run(name, sets=sets).run(passes, position, resumes=False)
        found = Run(name, sets=sets).run(passes, position, resumes=True)
        assert found == whole, (passes, position)
        orders = [tuple(map(tuple, each)) for each in whole if len(each) == 6]
        assert len(set(orders)) == len(orders)


def test_len_and_report_belong_to_an_epoch() -> None:
    sizes = [1 + 7 * i % 50 for i in range(101)]
    lengths = []
    for epoch in range(30):
        sampler = SizeBatchSampler(sizes, max_padded=160, window=3)
        sampler.set_epoch(epoch)
        lengths.append(len(sampler))
    assert len(set(lengths)) > 1  # so that the numbers below differ
    sampler = SizeBatchSampler(sizes, max_padded=160, window=3)
    for epoch in range(29):
        assert len(sampler) == lengths[epoch]  # of the next pass
        assert len(list(sampler)) == lengths[epoch]
        assert sampler.report().planned.num_steps == lengths[epoch]  # of the last one


def test_a_pass_keeps_its_plan_beside_another_thread() -> None:
    sampler, other = (SizeBatchSampler(SIZES, 4) for _ in range(2))
    other.set_epoch(1)
    plans = [each._make_plan(each._find_start().divide(1)) for each in (sampler, other)]
    starts = [each._find_start().divide(1) for each in (sampler, other)]
    code = SizeBatchSampler._make_plan.__code__

    def interfere(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is code and frame.f_locals["position"] is starts[0]:
            if event == "line":  # as another thread between two lines
                sampler._make_plan(starts[1])
            return interfere
        return None

    sys.settrace(interfere)
    try:
        found = sampler._make_plan(starts[0])
    finally:
        sys.settrace(None)
    assert (
        [found.batch(i, 0) for i in range(12)]
        == [plans[0].batch(i, 0) for i in range(12)]
        != [plans[1].batch(i, 0) for i in range(12)]
    )
