"""What was recorded of one training process and its workers: a value, and its JSON.

Note: [lanes]. A lane is one thread of one process: what stands in it happened one after
the other or one inside the other. ``loop`` is the main thread; ``worker 3`` a worker of
a loader; ``prefetch`` the thread of a `PreDataLoader`. Workers with the same number of
two epochs share a lane; of two loaders at the same time they do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import BatchValueError

FORMAT = "pyparallel-profile"
VERSION = 1

#: Markers of the loop: a ``wait`` gave a batch, an ``end`` did not, and at ``stop``
#: enough had been seen. All else is the name of a range of `pyparallel.core.tracing`.
WAIT, END, STOP = "wait", "end", "stop"


class Event(NamedTuple):
    """Something that happened, in nanoseconds since the first event of all."""

    lane: str
    kind: str
    start: int
    end: int
    #: Of markers: which loader, and which pass over it; both count from 1.
    loader: int = 0
    epoch: int = 0
    #: Of ``collate``: bytes of the tensors that were stacked, and how many are padding.
    stacked_nbytes: int = 0
    padding_nbytes: int = 0
    #: The CPU time in it: in a worker that of the process; -1: not measured.
    cpu: int = -1
    #: The time in it for which its thread could run, but had no core.
    core_wait: int = 0
    #: Which batch of the pass a worker makes, or the loop gets; -1: not known.
    batch: int = -1


@dataclass(frozen=True)
class Record:
    """What was seen of one training process, and under which circumstances.

    Attributes:
        script: the name of the script, without its folder.
        exit_code: of the whole command; None: it still ran, or was a block of code.
        rank: of this process, where a launcher gave it one.
        world_size: of all of them.
        steps: how many were asked for.
        warmup: how many steps are left out at the beginning.
        synchronized: whether each step ended when the device had done its work.
        environment: versions and the machine, by what they are called.
        loaders: kind, ``num_workers`` and ``batch_size`` of each loader, in order.
        events: in the order in which they ended.
    """

    script: str
    events: tuple[Event, ...]
    exit_code: int | None = None
    rank: int | None = None
    world_size: int | None = None
    steps: int = 0
    warmup: int = 0
    synchronized: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    loaders: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> str:
        """Return the record as JSON; see ``docs/profile-command.md`` for its form."""
        data = asdict(self)
        del data["events"]
        lines = ",\n".join(json.dumps(event) for event in self.events)
        head = {"format": FORMAT, "version": VERSION, **data}
        head["columns"] = Event._fields
        text = json.dumps(head, indent=1)
        return f'{text[:-2]},\n "events": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, where: str = "Record.from_json") -> Record:
        """Return the record that `to_json` wrote.

        Raises:
            ValueError: the text is no such record, or one of another version.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("no object")
            found, version = data.pop("format", None), data.pop("version", None)
            columns = data.pop("columns", None)
        except ValueError as error:
            raise BatchValueError(
                f"{where} must be JSON of a profile, but is not: {error}."
            ) from error
        if (found, version) != (FORMAT, VERSION):
            raise BatchValueError(
                f"{where} must have the format {FORMAT!r} and the version {VERSION}, "
                f"but has {found!r} and {version!r}. Draw it with the pyparallel that "
                "wrote it."
            )
        try:
            rows = [dict(zip(columns, row, strict=True)) for row in data.pop("events")]
            events = tuple(_checked(Event(**row)) for row in rows)
            loaders = tuple(map(_loader, data.pop("loaders")))
            return cls(events=events, loaders=loaders, **data)
        except (KeyError, TypeError, ValueError) as error:
            raise BatchValueError(
                f"{where} must have the fields of a profile, but does not: {error}."
            ) from error


def _checked(event: Event) -> Event:
    """Return an event whose fields are of the types that they must be of."""
    texts = all(isinstance(value, str) for value in event[:2])
    numbers = all(type(value) is int for value in event[2:])
    if not texts or not numbers or event.end < event.start:
        raise ValueError(f"an event is {list(event)}")
    return event


def _loader(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("name", "num_workers", "batch_size")}


def collect(folder: Path) -> list[Record]:
    """Return a record of every training process that wrote into a folder, by rank.

    Each file is what one process wrote: a head, and an event in each line. The last
    line of a process that was killed may be incomplete.
    """
    heads: dict[int, dict[str, Any]] = {}
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = _rows(path)
        if not rows:
            continue
        head = rows[0]
        owner = head["parent"] or head["pid"]
        if head["parent"] is None:
            heads.setdefault(owner, head)
        for row in rows[1:]:
            row["owner"] = f"{head['pid']} {row.get('thread', 0)}"
        found.setdefault(owner, []).extend(rows[1:])
    records = [_record(head, found[pid]) for pid, head in heads.items()]
    return sorted(records, key=lambda record: (record.rank or 0, record.script))


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _record(head: dict[str, Any], rows: list[dict[str, Any]]) -> Record:
    loaders = [row for row in rows if row["kind"] == "loader"]
    rows = [row for row in rows if row["kind"] != "loader"]
    lanes = _lanes(rows)
    first = min((row["start"] for row in rows), default=0)
    rows.sort(key=lambda row: (row["end"], -row["start"]))
    events = [
        Event(
            lanes[row["lane"], row["owner"]],
            row["kind"],
            row["start"] - first,
            row["end"] - first,
            **{name: row[name] for name in Event._fields[4:] if name in row},
        )
        for row in rows
    ]
    return Record(
        script=head["script"],
        events=tuple(events),
        rank=head["rank"],
        world_size=head["world_size"],
        steps=head["steps"],
        warmup=head["warmup"],
        synchronized=head["synchronize"],
        environment=head["environment"],
        loaders=tuple(map(_loader, loaders)),
    )


def _lanes(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the lane of every name and owner: see Note [lanes]."""
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        key = row["lane"], row["owner"]
        start, end = spans.get(key, (row["start"], row["end"]))
        spans[key] = min(start, row["start"]), max(end, row["end"])
    lanes: dict[tuple[str, str], str] = {}
    until: dict[str, int] = {}
    for key, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        name, number = key[0], 1
        while until.get(name, start) > start:
            number += 1
            name = f"{key[0]} ({number})"
        lanes[key], until[name] = name, end
    return lanes
