"""The report page: what it says, read back with a parser, and that it loads and runs nothing."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from surprisal_jax.evaluation import html, page, report
from surprisal_jax.evaluation.report import TokenRow

SCRIPT = "<script>alert(1)</script>"
VOID = {"meta", "wbr"}


class Reader(HTMLParser):
    """The elements as (tag, attributes, text inside, in whole), and an error for what is not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        element = [tag, dict(attrs), ""]
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self._open and self._open[-1][0] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element[2] += data

    def of(self, tag, **attributes):
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            (attrs, " ".join(text.split()))
            for name, attrs, text in self.elements
            if name == tag and all(value in attrs.get(key, "").split() for key, value in wanted.items())
        ]

    def texts(self, tag, **attributes):
        return [text for _, text in self.of(tag, **attributes)]


def summary():
    names = list(report.METRICS)
    return {
        **{name: 0.5 + i / 1000 for i, name in enumerate(names)},
        "strategy_token_share": None,
        "beta": 0.1,
        "c_base": 0.12434,
        "task": "sorting_algorithms",
        "seed": 7,
        "num_latents": 4,
        "intervals_95": {name: (0.25, 0.75) if i < 5 else None for i, name in enumerate(names)},
        "latent_strategies": {"0": "quick_sort", "2": "merge_sort"},
        "latents_by_strategies": [[0.9, 0.004, 0.0], [0.2, 0.1, 0.1], [0.02, 0.98, 0.0], [0.3, 0.4, 0.3]],
        "strategies": ["quick_sort", "merge_sort", "heap_sort"],
        "warnings": ["inverse_nll_floor acts on 63% of the training data"],
        "seconds": {"reference": 274.434, "score": 3.97, "disentangle": 134.938, "evaluate": 5.542},
        "reference_directory": "runs/sorting-reference",
        "versions": {"surprisal_jax": "0.1.0", "jax": "0.10.2"},
        "config": {
            "task": "sorting_algorithms",
            "posterior": "closed_form",
            "latent_scope": "group",
            "distributed": False,
            "run_dir": None,
            "model": {"width": 64, "rope_theta": 10000.0},
        },
    }


METRICS = [
    {"stage": "reference", "step": 1, "reference_loss": 3.0},
    {"stage": "reference", "step": 2, "reference_loss": 1.5, "validation_loss": 1.25},
    {"stage": "disentangle", "step": 1, "posterior_usage/0": 0.25, "posterior_usage/1": 0.75},
    {
        "stage": "disentangle",
        "step": 10,
        "posterior_usage/0": 0.5,
        "posterior_usage/1": 0.5,
        "validation_rho_recon": 0.4,
    },
]
ROWS = [TokenRow("5 3   quick_sort", ["3", "swap", "</y>"], [0.73, 0.002, 0.268], [1.1, 0.003, 0.404])]


def built(summary_=None, metrics=(), rows=ROWS):
    text = page.report_page(summary() if summary_ is None else summary_, metrics, rows)
    return text, Reader(text)


# safety


def test_texts_of_the_run_stay_text():
    hostile = summary() | {"task": SCRIPT, "strategies": [SCRIPT, '"><img src=x onerror=alert(1)>', "heap_sort"]}
    hostile["latent_strategies"] = {"0": SCRIPT}
    hostile["warnings"] = [SCRIPT]
    hostile["config"] = hostile["config"] | {"posterior": SCRIPT, "output_dir": SCRIPT, SCRIPT: SCRIPT}
    hostile["versions"] = {SCRIPT: SCRIPT}
    hostile["seconds"] = {SCRIPT: 1.0}
    hostile["reference_directory"] = '" onmouseover="alert(1)'
    hostile["intervals_95"] = {SCRIPT: (0.0, 1.0), **hostile["intervals_95"]}
    metrics = [{"stage": "disentangle", "step": 1, f"{SCRIPT}_reconstruction_loss": 1.0}]
    text, read = built(hostile, metrics, [TokenRow(SCRIPT, [SCRIPT, '" onfocus="x'], [0.5, 0.5], [1.0, 1.0])])
    assert "<script" not in text and "<img" not in text
    assert read.texts("h1") == [SCRIPT]
    assert read.texts("h3", class_="trace-title") == [SCRIPT]
    assert [token.startswith(SCRIPT) for token in read.texts("span", class_="token")] == [True, False]
    assert SCRIPT in read.texts("th", scope="col")
    assert SCRIPT in read.texts("td", class_="mono")
    assert any(SCRIPT in text for text in read.texts("th", scope="row"))  # a curve's legend, a metric, a stage
    for _, attributes, _ in read.elements:
        assert not [name for name in attributes if name.startswith("on")]


