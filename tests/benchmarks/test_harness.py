"""The benchmark: checks and counts of its harness, and a run of all its cases."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from pyparallel import DataContainer, backend

pytestmark = pytest.mark.peers


_harness = importlib.import_module("benchmarks._harness")
bench_collate = importlib.import_module("benchmarks.collate")
backends = importlib.import_module("benchmarks.backends")
cases = importlib.import_module("benchmarks.cases")
data = importlib.import_module("benchmarks.data")
peers = importlib.import_module("benchmarks.peers")
QUICK = importlib.import_module("benchmarks.case").QUICK
Contender, Disagreement = _harness.Contender, _harness.Disagreement


class FakeClock:
    """Stands still unless a function takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float, result: Any = 0) -> Any:
        """Return a function that takes these times in turn, the last one forever."""
        left = list(seconds)

        def call() -> Any:
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return result

        return call


def row(case: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in case["rows"] if row["name"] == name)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0, 4.0]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([[1.0, 2.0, 3.0]]),
        [1.0, 2.0, 3.0],
        None,
    ],
)
def test_functions_that_disagree_are_never_timed(other: Any) -> None:
    clock = FakeClock()
    first = Contender("a", lambda: torch.tensor([1.0, 2.0, 3.0]), "ours")
    with pytest.raises(Disagreement, match="a and b must give equal results"):
        _harness.compare("case", [first, Contender("b", lambda: other)], clock=clock)


def test_a_disagreement_deep_inside_is_named() -> None:
    one = {"x": [torch.zeros(2), "a"], "n": 1}
    two = {"x": [torch.zeros(2), "b"], "n": 1}
    assert _harness.difference(one, two) == " at ['x'][1]: 'a' and 'b'"
    assert _harness.difference(one, {"x": one["x"]}) != ""
    assert _harness.difference([one], [one, one]) != ""
    assert _harness.difference(one, {**one}) == ""


def test_equality_is_of_bits() -> None:
    nan = torch.tensor(float("nan"))
    assert _harness.difference(nan, nan.clone()) == ""
    assert _harness.difference(torch.tensor(0.0), torch.tensor(-0.0)) != ""


def test_containers_of_different_libraries_are_compared_by_content() -> None:
    class Other:
        cpu_only = False
        data = (torch.ones(2),)

    assert _harness.difference(DataContainer((torch.ones(2),)), Other()) == ""
    assert _harness.difference(DataContainer((torch.zeros(2),)), Other()) != ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_bytes_left_unwritten_are_a_disagreement(dtype: torch.dtype) -> None:
    right = torch.zeros(4, dtype=dtype)

    def forgets_the_end() -> torch.Tensor:
        out = torch.empty(4, dtype=dtype)
        out[:3] = 0
        return out

    contenders = [
        Contender("a", right.clone, "ours"),
        Contender("b", forgets_the_end),
    ]
    with pytest.raises(Disagreement):
        _harness.compare("case", contenders)
    assert not torch.are_deterministic_algorithms_enabled()


def test_limits_are_timed_without_being_compared() -> None:
    clock = FakeClock()
    contenders = [
        Contender("ours", clock.takes(2.0), "ours"),
        Contender("less work", clock.takes(1.0, result="other"), "limit"),
    ]
    case = _harness.compare("case", contenders, rounds=3, clock=clock)
    assert row(case, "less work")["over"]["ours"]["of_medians"] == 0.5
    assert row(case, "less work")["over"]["ours"]["of_minima"] == 0.5


def test_minimum_and_quartiles_are_those_of_the_rounds() -> None:
    clock = FakeClock()
    # One call to check, two to calibrate, then the five rounds.
    times = [9.0] * 3 + [5.0, 1.0, 2.0, 4.0, 3.0]
    contenders = [Contender("ours", clock.takes(*times), "ours")]
    case = _harness.compare("case", contenders, rounds=5, clock=clock)
    ours = row(case, "ours")
    assert ours["seconds"] == pytest.approx([5, 1, 2, 4, 3])
    figures = [ours[key] for key in ("min", "q1", "median", "q3")]
    assert figures == pytest.approx([1, 2, 3, 4])


