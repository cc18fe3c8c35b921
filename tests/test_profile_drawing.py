"""Bars are as long as their times, words are escaped, a page needs nothing else."""

from __future__ import annotations

import dataclasses
import re
import struct
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from profiles import MS, steady

from pyparallel.profiler import report
from pyparallel.profiler._svg import COLOURS, Drawing
from pyparallel.profiler.charts import draw_lanes, draw_mean, draw_steps, picture, ticks
from pyparallel.profiler.cut import PARTS
from pyparallel.profiler.page import page
from pyparallel.profiler.record import Event, Record
from pyparallel.profiler.summary import Summary, summarize

pytestmark = pytest.mark.one_backend

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('1')</script>&\"x\x00\x1b.py"


def summary(record: Record) -> Summary:
    found = summarize(record)
    assert found is not None
    return found


def bars(draw, record: Record, width: float) -> list[tuple[str, float, float, str]]:
    """Return part, width, height and title of every bar that is no legend."""
    drawing = Drawing(width, "")
    drawing.height = draw(drawing, summary(record), 0)
    tree = ElementTree.fromstring(drawing.to_svg())
    found = []
    for rect in tree.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        size = [rect.get("width", ""), rect.get("height", "")]
        if title is not None and size != ["12.000", "12.000"]:
            found.append((rect.get("class", ""), *map(float, size), title.text or ""))
    return found


def test_the_mean_is_as_long_as_its_parts():
    # A step of 3 + 1 + 6 ms on 1000 pixels: 100 for each.
    assert bars(draw_mean, steady(), 1000) == [
        ("compute", 600, 34, "compute 6.00 ms, 60 %"),
        ("copy", 100, 34, "copy 1.00 ms, 10 %"),
        ("wait", 300, 34, "wait 3.00 ms, 30 %"),
    ]


def test_columns_are_as_high_as_their_times():
    # The highest step, of 10 ms, is 180 pixels: 18 for each.
    found = bars(draw_steps, steady(steps=3, warmup=1), 960)
    assert [(part, height) for part, _, height, _ in found] == [
        ("compute", 108),
        ("copy", 18),
        ("wait", 54),
    ] * 2
    assert found[0][3] == "step 2: compute 6.00 ms"
    assert len({width for _, width, _, _ in found}) == 1


def test_a_step_that_dwarfs_the_others_is_cut_off_and_says_so():
    waits = [1] * 9 + [991, 1]
    at, events = 0, []
    for wait in waits:
        events.append(Event("loop", "wait", at * MS, (at + wait) * MS, 1, 1))
        at += wait + 9
    record = Record("x.py", tuple(events))  # ten steps: 9 of 10 ms and one of 1 s
    found = bars(draw_steps, record, 960)
    mean = (9 * 10 + 1000) / 10
    scale = 180 / (6 * mean)
    assert found[0][2] == pytest.approx(9 * scale, abs=1e-3)
    assert found[-1][2] == pytest.approx((6 * mean - 9) * scale, abs=1e-3)
    drawing = Drawing(960, "")
    draw_steps(drawing, summary(record), 0)
    assert ">1.00 s</text>" in drawing.to_svg()


@pytest.mark.parametrize("width", [912, 336])
def test_lanes_have_one_scale(width):
    found = bars(draw_lanes, steady(), width)
    num_steps = 8 if width > 600 else 4
    loop = [bar for bar in found if bar[3].startswith("the loop: ")]
    assert len(loop) == 3 * num_steps
    scale = sum(bar[1] for bar in loop) / (10 * num_steps)  # pixels of a millisecond
    lengths = {"compute": 6, "copy": 1, "wait": 3}
    for part, length, _, _ in loop:
        assert length == pytest.approx(lengths[part] * scale, abs=2e-3)
    workers = [bar for bar in found if bar[3].startswith("worker")]
    assert len(workers) == 3 * num_steps
    lengths = {"fetch": 6, "collate": 2, "pack": 1}
    for part, length, _, _ in workers:
        assert length == pytest.approx(lengths[part] * scale, abs=2e-3)


def test_many_lanes_are_not_all_drawn():
    drawing = Drawing(912, "")
    draw_lanes(drawing, summary(steady(steps=40, workers=20)), 0)
    assert ">and 8 more lanes</text>" in drawing.to_svg()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (10, [0, 5, 10]),
        (31, [0, 10, 20, 30]),
        (0.9, [0, 0.5]),
        (199, [0, 50, 100, 150]),
    ],
)
def test_ticks_are_round(limit, expected):
    assert ticks(limit, 4 if limit > 10 else 2) == pytest.approx(expected)


