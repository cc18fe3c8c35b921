"""Compare the plan of a `SizeBatchSampler` with random batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .planner import Plan, Planner


@dataclass(frozen=True)
class BatchFigures:
    """The figures of the batches of one epoch, on all ranks.

    Attributes:
        padding: the fraction of the elements of the batches that are padding.
        num_shapes: the number of different shapes of batches, with their number of
            samples.
        balance_mean: the largest cost of a step's batches divided by their mean cost:
            the mean over the steps. 1: all ranks have the same work.
        balance_p99: the same, exceeded by 1 % of the steps.
        num_steps: the number of batches of each rank.
        batch_size_mean: the mean number of samples of a batch.
    """

    padding: float
    num_shapes: int
    balance_mean: float
    balance_p99: float
    num_steps: int
    batch_size_mean: float


@dataclass(frozen=True)
class SizeBatchReport:
    """The figures of a plan, beside random batches of the same number of samples.

    Attributes:
        planned: the figures of the plan.
        random: the figures of random batches. They ignore the budget.
    """

    planned: BatchFigures
    random: BatchFigures

    def __str__(self) -> str:
        """Show the figures as a table."""
        lines = [f"{'':24}{'planned':>10}{'random':>10}"]
        for name, label, form in _ROWS:
            values = (getattr(each, name) for each in (self.planned, self.random))
            lines.append(f"{label:24}" + "".join(f"{form(v):>10}" for v in values))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as nested dicts, for a log."""
        return asdict(self)


_ROWS: Any = [
    ("padding", "padding", lambda v: f"{100 * v:.1f} %"),
    ("num_shapes", "shapes", str),
    ("balance_mean", "balance, mean", lambda v: f"{v:.3f}"),
    ("balance_p99", "balance, 99 % of steps", lambda v: f"{v:.3f}"),
    ("num_steps", "steps", str),
    ("batch_size_mean", "samples in a batch", lambda v: f"{v:.1f}"),
]


def make_report(planner: Planner, plan: Plan, epoch: int) -> SizeBatchReport:
    """Return the figures of a plan, and of random batches."""
    return SizeBatchReport(
        _figures(planner, plan), _figures(planner, _shuffle(planner, plan, epoch))
    )


def _shuffle(planner: Planner, plan: Plan, epoch: int) -> Plan:
    """Return a plan of the same number of batches, whose places are random."""
    generator = np.random.Generator(np.random.PCG64([planner.seed, epoch, 2**31]))
    order = generator.permutation(plan.order)
    num_batches, ends = len(plan.costs), plan.ends
    if not planner.batch_size:  # small batches of large samples would not be random
        ends = np.arange(num_batches + 1) * len(order) // max(1, num_batches)
    sizes = planner.places.sizes[order].T
    shapes, costs = planner.measure(sizes, np.diff(ends))
    return replace(plan, order=order, ends=ends, shapes=shapes, costs=costs)


def _figures(planner: Planner, plan: Plan) -> BatchFigures:
    lengths, cells = np.diff(plan.ends), plan.cells_of_batches()
    data = planner.num_elements(plan.order, np.repeat(cells, lengths))
    total = float((plan.costs * cells).sum())
    shapes = np.concatenate([lengths[None], plan.shapes])[:, cells > 0]
    costs = plan.costs[plan.steps[: plan.num_complete] // plan.places.depth]
    means = costs.mean(axis=1)
    ratios = np.ones(1)
    if (means > 0).any():
        ratios = costs.max(axis=1)[means > 0] / means[means > 0]
    return BatchFigures(
        padding=1 - data / total if total else 0.0,
        num_shapes=np.unique(shapes, axis=1).shape[1],
        balance_mean=float(ratios.mean()),
        balance_p99=float(np.quantile(ratios, 0.99)),
        num_steps=len(plan.steps),
        batch_size_mean=float((lengths * cells).sum() / max(1, cells.sum())),
    )
