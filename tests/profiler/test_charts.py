"""Bars have the lengths of their times, texts are escaped, pages are complete."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import struct
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from pyparallel.profiler import report
from pyparallel.profiler.record import Event, Record
from pyparallel.profiler.report import page
from pyparallel.profiler.summary import COLOURS, PARTS, Summary
from tests.support.profiler.profile_records import MS, steady, summary

pytestmark = pytest.mark.one_backend

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('1')</script>&\"$x^2$\x00\x1b.py"
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws the charts"
)


# Charts.


def bars(svg: str) -> dict[str, list[tuple[float, float]]]:
    """Return the widths and heights of all bars by their tooltips."""
    found: dict[str, list[tuple[float, float]]] = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, path = group.find(f"{SVG}title"), group.find(f"{SVG}path")
        if title is not None and path is not None:
            name = title.text or ""
            numbers = [float(n) for n in re.findall(r"[\d.]+", path.get("d", ""))]
            xs, ys = numbers[::2], numbers[1::2]
            found.setdefault(name, []).append((max(xs) - min(xs), max(ys) - min(ys)))
            (part,) = [part for part in PARTS if f" {part} " in f" {name}"]
            assert f"fill: {COLOURS[part]}" in path.get("style", "")
    return found


def draw(record: Record) -> str:
    from pyparallel.profiler import charts

    return charts.draw(summary(record)).inline


@needs_matplotlib
def test_the_mean_bar_is_as_long_as_its_parts():
    found = bars(draw(steady()))
    labels = ("compute 6.00 ms, 60 %", "copy 1.00 ms, 10 %", "wait 3.00 ms, 30 %")
    (widths, heights) = zip(*[found[label][0] for label in labels], strict=True)
    assert widths == pytest.approx([n / 10 * sum(widths) for n in (6, 1, 3)], abs=1e-3)
    assert sum(widths) > 700 and len(set(heights)) == 1


@needs_matplotlib
def test_a_step_much_longer_than_the_others_is_cut_off_and_labelled():
    waits = [1] * 9 + [991, 1]
    start, events = 0, []
    for wait in waits:
        events.append(Event("loop", "wait", start * MS, (start + wait) * MS, 1, 1))
        start += wait + 9
    # Ten steps: 9 of 10 ms and one of 1 s.
    svg = draw(Record("x.py", tuple(events)))
    found, mean = bars(svg), (9 * 10 + 1000) / 10
    scale = found["step 1: compute 9.00 ms"][0][1] / 9
    height = found["step 10: wait 991 ms"][0][1]
    assert height == pytest.approx((6 * mean - 9) * scale, rel=1e-3)
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "1.00 s" in texts


@needs_matplotlib
def test_many_lanes_are_not_all_drawn():
    assert ">and 8 more lanes</" in draw(steady(steps=40, workers=20))


# The page.


class Elements(HTMLParser):
    """The elements of a page with their attributes and texts; all must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
@needs_matplotlib
def test_a_page_is_complete_and_loads_nothing():
    record = steady(padding=500)
    text = page(summary(record), draw(record))
    found = Elements(text)
    assert not found.open and {"svg", "table", "ol", "dl"} <= set(found.tags)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    names = dict(found.attributes).keys()
    assert not {"src", "href", "xlink:href", "srcset", "data"} & names
    assert not [name for name in names if name.startswith("on")]
    assert "default-src 'none'" in text and "url(" not in text and "@import" not in text
    urls = set(re.findall(r"https?://[^\"<> ]+", text))
    assert urls == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "$" not in text


def test_a_page_shows_the_figures_of_the_summary():
    found = Elements(page(summary(steady()), None)).texts
    assert found["h1"] == ["Input-bound: 30 % of a step went into getting its batch"]
    assert [text for text in found["td"] if text.strip()] == [
        *("compute ", "6.00 ms", "6.00 ms", "6.00 ms", "60 %"),
        *("copy ", "1.00 ms", "1.00 ms", "1.00 ms", "10 %"),
        *("wait ", "3.00 ms", "3.00 ms", "3.00 ms", "30 %"),
    ]
    assert found["b"][:4] == ["10.0 ms", "30 %", "100", "10 %"]
    assert found["b"][4:] == [
        "Let workers run further ahead: prefetch_factor=8",
        "Send batches ahead of the step: PreDataLoader(loader, device)",
    ]


