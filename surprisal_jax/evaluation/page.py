"""The report page of a run: one HTML file that loads nothing, for a phone as for a desk.

Everything it needs is inside: the style, and the pictures as tables and inline SVG. There is no script, and a content
security policy forbids whatever might still come in with a run's texts. Those (tokens, prompts, strategies, the
configuration) are escaped by construction: `_tag` takes every string for text unless it is `Html`.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surprisal_jax.evaluation.report import (
    COLOURS,
    FAINT,
    Curve,
    MetricRow,
    Panel,
    TokenRow,
    draw_curves,
    ink_on,
    is_number,
    metric_row,
    metric_rows,
    panels_with_curves,
    shades_of,
    share_text,
    visible,
)
from surprisal_jax.files import write_text

LEVELS = 20  # shares are shaded in steps of 1/20; a class for each keeps the page small
_NOT_METRICS = ("beta", "c_base", "seed", "num_latents")  # numbers of a summary that are shown elsewhere

# What draw_curves draws, by what it is called in the style: matplotlib's colours do not know dark mode.
_SVG_COLOURS = {colour.lower(): f"var(--curve-{i})" for i, colour in enumerate(COLOURS)} | {
    FAINT: "var(--faint)",
    "#ffffff": "var(--paper)",
    "#ebebeb": "var(--grid)",
    "#999999": "var(--edge)",
}

# matplotlib's, in line widths.
_DASHES = {"-": (), "--": (3.7, 1.6), "-.": (6.4, 1.6, 1.0, 1.6), ":": (1.0, 1.65)}

# Both themes: curve colours have a contrast of 3 with the paper, texts of 4.5.
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1a1a1a",
    "faint": "#5a5f66",
    "grid": "#e4e6e9",
    "edge": "#9aa0a6",
    "card": "#f3f5f8",
    "warning": "#fff1d6",
    "focus": "#0b57d0",
    "curve-0": "#000000",
    "curve-1": "#0072b2",
    "curve-2": "#d55e00",
    "curve-3": "#008a64",
    "curve-4": "#b85c93",
    "curve-5": "#b07a00",
    "curve-6": "#2f8fc4",
}
DARK = {
    "paper": "#14171b",
    "ink": "#eceef1",
    "faint": "#a9b0b8",
    "grid": "#2c3138",
    "edge": "#6d757e",
    "card": "#1e2329",
    "warning": "#3d2f10",
    "focus": "#8ab8ff",
    "curve-0": "#f2f2f2",
    "curve-1": "#4aa3df",
    "curve-2": "#f0803c",
    "curve-3": "#2fbf93",
    "curve-4": "#d98fbb",
    "curve-5": "#e6a52e",
    "curve-6": "#8ccbf2",
}
_DARK_SHADES = {"blue": ("#20262e", "#17528c", "#4595da", "#a6d4ff"), "grey": ("#20262e", "#747c86")}

_STYLE = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;padding:1rem 1rem 3rem;max-width:62rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.75rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;padding-top:.75rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.25rem 0 .25rem}
p,ul{margin:.5rem 0}
ul{padding-left:1.25rem}
.faint{color:var(--faint)}
.small{font-size:.875rem}
.mono,.trace{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.facts{display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;margin:.5rem 0}
.facts div{display:flex;gap:.4rem}
dt{color:var(--faint)}
dd{margin:0}
.headline{display:flex;flex-wrap:wrap;gap:.75rem;margin:1rem 0}
.headline div{flex:1 1 16rem;background:var(--card);border-radius:.5rem;padding:.75rem 1rem}
.headline dd.value{font-size:2rem;font-weight:700;line-height:1.2;font-variant-numeric:tabular-nums}
.warnings{background:var(--warning);border-left:.3rem solid var(--curve-2);border-radius:.25rem;
padding:.5rem 1rem;margin:1rem 0}
.warnings h2{border:0;margin:0;padding:0;font-size:1rem}
.scroll{overflow-x:auto;max-width:100%}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;color:var(--faint);font-size:.875rem;padding-bottom:.25rem}
th,td{padding:.35rem .75rem .35rem 0;text-align:left;vertical-align:top}
tbody tr{border-top:1px solid var(--grid)}
thead th{color:var(--faint);font-size:.875rem;font-weight:600}
.number{text-align:right;white-space:nowrap}
.interval{white-space:nowrap}
.metrics{width:100%}
.metrics th small{display:block;font-weight:400;color:var(--faint);font-size:.875rem}
.shares{border-collapse:separate;border-spacing:.3rem;overflow-wrap:break-word}
.shares th,.shares td{padding:.5rem;text-align:center;vertical-align:middle}
.shares thead th{vertical-align:bottom;min-width:5.5rem;max-width:9rem;color:var(--ink)}
.shares tbody th{white-space:nowrap;text-align:left;padding-left:0;position:sticky;left:0;background:var(--paper)}
.shares td{border-radius:.25rem;min-width:5.5rem}
.shares td.mapped{outline:.2rem solid var(--ink);outline-offset:.05rem;font-weight:700}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem 2rem}
.panels svg{display:block;width:100%;height:auto}
.panels svg *{stroke-linejoin:round}
.panels text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.panels table{font-size:.875rem;width:100%}
.panels td,.panels th{padding:.15rem .5rem .15rem 0;font-weight:400}
.panels tbody th{padding-left:3rem;text-indent:-3rem}
.panels svg.swatch{display:inline-block;width:2.5rem;height:.7rem;margin-right:.5rem;vertical-align:baseline}
.trace-title{white-space:pre-wrap}
.trace{position:relative;margin:.25rem 0 1.25rem}
.token{display:inline-block;max-width:100%;margin:0 .2rem .3rem 0;padding:.15rem .4rem;border-radius:.25rem;
border:1px solid var(--grid);text-align:center;vertical-align:top;line-height:1.3;cursor:default}
.token small{display:block;min-height:1rem;font-size:.75rem;line-height:1rem}
.token:focus{outline:2px solid var(--focus);outline-offset:1px}
.tip{position:absolute;display:block;left:0;right:0;margin-top:.5rem;padding:.35rem .75rem;border-radius:.25rem;
background:var(--ink);color:var(--paper);text-align:left;font:.875rem/1.4 system-ui,sans-serif;
opacity:0;pointer-events:none;z-index:1}
.token:focus .tip{opacity:1}
@media (hover:none){.token:hover .tip{opacity:1}}
.legend{display:flex;flex-wrap:wrap;align-items:center;gap:.3rem;margin:.5rem 0}
.legend .mono{padding:.15rem .5rem;border-radius:.25rem;border:1px solid var(--grid)}
summary{cursor:pointer;padding:.25rem 0}
@media (max-width:34rem){
.metrics .number,.metrics .interval{font-size:.875rem;line-height:1.7}
.metrics .interval{white-space:normal;min-width:4.5rem;padding-right:0}
.shares{border-spacing:.2rem;font-size:.875rem}
.shares th,.shares td,.shares thead th{padding:.5rem .2rem;min-width:3.25rem}
.shares thead th{font-size:.8125rem}
}
@media print{.trace,.panels>div,tr{break-inside:avoid}}
""".strip()


