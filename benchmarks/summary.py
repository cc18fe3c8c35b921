"""Write the figures and tables of the pages from the records.

    python -m benchmarks summary

The pages are the project's README and the list of losses in benchmarks/README.md. The
chart of trainings is in the README and on the site's first page, and the predictions
beside them are in docs/how-much.md. It measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from . import report
from ._harness import Record
from .environment import malloc_mode
from .loader.fields import BY_TORCH
from .loader.images import MMCV, ONE_PASS, TORCH
from .loader.threads import PROCESSES
from .report import installed, write_block
from .training import predicted

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: The cases of both kinds of records in the README, and their names there.
CASES = {
    "photos float32": "12 photographs for 1333x800, float32",
    "photos uint8": "the same in uint8",
    "detection float32": "16 COCO-like images, float32",
    "small uint8": "16 small images, uint8",
    "many small fields": "256 samples of 10 small tensors",
    "scatter 528 leaves": "`scatter` of 528 small leaves to the host",
}
LOADER_CASES = {
    "photos uint8": "photographs for 1333x800, uint8",
    "photos uint8, read whole": "the same, and the step reads every byte",
    "photos float32": "photographs, float32",
    "equal uint8": "16 equal images, uint8",
}
#: The training whose profile is an example.
EXAMPLE = "photographs of different sizes"
_OTHER_LOADERS = ("SPDL", "DALI", "torchdata")
CROSSING = "112 small fields, to cross"
_PEERS = MMCV, ONE_PASS, TORCH


def times(case: Record, start: str) -> str:
    """Return the time relative to ours of the contender that begins so, if any."""
    for name, row in installed(case).items():
        if name.startswith(start) and "ours, native" in row["over"]:
            ratio = row["over"]["ours, native"]["of_medians"]
            return f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.{1 + (ratio < 2)}f}"
    return ""


def _both(cells: Iterable[str]) -> str:
    cells = list(cells)
    return " / ".join(cells) if all(cells) else ""


def _label(label: str, case: Record) -> str:
    nbytes = (case.get("nbytes") or 0) / case.get("batches", 1)
    return f"{label}, {nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else label


def cases_of(run: Record) -> dict[str, Record]:
    """Return the cases of a run by title."""
    return {case["title"]: case for case in run["cases"]}


def runs_of(results: Record) -> list[dict[str, Record]]:
    """Return the cases of one thread by title: as usual, and with memory kept."""
    found = {
        malloc_mode(run["machine"]): cases_of(run)
        for run in results["runs"]
        if run["machine"]["threads"] == "1"
    }
    return [found["default"], found["warm"]]


def batches(results: Record) -> list[str]:
    """Return the table of `collate` and `scatter` in one process."""
    titles = ["", "mmcv 1.7.2", "fill, then copy (detectron2)"]
    titles += ["*non-temporal memcpy of the result*"]
    contenders = "mmcv 1.x", "new_full + copy_", "non-temporal memcpy"
    runs = runs_of(results)
    return report.grid(
        titles,
        [
            [
                _label(label, runs[0][title]),
                *(
                    _both(times(run[title], name) for run in runs)
                    for name in contenders
                ),
            ]
            for title, label in CASES.items()
        ],
    )


def pure_python(results: Record) -> str:
    """Return the least and the greatest time of pure Python relative to mmcv."""
    shares = [
        1 / row["over"]["ours, Python"]["of_medians"]
        for run in results["runs"]
        for case in run["cases"]
        for name, row in installed(case).items()
        if name.startswith("mmcv") and "ours, Python" in row["over"]
    ]
    return f"{min(shares):.1f} to {max(shares):.1f}"


def loaded(results: Record) -> list[str]:
    """Return the table of loaders with one worker and with two."""
    cases = cases_of(results["runs"][0])
    titles = ["", "mmcv 1.7.2 collate", "one pass, torch's loader", "`default_collate`"]
    rows = []
    for title, label in LOADER_CASES.items():
        both = [cases[f"{title}, {number}"] for number in ("1 worker", "2 workers")]
        cells = [_both(times(case, name) for case in both) for name in _PEERS]
        rows.append([_label(label, both[0]), *cells])
    crossed = times(cases[CROSSING], "torch's loader")
    rows.append(["112 small tensors, from worker to parent", "", "", crossed])
    return report.grid(titles, rows)


def threads(results: Record) -> list[str]:
    """Return the table of worker threads for docs/threads.md, if it was measured."""
    cells = []
    for title, case in cases_of(results["runs"][0]).items():
        rows, name = installed(case), title.removeprefix("threads: ")
        if title.startswith("threads: ") and PROCESSES in rows:
            (ours, *_), processes = rows.values(), rows[PROCESSES]
            share = 1 / processes["over"][ours["name"]]["of_medians"]
            memory = [
                report._megabytes(row["facts"]["memory"])
                if "memory" in row.get("facts", {})
                else ""
                for row in (ours, processes)
            ]
            cells.append([name, f"{share:.2g}", *memory])
    if not cells:
        return []
    titles = ["two workers", "time of threads relative to processes"]
    text = f"Measured on two cores: {origin(results)}."
    titles += ["memory with threads", "with processes"]
    return [text, "", *report.grid(titles, cells)]


def origin(results: Record) -> str:
    """Return the date, the commit and the load of a measurement."""
    machine = results["runs"][0]["machine"]
    load = machine["load average"].split()[0]
    return f"{results['date']}, commit {machine['commit']}, load average {load}"


def epochs(results: Record, folder: str) -> list[str]:
    """Return the chart of trainings, and the best speeds of ours and of others.

    Args:
        results: the records.
        folder: the path of benchmarks/ from the page.
    """
    rows = []
    for case in results["runs"][0]["cases"]:
        first, *others = case["rows"]
        cells = [case["title"]]
        for chosen in (
            [row for row in others if row["kind"] == "ours"],
            [row for row in others if row["name"].startswith(_OTHER_LOADERS)],
        ):
            best = min(chosen, key=lambda row: row["median"])
            speed, name = first["median"] / best["median"], best["name"]
            cells.append(f"{speed:.2f} ({name.removeprefix('... ')})")
        rows.append(cells)
    return [
        "![Speed of an epoch beside torch's loader, for four trainings and each loader]"
        f"({folder}/charts/training.svg)",
        "",
        "An epoch goes from files to a trained model, on two cores. Its speed beside "
        "torch's `DataLoader` with the collate function of its users "
        f"([all figures]({folder}/results/training.md), {origin(results)}):",
        "",
        *report.grid(["", "best of ours", "best of SPDL, DALI, torchdata"], rows),
    ]


def block(results: Record, loader: Record) -> list[str]:
    """Return the tables of the README."""
    machine = results["runs"][0]["machine"]
    return [
        "Time relative to pyparallel (2.0 = twice as slow): ratios of medians, one "
        f"thread, {machine['cpu'].replace(' for this process', '')}, torch "
        f"{machine['torch']}, {origin(results)}. The first number is for memory fresh "
        "from the system, as in a training process. The second number is for an "
        "allocator that keeps freed memory.",
        "",
        *batches(results),
        "",
        "The last column copies the finished batch past the cache. pyparallel writes "
        "batches below half of the last cache (16 MB at most) into it, because the "
        "step reads them next, so its times for them are longer.",
        "",
        "One batch of a loader, time relative to pyparallel with one worker / with two "
        f"workers ({origin(loader)}):",
        "",
        *loaded(loader),
        "",
        "Without the compiled extension, `collate` takes "
        f"{pure_python(results)} of mmcv's time.",
    ]


def figures(results: Record, loader: Record) -> list[str]:
    """Return the three figures on the first screen of the README."""
    cases = cases_of(loader["runs"][0])
    fresh, kept = (times(run["detection float32"], "mmcv") for run in runs_of(results))
    return [
        "- Batches of photographs reach the training process "
        f"{times(cases['photos uint8, 1 worker'], MMCV)} times faster "
        "than with torch's\n  `DataLoader` and mmcv's `collate`.",
        f"- Padding and stacking 16 COCO-like images is {fresh} times faster than in "
        f"mmcv, and {kept} times\n  faster if the allocator keeps freed memory.",
        "- A batch of 112 small tensors gets from a worker to the training process "
        f"{times(cases[CROSSING], BY_TORCH)} times faster\n  than in torch's "
        "`DataLoader`.",
    ]


def lost(records: Iterable[Record]) -> list[str]:
    """Return the table of the losses: for each case the peer with the least time."""
    worst: dict[tuple[str, str], report.Loss] = {}
    for run in (run for results in records for run in results["runs"]):
        for loss in report.losses(run):
            known = worst.setdefault((loss.case, loss.ours), loss)
            if loss.over["of_medians"] < known.over["of_medians"]:
                worst[loss.case, loss.ours] = loss
    titles = ["case", "peer", "faster than", "time relative", "run", "reason"]
    found = worst.values()
    cells = [(x.case, x.peer, x.ours, x.ratio, x.run, x.reason) for x in found]
    return report.grid(titles, cells, left=len(titles))


def read(name: str) -> Record:
    """Return the records of a question."""
    records: Record = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return records


def main(root: Path = ROOT) -> None:
    """Write the figures of the newest records into the pages of a folder."""
    names = "collate", "loader", "parallel", "training"
    records = {name: read(name) for name in names}
    collate, loader, training = (records[n] for n in ("collate", "loader", "training"))
    run = training["runs"][0]  # of the default allocator
    for page, name, lines in (
        ("README.md", "trainings", epochs(training, "benchmarks")),
        ("docs/index.md", "trainings", epochs(training, "../benchmarks")),
        ("docs/how-much.md", "predicted", predicted.table(run)),
        ("docs/how-much.md", "example", predicted.example(run, EXAMPLE)),
        ("docs/threads.md", "threads", threads(loader)),
        ("benchmarks/README.md", "losses", lost(records.values())),
        ("README.md", "figures", figures(collate, loader)),
        ("README.md", "measured", block(collate, loader)),
    ):
        if lines:
            write_block(root / page, "\n".join(lines) + "\n", name)
