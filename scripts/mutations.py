"""Remove one protection of tests/mutations/ at a time and check that a test fails.

    python scripts/mutations.py                  # all; prints noticed or SURVIVED
    python scripts/mutations.py --only "landing" # those whose names contain it
    python scripts/mutations.py --changed        # those without a recorded outcome
    python scripts/mutations.py --list
    python scripts/mutations.py --record         # keep outcomes, write docs/traps.md
    python scripts/mutations.py --table          # write docs/traps.md

The script works in a copy of the tree. The tests must pass there first. A test that
hangs or dies counts as failed. The exit code is 1 if a mutation survives or does not
apply.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mutations import ALL, Mutation
from tests.mutations.page import is_current, pages, record, recorded
from tests.mutations.trial import NOTICED, Tree, preload, problem, run


def choose(parts: list[str]) -> list[Mutation]:
    """Return the mutations whose names contain any of these, or all."""
    return [m for m in ALL if not parts or any(part in m.name for part in parts)]


def attempt(chosen: list[Mutation], root: Path, cmake: str, keeps: bool) -> int:
    """Try mutations in a tree; return the exit code."""
    started = time.monotonic()
    preload()
    tree = Tree(root.resolve(), cmake, forks=True)
    tree.fill()
    outcomes = run(tree, chosen, lambda line: print(line, flush=True))
    noticed = sum(outcome.verdict in NOTICED for outcome in outcomes.values())
    seconds = time.monotonic() - started
    print(f"{len(outcomes)} mutations, {noticed} noticed, {seconds:.0f} s")
    for name, outcome in outcomes.items():
        if outcome.verdict == "BROKEN":
            print(f"\n---- {name}\n{outcome.by}")
    if keeps:
        record(ALL, outcomes)
        write_pages()
    return 0 if noticed == len(outcomes) else 1


def write_pages() -> None:
    """Write docs/traps*.md."""
    for path, text in pages(recorded()).items():
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """Run the chosen command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], help="a part of the names"
    )
    parser.add_argument(
        "--changed", action="store_true", help="only those without outcome"
    )
    parser.add_argument("--list", action="store_true", help="print names and files")
    parser.add_argument("--record", action="store_true", help="save the outcomes")
    parser.add_argument("--table", action="store_true", help="write docs/traps*.md")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--tree", type=Path, help="copy to this folder and keep it")
    args = parser.parse_args()
    if args.table:
        write_pages()
        return 0
    chosen = choose(args.only)
    if args.changed:
        kept = recorded()
        chosen = [each for each in chosen if not is_current(each, kept)]
    if args.list:
        for mutation in chosen:
            print(f"{mutation.name}  ({mutation.file})")
        return 0
    wrong = {m.name: why for m in chosen if (why := problem(m))}
    for name, why in wrong.items():
        print(f"BROKEN  {name}: {why}")
    if wrong or not chosen:
        return 1
    root = args.tree or Path(tempfile.mkdtemp(prefix="mutations-"))
    try:
        return attempt(chosen, root, args.cmake, args.record)
    finally:
        if args.tree is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