def write_report_page(
    path: str | Path, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], heat_rows: Sequence[TokenRow]
) -> None:
    """Write the page of `report_page`, which has the arguments, whole or not at all."""
    write_text(Path(path), report_page(summary, metrics, heat_rows))


def report_page(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], heat_rows: Sequence[TokenRow]) -> str:
    """The page as text, the same for the same arguments.

    Args:
      summary: as in `summary.json`. What is missing or None is said to be so.
      metrics: lines of `metrics.jsonl` of the reference and the disentangle stage.
      heat_rows: the traces of the token heat map.

    Raises:
      ValueError: a trace whose tokens, weights and surprisals are not equally many.
    """
    task = _text_or(summary.get("task"), "unknown task")
    title = _tag("title", f"{task}, seed {_text_or(summary.get('seed'))}: run report")
    head = (
        '<meta charset="utf-8">\n'
        # Nothing is loaded and nothing runs, whatever a text of the run may contain.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"{title}\n<style>\n{_style()}\n</style>"
    )
    sections = [
        _header(task, summary),
        _warnings(summary),
        _latents_by_strategies(summary),
        _metrics(summary),
        _training_curves(metrics),
        _token_heat_map(heat_rows),
        _seconds(summary),
        _configuration(summary),
        _versions(summary),
    ]
    main = _tag("main", *_lines(section for section in sections if section))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{main}\n</body>\n</html>\n'


