"""The report page of a run: one HTML file that loads nothing, for a phone as for a desk.

Everything it needs is inside: the style, and the pictures as tables and inline SVG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surprisal_jax.evaluation.html import (
    SVG_COLOURS,
    Html,
    breakable,
    column,
    data_table,
    document,
    inline_svg,
    level_class,
    lines,
    paragraph,
    row_head,
    scrolling,
    section,
    tag,
)
from surprisal_jax.evaluation.report import (
    Curve,
    MetricRow,
    Panel,
    TokenRow,
    draw_curves,
    is_number,
    metric_row,
    metric_rows,
    panels_with_curves,
    share_text,
    visible,
)
from surprisal_jax.files import write_text

_NOT_METRICS = ("beta", "c_base", "seed", "num_latents")  # numbers of a summary that are shown elsewhere

# matplotlib's, in line widths.
_DASHES = {"-": (), "--": (3.7, 1.6), "-.": (6.4, 1.6, 1.0, 1.6), ":": (1.0, 1.65)}


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
    return document(f"{task}, seed {_text_or(summary.get('seed'))}: run report", sections)


def _text_or(value: Any, otherwise: str = "n/a") -> str:
    return otherwise if value is None else str(value)


def _number_text(value: Any, pattern: str) -> str:
    return format(value, pattern) if is_number(value) else "n/a"


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
            tag(
                "div",
                tag("dt", breakable(name)),
                tag("dd", row.value, class_="value"),
                tag("dd", below, class_="faint small"),
            )
        )
    terms = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    parts = [tag("h1", breakable(task)), tag("dl", *terms, class_="facts"), tag("dl", *headline, class_="headline")]
    return tag("header", *lines(parts))


def _warnings(summary: Mapping[str, Any]) -> Html | None:
    warnings = summary.get("warnings") or ()
    if not warnings:
        return None
    items = tag("ul", *(tag("li", warning) for warning in warnings))
    return tag("section", tag("h2", "Warnings"), items, class_="warnings")


def _latents_by_strategies(summary: Mapping[str, Any]) -> Html:
    title, table = "What each latent writes", summary.get("latents_by_strategies")
    strategies = [str(name) for name in summary.get("strategies") or ()]
    if table is None or not strategies:
        return section(title, paragraph("No strategies are known for this task, so no latent is compared to any."))
    meanings = {int(latent): str(name) for latent, name in (summary.get("latent_strategies") or {}).items()}
    note = (
        "Share of the held-out x on which the answer under a forced latent follows a strategy; an answer that fits "
        "several counts in parts, and “none” is what fits no strategy. Outlined: the best one-to-one map."
    )
    return section(title, paragraph(note, look="faint small"), *shares_table(table, strategies, meanings))


def shares_table(table: Any, strategies: Sequence[str], meanings: Mapping[int, str]) -> tuple[Html, Html]:
    """What each latent writes, as a table of shaded shares, and what the table says in sentences.

    Args:
      table: [K, S], the share of answers under latent k that follow strategy s.
      strategies: the S names.
      meanings: latent -> strategy, of the mapped ones.
    """
    shares = np.asarray(table, np.float64).reshape(-1, len(strategies))
    head = [tag("td"), *(column(breakable(name)) for name in strategies), column(tag("em", "none"))]
    rows = []
    for latent, row in enumerate(shares.tolist()):
        cells = [row_head(f"latent {latent}")]
        for name, share in zip(strategies, row, strict=True):
            mapped = meanings.get(latent) == name
            said = [tag("span", ", mapped", class_="hidden")] if mapped else []
            cells.append(tag("td", share_text(share), *said, class_=level_class(share) + (" mapped" if mapped else "")))
        none = _none_share(row)
        cells.append(tag("td", share_text(none), class_=level_class(none, "grey")))
        rows.append(cells)
    picture = scrolling(data_table(head, rows, "shares"), "shares of the strategies by latent")
    sentences = tag("ul", *lines(tag("li", s) for s in _mapping_sentences(shares, strategies, meanings)))
    return picture, sentences


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
        return section("Metrics", paragraph("No metrics were measured."))
    head = [column("metric"), column("value", look="number"), column("95% interval")]
    table = data_table(head, map(_metric_cells, rows), "metrics")
    note = "n/a: undefined for this task or data. Intervals are bootstrapped over the held-out x."
    return section("Metrics", scrolling(table, "metrics"), paragraph(note, look="faint small"))


def _metric_cells(row: MetricRow) -> list[Html]:
    # The id lets a link lead to a metric.
    name = tag("th", breakable(row.name), tag("small", row.meaning), scope="row", id=row.name)
    return [name, tag("td", row.value, class_="number"), tag("td", row.interval, class_="interval")]


def _training_curves(metrics: Sequence[Mapping[str, Any]]) -> Html:
    panels = panels_with_curves(metrics)
    if not panels:
        return section("Training curves", paragraph("No metrics were logged, so there are no curves."))
    figures = []
    for number, (panel, curves) in enumerate(panels):
        head = [column("curve"), column("last value", look="number"), column("at step", look="number")]
        rows = [
            [
                row_head(swatch(curve), curve.legend),
                tag("td", f"{curve.points[-1][1]:.4g}", class_="number"),
                tag("td", curve.points[-1][0], class_="number"),
            ]
            for curve in curves
        ]
        parts = [tag("h3", panel.title), _panel_svg(panel, curves, number), data_table(head, rows)]
        figures.append(tag("div", *lines(parts)))
    return section("Training curves", tag("div", *lines(figures), class_="panels"))


def _panel_svg(panel: Panel, curves: Sequence[Curve], number: int) -> Html:
    """The panel as inline SVG; `number` tells it from the other panels."""
    label = f"{panel.title}: {panel.ylabel} by step; the table below has the last values"
    return inline_svg(lambda axes: draw_curves(axes, panel, curves), (3.8, 2.5), label, f"panel {number}")


def swatch(curve: Curve) -> Html:
    """A piece of the curve for its legend."""
    style = curve.style
    dashes = style["ls"][1] if isinstance(style["ls"], tuple) else _DASHES[style["ls"]]
    pattern = " ".join(f"{length * style['lw']:g}" for length in dashes)
    colour = SVG_COLOURS[style["color"].lower()]
    look = {"stroke": colour, "stroke_width": style["lw"], "stroke_dasharray": pattern or None}
    drawn = [tag("line", x1=0, y1=4, x2=30, y2=4, opacity=style.get("alpha"), **look)]
    if "marker" in style:
        drawn.append(tag("circle", cx=15, cy=4, r=1.8, fill="var(--paper)", stroke=colour))
    return tag("svg", *drawn, viewBox="0 0 30 8", class_="swatch", aria_hidden="true")


def _token_heat_map(rows: Sequence[TokenRow]) -> Html:
    title = "Which tokens carry the loss"
    if not rows:
        return section(title, paragraph("There are no traces to show."))
    traces = [
        (row.title, list(zip(row.tokens, _floats(row.weights), _floats(row.surprisal), strict=True)))
        for row in (TokenRow(*row) for row in rows)
    ]
    largest = max((pi for _, trace in traces for _, pi, _ in trace if math.isfinite(pi)), default=0.0)
    scale = largest if largest > 0 else 1.0
    steps = [tag("span", share_text(i / 4 * scale), class_=f"{level_class(i / 4)} mono small") for i in range(5)]
    note = (
        "Each token of a trace is shaded by its share π of the trace's weight; the number under it is that share, left "
        "out below 0.01. Point at a token, tap it or reach it with the Tab key for its share π and its surprisal b."
    )
    parts = [
        paragraph(note, look="faint small"),
        tag("p", tag("span", "share π", class_="faint small"), *steps, class_="legend"),
    ]
    for name, trace in traces:
        tokens = [_token(token, pi, b, level_class(pi / scale)) for token, pi, b in trace]
        parts += [tag("h3", name, class_="trace-title mono small"), tag("div", *lines(tokens), class_="trace")]
    return section(title, *parts)


def _floats(values: Any) -> list[float]:
    return [float(value) for value in np.asarray(values, np.float64)]


def _token(token: str, pi: float, b: float, look: str) -> Html:
    says = f"share π {share_text(pi)}, surprisal b {b:.2f} nats"
    below = share_text(pi) if pi >= 0.01 else ""
    # The tip lies across the trace, just below the token's line: above any screen's edge, wherever the token is.
    content = (visible(token), tag("small", below, aria_hidden="true"), tag("span", says, class_="tip"))
    return tag("span", *content, class_=f"token {look}", tabindex="0", title=says)


def _seconds(summary: Mapping[str, Any]) -> Html:
    seconds = {str(stage): float(s) for stage, s in (summary.get("seconds") or {}).items() if is_number(s)}
    if not seconds:
        return section("Time", paragraph("The stages' times are not known."))
    head = [column("stage"), column("seconds", look="number")]
    rows = [*seconds.items(), ("total", sum(seconds.values()))]
    cells = [[row_head(stage), tag("td", f"{value:.1f}", class_="number")] for stage, value in rows]
    note = "Wall time in the process that ended the run; a stage that was done before only takes its loading."
    return section("Time", data_table(head, cells), paragraph(note, look="faint small"))


def _configuration(summary: Mapping[str, Any]) -> Html:
    config = summary.get("config") or {}
    if not config:
        return section("Configuration", paragraph("The configuration is not known."))
    rows = [
        [row_head(breakable(name)), tag("td", _config_text(value), class_="mono small")]
        for name, value in _flattened(config)
    ]
    table = scrolling(data_table([column("field"), column("value")], rows), "configuration")
    return section("Configuration", tag("details", tag("summary", f"all {len(rows)} fields"), table))


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
        return section("Versions", paragraph("The versions are not known."))
    terms = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    return section("Versions", tag("dl", *terms, class_="facts"))
