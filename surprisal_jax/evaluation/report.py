"""What a person sees of a run: three pictures (PNG) and a table on the terminal.

Each picture has a function that returns the figure and one that writes it. Figures are made without pyplot,
so nothing global is touched and no display is needed. Colours are safe for colour-blind readers and survive
printing in grey; text that comes from a user (tokens, prompts, strategies) is drawn literally, never as
mathtext.
"""

from __future__ import annotations

import io
import json
import math
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from surprisal_jax.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

WIDTH_INCHES = 9.0
DOTS_PER_INCH = 200

_SANS, _MONO = "DejaVu Sans", "DejaVu Sans Mono"  # they ship with matplotlib
_MONO_ADVANCE = 0.602  # width of one character, in em
INK, FAINT = "#1a1a1a", "#5f5f5f"
# Okabe and Ito, without the yellow that vanishes on white; line styles tell the same curves apart in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


class Curve(NamedTuple):
    """One line of a panel: the metric's name, as a legend has it; (step, value) pairs; how matplotlib draws it."""

    name: str
    legend: str
    points: list[tuple[int, float]]
    style: dict[str, Any]


class TokenRow(NamedTuple):
    """One trace of the token heat map: a title, and per supervised token its text, pi and b (nats)."""

    title: str
    tokens: Sequence[str]
    weights: ArrayLike
    surprisal: ArrayLike


# ---- latents by strategies


def write_latents_by_strategies(
    path: str | Path,
    table: ArrayLike,
    strategies: Sequence[str],
    mapping: Sequence[tuple[int, int]],
    alignment: float,
) -> None:
    """Write the picture of `latents_by_strategies_figure`, which has the arguments, to a PNG file."""
    _write_png(path, latents_by_strategies_figure(table, strategies, mapping, alignment))


def latents_by_strategies_figure(
    table: ArrayLike,
    strategies: Sequence[str],
    mapping: Sequence[tuple[int, int]],
    alignment: float,
) -> Figure:
    """Heat map of what each forced latent shows.

    Args:
      table: [K, S], the share of instances on which latent k shows strategy s; an output that fits m
        strategies counts as 1/m of each (the mean credit over instances). What a row lacks to 1 fits no
        strategy and is the last column.
      strategies: the S names.
      mapping: (latent, strategy index) pairs; their cells are outlined.
      alignment: the one-to-one value, for the title.

    Raises:
      ValueError: the table has another shape, or entries outside [0, 1], or a row above 1.
    """
    from matplotlib.figure import Figure

    shares = np.asarray(table, np.float64)
    if shares.ndim != 2 or 0 in shares.shape or shares.shape[1] != len(strategies):
        raise ValueError(f"expected a table of latents x {len(strategies)} strategies, got shape {shares.shape}")
    none = 1.0 - shares.sum(axis=1)
    if not (shares >= -1e-6).all() or not (none >= -1e-6).all():
        raise ValueError("the table must hold shares: none negative, no row above 1 in total")
    num_latents, num_strategies = len(shares), len(strategies)

    names = [_broken(name, 15, 3) for name in strategies]
    cell_width, cell_height, gap, below, labels = 1.35, 0.62, 0.25, 0.65, 0.9
    above = 0.85 + 0.17 * max(name.count("\n") + 1 for name in names)
    cells_width = (num_strategies + 1) * cell_width + gap
    width = max(labels + cells_width + 0.3, 6.0)
    height = above + num_latents * cell_height + below
    left = (width - labels - cells_width) / 2 + labels - 0.1
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH)
    axes = _inch_axes(figure)

    def column(s: int) -> float:
        return left + s * cell_width + (gap if s == num_strategies else 0.0)

    blues, greys, mapped = shades_of("Blues"), shades_of("Greys", 0.6), set(mapping)
    for k in range(num_latents):
        top = above + k * cell_height
        _write(axes, left - 0.12, top + cell_height / 2, f"latent {k}", 10, ha="right")
        for s, share in enumerate([*shares[k], none[k]]):
            share = min(max(float(share), 0.0), 1.0)
            shade = (greys if s == num_strategies else blues)(share)
            outlined = (k, s) in mapped
            _box(axes, column(s) + 0.04, top + 0.04, cell_width - 0.08, cell_height - 0.08, shade)
            if outlined:
                _box(axes, column(s) + 0.02, top + 0.02, cell_width - 0.04, cell_height - 0.04, None)
            centre = column(s) + cell_width / 2, top + cell_height / 2
            ink, weight = ink_on(shade), "bold" if outlined else "normal"
            _write(axes, *centre, share_text(share), 11, color=ink, weight=weight)
    for s, name in enumerate(names):
        _write(axes, column(s) + cell_width / 2, above - 0.08, name, 9.5, va="bottom")
    none_x = column(num_strategies) + cell_width / 2
    _write(axes, none_x, above - 0.08, "none", 9.5, va="bottom", style="italic", color=FAINT)
    _write(axes, width / 2, 0.28, "What each latent writes", 12.5, weight="bold")
    _write(axes, width / 2, 0.53, f"one-to-one alignment {alignment:.3f}", 10, color=FAINT)
    note = (
        "share of the held-out x on which the answer under a forced latent follows a strategy\n"
        "(an answer that fits several counts in parts); outlined: the best one-to-one map"
    )
    _write(axes, width / 2, height - below / 2, note, 8, color=FAINT)
    return figure


