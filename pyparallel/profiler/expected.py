"""The text of a prediction: the expected speed, its parts, and their figures."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..core.text import nbytes_text, percent, plural, time_text
from .prediction import Numbers, changes

#: A smaller gain counts as no gain: the model is not more accurate.
_WORTH = 1.05


def expected(numbers: Numbers) -> list[str]:
    """Return the prediction as lines: the sum, the parts, and the figures."""
    found = changes(numbers)
    counted = [each for each in found if each.factor and not each.is_other]
    reasons = [each.reason for each in found if each.factor is None]
    if not counted:
        why = reasons[0] if reasons else "the loop has all parts"
        return [f"expected with pyparallel: not known, because {why}"]
    factors = [1.0, *(each.factor or 1.0 for each in counted)]
    gains = [after / before for before, after in itertools.pairwise(factors)]
    if factors[-1] < _WORTH:
        text = f"no gain ({factors[-1]:.2f}x), because {_limit(numbers)}"
    else:
        best = counted[gains.index(max(gains))].title.partition(":")[0]
        text = f"{factors[-1]:.1f}x; most of it from: {best}"
    rows = []
    for title, factor, reason, _ in found:
        value = "not known:" if factor is None else f"{factor:.2f}x"
        rows.append(f"  {title:<45} {value} {reason}".rstrip())
    return [f"expected with pyparallel: {text}", *rows, f"  {_figures(numbers)}"]


def _limit(numbers: Numbers) -> str:
    """Return the part of the loop that no change makes shorter."""
    now = numbers.now
    step = now.compute / now.period
    if step >= 0.8 or not now.fetch:
        return f"the step takes {percent(min(1.0, step))} of the time"
    cpu = (now.fetch - now.idle) / (now.period * now.cores)
    read = now.fetch / (now.period * max(1, now.workers))
    return f"reading samples takes {percent(min(1.0, max(read, cpu)))} of the time"


def _figures(numbers: Numbers) -> str:
    now, size = numbers.now, numbers.batch_size

    def known(value: float | None, text: Callable[[float], str]) -> str:
        return "not known" if value is None else text(value)

    transport = None
    if numbers.transports:
        transport = now.send + now.receive + now.read
    figures = {
        "bytes of a batch": known(numbers.nbytes, nbytes_text),
        "reading a sample": known(size and now.fetch / size, time_text),
        "collate": time_text(now.collate),
        "transport": known(transport, time_text),
        "padding": known(numbers.padding, percent),
        "step": time_text(now.compute),
        "wait": time_text(numbers.wait),
    }
    texts = [f"{name} {value}" for name, value in figures.items()]
    return f"{', '.join(texts)}, {plural(now.workers, 'worker')}"