def test_characters_that_nobody_sees_are_spelt_out(tmp_path):
    rows = [TokenRow("a\u202eb\ud800", [" ", "\n", "\ud800", "\x00"], np.full(4, 0.25), np.ones(4))]
    page.write_report_page(tmp_path / "report.html", summary() | {"task": "x\x00y"}, [], rows)
    read = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert read.texts("h1") == ["x\\x00y"]
    assert "a\\u202eb\\ud800" in read.texts("h3")
    tokens = [text.split("0.25")[0] for text in read.texts("span", class_="token")]
    assert tokens == ["␣", "\\n", "\\ud800", "\\x00"]


def test_the_page_loads_nothing_and_runs_nothing():
    text, read = built(metrics=METRICS)
    assert {tag for tag, _, _ in read.elements}.isdisjoint(
        {"script", "link", "iframe", "object", "img", "base", "form"}
    )
    for _, attributes, _ in read.elements:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster", "background"):
            assert attributes.get(name, "#").startswith("#"), attributes
    assert not re.search(r"https?:|//|@import|javascript:", text)
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    policies = [
        attrs["content"] for attrs, _ in read.of("meta") if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert {"default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"} <= set(policies[0].split("; "))


def test_ids_are_unique_and_every_reference_leads_to_one():
    text, read = built(metrics=METRICS)
    ids = [attrs["id"] for _, attrs, _ in read.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:url\(|href=")#([^)"]+)', text)
    assert references and set(references) <= set(ids)


# what it says


def test_the_top_says_task_setting_and_headline():
    _, read = built()
    assert read.texts("title") == ["sorting_algorithms, seed 7: run report"]
    facts = {"seed 7", "latents K 4", "posterior closed_form", "scope group", "beta 0.1", "c_base 0.1243 nats"}
    terms = dict(zip(read.texts("dt"), (text for text in read.texts("dd") if "interval" not in text), strict=False))
    assert facts <= {f"{name} {value}" for name, value in terms.items()}
    assert read.texts("dd", class_="value") == ["0.500", "0.506"]
    assert read.texts("dd", class_="small")[0].startswith("95% interval 0.250 to 0.750")
    assert read.texts("li")[0] == "inverse_nll_floor acts on 63% of the training data"
    assert "Warnings" not in built(summary() | {"warnings": []})[1].texts("h2")


def test_every_metric_has_its_value_interval_and_explanation():
    values = summary() | {"a_metric_of_tomorrow": 0.125}
    _, read = built(values)
    table = next(text for attrs, text in read.of("table") if attrs.get("class") == "metrics")
    for row in report.metric_rows(values):
        assert " ".join(f"{row.name} {row.meaning}".split()) in table.replace(row.name, f"{row.name} ")
        assert read.of("th", id=row.name)
    cells = read.texts("td", class_="interval")
    assert len(cells) == len(report.METRICS) + 1
    assert cells.count("0.250 to 0.750") == 5
    numbers = read.texts("td", class_="number")
    assert numbers[:2] == ["0.500", "0.501"] and numbers[13:15] == ["n/a", "0.125"]
    assert "largest token weight > beta = 0.1: z pays off" in table


def test_latents_by_strategies_as_a_table():
    _, read = built()
    cells = [text for attrs, text in read.of("td") if re.search("(blue|grey)-", attrs.get("class", ""))]
    assert cells == [
        *["0.90, mapped", "<0.01", "0.00", "0.10"],
        *["0.20", "0.10", "0.10", "0.60"],
        *["0.02", "0.98, mapped", "0.00", "0.00"],  # a full row leaves nothing, whatever rounding leaves
        *["0.30", "0.40", "0.30", "0.00"],
    ]
    assert [attrs["class"] for attrs, _ in read.of("td", class_="mapped")] == ["blue-18 mapped", "blue-20 mapped"]
    assert read.texts("th", scope="col")[:4] == ["quick_sort", "merge_sort", "heap_sort", "none"]
    assert read.texts("li")[1:] == [
        "The map: latent 0 is quick_sort, latent 2 is merge_sort.",
        "latent 1 is surplus: it is mapped to no strategy. What it writes most often fits no strategy (0.60).",
        "latent 3 is surplus: it is mapped to no strategy. What it writes most often follows merge_sort (0.40).",
        "No latent is mapped to heap_sort.",
    ]


def test_curves_have_a_legend_with_their_last_values():
    text, read = built(metrics=METRICS)
    assert read.texts("h3")[:3] == [
        "Reference: loss",
        "Disentangle: posterior usage",
        "Disentangle: agreement on validation",
    ]
    pictures = [attrs for attrs, _ in read.of("svg") if attrs.get("role") == "img"]
    assert len(pictures) == 3 and all(attrs["aria-label"] for attrs in pictures)
    panel = next(text for attrs, text in read.of("div") if attrs.get("class") == "panels")
    for legend in ("loss (training) 1.5 2", "loss (validation) 1.25 2", "latent 1 0.5 10", "rho recon 0.4 10"):
        words = legend.rsplit(" ", 2)
        assert re.search(rf"{re.escape(words[0])}\s*{words[1]}\s*{words[2]}", panel), legend
    # All colours are the theme's, so that dark mode reaches into the pictures.
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert drawings
    assert not [drawing for drawing in drawings if re.search(r"(stroke|fill): ?#", drawing)]


def test_tokens_say_share_and_surprisal():
    _, read = built()
    tokens = read.of("span", class_="token")
    assert [attrs["title"] for attrs, _ in tokens] == [
        "share π 0.73, surprisal b 1.10 nats",
        "share π <0.01, surprisal b 0.00 nats",
        "share π 0.27, surprisal b 0.40 nats",
    ]
    assert [attrs["class"] for attrs, _ in tokens] == ["token blue-20", "token blue-0", "token blue-7"]
    assert all(attrs["tabindex"] == "0" for attrs, _ in tokens)
    assert read.texts("span", class_="tip") == [attrs["title"] for attrs, _ in tokens]
    assert read.texts("p", class_="legend") == ["share π0.000.180.360.550.73"]
    with pytest.raises(ValueError, match="zip"):
        built(rows=[TokenRow("x", ["a", "b"], [1.0], [1.0])])


def test_seconds_configuration_and_versions():
    _, read = built()
    table = next(text for text in read.texts("table") if text.startswith("stageseconds"))
    assert "reference274.4" in table and "total418.9" in table
    details = read.texts("details")[0]
    for name, value in (("distributed", "false"), ("run_dir", "null"), ("model.width", "64"), ("task", "sorting")):
        assert f"{name}{value}" in details
    assert read.texts("summary") == ["all 7 fields"]
    assert "0.10.2" in read.texts("dd") and "runs/sorting-reference" in read.texts("dd")


def test_headings_are_in_order_and_tables_have_headers():
    text, read = built(metrics=METRICS[:1])
    levels = [int(tag[1]) for tag, _, _ in read.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(levels))
    assert '<html lang="en">' in text and 'name="viewport"' in text
    assert all("scope" in attrs for attrs, _ in read.of("th"))


# what may be missing


def test_a_summary_without_anything():
    _, read = built({}, [], [])
    sentences = read.texts("p")
    assert [text.split(",")[0] for text in sentences] == [
        "No strategies are known for this task",
        "No metrics were measured.",
        "No metrics were logged",
        "There are no traces to show.",
        "The stages' times are not known.",
        "The configuration is not known.",
        "The versions are not known.",
    ]
    assert read.texts("dd", class_="value") == ["n/a", "n/a"]


def test_a_task_without_strategies_and_metrics_that_are_none():
    names = report.METRICS
    without = summary() | dict.fromkeys(names) | {"latents_by_strategies": None, "latent_strategies": {}}
    without |= {"strategies": [], "intervals_95": dict.fromkeys(names)}
    _, read = built(without)
    assert any(text.startswith("No strategies are known") for text in read.texts("p"))
    assert read.texts("td", class_="number")[: len(names)] == ["n/a"] * len(names)


def test_a_table_without_a_map_and_a_trace_without_surprise():
    rows = [TokenRow("x", ["a"], [0.0], [0.0]), TokenRow("y", [], [], []), TokenRow("z", ["b"], [math.nan], [math.nan])]
    _, read = built(summary() | {"latent_strategies": None}, rows=rows)
    assert "No latent is mapped to a strategy." in read.texts("li")
    assert read.of("span", class_="token")[0][0]["title"] == "share π 0.00, surprisal b 0.00 nats"


# style


def contrast(one, other):
    from matplotlib.colors import to_rgb

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [html.LIGHT, html.DARK])
def test_texts_and_curves_stand_out_in_both_themes(theme):
    for paper in ("paper", "card", "warning"):
        assert contrast(theme["ink"], theme[paper]) > 7
    for paper in ("paper", "card"):
        assert contrast(theme["faint"], theme[paper]) > 4.5
    for name in ("focus", *(f"curve-{i}" for i in range(len(report.COLOURS)))):
        assert contrast(theme[name], theme["paper"]) > 3, name
    levels = html.level_colours(dark=theme is html.DARK)
    assert len(levels) == 2 * (html.LEVELS + 1)
    for name, (shade, ink) in levels.items():
        assert contrast(shade, ink) > 4.5, name