# ---- training curves


@dataclass(frozen=True)
class Panel:
    """Which metrics of a stage one panel shows.

    `label` gives a metric's name in the legend, None for a metric that belongs elsewhere. `scale` is `loss`
    (logarithmic where the values span much), `linear`, or `share` (0 to 1, with a line where all shares are
    equal).
    """

    title: str
    ylabel: str
    stage: str
    scale: str
    label: Callable[[str], str | None]


def _reference_label(name: str) -> str | None:
    return "loss" if name in ("loss", "reference_loss") else None


def _reconstruction_label(name: str) -> str | None:
    if name == "total":
        return "total objective"
    term = name.removesuffix("_reconstruction_loss")
    return term.replace("_", " ") if term != name else None


def _latent_label(name: str) -> str | None:
    divergences = ("prior_kl", "router_marginal_kl", "inter_latent_divergence", "posterior_fit")
    entropies = ("posterior_entropy", "router_entropy")
    return name.replace("_", " ") if name in divergences + entropies else None


def _agreement_label(name: str) -> str | None:
    return name.replace("_", " ") if name in ("rho_recon", "posterior_alignment") else None


def _usage_label(name: str) -> str | None:
    match = re.fullmatch(r"posterior_usage/(\d+)", name)
    return f"latent {match.group(1)}" if match else None


_PANELS = (
    Panel("Reference: loss", "nats per token", "reference", "loss", _reference_label),
    Panel("Disentangle: reconstruction", "weighted NLL", "disentangle", "loss", _reconstruction_label),
    Panel("Disentangle: divergences and entropies", "nats", "disentangle", "linear", _latent_label),
    Panel("Disentangle: posterior usage", "mean of q", "disentangle", "share", _usage_label),
    Panel("Disentangle: agreement on validation", "share", "disentangle", "linear", _agreement_label),
)


