"""The page of a profile in a real browser: wide and narrow, light and dark."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from profiles import MS, steady

from pyparallel.profiler.page import page
from pyparallel.profiler.record import Record
from pyparallel.profiler.summary import summarize

pytestmark = pytest.mark.one_backend

EVIL = "train<img src=x onerror=window.evil=1><script>window.evil=1</script>.py"
#: As much as a page can hold: long words, many lanes, all advice, an endless step.
FULL = dataclasses.replace(
    steady(steps=200, warmup=3, workers=14, compute=2 * MS, padding=640, cores=64),
    script=EVIL + "with_a_name_that_is_as_long_as_names_of_scripts_sometimes_are" * 3,
    rank=12,
    world_size=1024,
    environment={"cores": "64", "device": "One with a long name, 141 GB of HBM" * 3},
)
PLAIN = steady()

#: Texts that leave their picture, or lie upon another one, and words beyond their box.
PROBLEMS = """
(() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    const texts = [...svg.querySelectorAll("text")].map(t => ({
      words: t.textContent, box: t.getBoundingClientRect()}));
    for (const {words, box: b} of texts) {
      if (b.left < box.left - 1 || b.right > box.right + 1 ||
          b.top < box.top - 1 || b.bottom > box.bottom + 1)
        found.push("outside: " + words);
    }
    texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
      const across = Math.min(a.box.right, b.box.right) -
                     Math.max(a.box.left, b.box.left);
      const down = Math.min(a.box.bottom, b.box.bottom) -
                   Math.max(a.box.top, b.box.top);
      if (across > 1 && down > 3) found.push("over: " + a.words + " | " + b.words);
    }));
  }
  for (const e of document.querySelectorAll("main *:not(svg):not(svg *)"))
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.matches(".scroll"))
      found.push("wide: " + e.tagName + " " + e.textContent.slice(0, 40));
  if (document.documentElement.scrollWidth > innerWidth)
    found.push("the page is " + document.documentElement.scrollWidth);
  return found;
})()
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    if browser.find() is None:
        pytest.skip(f"needs a browser: one of {', '.join(browser.NAMES)}")
    with browser.opened(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def shown(tab: browser.Browser, tmp_path: Path):
    """Return a function that shows the page of a record."""

    def show(record: Record, width: int, dark: bool = False) -> browser.Browser:
        summary = summarize(record)
        assert summary is not None
        path = tmp_path / "page.html"
        path.write_text(page(summary), encoding="utf-8")
        tab.open(path, width, dark)
        assert tab.messages == []
        assert tab.requests == [path.as_uri()]
        return tab

    return show


def ink(png: bytes) -> float:
    """Return the fraction of bytes in a PNG that are not as their neighbours say."""
    at, data = 8, b""
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw = zlib.decompress(data)
    return 1 - raw.count(0) / len(raw)


@pytest.mark.parametrize("width", [1280, 400, 320])
@pytest.mark.parametrize("record", [PLAIN, FULL], ids=["plain", "full"])
def test_nothing_overlaps_or_sticks_out(shown, record, width):
    assert shown(record, width).evaluate(PROBLEMS) == []


@pytest.mark.parametrize(("width", "visible"), [(1280, "wide"), (400, "narrow")])
def test_one_picture_of_each_kind_is_shown(shown, width, visible):
    code = """[...document.querySelectorAll("svg")].filter(
        s => s.getBoundingClientRect().width).map(s => s.parentNode.className)"""
    assert shown(PLAIN, width).evaluate(code) == [visible] * 3


def test_the_page_says_what_the_summary_says(shown):
    tab = shown(PLAIN, 1280)
    heading = tab.evaluate("document.querySelector('h1').textContent")
    assert heading.replace("\xa0", " ") == (
        "Input-bound: 30 % of a step went into getting its batch"
    )
    code = (
        "[...document.querySelectorAll('tbody tr')].map(r => r.innerText.split('\\t'))"
    )
    rows = [[cell.replace("\xa0", " ") for cell in row] for row in tab.evaluate(code)]
    assert [row[1:] for row in rows] == [
        ["6.00 ms", "6.00 ms", "6.00 ms", "60 %"],
        ["1.00 ms", "1.00 ms", "1.00 ms", "10 %"],
        ["3.00 ms", "3.00 ms", "3.00 ms", "30 %"],
    ]
    # On the screen as in the file: bars are as long as their times.
    code = """[...document.querySelector(".wide svg").querySelectorAll("rect")].slice(
        0, 3).map(r => r.getBoundingClientRect().width)"""
    assert tab.evaluate(code) == pytest.approx([547.2, 91.2, 273.6], abs=0.2)


def test_nothing_of_a_script_s_name_is_run(shown):
    tab = shown(FULL, 1280)
    assert tab.evaluate("window.evil") is None
    assert tab.evaluate("document.querySelectorAll('img,script').length") == 0
    assert tab.evaluate("document.title").startswith(EVIL)


def test_it_is_dark_in_the_dark(shown):
    pictures = []
    for dark, paper in ((False, "rgb(255, 255, 255)"), (True, "rgb(21, 25, 30)")):
        tab = shown(PLAIN, 1280, dark)
        code = "getComputedStyle(document.body).backgroundColor"
        assert tab.evaluate(code) == paper
        pictures.append(tab.screenshot())
        assert ink(pictures[-1]) > 0.01
    assert pictures[0] != pictures[1]


def test_a_blank_picture_would_be_noticed(tab, tmp_path):
    path = tmp_path / "blank.html"
    path.write_text("<!DOCTYPE html><title>blank</title>", encoding="utf-8")
    tab.open(path, 1280)
    assert ink(tab.screenshot()) < 0.01
    path.write_text('<img src="x.png"><script>console.error(1)</script>')
    tab.open(path, 400)
    assert len(tab.requests) == 2 and len(tab.messages) >= 1
    path.write_text("<main><p style='width:9px'>toolongaword</p></main>")
    tab.open(path, 400)
    assert tab.evaluate(PROBLEMS) == ["wide: P toolongaword"]