def evil() -> Summary:
    record = dataclasses.replace(
        steady(),
        script=EVIL,
        environment={EVIL: EVIL, "cores": EVIL},
        loaders=({"name": EVIL, "num_workers": 2, "batch_size": EVIL},),
    )
    lanes = [
        event._replace(lane=event.lane.replace("worker", f"worker{EVIL}"))
        for event in record.events
    ]
    return summary(dataclasses.replace(record, events=tuple(lanes)))


def test_texts_of_a_record_are_escaped():
    text = page(evil(), None, EVIL)
    assert "script" not in Elements(text).tags
    assert not set("\x00\x1b") & set(text)
    assert "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;" in text


@needs_matplotlib
def test_texts_of_a_record_are_escaped_in_charts():
    from pyparallel.profiler import charts

    tree = ElementTree.fromstring(charts.draw(evil()).svg)
    assert {element.tag for element in tree.iter()} <= {
        SVG + tag for tag in "svg title style g path text defs".split()
    }
    # XML cannot contain control characters.
    assert "<script>alert('1')</script>&\"$x^2$??.py" in "".join(tree.itertext())


def test_a_verdict_without_a_loader_has_a_page():
    events = [Event("loop", "step", 10 * i, 10 * i + 8) for i in range(4)]
    text = page(summary(Record("x.py", tuple(events))), None)
    assert "Input or compute: not known" in text and "of it for input" not in text


# Files.


def test_without_matplotlib_a_report_has_no_charts_and_names_the_extra(
    tmp_path, monkeypatch
):
    monkeypatch.delitem(sys.modules, "pyparallel.profiler.charts", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if not installed
    for suffix in ("png", "svg"):
        (tmp_path / f"profile.{suffix}").write_bytes(b"of an earlier profile")
    (written,) = report.write([steady()], tmp_path)
    assert [path.name for path in written.files] == [
        "profile.html",
        "profile.json",
        "profile.trace.json",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(written.files)
    assert report.text(written) == (
        "train.py: 10 steps, 10.0 ms each\n"
        "  input-bound: 30 % of a step went into getting its batch\n"
        "    compute    6.00 ms   60 %\n"
        "    copy       1.00 ms   10 %\n"
        "    wait       3.00 ms   30 %\n"
        "  expected with pyparallel: not known, because the transport of a batch was "
        "not measured\n"
        "  what to change first\n"
        "    1. Let workers run further ahead: prefetch_factor=8\n"
        "       A batch takes 9.00 ms of a worker's time: one is ready every 4.50 ms "
        "with 2 workers. The rest of a step takes 7.00 ms. That is enough on average, "
        "but some batches are late. The longest wait is 3.00 ms.\n"
        "    2. Send batches ahead of the step: PreDataLoader(loader, device)\n"
        "       Opening and sending a batch takes 1.00 ms of a step, 10 %. A "
        "PreDataLoader does it in a thread during the previous step.\n"
        "  no charts: matplotlib is not installed (pip install "
        "'pyparallel-torch[profile]')\n"
        f"  {tmp_path / 'profile.html'}"
    )
    shown = "".join(Elements(written.files[0].read_text("utf-8")).texts["p"])
    assert "This page has no charts: matplotlib is not installed." in shown
    again = Record.from_json((tmp_path / "profile.json").read_text())
    assert again == steady()


@needs_matplotlib
def test_a_report_has_charts_and_its_png_has_the_same_bars(tmp_path):
    (written,) = report.write([steady()], tmp_path)
    page, *_, path = written.files
    ends = ["html", "json", "trace.json", "svg", "png"]
    assert [file.name for file in written.files] == [f"profile.{end}" for end in ends]
    assert sorted(tmp_path.iterdir()) == sorted(written.files)
    assert "matplotlib" not in report.text(written)
    assert {"svg", "figure"} <= set(Elements(page.read_text("utf-8")).tags)
    image = path.read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert width == 2 * 960 and height > 1000
    import numpy as np
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    counts = {}
    for part in ("compute", "copy", "wait"):
        colour = [int(COLOURS[part][i : i + 2], 16) for i in (1, 3, 5)]
        counts[part] = (abs(pixels - colour).max(axis=2) <= 2).sum(axis=1)
    row = np.minimum.reduce(list(counts.values())).argmax()  # through the mean step
    total = sum(counts[part][row] for part in counts)
    for part, share in (("compute", 0.6), ("copy", 0.1), ("wait", 0.3)):
        assert counts[part][row] == pytest.approx(total * share, abs=4)
    assert total > 1500