def test_ratios_are_of_medians_with_the_spread_over_rounds() -> None:
    over = _harness.ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    expected = {"of_medians": 2.0, "of_minima": 2.0, "q1": 1.5, "q3": 2.5}
    assert over == pytest.approx(expected)
    assert _harness.ratio([2.0, 6.0], [4.0, 1.0])["of_minima"] == 2.0


def test_a_fast_function_is_called_often_in_a_round() -> None:
    clock = FakeClock()
    fast, slow = clock.takes(2**-13), clock.takes(0.5)
    contenders = [Contender("ours", fast, "ours"), Contender("peer", slow)]
    options = {"rounds": 2, "clock": clock, "min_seconds": 2**-7}
    case = _harness.compare("case", contenders, **options)
    assert row(case, "ours")["median"] == 2**-13
    assert row(case, "peer")["over"]["ours"]["of_medians"] == 2**12
    # A check, two calibrations and two rounds of each; 64 calls fill a round.
    assert clock.now == 5 * 0.5 + (3 + 2 * 64) * 2**-13


def test_other_measurements_of_a_timer_are_stored_separately() -> None:
    clock = FakeClock()

    def timer(call: Any, repeats: int) -> dict[str, float]:
        more = _harness.by(clock)(call, repeats)["seconds"]
        return {"seconds": more, "host": more / 2} | ({"gpu": 3.0} if more > 1 else {})

    contenders = [
        Contender("ours", clock.takes(2.0), "ours"),
        Contender("also ours", clock.takes(1.0), "ours"),
        Contender("peer", clock.takes(8.0)),
    ]
    case = _harness.compare("case", contenders, rounds=4, timer=timer)
    peer = row(case, "peer")
    assert (peer["median"], peer["host"]["median"]) == (8.0, 4.0)
    assert peer["host"]["over"]["ours"]["of_medians"] == 4
    assert set(peer["over"]) == set(peer["host"]["over"]) == {"ours", "also ours"}
    assert set(peer["gpu"]["over"]) == {"ours"}, "one of ours has no such figure"
    assert "gpu" not in row(case, "also ours")


def test_every_round_times_every_contender_once_and_orders_change() -> None:
    clock, calls = FakeClock(), []

    def noted(name: str) -> Any:
        def call() -> int:
            calls.append(name)
            clock.now += 1
            return 0

        return call

    contenders = [Contender(name, noted(name), "ours") for name in "abc"]
    _harness.compare("case", contenders, rounds=20, clock=clock)
    timed = calls[3 + 6 :]
    rounds = [tuple(timed[i : i + 3]) for i in range(0, 60, 3)]
    assert all(set(each) == set("abc") for each in rounds)
    assert len(set(rounds)) > 1


def test_the_payload_is_the_bytes_of_all_tensors_of_a_result() -> None:
    clock = FakeClock()
    tree = {"a": [torch.zeros(3), "x"], "b": DataContainer([torch.zeros(2, 2)]), "c": 1}
    contenders = [Contender("ours", clock.takes(1.0, result=tree), "ours")]
    case = _harness.compare("case", contenders, rounds=1, clock=clock)
    assert case["nbytes"] == 7 * 4


def test_a_view_is_compared_and_not_timed() -> None:
    clock = FakeClock()

    def view(result: str) -> list[str]:
        clock.now += 1000
        return list(result)

    contenders = [
        Contender("ours", clock.takes(2.0, result=["a", "b"]), "ours"),
        Contender("peer", clock.takes(1.0, result="ab"), view=view),
    ]
    case = _harness.compare("case", contenders, rounds=3, clock=clock)
    assert row(case, "peer")["seconds"] == [1.0] * 3
    with pytest.raises(Disagreement):
        _harness.compare("case", [*contenders, Contender("b", lambda: "ab")])


