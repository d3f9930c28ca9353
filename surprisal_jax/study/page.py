"""The report of the study: one HTML file that loads nothing, made from the two tables alone."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from surprisal_jax.config import ExperimentConfig
from surprisal_jax.evaluation.alignment import best_map
from surprisal_jax.evaluation.html import (
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
from surprisal_jax.evaluation.page import shares_table, swatch
from surprisal_jax.evaluation.report import COLOURS, METRICS, STYLES, Curve
from surprisal_jax.files import write_text
from surprisal_jax.study.plan import EVERYWHERE, FROZEN, SETTINGS, Member, members
from surprisal_jax.study.table import SECONDS
from surprisal_jax.tasks import TASK_NAMES, get_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, str]
Rows = Mapping[Member, Row]

ALIGNMENT = "alignment_one_to_one"
COVERAGE = "local_strategy_coverage_mean"
ACCURACY = "sampled_final_answer_accuracy"
#: What makes the tables and this page, over as many sittings as it takes.
COMMAND = "make study"
#: What the recipe has to reach in every run.
ALIGNED, COVERED, RIGHT = 0.95, 0.98, 0.98
#: A posterior with less than this of the reference's loss explained has collapsed.
COLLAPSED_RHO = 0.9


def write_study_page(path: Path, rows: Rows, curves: Iterable[Row]) -> None:
    """Write the page of `study_page`, which has the arguments, whole or not at all."""
    write_text(path, study_page(rows, curves))


def study_page(rows: Rows, curves: Iterable[Row]) -> str:
    """The page as text, the same for the same arguments.

    Args:
      rows: lines of `results.csv` by member, those that the plan asks for.
      curves: lines of `curves.csv`; those of other members are left out.
    """
    planned = list(members())
    done = {member: rows[member] for member in planned if member in rows}
    points = _points(done, curves)
    parts = [
        _header(done, len(planned)),
        _worth(done),
        _frozen(done),
        _differences(done),
        _alignments(done),
        _over_steps(points),
        _time_to_aligned(points),
        _collapse(done),
        _token_share(done),
        _other_k(done),
        _controls(done),
        _time(done),
        _every_run(done),
    ]
    return document("surprisal_jax: the study", parts)


# ---- numbers


def number(row: Row, name: str) -> float | None:
    """A value of a row; None where it is undefined."""
    return float(row[name]) if row.get(name) else None


class Difference(NamedTuple):
    """A mean over pairs with its 95% bootstrap interval, which is None below three pairs."""

    pairs: int
    mean: float
    interval: tuple[float, float] | None


def paired_difference(
    rows: Rows, setting: str, other: str, name: str, where: Callable[[Member], bool] = lambda member: True
) -> Difference | None:
    """`setting` minus `other` over the tasks and seeds that have both; None where none has.

    The interval is the percentile bootstrap over pairs. Within a task, seeds are exchangeable; so are tasks, for what
    is said of all of them.
    """
    differences = []
    for member, row in rows.items():
        pair = rows.get(Member(member.task, member.seed, other))
        if member.setting != setting or pair is None or not where(member):
            continue
        value, compared = number(row, name), number(pair, name)
        if value is not None and compared is not None:
            differences.append(value - compared)
    if not differences:
        return None
    pairs, mean = len(differences), float(np.mean(differences))
    if pairs < 3:
        return Difference(pairs, mean, None)
    # Drawn from one order and sign, so that neither the order of the rows nor which setting is named first decides.
    sign = -1.0 if mean < 0 else 1.0
    values = np.sort(sign * np.asarray(differences))
    drawn = np.random.default_rng(0).integers(pairs, size=(9999, pairs))
    low, high = sorted(sign * np.quantile(values[drawn].mean(axis=1), (0.025, 0.975)))
    return Difference(pairs, mean, (float(low), float(high)))


def steps_to_aligned(points: Sequence[tuple[int, float]]) -> int | None:
    """The first step at which the posterior told the strategies of 95% of the validation set; None: at none."""
    return next((step for step, value in points if value >= ALIGNED), None)


def _points(rows: Rows, curves: Iterable[Row]) -> dict[Member, list[tuple[int, float]]]:
    """(step, posterior alignment on validation) of every member."""
    points: dict[Member, list[tuple[int, float]]] = {}
    for line in curves:
        member = Member(line["task"], int(line["seed"]), line["setting"])
        if member in rows and rows[member]["identity"] == line["identity"] and line["posterior_alignment"]:
            points.setdefault(member, []).append((int(line["step"]), float(line["posterior_alignment"])))
    return points


# ---- markup


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _difference_cells(difference: Difference | None) -> list[Html]:
    if difference is None:
        return [tag("td", "n/a", class_="number"), tag("td"), tag("td", "0", class_="number")]
    low_high = difference.interval
    interval = "" if low_high is None else f"{low_high[0]:+.3f} to {low_high[1]:+.3f}"
    return [
        tag("td", f"{difference.mean:+.3f}", class_="number"),
        tag("td", interval, class_="interval"),
        tag("td", str(difference.pairs), class_="number"),
    ]


def _sentence(difference: Difference) -> str:
    text = f"{difference.mean:+.3f}"
    if difference.interval is not None:
        text += f" (95% interval {difference.interval[0]:+.3f} to {difference.interval[1]:+.3f})"
    return f"{text} over {difference.pairs} pairs"


def _header(rows: Rows, planned: int) -> Html:
    versions = sorted({f"surprisal_jax {row['surprisal_jax']}, jax {row['jax']}" for row in rows.values()})
    facts = {
        "runs": f"{len(rows)} of {planned}",
        "command": COMMAND,
        "versions": "; ".join(versions) or "n/a",
        "data": "results.csv and curves.csv, beside this page",
    }
    terms = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    missing = None
    if len(rows) < planned:
        missing = paragraph(f"{planned - len(rows)} planned runs have no row yet; nothing here is about them.")
    parts = [tag("h1", "Which strategy is which latent?"), tag("dl", *terms, class_="facts"), missing]
    return tag("header", *lines(part for part in parts if part is not None))


#: What is taken away, and the pairs of settings that differ in it alone.
PARTS = (
    ("token weighting", (("default", "token weight 0"), ("scope example", "example, token weight 0"))),
    ("token weighting, against a smaller beta", (("default", "token weight 0, beta 0.01"),)),
    ("the closed-form posterior", (("default", "amortized"), ("scope example", "amortized, example"))),
    ("the start that the reference's groups give", (("default", "start by chance, no splits"),)),
    ("persistence, groups of two", (("default", "scope example"), ("amortized", "amortized, example"))),
)


def _worth(rows: Rows) -> Html:
    title = "What each part is worth"
    note = (
        f"Differences in {ALIGNMENT} between two settings that differ in one part, paired by task and seed. Token "
        "weight 0 has the same total reconstruction weight. Intervals: 95%, bootstrap over pairs."
    )
    head = [
        column("part"),
        column("with, against without"),
        column("task"),
        column("difference", look="number"),
        column("95% interval"),
        column("pairs", look="number"),
    ]
    sentences, body = [], []
    for part, comparisons in PARTS:
        for setting, other in comparisons:
            overall = paired_difference(rows, setting, other, ALIGNMENT)
            if overall is None:
                continue
            sentences.append(f"{part} ({setting} against {other}): {_sentence(overall)}")
            body.append(
                [row_head(part), tag("td", f"{setting}, {other}"), tag("td", "all"), *_difference_cells(overall)]
            )
            for task in TASK_NAMES:
                of_task = paired_difference(rows, setting, other, ALIGNMENT, _task_is(task))
                if of_task is not None:
                    cells = [row_head(part), tag("td", f"{setting}, {other}"), tag("td", breakable(task))]
                    body.append(cells + _difference_cells(of_task))
    if not body:
        return section(title, paragraph("No two settings that differ in one part have been run."))
    answer = tag("ul", *lines(tag("li", sentence) for sentence in sentences))
    table = scrolling(data_table(head, body), "differences by task")
    return section(title, paragraph(note, look="faint small"), answer, tag("details", tag("summary", "by task"), table))


def _task_is(task: str) -> Callable[[Member], bool]:
    return lambda member: member.task == task


def _frozen(rows: Rows) -> Html:
    note = (
        "Developed on seeds 0 to 4, then frozen. Two earlier recipes had been run on seeds 10 and 11 and, on three "
        "tasks, 12, and failed four times (docs/recipe.md); the other 15 pairs nobody had seen. A cell has alignment "
        "and sampled accuracy (scope example: coverage besides), shaded by the alignment."
    )
    parts = [paragraph(note, look="faint small")]
    for setting in FROZEN.settings:
        parts += _frozen_table(rows, setting)
    return section("The frozen recipe, on seeds it was not developed on", *parts)


def _frozen_table(rows: Rows, setting: str) -> list[Html]:
    frozen = {m: rows[m] for m in rows if m.setting == setting and m.seed in FROZEN.seeds}
    if not frozen:
        return [tag("h3", setting), paragraph("Not run yet.")]
    head = [column("task"), *(column(f"seed {seed}", look="number") for seed in FROZEN.seeds)]
    body = []
    for task in FROZEN.tasks:
        cells = [row_head(breakable(task))]
        for seed in FROZEN.seeds:
            row = frozen.get(Member(task, seed, setting))
            cells.append(tag("td", "-") if row is None else _frozen_cell(row, setting == "scope example"))
        body.append(cells)
    return [
        tag("h3", setting),
        _counts(frozen, len(FROZEN.tasks) * len(FROZEN.seeds)),
        scrolling(data_table(head, body, "shares"), f"frozen recipe, {setting}"),
    ]


def _frozen_cell(row: Row, with_coverage: bool) -> Html:
    names = (ALIGNMENT, COVERAGE, ACCURACY) if with_coverage else (ALIGNMENT, ACCURACY)
    values = [number(row, name) for name in names]
    shown: list[object] = []
    for value in values:
        shown += [Html("<br>")] if shown else []
        shown.append(_text(value))
    return tag("td", *shown, class_=level_class(values[0] or 0.0))


def _counts(rows: Rows, planned: int) -> Html:
    def reached(name: str, least: float) -> str:
        values = [value for row in rows.values() if (value := number(row, name)) is not None]
        lowest = f", the lowest {min(values):.3f}" if values else ""
        return f"{name} is at least {least:g} in {sum(v >= least for v in values)} of {len(rows)} runs{lowest}."

    texts = [reached(ALIGNMENT, ALIGNED), reached(COVERAGE, COVERED), reached(ACCURACY, RIGHT)]
    times = [seconds for row in rows.values() if (seconds := _whole_seconds(row)) is not None]
    if times:
        texts.append(
            f"A run with its reference took {min(times) / 60:.1f} to {max(times) / 60:.1f} minutes of one core "
            f"({len(times)} runs)."
        )
    if len(rows) < planned:
        texts.append(f"{planned - len(rows)} of {planned} are not run yet.")
    return tag("ul", *lines(tag("li", text) for text in texts))


def _differences(rows: Rows) -> Html:
    title = "Every setting against the default"
    head = [
        column("setting"),
        *(
            cell
            for name in ("alignment", "accuracy")
            for cell in (column(name, look="number"), column("95% interval"), column("pairs", look="number"))
        ),
    ]
    body = []
    for setting in SETTINGS:
        if setting == "default":
            continue
        alignment = paired_difference(rows, setting, "default", ALIGNMENT)
        if alignment is not None:
            accuracy = paired_difference(rows, setting, "default", ACCURACY)
            body.append([row_head(breakable(setting)), *_difference_cells(alignment), *_difference_cells(accuracy)])
    if not body:
        return section(title, paragraph("Nothing to compare yet."))
    note = (
        "The setting minus the default, paired by task and seed, over all that have both. With K = 2 the "
        "alignment is 1 where each latent writes one strategy and a third is lost, about 0.75 where one writes two."
    )
    return section(title, paragraph(note, look="faint small"), scrolling(data_table(head, body, "settings"), title))


def _settings_of(rows: Rows) -> list[str]:
    return [setting for setting in SETTINGS if any(member.setting == setting for member in rows)]


def _alignments(rows: Rows) -> Html:
    title = "Alignment of every run"
    settings = _settings_of(rows)
    if not settings:
        return section(title, paragraph("No runs yet."))

    def draw(axes: Axes) -> None:
        for index, task in enumerate(TASK_NAMES):
            points = [
                (number(row, ALIGNMENT), settings.index(member.setting) + 0.12 * (index - 2.5))
                for member, row in rows.items()
                if member.task == task
            ]
            if points:
                values, heights = zip(*points, strict=True)
                colour = COLOURS[1 + index]
                axes.plot(values, heights, "o", ms=3, color=colour, mfc="none")
        axes.set_yticks(range(len(settings)), settings, fontsize=6)
        axes.set_ylim(len(settings) - 0.4, -0.6)
        axes.set_xlim(-0.02, 1.02)
        _plain(axes, ALIGNMENT)

    picture = inline_svg(draw, (3.8, 0.6 + 0.2 * len(settings)), f"{title}; the table below has them", "alignments")
    return section(title, _task_legend(), tag("div", picture, class_="panels wide"))


def _plain(axes: Axes, xlabel: str, ylabel: str | None = None) -> None:
    """Labels and a faint grid, across rows of names only where there is no `ylabel`."""
    axes.set_xlabel(xlabel, fontsize=8)
    if ylabel is not None:
        axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, axis="x" if ylabel is None else "both", color="0.92", lw=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _task_legend() -> Html:
    swatches = []
    for index, task in enumerate(TASK_NAMES):
        dot = tag("circle", cx=6, cy=6, r=4, fill="none", stroke=f"var(--curve-{1 + index})", stroke_width=2)
        swatches.append(tag("span", tag("svg", dot, viewBox="0 0 12 12", width=12, height=12), " ", breakable(task)))
    return tag("p", *swatches, class_="legend small")


def _over_steps(points: Mapping[Member, list[tuple[int, float]]]) -> Html:
    title = "Alignment over steps"
    figures = []
    for task in TASK_NAMES:
        of_task = {member: line for member, line in points.items() if member.task == task}
        drawn = {m: line for m, line in of_task.items() if m.setting in EVERYWHERE.settings}
        if drawn:
            figures.append(tag("div", tag("h3", breakable(task)), _curves_svg(task, drawn)))
    if not figures:
        return section(title, paragraph("No curves yet."))
    note = "The posterior network against the strategies on the validation set, under its best map; a line a seed."
    legend = [
        tag("span", swatch(Curve(setting, setting, [], _style(index))), " ", setting)
        for index, setting in enumerate(EVERYWHERE.settings)
    ]
    parts = [paragraph(note, look="faint small"), tag("p", *legend, class_="legend small")]
    return section(title, *parts, tag("div", *lines(figures), class_="panels"))


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index], "ls": STYLES[index], "lw": 1}


def _curves_svg(task: str, curves: Mapping[Member, list[tuple[int, float]]]) -> Html:
    def draw(axes: Axes) -> None:
        for member, line in curves.items():
            index = EVERYWHERE.settings.index(member.setting)
            steps, values = zip(*line, strict=True)
            axes.plot(steps, values, **_style(index), alpha=0.8)
        axes.set_ylim(-0.02, 1.02)
        _plain(axes, "step", "posterior alignment")

    return inline_svg(draw, (3.8, 2.3), f"posterior alignment by step, {task}", f"curves {task}")


def _time_to_aligned(points: Mapping[Member, list[tuple[int, float]]]) -> Html:
    title = f"Steps until the posterior alignment is {ALIGNED:g}"
    head = [
        column("setting"),
        column("runs", look="number"),
        column("reached it", look="number"),
        column("median step", look="number"),
        column("latest", look="number"),
    ]
    body = []
    for setting in SETTINGS:
        firsts = [steps_to_aligned(line) for member, line in points.items() if member.setting == setting]
        reached = sorted(step for step in firsts if step is not None)
        if firsts:
            middle = f"{statistics.median(reached):g}" if reached else "never"
            latest = str(reached[-1]) if reached else "never"
            cells = [str(len(firsts)), str(len(reached)), middle, latest]
            body.append([row_head(breakable(setting)), *(tag("td", cell, class_="number") for cell in cells)])
    if not body:
        return section(title, paragraph("No curves yet."))
    return section(title, scrolling(data_table(head, body, "settings"), title))


def _scatter(
    rows: Rows, x: Callable[[Member], float | None], xlabel: str, salt: str, logarithmic: bool, mark: float | None
) -> Html:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    def draw(axes: Axes) -> None:
        for index, task in enumerate(TASK_NAMES):
            pairs = [
                (at, value)
                for member, row in rows.items()
                if member.task == task
                and (at := x(member)) is not None
                and (value := number(row, ALIGNMENT)) is not None
            ]
            if pairs:
                horizontal, vertical = zip(*pairs, strict=True)
                axes.plot(horizontal, vertical, "o", ms=3, color=COLOURS[1 + index], mfc="none")
        if logarithmic:
            axes.set_xscale("log")
            # Powers as the formatter writes them are pictures of letters, which inline pictures have not.
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        if mark is not None:
            axes.axvline(mark, color="#999999", lw=0.8)
        axes.set_ylim(-0.02, 1.02)
        _plain(axes, xlabel, ALIGNMENT)

    picture = inline_svg(draw, (3.8, 2.5), f"{ALIGNMENT} by {xlabel}", salt)
    return tag("div", picture, class_="panels wide")


def _collapse(rows: Rows) -> Html:
    title = "Collapse against the collapse threshold"
    known = {m: row for m, row in rows.items() if number(row, "collapse_threshold") is not None}
    if not known:
        return section(title, paragraph("No runs yet."))
    # The threshold is judged against the run's own beta.
    ratios = {m: (number(row, "collapse_threshold") or 0.0) / _beta(m) for m, row in known.items()}
    head = [
        column("posterior"),
        column("collapse threshold / beta"),
        column("runs", look="number"),
        column("collapsed", look="number"),
        column("share", look="number"),
    ]
    bounds = (0.0, 1.0, 3.0, 10.0, float("inf"))
    body = []
    for posterior, (low, high) in itertools.product(("closed_form", "amortized"), itertools.pairwise(bounds)):
        inside = [row for m, row in known.items() if _posterior(m) == posterior and low <= ratios[m] < high]
        if not inside:
            continue
        collapsed = sum((number(row, "rho_recon") or 0.0) > COLLAPSED_RHO for row in inside)
        name = f"{low:g} to {high:g}" if high < float("inf") else f"{low:g} and more"
        cells = [str(len(inside)), str(collapsed), f"{collapsed / len(inside):.2f}"]
        numbers = (tag("td", cell, class_="number") for cell in cells)
        body.append([row_head(posterior), tag("td", name), *numbers])
    note = (
        "The threshold is known before training: below beta, a ratio of 1 (the line), ignoring z is the optimum. "
        f"Collapsed: rho_recon above {COLLAPSED_RHO:g}, so that z explains hardly anything. Above beta, not collapsing "
        "pays; whether training gets there is another matter."
    )
    picture = _scatter(known, ratios.get, "collapse threshold / beta", "collapse", True, 1.0)
    return section(
        title, paragraph(note, look="faint small"), _task_legend(), picture, scrolling(data_table(head, body), title)
    )


def _beta(member: Member) -> float:
    return float(SETTINGS[member.setting].get("beta", ExperimentConfig().beta))


def _posterior(member: Member) -> str:
    """`closed_form` is what every task's file in `configs/` says."""
    return str(SETTINGS[member.setting].get("posterior", "closed_form"))


