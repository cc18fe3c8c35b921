"""Write the figures and tables of the pages from the records.

    python -m benchmarks.summary

The pages are the project's README and the list of losses in benchmarks/README.md. The
chart of trainings is in the README and on the site's first page, and the predictions
beside them are in docs/how-much.md. Each command of `make` that measures ends with this
one. It measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from . import report
from ._harness import Record
from .environment import malloc_mode
from .loader.images import MMCV, ONE_PASS, TORCH
from .report import _head, _row
from .training import predicted

BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
HEAD_BEGIN, HEAD_END = "<!-- figures -->", "<!-- end of figures -->"
EPOCHS_BEGIN, EPOCHS_END = "<!-- trainings -->", "<!-- end of trainings -->"
LOST_BEGIN, LOST_END = "<!-- losses -->", "<!-- end of losses -->"
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NATIVE, PYTHON = "ours, native", "ours, Python"
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
#: The pages with the chart of trainings, and the path of this folder from them.
TRAINING_PAGES = {"README.md": "benchmarks", "docs/index.md": "../benchmarks"}
#: The training whose profile is an example.
EXAMPLE = "photographs of different sizes"
_OTHER_LOADERS = ("SPDL", "DALI", "torchdata")
CROSSING = "112 small fields, to cross"


def file_of(kind: str) -> Path:
    """Return the file of the records of a kind: ``collate``, ``loader``."""
    return RESULTS / f"{kind}.json"


def times(row: Record | None, ours: str = NATIVE) -> str:
    """Return the time of a row relative to ours; empty if unknown."""
    over = (row or {}).get("over", {}).get(ours)
    if not over:
        return ""
    ratio = over["of_medians"]
    return f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.{1 if ratio >= 2 else 2}f}"


def _both(cells: list[str]) -> str:
    return " / ".join(cells) if all(cells) else ""


def _rows(case: Record) -> dict[str, Record]:
    return {row["name"]: row for row in case["rows"] if row["installed"]}


def _megabytes(case: Record) -> str:
    nbytes = (case.get("nbytes") or 0) / case.get("batches", 1)
    return f", {nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else ""


def runs_of(results: Record) -> list[dict[str, Record]]:
    """Return the cases of one thread by title: as usual, and with memory kept."""
    found = {
        malloc_mode(run["machine"]): {case["title"]: case for case in run["cases"]}
        for run in results["runs"]
        if run["machine"]["threads"] == "1"
    }
    return [found["default"], found["warm"]]


def batches(results: Record) -> Iterator[str]:
    """Yield the table of `collate` and `scatter` in one process."""
    titles = [
        "",
        "mmcv 1.7.2",
        "fill, then copy (detectron2)",
        "*non-temporal memcpy of the result*",
    ]
    yield from _head(titles)
    runs = runs_of(results)
    contenders = "mmcv 1.x", "new_full + copy_", "non-temporal memcpy"
    for title, label in CASES.items():
        both = [_rows(run[title]) for run in runs]
        cells = [_both([_first(rows, name) for rows in both]) for name in contenders]
        yield _row([label + _megabytes(runs[0][title]), *cells])


def _first(rows: dict[str, Record], name: str) -> str:
    """Return the times of the contender whose name begins with ``name``."""
    return next((times(row) for full, row in rows.items() if full.startswith(name)), "")


def pure_python(results: Record) -> str:
    """Return the least and the greatest time of pure Python relative to mmcv."""
    shares = [
        1 / row["over"][PYTHON]["of_medians"]
        for run in results["runs"]
        for case in run["cases"]
        for row in case["rows"]
        if row["name"].startswith("mmcv") and PYTHON in row.get("over", {})
    ]
    return f"{min(shares):.1f} to {max(shares):.1f}"


def loaded(results: Record) -> Iterator[str]:
    """Yield the table of loaders with one worker and with two."""
    (run,) = results["runs"]
    cases = {case["title"]: case for case in run["cases"]}
    titles = ["", "mmcv 1.7.2 collate", "one pass, torch's loader", "`default_collate`"]
    yield from _head(titles)
    for title, label in LOADER_CASES.items():
        both = [cases[f"{title}, {number}"] for number in ("1 worker", "2 workers")]
        cells = [
            _both([times(_rows(case).get(name)) for case in both])
            for name in (MMCV, ONE_PASS, TORCH)
        ]
        yield _row([label + _megabytes(both[0]), *cells])
    crossed = times(_rows(cases[CROSSING]).get("torch's loader"))
    yield _row(["112 small tensors, from worker to parent", "", "", crossed])


def origin(results: Record) -> str:
    """Return the date, the commit and the load of a measurement."""
    machine = results["runs"][0]["machine"]
    load = machine["load average"].split()[0]
    return f"{results['date']}, commit {machine['commit']}, load average {load}"


def epochs(results: Record, folder: str) -> str:
    """Return the chart of trainings, and the best speeds of ours and of others.

    Args:
        results: the records.
        folder: the path of benchmarks/ from the page.
    """
    lines = [
        "![Speed of an epoch beside torch's loader, for four trainings and each loader]"
        f"({folder}/charts/training.svg)",
        "",
        "An epoch goes from files to a trained model, on two cores. Its speed beside "
        "torch's `DataLoader` with the collate function of its users "
        f"([all figures]({folder}/results/training.md), {origin(results)}):",
        "",
        *_head(["", "best of ours", "best of SPDL, DALI, torchdata"]),
    ]
    for case in results["runs"][0]["cases"]:
        first, *others = case["rows"]
        kinds = (
            [row for row in others if row["kind"] == "ours"],
            [row for row in others if row["name"].startswith(_OTHER_LOADERS)],
        )
        cells = [case["title"]]
        for rows in kinds:
            best = min(rows, key=lambda row: row["median"])
            speed, name = first["median"] / best["median"], best["name"]
            cells.append(f"{speed:.2f} ({name.removeprefix('... ')})")
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def block(results: Record, loader: Record) -> str:
    """Return the tables of the README."""
    machine = results["runs"][0]["machine"]
    lines = [
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
    return "\n".join(lines) + "\n"


def figures(results: Record, loader: Record) -> str:
    """Return the three figures on the first screen of the README."""
    cases = {case["title"]: case for case in loader["runs"][0]["cases"]}
    loaded = times(_rows(cases["photos uint8, 1 worker"])[MMCV])
    crossed = times(_rows(cases[CROSSING])["torch's loader"])
    fresh, kept = (
        _first(_rows(run["detection float32"]), "mmcv 1.x") for run in runs_of(results)
    )
    return (
        f"- Batches of photographs reach the training process {loaded} times faster "
        "than with torch's\n  `DataLoader` and mmcv's `collate`.\n"
        f"- Padding and stacking 16 COCO-like images is {fresh} times faster than in "
        f"mmcv, and {kept} times\n  faster if the allocator keeps freed memory.\n"
        f"- A batch of 112 small tensors gets from a worker to the training process "
        f"{crossed} times faster\n  than in torch's `DataLoader`.\n"
    )


def lost(*records: Record) -> str:
    """Return the table of the losses: for each case the peer with the least time."""
    worst: dict[tuple[str, str], report.Loss] = {}
    for results in records:
        for run in results["runs"]:
            for loss in report.losses(run):
                key = loss.case, loss.ours
                known = worst.setdefault(key, loss)
                if loss.over["of_medians"] < known.over["of_medians"]:
                    worst[key] = loss
    titles = ["case", "peer", "faster than", "time relative", "run", "reason"]
    lines = [*_head(titles, left=len(titles))]
    for loss in worst.values():
        cells = [loss.case, loss.peer, loss.ours, loss.ratio, loss.run, loss.reason]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def read(path: Path) -> Record:
    """Return the records of a file."""
    records: Record = json.loads(path.read_text(encoding="utf-8"))
    return records


def main(arguments: list[str] | None = None) -> None:
    """Write the figures of the newest records into both pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary")
    parser.description = __doc__
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the pages")
    root = parser.parse_args(arguments).root
    records = read(file_of("collate")), read(file_of("loader"))
    more = [read(file_of("parallel"))]
    if file_of("training").exists():
        more.append(training := read(file_of("training")))
        for page, folder in TRAINING_PAGES.items():
            text = epochs(training, folder)
            report.write_block(root / page, text, EPOCHS_BEGIN, EPOCHS_END)
        (run,) = training["runs"]
        for lines, name in (
            (predicted.table(run), "predicted"),
            (predicted.example(run, EXAMPLE), "example"),
        ):
            marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
            report.write_block(
                root / "docs/how-much.md", "\n".join(lines) + "\n", *marks
            )
    table = lost(*records, *more)
    report.write_block(root / "benchmarks/README.md", table, LOST_BEGIN, LOST_END)
    report.write_block(root / "README.md", figures(*records), HEAD_BEGIN, HEAD_END)
    report.write_block(root / "README.md", block(*records), BEGIN, END)


if __name__ == "__main__":
    main()
