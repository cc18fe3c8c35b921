"""One HTML page that needs nothing else: no script, no file, no network."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable

from ..core.text import nbytes_text, percent, plural, time_text
from ._svg import COLOURS, DARK, LIGHT, Drawing, escape, style
from .advice import Advice, advise
from .charts import draw_lanes, draw_mean, draw_steps, subtitle
from .cut import PARTS
from .summary import Summary, Work

#: The charts are drawn for wide and for narrow windows; one of both is shown.
WIDE, NARROW = 912, 336

_CSS = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",
sans-serif;background:var(--paper);color:var(--ink)}
main{overflow-wrap:anywhere;max-width:960px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:1.75rem;line-height:1.25;margin:0 0 4px}
h2{font-size:1.15rem;margin:40px 0 10px}
p{margin:0 0 12px}
.muted,figcaption,dt{color:var(--muted)}
.bound{display:inline-block;padding:2px 12px;border-radius:99px;margin:0 0 12px;
border:2px solid currentColor;font-weight:600;font-size:.9rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;
margin:24px 0 0}
.tiles div,.advice li{border:1px solid var(--faint);border-radius:10px;
padding:12px 16px}
.tiles b{display:block;font-size:1.4rem;font-variant-numeric:tabular-nums}
.advice{list-style-position:inside;padding:0;margin:0;display:grid;gap:10px}
.advice p{margin:4px 0 0}
figure{margin:0}
figcaption{font-size:.875rem;margin:0 0 10px}
svg{display:block;width:100%;height:auto}
.narrow{display:none}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
.one,th,td+td{white-space:nowrap}
th,td{text-align:right;padding:6px 0 6px 16px;border-bottom:1px solid var(--faint)}
th:first-child,td:first-child{text-align:left;padding-left:0}
table+p,.scroll+p{margin-top:16px}
i{display:inline-block;width:11px;height:11px;margin-right:8px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 20px;margin:0}
dd{margin:0}
footer{margin-top:40px;font-size:.875rem}
@media (max-width:640px){main{padding:20px 16px 32px}.wide{display:none}
.narrow{display:block}
th,td{padding-left:8px;font-size:.85rem}.what{display:none}h1{font-size:1.4rem}}
"""