def test_a_part_has_a_colour_and_a_word():
    assert list(COLOURS) == list(PARTS)
    assert len(set(COLOURS.values())) == len(PARTS)


class Seen(HTMLParser):
    """Every element of a page with its attributes, and that all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_and_asks_for_nothing():
    seen = Seen(page(summary(steady(padding=500))))
    assert not seen.open and {"svg", "table", "ol", "dl"} <= set(seen.tags)
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.tags)
    assert not {"src", "href", "srcset", "data"} & dict(seen.attributes).keys()
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    text = page(summary(steady()))
    assert "default-src 'none'" in text and "url(" not in text and "@import" not in text
    urls = set(re.findall(r"https?://[^\"<> ]+", text))
    assert urls == {"http://www.w3.org/2000/svg"}  # a name, not a place


@pytest.mark.parametrize(("cpu", "says"), [(-1, False), (MS, True)])
def test_the_cpu_time_of_a_batch_is_told_if_it_is_known(cpu, says):
    text = page(summary(steady(cpu=cpu))).replace("\xa0", " ")
    assert (" 1.00 ms of it are CPU time.</p>" in text) is says


def test_what_comes_from_elsewhere_is_escaped():
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
    found = summary(dataclasses.replace(record, events=tuple(lanes)))
    assert "script" not in Seen(page(found)).tags
    assert not set("\x00\x1b") & set(page(found))
    assert "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;" in page(found)
    tree = ElementTree.fromstring(picture(found, EVIL).to_svg())
    assert {element.tag for element in tree.iter()} == {
        SVG + tag for tag in ("svg", "title", "style", "rect", "line", "text")
    }
    # A control character is no text of XML.
    assert "<script>alert('1')</script>&\"x??.py" in "".join(tree.itertext())


def test_a_verdict_without_a_loader_is_drawn_too():
    events = [Event("loop", "step", 10 * i, 10 * i + 8) for i in range(4)]
    text = page(summary(Record("x.py", tuple(events))))
    assert "Input or compute: not known" in text and "of it for input" not in text


# Files.


def test_a_report_is_files_and_words(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if not installed
    (tmp_path / "profile.png").write_bytes(b"of another profile")
    (written,) = report.write([steady()], tmp_path)
    assert [path.name for path in written.files] == [
        "profile.html",
        "profile.svg",
        "profile.json",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(written.files)
    assert report.text(written) == (
        "train.py: 10 steps, 10.0 ms each\n"
        "  input-bound: 30 % of a step went into getting its batch\n"
        "    compute    6.00 ms   60 %\n"
        "    copy       1.00 ms   10 %\n"
        "    wait       3.00 ms   30 %\n"
        "  what to change first\n"
        "    1. Let workers run further ahead: prefetch_factor\n"
        "       A batch takes 9.00 ms of a worker's time: one is ready every 4.50 ms "
        "with 2 workers. The rest of a step takes 7.00 ms. That is enough on average, "
        "so single batches come late. The longest wait is 3.00 ms. Raise "
        "prefetch_factor, and see which samples are slow.\n"
        "    2. Send batches ahead of the step: PreDataLoader(loader, device)\n"
        "       Opening and sending a batch takes 1.00 ms of a step, 10 %. A "
        "PreDataLoader does it in a thread while the step before runs.\n"
        "  no PNG: matplotlib is not installed (pip install "
        "'pyparallel-torch[profile]')\n"
        f"  {tmp_path / 'profile.html'}"
    )
    again = Record.from_json((tmp_path / "profile.json").read_text())
    assert again == steady()


def test_every_rank_has_its_files(tmp_path):
    records = [dataclasses.replace(steady(), rank=i, world_size=2) for i in range(2)]
    first, second = report.write([*records, Record("x.py", ())], tmp_path)
    assert first.files[0].name == "profile-rank0.html"
    assert second.files[0].name == "profile-rank1.html"
    assert report.text(second).startswith("train.py, rank 1 of 2: 10 steps, ")


def test_a_png_has_the_same_bars(tmp_path):
    pytest.importorskip("matplotlib", reason="PNG is drawn by matplotlib")
    (written,) = report.write([steady()], tmp_path)
    (path,) = [path for path in written.files if path.suffix == ".png"]
    image = path.read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert width == 2 * (960 + 48) and height > 800
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    row = pixels[2 * (84 + 17)]  # in the middle of the bar of the mean step
    for part, length in (("compute", 0.6), ("copy", 0.1), ("wait", 0.3)):
        colour = [int(COLOURS[part][i : i + 2], 16) for i in (1, 3, 5)]
        count = (abs(row - colour).max(axis=1) <= 2).sum()
        assert count == pytest.approx(2 * 960 * length, abs=3)