def test_a_slow_case_gets_fewer_rounds_but_never_too_few() -> None:
    def rounds(max_seconds: float) -> int:
        clock = FakeClock()
        contenders = [Contender("ours", clock.takes(1.0), "ours")]
        options = {"rounds": 30, "clock": clock, "max_seconds": max_seconds}
        case = _harness.compare("case", contenders, **options)
        assert len(row(case, "ours")["seconds"]) == case["rounds"]
        return case["rounds"]

    assert [rounds(x) for x in (0.0, 10.5, 1e9)] == [_harness.MIN_ROUNDS, 11, 30]


SWAPPED = ("name", *backend._OPERATORS)


def test_a_run_leaves_the_backend_and_the_threads_as_they_were() -> None:
    before = [getattr(backend, each) for each in SWAPPED], torch.get_num_threads()
    record = bench_collate.measure(1, QUICK, only="tiny", quick=True)
    assert [case["title"] for case in record["cases"]] == ["tiny"]
    assert record["machine"]["threads"] == "1"
    after = [getattr(backend, each) for each in SWAPPED], torch.get_num_threads()
    assert after == before


def test_both_backends_are_timed_in_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in SWAPPED:
        monkeypatch.setattr(backend, each, None)
        monkeypatch.setitem(backends.AS_LOADED, each, "native")
        monkeypatch.setitem(backends.IN_PYTHON, each, "python")
    for _ in range(2):  # the first case leaves its last backend behind
        native, python = backends.ours(lambda: {getattr(backend, x) for x in SWAPPED})
        assert [python.call(), native.call(), python.call()] == [
            {"python"},
            {"native"},
            {"python"},
        ]


def test_every_case_runs_and_all_contenders_agree() -> None:
    found = cases.cases(True)
    titles = [case.title for case in found]
    assert len(set(titles)) == len(titles) >= 15
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in found:
            record = _harness.compare(case.title, case.contenders(), **QUICK._asdict())
            kinds = [each["kind"] for each in record["rows"] if each["installed"]]
            assert "ours" in kinds and "peer" in kinds, case.title
            assert record["nbytes"] > 0
    finally:
        torch.set_num_threads(before)
        backends.use_backend(backends.AS_LOADED)


def test_the_nest_has_the_requested_number_of_leaves() -> None:
    for num in (1, 3, 33, 100, 528):
        leaves, _ = _pytree.tree_flatten(data.nested_batch(num))
        assert len(leaves) == num
    assert 100e3 < sum(leaf.nbytes for leaf in leaves) < 200e3


def test_mappings_are_converted_and_restored() -> None:
    tree = {"a": [torch.ones(2), (torch.zeros(1), {"b": torch.ones(1)})]}
    mappings = peers.in_mappings(tree)
    assert set(mappings["a"]["1"]) == {"0", "1"}
    assert _harness.difference(peers.out_of_mappings(mappings, tree), tree) == ""


def test_photographs_are_resized_by_the_rule_of_mmdet() -> None:
    assert data.rescaled(427, 640, 800, 1333) == (800, 1199)
    assert data.rescaled(480, 1280, 800, 1333) == (500, 1333)
    assert data.rescaled(1411, 1411, 800, 1333) == (800, 800)


@pytest.mark.skipif(not data.photos(50, 83), reason="needs scikit-image or its like")
def test_photographs_are_real_and_ragged() -> None:
    photos = data.photos(50, 83)
    assert len({photo.shape for photo in photos}) > 1
    for photo in photos:
        assert photo.dtype == torch.uint8 and photo.shape[0] == 3
        assert min(photo.shape[1:]) <= 50 and max(photo.shape[1:]) <= 83
        assert photo.float().std() > 10


@pytest.mark.skipif(not data.glyphs(1), reason="needs matplotlib, for its fonts")
def test_glyphs_are_cut_out_of_a_font() -> None:
    glyphs = data.glyphs(200)
    assert len(glyphs) == 200 and len({glyph.shape for glyph in glyphs}) > 20
    assert all(glyph.dim() == 3 and glyph.any() for glyph in glyphs)
    assert _harness.difference(glyphs, data.glyphs(200)) == ""