# the file


def test_two_writes_give_the_same_bytes_and_leave_nothing_else(tmp_path):
    page.write_report_page(tmp_path / "one.html", summary(), METRICS, ROWS)
    page.write_report_page(tmp_path / "two.html", summary(), METRICS, ROWS)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "two.html"]


def test_another_process_writes_the_same_bytes(tmp_path):
    page.write_report_page(tmp_path / "here.html", {}, METRICS[:1], ROWS)
    arguments = f"{str(tmp_path / 'there.html')!r}, {{}}, {METRICS[:1]!r}, {[tuple(row) for row in ROWS]!r}"
    code = f"from surprisal_jax.evaluation import page; page.write_report_page({arguments})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "here.html").read_bytes() == (tmp_path / "there.html").read_bytes()


@pytest.mark.parametrize("failing", ["rendering", "writing"])
def test_a_failing_write_leaves_the_old_page(tmp_path, monkeypatch, failing):
    path = tmp_path / "report.html"
    path.write_text("old")
    rows = [TokenRow("x", ["a", "b"], [1.0], [1.0])] if failing == "rendering" else ROWS

    def full(_):
        raise OSError("no space left on device")

    if failing == "writing":
        monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ValueError if failing == "rendering" else OSError):
        page.write_report_page(path, summary(), METRICS, rows)
    assert path.read_text() == "old"


def test_a_page_needs_no_early_import():
    code = "import sys; from surprisal_jax.evaluation import page; assert not {'matplotlib', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