# ---- markup


class Html(str):
    """Markup. Any other string is text, to be escaped where it goes into markup."""


def _html(content: object) -> Html:
    """The content as markup; characters that nobody sees, or that UTF-8 lacks, are spelt out."""
    if isinstance(content, Html):
        return content
    return Html(html.escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in str(content))))


def _tag(name: str, /, *content: object, **attributes: object) -> Html:
    """An element. Attributes that are None are left out; `class_` and `aria_label` stand for class and aria-label."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_html(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{''.join(map(_html, content))}</{name}>")


def _lines(parts: Iterable[Html]) -> list[Html]:
    """The parts, each on a line of the file."""
    return [Html(f"\n{part}") for part in parts] + [Html("\n")]


def _breakable(name: str) -> Html:
    """A name with underscores, which a narrow screen may break after one."""
    return Html(_html(name).replace("_", "_<wbr>"))


def _text_or(value: Any, otherwise: str = "n/a") -> str:
    return otherwise if value is None else str(value)


def _number_text(value: Any, pattern: str) -> str:
    return format(value, pattern) if is_number(value) else "n/a"


def _section(title: str, *content: Html) -> Html:
    return _tag("section", *_lines([_tag("h2", title), *content]))


def _paragraph(*content: object, look: str | None = None) -> Html:
    return _tag("p", *content, class_=look)


def _scrolling(table: Html, label: str) -> Html:
    """A wide table scrolls by itself, by keyboard too, so that the page never does."""
    return _tag("div", table, class_="scroll", role="region", tabindex="0", aria_label=label)


def _table(head: Sequence[Html], rows: Iterable[Sequence[Html]], look: str | None = None, caption: str = "") -> Html:
    top = [_tag("caption", caption)] if caption else []
    body = [_tag("tr", *row) for row in rows]
    return _tag("table", *top, _tag("thead", _tag("tr", *head)), _tag("tbody", *_lines(body)), class_=look)


def _column(*content: object, look: str | None = None) -> Html:
    return _tag("th", *content, scope="col", class_=look)


def _row_head(*content: object) -> Html:
    return _tag("th", *content, scope="row")


# ---- style


def _style() -> str:
    light, dark = _theme(LIGHT, level_colours(dark=False)), _theme(DARK, level_colours(dark=True))
    return f"{light}\n@media (prefers-color-scheme:dark){{\n{dark}\n}}\n{_STYLE}"


def _theme(colours: Mapping[str, str], levels: Mapping[str, tuple[str, str]]) -> str:
    variables = ";".join(f"--{name}:{colour}" for name, colour in colours.items())
    shades = [f".{name}{{background:{paper};color:{ink}}}" for name, (paper, ink) in levels.items()]
    return "\n".join([f":root{{{variables}}}", *shades])


def level_colours(dark: bool) -> dict[str, tuple[str, str]]:
    """Class -> (shade, ink on it), for the levels of both maps: blue for shares, grey for what fits no strategy."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    maps = {"blue": shades_of("Blues"), "grey": shades_of("Greys", 0.6)}
    if dark:
        maps = {name: LinearSegmentedColormap.from_list(name, _DARK_SHADES[name]) for name in maps}
    colours = {}
    for name, shades in maps.items():
        for level in range(LEVELS + 1):
            shade = shades(level / LEVELS)
            # Small text asks for more contrast with a middle shade than the pictures' softer black has.
            colours[f"{name}-{level}"] = to_hex(shade), "#ffffff" if ink_on(shade) == "white" else "#000000"
    return colours


def _level(share: float, name: str = "blue") -> str:
    """The class of a share, which rounds half up and takes what is outside [0, 1] for the end it is nearer to."""
    return f"{name}-{math.floor(min(max(share, 0.0), 1.0) * LEVELS + 0.5)}" if math.isfinite(share) else f"{name}-0"


# ---- the sections, in the order of the page