def write_training_curves(path: str | Path, metrics_path: str | Path | Sequence[str | Path]) -> None:
    """Write the curves of one `metrics.jsonl` file, or of several (one a stage), to a PNG file."""
    paths = [metrics_path] if isinstance(metrics_path, str | Path) else list(metrics_path)
    _write_png(path, training_curves_figure([line for p in paths for line in read_metrics(p)]))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` file, without a last line that was cut off (a run killed while writing).

    Raises:
      ValueError: another line is no JSON object.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline after it
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected an object, got {line[:40]!r}")
        records.append(record)
    return records


def training_curves_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Curves of what was logged, one panel for each group of metrics that has values.

    Args:
      records: lines of `metrics.jsonl`, `{"stage": ..., "step": ..., name: value, ...}`. A name with
        `validation` in front (`validation_reference_loss`, `validation/raw_reconstruction_loss`) is drawn as
        the validation curve of that name.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = panels_with_curves(records)
    if not panels:
        figure = Figure(figsize=(WIDTH_INCHES, 1.5), dpi=DOTS_PER_INCH)
        figure.text(0.5, 0.5, "no metrics logged yet", ha="center", va="center", fontsize=11, color=FAINT)
        return figure
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(WIDTH_INCHES, 3.3 * down), dpi=DOTS_PER_INCH, layout=layout)
    for position, (panel, curves) in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(down, across, position), panel, curves)
    return figure


def panels_with_curves(records: Sequence[Mapping[str, Any]]) -> list[tuple[Panel, list[Curve]]]:
    """The panels that `training_curves_figure`, which has the argument, has values for."""
    return [(panel, curves) for panel in _PANELS if (curves := _curves(panel, records))]


def _curves(panel: Panel, records: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Finite values only; the validation curve of a metric follows the training curve."""
    curves: dict[tuple[str, bool], dict[int, float]] = {}
    for record in records:
        if record.get("stage") != panel.stage:
            continue
        for key, value in record.items():
            name = re.sub(r"^validation[_/]", "", key)
            label = panel.label(name)
            if label is not None and isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault((label, name != key), {})[int(record["step"])] = float(value)
    labels = list(dict.fromkeys(label for label, _ in curves))
    drawn = []
    for label, validation in sorted(curves, key=lambda curve: (labels.index(curve[0]), curve[1])):
        index = labels.index(label)
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "lw": 1.4}
        style["ls"] = STYLES[(index + index // len(COLOURS)) % len(STYLES)]
        text = label
        if (label, not validation) in curves:
            text = f"{label} ({'validation' if validation else 'training'})"
            style |= {"lw": 1.2, "alpha": 1.0 if validation else 0.45}
        if validation:
            style |= {"marker": "o", "ms": 3.5, "mfc": "white"}
        drawn.append(Curve(label, text, sorted(curves[label, validation].items()), style))
    return drawn


def draw_curves(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    """Curves, axes and grid of one panel, without title and legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for curve in curves:
        steps, values = zip(*curve.points, strict=True)
        axes.plot(steps, values, label=curve.legend, **curve.style)
    everything = [value for curve in curves for _, value in curve.points]
    if panel.scale == "loss" and 0 < 20 * min(everything) < max(everything):
        axes.set_yscale("log")
        # Over many decades their labels would touch.
        within = (1, 2, 5) if max(everything) < 1000 * min(everything) else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=within))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.scale == "share":
        axes.axhline(1 / len({curve.name for curve in curves}), color="0.6", lw=0.8, zorder=0)
        axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("step", fontsize=8.5, color=FAINT)
    axes.set_ylabel(panel.ylabel, fontsize=8.5, color=FAINT)
    axes.tick_params(labelsize=8, colors=FAINT)
    axes.grid(True, color="0.92", lw=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_panel(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    draw_curves(axes, panel, curves)
    axes.set_title(panel.title, fontsize=10, color=INK, loc="left", weight="bold")
    # Below the panel: with seven curves no corner is free.
    in_a_row = 4 if max(len(curve.name) for curve in curves) < 12 else 2
    legend: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "ncols": in_a_row}
    axes.legend(fontsize=7, frameon=False, handlelength=3.2, columnspacing=1.5, **legend)


# ---- token heat map


def write_token_heat_map(path: str | Path, rows: Sequence[tuple[str, Sequence[str], ArrayLike, ArrayLike]]) -> None:
    """Write the picture of `token_heat_map_figure` to a PNG file."""
    _write_png(path, token_heat_map_figure(rows))


def token_heat_map_figure(rows: Sequence[tuple[str, Sequence[str], ArrayLike, ArrayLike]]) -> Figure:
    """Some traces, token by token: each cell is shaded by the token's share pi and says the token, pi and b.

    Args:
      rows: the traces, as `TokenRow` or plain tuples of its fields. Long ones wrap; a token wider than the
        picture is cut.

    Raises:
      ValueError: no rows, or a row whose tokens, weights and surprisals are not equally many.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("a token heat map needs at least one trace")
    traces = []
    for index, row in enumerate(TokenRow(*row) for row in rows):
        weights, surprisal = np.asarray(row.weights, np.float64), np.asarray(row.surprisal, np.float64)
        if not (len(row.tokens),) == weights.shape == surprisal.shape:
            counts = f"{len(row.tokens)} tokens, weights {weights.shape}, surprisals {surprisal.shape}"
            raise ValueError(f"row {index} of the token heat map has {counts}")
        traces.append((row.title, list(zip(row.tokens, weights.tolist(), surprisal.tolist(), strict=True))))
    largest = max((weight for _, trace in traces for _, weight, _ in trace), default=0.0)
    norm, shades = Normalize(0.0, largest if largest > 0 else 1.0), shades_of("Blues")

    margin, bar_room, header, gap = 0.25, 0.95, 0.75, 0.04
    token_size, small_size, title_size = 9.0, 6.5, 8.5
    cell_height, line_height, title_height = 0.5, 0.56, 0.17
    usable = WIDTH_INCHES - margin - bar_room
    token_em = _MONO_ADVANCE * token_size / 72
    longest = int((usable - 0.14) / token_em)

    # First where everything goes, then how tall the figure must be.
    titles: list[tuple[float, str]] = []
    cells: list[tuple[float, float, float, str, float, float]] = []
    top = header
    for title, trace in traces:
        for line in _lines(title, int(usable / (_MONO_ADVANCE * title_size / 72)), 3):
            titles.append((top, line))
            top += title_height
        x, top = 0.0, top + 0.03
        for token, weight, b in trace:
            text = visible(token)
            text = text if _columns(text) <= longest else text[: longest // 2] + "…"
            width = max(0.4, token_em * _columns(text) + 0.14)
            if x > 0 and x + width > usable:
                x, top = 0.0, top + line_height
            cells.append((margin + x, top, width, text, weight, b))
            x += width + gap
        top += line_height + 0.16
    height = max(top, 2.4)

    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH)
    axes = _inch_axes(figure)
    _write(axes, margin, 0.28, "Which tokens carry the loss", 12.5, weight="bold", ha="left")
    explanation = "each cell: a token; its share π of the trace's weight, the shade; its surprisal b, nats"
    _write(axes, margin, 0.53, explanation, 8, color=FAINT, ha="left")
    for y, line in titles:
        _write(axes, margin, y, line, title_size, family=_MONO, ha="left", va="top")
    for x, y, width, text, weight, b in cells:
        shade = shades(norm(weight))
        ink, centre = ink_on(shade), x + width / 2
        _box(axes, x, y, width, cell_height, shade)
        _write(axes, centre, y + 0.17, text, token_size, family=_MONO, va="baseline", color=ink)
        _write(axes, centre, y + 0.29, share_text(weight), small_size, weight="bold", color=ink)
        _write(axes, centre, y + 0.41, f"{b:.2f}", small_size, color=ink)
    bar_height = min(height - header - 0.25, 3.0)
    bar_left = WIDTH_INCHES - bar_room + 0.2
    # Figure coordinates: shares of its width and height, from the bottom left corner.
    corner = bar_left / WIDTH_INCHES, 1 - (header + bar_height) / height
    bar_axes = figure.add_axes((*corner, 0.16 / WIDTH_INCHES, bar_height / height))
    bar = figure.colorbar(ScalarMappable(norm, shades), cax=bar_axes)
    bar.set_label("share π", fontsize=8, color=FAINT)
    bar_axes.tick_params(labelsize=7, colors=FAINT)
    bar_axes.spines["outline"].set_edgecolor("0.75")
    return figure


# ---- the terminal

#: Every metric of a run and what it says, in the order in which tables have them.
METRICS: Mapping[str, str] = {
    "alignment_one_to_one": "answers that follow the strategy of their latent",
    "permuted_latent_control": "the same, latents shuffled per x: must be at chance",
    "bag_of_tokens_accuracy": "strategies told by counting the tokens of y",
    "local_strategy_coverage_mean": "strategies that some latent shows, mean over x",
    "local_strategy_full_coverage_rate": "x on which the latents show every strategy",
    "mean_overall_final_answer_accuracy": "right final answers, each latent forced in turn",
    "sampled_final_answer_accuracy": "right final answers, latent drawn from the router",
    "posterior_alignment": "traces whose strategy the posterior tells",
    "posterior_alignment_best_map": "the same under the map that is best for it",
    "closed_form_posterior_alignment": "the same for the closed-form posterior",
    "closed_form_posterior_alignment_best_map": "and under the map that is best for that",
    "rho_recon": "loss relative to the reference: z helps below 1",
    "collapse_threshold": "largest token weight: z pays off above beta",
    "strategy_token_share": "token weight where the strategies part",
}


class MetricRow(NamedTuple):
    """A metric as text: what it means, its value and its 95% interval, empty where it has none."""

    name: str
    meaning: str
    value: str
    interval: str


def metric_rows(summary: Mapping[str, Any]) -> list[MetricRow]:
    """The metrics of a summary that have an explanation, in its order. The argument is that of `print_summary`."""
    return [metric_row(summary, name) for name in METRICS if name in summary]


def metric_row(summary: Mapping[str, Any], name: str) -> MetricRow:
    """One metric of a summary; a value that is missing or no number is written n/a."""
    value, meaning = summary.get(name), METRICS.get(name, "")
    if name == "collapse_threshold" and is_number(value) and is_number(summary.get("beta")):
        beta = summary["beta"]
        relation, verdict = (">", "pays off") if value > beta else ("<=", "collapses")
        meaning = f"largest token weight {relation} beta = {beta:g}: z {verdict}"
    low_high = (summary.get("intervals_95") or {}).get(name)
    interval = "" if low_high is None else f"{low_high[0]:.3f} to {low_high[1]:.3f}"
    return MetricRow(name, meaning, f"{value:.3f}" if is_number(value) else "n/a", interval)


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a run's numbers as a table: metric and what it means, value, 95% interval.

    Args:
      summary: as in `summary.json`: the metrics by name (None: undefined for this task or data),
        `intervals_95`, name -> (low, high) or None, and `beta`. Metrics that are missing, and other keys, are
        left out.
      console: where to print; the terminal by default.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Evaluation", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95% interval", no_wrap=True)
    for row in metric_rows(summary):
        # The meaning goes under the name: a column of its own would not fit 80 characters.
        what = Text.assemble((row.name, "bold"), (f"\n  {row.meaning}", "dim"))
        table.add_row(what, Text(row.value), Text(row.interval))
    (console or Console()).print(table)


def is_number(value: Any) -> bool:
    """A number, not a boolean."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


# ---- drawing


def _write_png(path: str | Path, figure: Figure) -> None:
    """Whole or not at all: a reader of a run in progress never opens half a picture."""
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A token in a script the font lacks is drawn as boxes; a warning for each of them helps nobody.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(picture, format="png", dpi=figure.dpi)
    write_bytes(Path(path), picture.getvalue())


def _inch_axes(figure: Figure) -> Axes:
    """Invisible axes over the whole figure, in inches from its top left corner."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes


def _write(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    defaults: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "family": _SANS}
    # Tokens hold dollar signs, underscores and backslashes: literal, never mathtext.
    literal: dict[str, Any] = {"parse_math": False, "usetex": False}
    axes.text(x, y, text, fontsize=size, linespacing=1.3, **(defaults | literal | style))


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: Any) -> None:
    """A cell filled with a colour, or, for None, the outline of one."""
    from matplotlib.patches import Rectangle

    look: dict[str, Any] = {"fc": colour, "ec": "0.75", "lw": 0.5}
    if colour is None:
        look = {"fill": False, "ec": INK, "lw": 2.2}
    axes.add_patch(Rectangle((x, y), width, height, **look))


def shades_of(name: str, darkest: float = 0.9) -> Any:
    """A light-to-dark map without its darkest part, where neighbouring shades look the same."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, colormaps[name](np.linspace(0.0, darkest, 256)))


def ink_on(shade: Sequence[float]) -> str:
    """Black or white, whichever contrasts more with the shade (luminance as in WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shade[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if luminance < 0.179 else INK


def share_text(share: float) -> str:
    """Two decimals, and never 0.00 for something or 1.00 for not quite all."""
    if 0 < share < 0.005:
        return "<0.01"
    if 0.995 <= share < 1:
        return f"{math.floor(share * 1000) / 1000:.3f}"
    return f"{share:.2f}"


def visible(token: str) -> str:
    """The token with white space and control characters spelt out."""
    spelt = {" ": "␣", "\n": "\\n", "\t": "\\t"}
    return "".join(spelt.get(c, c if c.isprintable() else repr(c)[1:-1]) for c in token)


def _columns(text: str) -> int:
    """Width in characters of a fixed-width font, in which East Asian characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _lines(text: str, width: int, most: int) -> list[str]:
    """The text in at most `most` lines of at most `width` columns; what is too long loses its middle."""
    text = "".join(c if c == " " else visible(c) for c in text)
    width = width // 2 if _columns(text) > len(text) else width
    lines, kept = textwrap.wrap(text, width), width * most
    while len(lines) > most:
        kept -= 1
        lines = textwrap.wrap(text[: (kept + 1) // 2] + "…" + text[len(text) - kept // 2 :], width)
    return lines


def _broken(name: str, width: int, most: int) -> str:
    """A name over at most `most` lines, broken only after underscores and spaces."""
    lines = [""]
    for piece in re.findall(r"[^_ ]*[_ ]|[^_ ]+", name):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    if len(lines) > most:
        lines = [*lines[: most - 1], f"…{lines[-1]}"]
    return "\n".join(line if len(line) <= width + 2 else f"{line[:width]}…" for line in lines)