def _token_share(rows: Rows) -> Html:
    title = "Token weight on revealing positions against alignment"
    if not rows:
        return section(title, paragraph("No runs yet."))
    note = "strategy_token_share: the share of pi on the positions where the strategies part, before training."
    picture = _scatter(
        rows, lambda member: number(rows[member], "strategy_token_share"), "strategy_token_share", "share", False, None
    )
    return section(title, paragraph(note, look="faint small"), _task_legend(), picture)


def _other_k(rows: Rows) -> Html:
    title = "Two and five latents for three strategies"
    parts: list[Html] = []
    for setting in ("K = 2", "K = 5"):
        for member, row in rows.items():
            if member.setting == setting and row.get("latents_by_strategies"):
                strategies = get_task(member.task).strategies
                table = np.asarray(json.loads(row["latents_by_strategies"]), np.float64)
                meanings = {latent: strategies[s] for latent, s in best_map(table)}
                coverage = _text(number(row, COVERAGE))
                parts.append(tag("h3", f"{setting}, {member.task}, seed {member.seed}; coverage {coverage}"))
                parts += shares_table(table, strategies, meanings)
    if not parts:
        return section(title, paragraph("Not run yet."))
    return section(title, *parts)


def _controls(rows: Rows) -> Html:
    title = "Controls"
    values = sorted(v for row in rows.values() if (v := number(row, "permuted_latent_control")) is not None)
    bags = {
        task: sorted({v for m, row in rows.items() if m.task == task and (v := number(row, "bag_of_tokens_accuracy"))})
        for task in TASK_NAMES
    }
    if not values:
        return section(title, paragraph("No runs yet."))
    items = [
        f"permuted_latent_control, {METRICS['permuted_latent_control']}: {values[0]:.3f} to {values[-1]:.3f} "
        f"in {len(values)} runs."
    ]
    items += [
        f"bag_of_tokens_accuracy of {task}: {found[0]:.3f} to {found[-1]:.3f}." for task, found in bags.items() if found
    ]
    return section(title, tag("ul", *lines(tag("li", item) for item in items)))