def _header(task: str, summary: Mapping[str, Any]) -> Html:
    config = summary.get("config") or {}
    facts = {
        "seed": _text_or(summary.get("seed")),
        "latents K": _text_or(summary.get("num_latents")),
        "posterior": _text_or(config.get("posterior")),
        "scope": _text_or(config.get("latent_scope")),
        "beta": _number_text(summary.get("beta"), "g"),
        "c_base": _number_text(summary.get("c_base"), ".4f") + " nats",
    }
    headline = []
    for name in ("alignment_one_to_one", "sampled_final_answer_accuracy"):
        row = metric_row(summary, name)
        below = f"95% interval {row.interval}; {row.meaning}" if row.interval else row.meaning
        headline.append(
            _tag(
                "div",
                _tag("dt", _breakable(name)),
                _tag("dd", row.value, class_="value"),
                _tag("dd", below, class_="faint small"),
            )
        )
    terms = [_tag("div", _tag("dt", name), _tag("dd", value)) for name, value in facts.items()]
    parts = [_tag("h1", _breakable(task)), _tag("dl", *terms, class_="facts"), _tag("dl", *headline, class_="headline")]
    return _tag("header", *_lines(parts))


def _warnings(summary: Mapping[str, Any]) -> Html | None:
    warnings = summary.get("warnings") or ()
    if not warnings:
        return None
    items = _tag("ul", *(_tag("li", warning) for warning in warnings))
    return _tag("section", _tag("h2", "Warnings"), items, class_="warnings")


def _latents_by_strategies(summary: Mapping[str, Any]) -> Html:
    title, table = "What each latent writes", summary.get("latents_by_strategies")
    strategies = [str(name) for name in summary.get("strategies") or ()]
    if table is None or not strategies:
        return _section(title, _paragraph("No strategies are known for this task, so no latent is compared to any."))
    shares = np.asarray(table, np.float64).reshape(-1, len(strategies))
    meanings = {int(latent): str(name) for latent, name in (summary.get("latent_strategies") or {}).items()}
    head = [_tag("td"), *(_column(_breakable(name)) for name in strategies), _column(_tag("em", "none"))]
    rows = []
    for latent, row in enumerate(shares.tolist()):
        cells = [_row_head(f"latent {latent}")]
        for name, share in zip(strategies, row, strict=True):
            mapped = meanings.get(latent) == name
            said = [_tag("span", ", mapped", class_="hidden")] if mapped else []
            cells.append(_tag("td", share_text(share), *said, class_=_level(share) + (" mapped" if mapped else "")))
        none = _none_share(row)
        cells.append(_tag("td", share_text(none), class_=_level(none, "grey")))
        rows.append(cells)
    note = (
        "Share of the held-out x on which the answer under a forced latent follows a strategy; an answer that fits "
        "several counts in parts, and “none” is what fits no strategy. Outlined: the best one-to-one map."
    )
    picture = _scrolling(_table(head, rows, "shares"), "shares of the strategies by latent")
    sentences = _tag("ul", *_lines(_tag("li", s) for s in _mapping_sentences(shares, strategies, meanings)))
    return _section(title, _paragraph(note, look="faint small"), picture, sentences)


def _none_share(row: Any) -> float:
    """What a row lacks to 1; what rounding leaves of a full one is nothing, not <0.01."""
    rest = 1.0 - float(np.sum(row))
    return min(rest, 1.0) if rest > 1e-9 else 0.0


def _mapping_sentences(shares: np.ndarray, strategies: Sequence[str], meanings: Mapping[int, str]) -> list[str]:
    """What the map says, what is left over on either side, and what a surplus latent writes instead."""
    mapped = [f"latent {latent} is {name}" for latent, name in sorted(meanings.items())]
    sentences = [f"The map: {', '.join(mapped)}." if mapped else "No latent is mapped to a strategy."]
    for latent in range(len(shares)):
        if latent not in meanings:
            share, none = float(shares[latent].max()), _none_share(shares[latent])
            most = f"follows {strategies[int(np.argmax(shares[latent]))]}" if share >= none else "fits no strategy"
            sentences.append(
                f"latent {latent} is surplus: it is mapped to no strategy. "
                f"What it writes most often {most} ({share_text(max(share, none))})."
            )
    sentences += [f"No latent is mapped to {name}." for name in strategies if name not in meanings.values()]
    return sentences