def page(summary: Summary) -> str:
    """Return the page. Every text in it that comes from elsewhere is escaped."""
    script = escape(summary.record.script)
    body = [
        f"<h1>{escape(_sentence(summary.verdict))}</h1>",
        f'<p class="muted">{escape(subtitle(summary))}</p>',
        _tiles(summary),
        "<h2>What to change first</h2>",
        _advice(advise(summary)),
        "<h2>A step on average</h2>",
        _figure(summary, draw_mean, "What the loop does in a step."),
        "<h2>Every step</h2>",
        _figure(summary, draw_steps, "One column is one step; its height is its time."),
        "<h2>A few steps, side by side</h2>",
        _figure(
            summary,
            draw_lanes,
            "Time goes to the right. What stands above each other happened at the same "
            "time; vertical lines are where a step begins.",
        ),
        "<h2>In numbers</h2>",
        _table(summary),
        *_works(summary),
        "<h2>Where and how</h2>",
        _facts(summary),
        '<footer class="muted">Made by <code>pyparallel profile</code>. Times are the '
        "host's.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{script}: {escape(summary.kind)}</title>\n<style>{_inks()}{_CSS}"
        f"{_parts()}{style()}</style></head>\n<body><main>\n"
        + _glued("\n".join(body))
        + "\n</main></body></html>\n"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _glued(text: str) -> str:
    """Return text in which no line ends between a number and its unit."""
    return re.sub(r"(\d) (?=(?:us|ms|s|%|bytes|[KMGT]B)\b|%)", "\\1\xa0", text)


def _inks() -> str:
    def variables(inks: dict[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in inks.items())

    dark = f"@media (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    return f":root{{{variables(LIGHT)}}}{dark}"


def _parts() -> str:
    return "".join(f"i.{part}{{background:{c}}}" for part, c in COLOURS.items())


def _tiles(summary: Summary) -> str:
    tiles = {
        "a step takes": time_text(summary.step),
        "of it for input": percent(summary.waited),
        "steps a second": f"{1e9 / summary.step:.3g}",
    }
    if not summary.loader:
        del tiles["of it for input"]
    if summary.stacked[0]:
        tiles["of stacked bytes are padding"] = percent(summary.padding_fraction)
    cells = [f"<div><b>{value}</b>{name}</div>" for name, value in tiles.items()]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _advice(advice: Iterable[Advice]) -> str:
    items = []
    for title, text, gain in advice:
        most = f" Saves up to {time_text(gain)} of a step." if gain else ""
        items.append(f"<li><b>{escape(title)}</b><p>{escape(text + most)}</p></li>")
    return f'<ol class="advice">{"".join(items)}</ol>'


def _figure(
    summary: Summary, draw: Callable[[Drawing, Summary, float], float], caption: str
) -> str:
    pictures = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        drawing = Drawing(width, caption)
        drawing.height = draw(drawing, summary, 0)
        pictures.append(f'<div class="{name}">{drawing.to_svg(alone=False)}</div>')
    caption = f"<figcaption>{escape(caption)}</figcaption>"
    return f"<figure>{caption}{''.join(pictures)}</figure>"


def _table(summary: Summary) -> str:
    rows = []
    of_steps = [step.parts for step in summary.steps]
    for part, meaning in PARTS.items():
        times = sorted(parts[part] for parts in of_steps)
        if times[-1]:
            mean = summary.mean[part]
            cells = [mean, statistics.median(times), times[-1]]
            rows.append(
                f'<tr><td><span class="one"><i class="{part}"></i>{part}</span> '
                f'<span class="muted what">{meaning}</span></td>'
                + "".join(f"<td>{time_text(ns)}</td>" for ns in cells)
                + f"<td>{percent(mean / summary.step)}</td></tr>"
            )
    head = "".join(f"<th>{name}</th>" for name in ("mean", "median", "most", "share"))
    head = f"<thead><tr><th>in a step</th>{head}</tr></thead>"
    return (
        f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
    )


def _works(summary: Summary) -> list[str]:
    found = []
    for prefix, name in (("worker", "worker"), ("prefetch", "prefetch thread")):
        work = summary.work(prefix)
        if work is not None:
            found.append(f"<p>{_work(work, name)}</p>")
    return found


def _work(work: Work, name: str) -> str:
    who = plural(len(work.lanes), name)
    verb = "was" if len(work.lanes) == 1 else "were"
    parts = ", ".join(f"{part} {time_text(ns)}" for part, ns in work.parts.items())
    cpu = f" {time_text(work.cpu)} of it are CPU time." if work.cpu else ""
    return (
        f"Meanwhile {who} {verb} busy {percent(work.busy)} of the time. A batch took "
        f"{time_text(work.per_batch)}: {parts}.{cpu}"
    )


def _facts(summary: Summary) -> str:
    record, (stacked, padding) = summary.record, summary.stacked
    facts = {"script": record.script}
    for i, loader in enumerate(record.loaders, 1):
        of = "steps shown here" if i == summary.loader else "not shown"
        workers = plural(loader["num_workers"] or 0, "worker")
        size = loader["batch_size"]
        batches = "" if size is None else f", batches of {size}"
        facts[f"loader {i}"] = f"{loader['name']}, {workers}{batches}: {of}"
    if stacked:
        facts["padding"] = f"{nbytes_text(padding)} of {nbytes_text(stacked)} stacked"
    if summary.interrupted:
        facts["left out"] = (
            f"{summary.interrupted} steps in which another loader was used"
        )
    if record.environment.get("device", "CPU") != "CPU":
        device = "its device has done its work"
        waits = device if record.synchronized else "the host goes on"
        facts["a step ends"] = f"when {waits}"
    if record.exit_code:
        facts["the script"] = f"ended with exit code {record.exit_code}"
    facts |= record.environment
    rows = [
        f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items()
    ]
    return f"<dl>{''.join(rows)}</dl>"