def _time(rows: Rows) -> Html:
    title = "Time"
    head = [column("stage"), column("hours of one core", look="number"), column("runs with a time", look="number")]
    body = []
    for stage in SECONDS:
        known = [
            seconds / (1.0 if stage == "evaluate" else float(row["members"]))
            for row in rows.values()
            if (seconds := number(row, f"seconds_{stage}")) is not None
        ]
        cells = [f"{sum(known) / 3600:.2f}", str(len(known))]
        body.append([row_head(stage), *(tag("td", cell, class_="number") for cell in cells)])
    note = (
        "Each process had one thread, two at a time on two cores. A reference that was there took its loading only, "
        "and runs of one program share its time in all stages but evaluate. A process that was halted counts its halt."
    )
    return section(title, paragraph(note, look="faint small"), data_table(head, body))


def _whole_seconds(row: Row) -> float | None:
    """All stages of a run that trained its reference itself and was alone in its program; None for others."""
    reference, score = number(row, "seconds_reference"), number(row, "seconds_score")
    # Loading stored scores takes no time; computing them takes seconds.
    if row["members"] != "1" or reference is None or score is None or score < 1:
        return None
    return sum(number(row, f"seconds_{stage}") or 0.0 for stage in SECONDS)


def _every_run(rows: Rows) -> Html:
    title = "Every run"
    if not rows:
        return section(title, paragraph("No runs yet."))
    head = [column("task"), column("seed", look="number"), column("setting")]
    head += [column(breakable(name), look="number") for name in METRICS]
    body = [
        [
            row_head(breakable(member.task)),
            tag("td", str(member.seed), class_="number"),
            tag("td", member.setting),
            *(tag("td", _text(number(row, name)), class_="number") for name in METRICS),
        ]
        for member, row in sorted(rows.items(), key=_order)
    ]
    table = scrolling(data_table(head, body), "every run")
    return section(title, tag("details", tag("summary", f"{len(rows)} runs, every metric"), table))


def _order(item: tuple[Member, Any]) -> tuple[int, int, int]:
    member = item[0]
    return list(SETTINGS).index(member.setting), TASK_NAMES.index(member.task), member.seed