def _metrics(summary: Mapping[str, Any]) -> Html:
    rows = metric_rows(summary)
    known = {row.name for row in rows} | set(_NOT_METRICS)
    unexplained = [name for name, value in summary.items() if is_number(value)]
    unexplained += [str(name) for name in summary.get("intervals_95") or ()]
    rows += [metric_row(summary, name) for name in dict.fromkeys(unexplained) if name not in known]
    if not rows:
        return _section("Metrics", _paragraph("No metrics were measured."))
    head = [_column("metric"), _column("value", look="number"), _column("95% interval")]
    table = _table(head, map(_metric_cells, rows), "metrics")
    note = "n/a: undefined for this task or data. Intervals are bootstrapped over the held-out x."
    return _section("Metrics", _scrolling(table, "metrics"), _paragraph(note, look="faint small"))


def _metric_cells(row: MetricRow) -> list[Html]:
    # The id lets a link lead to a metric.
    name = _tag("th", _breakable(row.name), _tag("small", row.meaning), scope="row", id=row.name)
    return [name, _tag("td", row.value, class_="number"), _tag("td", row.interval, class_="interval")]


def _training_curves(metrics: Sequence[Mapping[str, Any]]) -> Html:
    panels = panels_with_curves(metrics)
    if not panels:
        return _section("Training curves", _paragraph("No metrics were logged, so there are no curves."))
    figures = []
    for number, (panel, curves) in enumerate(panels):
        head = [_column("curve"), _column("last value", look="number"), _column("at step", look="number")]
        rows = [
            [
                _row_head(_swatch(curve), curve.legend),
                _tag("td", f"{curve.points[-1][1]:.4g}", class_="number"),
                _tag("td", curve.points[-1][0], class_="number"),
            ]
            for curve in curves
        ]
        parts = [_tag("h3", panel.title), _panel_svg(panel, curves, number), _table(head, rows)]
        figures.append(_tag("div", *_lines(parts)))
    return _section("Training curves", _tag("div", *_lines(figures), class_="panels"))


