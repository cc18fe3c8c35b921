"""The record of one training process and its workers, with its JSON forms.

Note: [lanes]. A lane contains the events of one thread of one process: they are
consecutive or nested. ``loop`` is the main thread, ``worker 3`` a worker of a loader,
and ``prefetch`` the thread of a `PreDataLoader`. Workers of consecutive epochs share a
lane if they have the same number. Workers of two loaders that run at the same time do
not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import BatchValueError

FORMAT = "pyparallel-profile"
VERSION = 1

#: Markers of the loop: a ``wait`` returned a batch, an ``end`` did not, and ``stop``
#: ends the recording. Other kinds are the names of ranges of `pyparallel.core.tracing`.
WAIT, END, STOP = "wait", "end", "stop"
#: Ranges of the loop: calls of ``iter()``. The first one of a loader has another name.
ITER, FIRST_ITER = "iter", "first iter"
#: The types of the fields of a `Record`, except for those of lists.
_TYPES = {
    **dict.fromkeys(("exit_code", "rank", "world_size"), int | None),
    **dict.fromkeys(("steps", "warmup"), int),
    **{"script": str, "synchronized": bool},
    **dict.fromkeys(("environment", "transports"), dict),
}


class Event(NamedTuple):
    """An event of a lane; times are nanoseconds since the first event of the record.

    ``docs/profile-command.md`` explains the fields, in its table of columns.
    """

    lane: str
    kind: str
    start: int
    end: int
    loader: int = 0
    epoch: int = 0
    stacked_nbytes: int = 0
    padding_nbytes: int = 0
    cpu: int = -1
    core_wait: int = 0
    batch: int = -1
    gil_wait: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Record:
    """The events of one training process and its workers, in the order of their ends.

    ``docs/profile-command.md`` explains the fields.
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
    batches: tuple[dict[str, Any], ...] = ()
    transports: dict[str, list[int]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as JSON; ``docs/profile-command.md`` lists its fields."""
        data = asdict(self)
        del data["events"]
        lines = ",\n".join(json.dumps(event) for event in self.events)
        head = {"format": FORMAT, "version": VERSION, **data}
        head["columns"] = Event._fields
        text = json.dumps(head, indent=1)
        return f'{text[:-2]},\n "events": [\n{lines}\n]}}\n'

    def to_trace(self) -> str:
        """Return the lanes in Chrome's trace event format, which Perfetto opens."""
        process = self.rank or 0
        lanes = sorted({event.lane for event in self.events}, key=lane_order)
        threads = {lane: i for i, lane in enumerate(lanes, 1)}

        def name_of(kind: str, args: dict[str, Any], **thread: int) -> dict[str, Any]:
            return {"ph": "M", "pid": process, "name": kind, "args": args, **thread}

        found = [name_of("process_name", {"name": self.script})]
        for lane, thread in threads.items():
            found.append(name_of("thread_name", {"name": lane}, tid=thread))
            found.append(
                name_of("thread_sort_index", {"sort_index": thread}, tid=thread)
            )
        for event in self.events:
            details = zip(Event._fields, event, Event(*event[:4]), strict=True)
            found.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": threads[event.lane],
                    "name": event.kind,
                    "ts": event.start / 1e3,  # microseconds
                    "dur": (event.end - event.start) / 1e3,
                    "args": {name: n for name, n, default in details if n != default},
                }
            )
        lines = ",\n".join(map(json.dumps, found))
        return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, where: str = "Record.from_json") -> Record:
        """Return the record that `to_json` wrote.

        Args:
            text: the JSON text.
            where: the source of the text, for error messages.

        Raises:
            ValueError: the text is not a record, or has another version.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise BatchValueError(
                f"{where} must be JSON of a profile, but is not: {error}."
            ) from error
        found, version = data.pop("format", None), data.pop("version", None)
        if (found, version) != (FORMAT, VERSION):
            raise BatchValueError(
                f"{where} must have the format {FORMAT!r} and the version {VERSION}, "
                f"but has {found!r} and {version!r}. Use the version of pyparallel "
                "that wrote it."
            )
        try:
            del data["columns"]
            events = tuple(_checked(Event(*row)) for row in data.pop("events"))
            loaders = tuple(map(_loader, data.pop("loaders")))
            batches = tuple(map(_batch, data.pop("batches")))
            record = cls(events=events, loaders=loaders, batches=batches, **data)
            typed = [(name, getattr(record, name), _TYPES[name]) for name in _TYPES]
            for name, value in record.environment.items():
                typed.append((f"{name} of environment", value, str))
            for name, value, kind in typed:
                if not isinstance(value, kind):
                    raise TypeError(f"{name} is {value!r}")
            return record
        except (KeyError, TypeError, ValueError) as error:
            raise BatchValueError(
                f"{where} must have the fields of a profile, but does not: {error}."
            ) from error


def _checked(event: Event) -> Event:
    """Return the event; raise ValueError if a field has a wrong type."""
    texts = all(isinstance(value, str) for value in event[:2])
    numbers = all(type(value) is int for value in event[2:])
    if not texts or not numbers or event.end < event.start:
        raise ValueError(f"an event is {list(event)}")
    return event


def _loader(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: row[name] for name in ("name", "num_workers", "batch_size")}
    return found | {name: row[name] for name in ("applied", "slabs") if name in row}


def _batch(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row about a batch; raise if their types are wrong."""
    found: dict[str, Any] = {"sizes": [[int(n) for n in size] for size in row["sizes"]]}
    if "layout" in row:
        layout = [([int(n) for n in s], str(t), bool(x)) for s, t, x in row["layout"]]
        ours, held = row["ours"], float(row["held"])
        found |= {"layout": layout, "ours": ours and int(ours), "held": held}
    return found


def collect(folder: Path) -> list[Record]:
    """Return the records of all training processes in a folder, sorted by rank.

    Each file is written by one process: a head, then one event in each line. The last
    line of a killed process may be incomplete.
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
    batches = [row for row in rows if row["kind"] == "batch"]
    rows = [row for row in rows if row["kind"] not in ("loader", "batch")]
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
        **head["record"],
        events=tuple(events),
        loaders=tuple(map(_loader, loaders)),
        batches=tuple(map(_batch, batches)),
    )


def _lanes(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the lane of every pair of name and owner; see Note [lanes]."""
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        key = row["lane"], row["owner"]
        start, end = spans.get(key, (row["start"], row["end"]))
        spans[key] = min(start, row["start"]), max(end, row["end"])
    lanes: dict[tuple[str, str], str] = {}
    last_ends: dict[str, int] = {}
    for key, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        name, number = key[0], 1
        while last_ends.get(name, start) > start:
            number += 1
            name = f"{key[0]} ({number})"
        lanes[key], last_ends[name] = name, end
    return lanes


def lane_order(lane: str) -> tuple[list[object], ...]:
    """Return the sort key of a lane's name, in which numbers count as numbers."""
    return tuple([int(t) if t.isdigit() else t] for t in re.split(r"(\d+)", lane))