def _panel_svg(panel: Panel, curves: Sequence[Curve], number: int) -> Html:
    """The panel as inline SVG, without what belongs to a file of its own, in the colours of the page's theme.

    Args:
      number: of the panel, so that no two share an id.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Ids depend on the salt alone, and text stays text: small, and in the reader's font.
    with matplotlib.rc_context({"svg.hashsalt": f"panel {number}", "svg.fonttype": "none"}):
        figure = Figure(figsize=(3.8, 2.5), layout="constrained")
        draw_curves(figure.add_subplot(), panel, curves)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata, transparent=True)
    text = file.getvalue()
    view_box = re.search(r'viewBox="([^"]*)"', text)
    assert view_box is not None
    drawing = text[text.index(">", view_box.end()) + 1 : text.rindex("</svg>")]
    # The style element would hold for the whole page.
    drawing = re.sub(r"<style.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"font-family: [^;]*; ", "", drawing).replace("xlink:href", "href")
    drawing = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda match: _SVG_COLOURS.get(match[0], match[0]), drawing)
    # Groups are named alike in every figure; only the ids that something refers to matter.
    used = set(re.findall(r'url\(#(\w+)\)|href="#(\w+)"', drawing))
    names = {name for pair in used for name in pair if name}
    drawing = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in names else "", drawing)
    drawing = re.sub(r"\s*\n\s*", "\n", drawing).strip()
    label = f"{panel.title}: {panel.ylabel} by step; the table below has the last values"
    return _tag("svg", Html(drawing), viewBox=view_box[1], role="img", aria_label=label)


def _swatch(curve: Curve) -> Html:
    """A piece of the curve for its legend."""
    style = curve.style
    dashes = style["ls"][1] if isinstance(style["ls"], tuple) else _DASHES[style["ls"]]
    pattern = " ".join(f"{length * style['lw']:g}" for length in dashes)
    colour = _SVG_COLOURS[style["color"].lower()]
    look = {"stroke": colour, "stroke_width": style["lw"], "stroke_dasharray": pattern or None}
    drawn = [_tag("line", x1=0, y1=4, x2=30, y2=4, opacity=style.get("alpha"), **look)]
    if "marker" in style:
        drawn.append(_tag("circle", cx=15, cy=4, r=1.8, fill="var(--paper)", stroke=colour))
    return _tag("svg", *drawn, viewBox="0 0 30 8", class_="swatch", aria_hidden="true")


def _token_heat_map(rows: Sequence[TokenRow]) -> Html:
    title = "Which tokens carry the loss"
    if not rows:
        return _section(title, _paragraph("There are no traces to show."))
    traces = [
        (row.title, list(zip(row.tokens, _floats(row.weights), _floats(row.surprisal), strict=True)))
        for row in (TokenRow(*row) for row in rows)
    ]
    largest = max((pi for _, trace in traces for _, pi, _ in trace if math.isfinite(pi)), default=0.0)
    scale = largest if largest > 0 else 1.0
    steps = [_tag("span", share_text(i / 4 * scale), class_=f"{_level(i / 4)} mono small") for i in range(5)]
    note = (
        "Each token of a trace is shaded by its share π of the trace's weight; the number under it is that share, left "
        "out below 0.01. Point at a token, tap it or reach it with the Tab key for its share π and its surprisal b."
    )
    parts = [
        _paragraph(note, look="faint small"),
        _tag("p", _tag("span", "share π", class_="faint small"), *steps, class_="legend"),
    ]
    for name, trace in traces:
        tokens = [_token(token, pi, b, _level(pi / scale)) for token, pi, b in trace]
        parts += [_tag("h3", name, class_="trace-title mono small"), _tag("div", *_lines(tokens), class_="trace")]
    return _section(title, *parts)


def _floats(values: Any) -> list[float]:
    return [float(value) for value in np.asarray(values, np.float64)]


def _token(token: str, pi: float, b: float, look: str) -> Html:
    says = f"share π {share_text(pi)}, surprisal b {b:.2f} nats"
    below = share_text(pi) if pi >= 0.01 else ""
    # The tip lies across the trace, just below the token's line: above any screen's edge, wherever the token is.
    content = (visible(token), _tag("small", below, aria_hidden="true"), _tag("span", says, class_="tip"))
    return _tag("span", *content, class_=f"token {look}", tabindex="0", title=says)


def _seconds(summary: Mapping[str, Any]) -> Html:
    seconds = {str(stage): float(s) for stage, s in (summary.get("seconds") or {}).items() if is_number(s)}
    if not seconds:
        return _section("Time", _paragraph("The stages' times are not known."))
    head = [_column("stage"), _column("seconds", look="number")]
    rows = [*seconds.items(), ("total", sum(seconds.values()))]
    cells = [[_row_head(stage), _tag("td", f"{value:.1f}", class_="number")] for stage, value in rows]
    note = "Wall time in the process that ended the run; a stage that was done before only takes its loading."
    return _section("Time", _table(head, cells), _paragraph(note, look="faint small"))


def _configuration(summary: Mapping[str, Any]) -> Html:
    config = summary.get("config") or {}
    if not config:
        return _section("Configuration", _paragraph("The configuration is not known."))
    rows = [
        [_row_head(_breakable(name)), _tag("td", _config_text(value), class_="mono small")]
        for name, value in _flattened(config)
    ]
    table = _scrolling(_table([_column("field"), _column("value")], rows), "configuration")
    return _section("Configuration", _tag("details", _tag("summary", f"all {len(rows)} fields"), table))


def _flattened(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat += _flattened(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _config_text(value: Any) -> str:
    """As the configuration's file writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _versions(summary: Mapping[str, Any]) -> Html:
    facts = {str(name): str(version) for name, version in (summary.get("versions") or {}).items()}
    if summary.get("reference_directory") is not None:
        facts["reference in"] = str(summary["reference_directory"])
    if not facts:
        return _section("Versions", _paragraph("The versions are not known."))
    terms = [_tag("div", _tag("dt", name), _tag("dd", value)) for name, value in facts.items()]
    return _section("Versions", _tag("dl", *terms, class_="facts"))
