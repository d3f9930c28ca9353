"""The pictures and the table: what they say, read back from the artists, and whether the files are PNG."""

import io
import itertools
import json
import math
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from rich.console import Console

from surprisal_jax.evaluation import report

TABLE = [[0.004, 0.97, 0.02], [0.0, 0.0, 0.998], [0.93, 0.031, 0.0]]
STRATEGIES = ("rows_first", "columns_first", "alternating")
MAPPING = ((0, 1), (1, 2), (2, 0))


def png_size(path):
    """Width and height from the header of a complete PNG file."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert struct.unpack(">I", data[29:33])[0] == zlib.crc32(data[12:29])
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def texts(figure):
    """Everything the figure writes outside its axes' ticks, in drawing order."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def boxes(figure):
    from matplotlib.patches import Rectangle

    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


def luminance(colour):
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def overflowing(figure):
    """Texts that do not fit into the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    frame = figure.bbox.padded(0.5)
    artists = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # their boxes have a size, too
        extents = [(text.get_text(), text.get_window_extent(renderer)) for text in artists]
    return [text for text, box in extents if not (frame.contains(*box.min) and frame.contains(*box.max))]


# latents by strategies


def test_latents_by_strategies_writes_every_share_and_what_fits_none():
    figure = report.latents_by_strategies_figure(TABLE, STRATEGIES, MAPPING, 0.9661)
    written = texts(figure)
    # By hand: 0.004 -> <0.01; none = 1 - row sum = 0.006, 0.002, 0.039; 0.998 is not yet 1.
    rows = [
        ["<0.01", "0.97", "0.02", "0.01"],
        ["0.00", "0.00", "0.998", "<0.01"],
        ["0.93", "0.03", "0.00", "0.04"],
    ]
    start = written.index("latent 0")
    assert written[start : start + 15] == [cell for k, row in enumerate(rows) for cell in [f"latent {k}", *row]]
    assert written[start + 15 : start + 19] == [*STRATEGIES, "none"]
    assert "one-to-one alignment 0.966" in written
    assert overflowing(figure) == []


def test_latents_by_strategies_outlines_the_map_and_shades_by_share():
    figure = report.latents_by_strategies_figure(TABLE, STRATEGIES, MAPPING, 0.9661)
    filled = [box for box in boxes(figure) if box.get_fill()]
    outlines = [box for box in boxes(figure) if not box.get_fill()]
    assert (len(filled), len(outlines)) == (12, 3)
    for outline, (latent, strategy) in zip(outlines, MAPPING, strict=True):
        cell = filled[latent * 4 + strategy]
        assert outline.get_bbox().x0 < cell.get_bbox().x0 < cell.get_bbox().x1 < outline.get_bbox().x1
        assert outline.get_bbox().y0 < cell.get_bbox().y0 < cell.get_bbox().y1 < outline.get_bbox().y1
    # Read in grey, a larger share is darker, and the text stands out from its cell.
    shares = np.array(TABLE)
    grey = [luminance(filled[k * 4 + s].get_facecolor()) for k in range(3) for s in range(3)]
    order = np.argsort(shares.ravel(), kind="stable")
    assert np.all(np.diff(np.array(grey)[order]) <= 1e-6)
    assert grey[5] < 0.35 < 0.9 < grey[4]


def test_latents_by_strategies_ink_contrasts_with_every_shade():
    from matplotlib.colors import to_rgb

    def relative(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
        return luminance(linear)

    shares = np.linspace(0, 1, 16)[:, None]
    figure = report.latents_by_strategies_figure(shares, ["only"], (), 0.0)
    cells = [box for box in boxes(figure) if box.get_fill()]
    written = [text for text in figure.axes[0].texts if text.get_text()[:2] in ("0.", "1.", "<0")]
    assert len(cells) == len(written) == 32
    for cell, text in zip(cells, written, strict=True):
        ink, paper = sorted((relative(to_rgb(text.get_color())), relative(cell.get_facecolor())))
        assert (paper + 0.05) / (ink + 0.05) > 4  # WCAG asks 3 for large text, 4.5 for small


@pytest.mark.parametrize(("num_latents", "num_strategies"), [(2, 5), (5, 2), (16, 1)])
def test_latents_by_strategies_in_other_shapes(tmp_path, num_latents, num_strategies):
    names = [f"a_rather_long_$strategy$_name_{s}_and_more_of_it" for s in range(num_strategies)]
    table = np.full((num_latents, num_strategies), 1 / num_strategies)
    figure = report.latents_by_strategies_figure(table, names, ((0, 0),), 1.0)
    assert overflowing(figure) == []
    assert sum(text == "0.00" for text in texts(figure)) == num_latents  # none: nothing is left
    path = tmp_path / "latents.png"
    report.write_latents_by_strategies(path, table, names, ((0, 0),), 1.0)
    assert png_size(path) == tuple(np.round(figure.get_size_inches() * figure.dpi).astype(int))
    assert [p.name for p in tmp_path.iterdir()] == ["latents.png"]


def test_latents_by_strategies_refuses_what_is_no_table_of_shares():
    with pytest.raises(ValueError, match=r"latents x 3 strategies, got shape \(3, 2\)"):
        report.latents_by_strategies_figure(np.zeros((3, 2)), STRATEGIES, (), 0.0)
    with pytest.raises(ValueError, match="no row above 1"):
        report.latents_by_strategies_figure([[0.6, 0.6, 0.0]], STRATEGIES, (), 0.0)
    with pytest.raises(ValueError, match="none negative"):
        report.latents_by_strategies_figure([[math.nan, 0.6, 0.0]], STRATEGIES, (), 0.0)


# training curves


def metrics():
    reference = [{"stage": "reference", "step": s, "reference_loss": 3 / s, "gradient_norm": 9.0} for s in (1, 2, 3)]
    reference[2]["validation_loss"] = 1.25
    disentangle = [
        {
            "stage": "disentangle",
            "step": s,
            "total": 4.0 - s,
            "raw_reconstruction_loss": 1.0 / s,
            "normalized_inverse_token_weighted_reconstruction_loss": 2.0 / s,
            "prior_kl": 0.1 * s,
            "posterior_entropy": math.nan if s == 2 else 0.5,
            "posterior_usage/0": 0.25,
            "posterior_usage/1": 0.75,
        }
        for s in (1, 2, 3)
    ]
    return reference + disentangle


def curves(figure):
    """(panel, legend text) -> points; a line without a legend is no curve."""
    return {
        (axes.get_title(loc="left"), line.get_label()): list(zip(*map(np.ndarray.tolist, line.get_data()), strict=True))
        for axes in figure.axes
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def test_training_curves_show_what_was_logged():
    usage, divergences = "Disentangle: posterior usage", "Disentangle: divergences and entropies"
    reconstruction = "Disentangle: reconstruction"
    assert curves(report.training_curves_figure(metrics())) == {
        ("Reference: loss", "loss (training)"): [(1, 3.0), (2, 1.5), (3, 1.0)],
        ("Reference: loss", "loss (validation)"): [(3, 1.25)],
        (reconstruction, "total objective"): [(1, 3.0), (2, 2.0), (3, 1.0)],
        (reconstruction, "raw"): [(1, 1.0), (2, 0.5), (3, 1 / 3)],
        (reconstruction, "normalized inverse token weighted"): [(1, 2.0), (2, 1.0), (3, 2 / 3)],
        (divergences, "prior kl"): [(1, 0.1), (2, 0.2), (3, 0.1 * 3)],
        (divergences, "posterior entropy"): [(1, 0.5), (3, 0.5)],  # the NaN is a gap
        (usage, "latent 0"): [(1, 0.25), (2, 0.25), (3, 0.25)],
        (usage, "latent 1"): [(1, 0.75), (2, 0.75), (3, 0.75)],
    }


def test_training_curves_have_no_empty_panel():
    only_reference = [record for record in metrics() if record["stage"] == "reference"]
    assert [a.get_title(loc="left") for a in report.training_curves_figure(only_reference).axes] == ["Reference: loss"]
    nothing = report.training_curves_figure([{"stage": "score", "step": 1, "examples": 3}])
    assert nothing.axes == []
    assert [text.get_text() for text in nothing.texts] == ["no metrics logged yet"]


def test_validation_measures_have_a_panel():
    records = [
        {
            "stage": "disentangle",
            "step": 100,
            "validation_rho_recon": 0.4,
            "validation/posterior_alignment": 1,
        }
    ]
    assert curves(report.training_curves_figure(records)) == {
        ("Disentangle: agreement on validation", "rho recon"): [(100, 0.4)],
        ("Disentangle: agreement on validation", "posterior alignment"): [(100, 1.0)],
    }


def test_curves_of_one_panel_differ_in_grey():
    records = [
        {"stage": "disentangle", "step": s} | {f"posterior_usage/{k}": 1 / 16 for k in range(16)} for s in (1, 2)
    ]
    lines = [line for line in report.training_curves_figure(records).axes[0].get_lines() if line.get_label()[0] != "_"]
    assert len({(line.get_color(), str(line.get_linestyle()), str(line._dash_pattern)) for line in lines}) == 16


def test_losses_over_many_scales_are_drawn_on_a_logarithmic_axis_with_plain_labels():
    records = [{"stage": "reference", "step": s, "reference_loss": 2.0 * 0.9**s} for s in range(60)]
    axes = report.training_curves_figure(records).axes[0]
    assert axes.get_yscale() == "log"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {"0.01", "0.1", "1"} <= set(labels)
    assert report.training_curves_figure(metrics()).axes[0].get_yscale() == "linear"


def test_training_curves_file_from_one_or_several_metrics_files(tmp_path):
    first, second = tmp_path / "reference.jsonl", tmp_path / "disentangle.jsonl"
    first.write_text("".join(json.dumps(r) + "\n" for r in metrics()[:3]))
    second.write_text("".join(json.dumps(r) + "\n" for r in metrics()[3:]))
    report.write_training_curves(tmp_path / "both.png", [first, second])
    report.write_training_curves(tmp_path / "one.png", first)
    assert png_size(tmp_path / "both.png") == (1800, 1320)  # 9 x (2 rows of 3.3) inches, 200 dots each
    assert png_size(tmp_path / "one.png") == (1800, 660)


def test_metrics_of_a_killed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "reference", "step": 1}\n{"stage": "reference", "st')
    assert report.read_metrics(path) == [{"stage": "reference", "step": 1}]
    path.write_text('{"stage": "reference", "st\n{"stage": "reference", "step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: not JSON"):
        report.read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"line 1: expected an object, got '\[1\]'"):
        report.read_metrics(path)


# token heat map

ROW = report.TokenRow("r2 c7 r4 c6   rows_first", ["r3", "$r_4$", "</y>"], [0.73, 0.002, 0.268], [1.1, 0.003, 0.404])


def cells_of(figure):
    """(token, pi, b) of every cell and its colour, in drawing order."""
    written = texts(figure)
    count = len(boxes(figure))
    flat = written[len(written) - 3 * count :]
    colours = [box.get_facecolor() for box in boxes(figure)]
    return [tuple(flat[3 * i : 3 * i + 3]) for i in range(count)], colours


def test_token_heat_map_says_token_share_and_surprisal():
    figure = report.token_heat_map_figure([ROW])
    cells, colours = cells_of(figure)
    assert cells == [("r3", "0.73", "1.10"), ("$r_4$", "<0.01", "0.00"), ("</y>", "0.27", "0.40")]
    assert ROW.title in texts(figure)
    assert luminance(colours[0]) < luminance(colours[2]) < luminance(colours[1])
    bar = figure.axes[1]
    assert bar.get_ylabel() == "share π"
    assert bar.get_ylim() == (0.0, 0.73)
    assert overflowing(figure) == []


def test_token_heat_map_shades_are_those_of_its_colour_bar():
    figure = report.token_heat_map_figure([ROW])
    _, colours = cells_of(figure)
    mesh = figure.axes[1].collections[-1]
    for weight, colour in zip(ROW.weights, colours, strict=True):
        np.testing.assert_allclose(colour, mesh.cmap(mesh.norm(weight)), atol=1e-12)


def test_tokens_are_drawn_literally():
    strange = ["$x^2$", "$", "a_b", "<z_0>", "\\alpha", r"\$", "%", "{}"]
    figure = report.token_heat_map_figure([("$title$ $", strange, np.full(8, 1 / 8), np.ones(8))])
    assert [token for token, _, _ in cells_of(figure)[0]] == strange
    figure.canvas.draw()  # an odd dollar sign is an error where mathtext is on
    for text in figure.axes[0].texts:
        assert text.get_parse_math() is False


def test_invisible_characters_are_spelt_out():
    tokens = [" ", "\n", "\t", "\x07", "\ud800"]
    figure = report.token_heat_map_figure([("a\nb", tokens, np.full(5, 0.2), np.ones(5))])
    assert [token for token, _, _ in cells_of(figure)[0]] == ["␣", "\\n", "\\t", "\\x07", "\\ud800"]
    assert "a\\nb" in texts(figure)


def test_long_traces_wrap_inside_the_picture(tmp_path):
    tokens = [f"token{i}" for i in range(60)] + ["x" * 500, "日本" * 35]
    title = " ".join(str(i) for i in range(400)) + " quick_sort"
    row = (title, tokens, np.full(62, 1 / 62), np.ones(62))
    figure = report.token_heat_map_figure([row, ROW])
    assert overflowing(figure) == []
    width, height = figure.get_size_inches()
    placed = [box.get_bbox() for box in boxes(figure)]
    assert len(placed) == 65
    assert all(box.x0 >= 0 and box.x1 < width - 0.7 and box.y1 < height for box in placed)  # left of the bar
    for a, b in itertools.pairwise(placed):
        assert b.x0 > a.x1 or b.y0 > a.y1  # no cell lies on the one before
    titles = texts(figure)[2:5]
    assert titles[0].startswith("0 1 2 3") and titles[2].endswith("399 quick_sort")
    assert "…" in "".join(titles)
    report.write_token_heat_map(tmp_path / "tokens.png", [row, ROW])
    assert png_size(tmp_path / "tokens.png") == (1800, round(height * 200))


def test_token_heat_map_of_a_reference_without_any_surprise(tmp_path):
    rows = [("x", ["a", "b"], [0.0, 0.0], [0.0, 0.0])]
    report.write_token_heat_map(tmp_path / "t.png", rows)
    assert png_size(tmp_path / "t.png") == (1800, 480)
    assert report.token_heat_map_figure(rows).axes[1].get_ylim() == (0.0, 1.0)


def test_token_heat_map_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match=r"row 1 of the token heat map has 2 tokens, weights \(1,\)"):
        report.token_heat_map_figure([ROW, ("x", ["a", "b"], [1.0], [1.0])])
    with pytest.raises(ValueError, match="at least one trace"):
        report.token_heat_map_figure([])


def test_a_failing_picture_leaves_the_old_one(tmp_path):
    path = tmp_path / "latents.png"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="no row above 1"):
        report.write_latents_by_strategies(path, [[2.0]], ["a"], (), 0.0)
    assert path.read_bytes() == b"old"


def test_pictures_need_no_pyplot_and_no_early_import():
    code = (
        "import sys; from surprisal_jax.evaluation import report;"
        "assert not {'matplotlib', 'rich', 'jax'} & set(sys.modules), 'imported early';"
        "report.token_heat_map_figure([('x', ['a'], [1.0], [1.0])]);"
        "report.latents_by_strategies_figure([[1.0]], ['s'], (), 1.0);"
        "report.training_curves_figure([{'stage': 'reference', 'step': 1, 'loss': 1.0}]);"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# the terminal


def printed(summary, width=80):
    console = Console(file=io.StringIO(), width=width)
    report.print_summary(summary, console)
    return console.file.getvalue()


def test_summary_table():
    summary = {
        "strategy_token_share": np.float32(0.5),
        "alignment_one_to_one": 0.99609375,
        "sampled_final_answer_accuracy": None,
        "collapse_threshold": 1.5,
        "beta": 0.1,
        "seed": 7,
        "task": "grid_pathfinding",
        "intervals_95": {"alignment_one_to_one": [0.9883, 1.0], "collapse_threshold": None},
    }
    lines = [" ".join(line.split()) for line in printed(summary).splitlines()]
    assert lines[lines.index("alignment_one_to_one 0.996 0.988 to 1.000") + 1] == (
        "answers that follow the strategy of their latent"
    )
    assert "sampled_final_answer_accuracy n/a" in lines
    assert lines[lines.index("collapse_threshold 1.500") + 1] == "largest token weight > beta = 0.1: z pays off"
    assert "strategy_token_share 0.500" in lines
    assert not any("seed" in line or "rho_recon" in line or line.startswith("beta") for line in lines)


def test_summary_says_when_collapse_is_the_optimum():
    assert "<= beta = 0.1: z collapses" in printed({"collapse_threshold": 0.1, "beta": 0.1})
    assert "z pays off above beta" in printed({"collapse_threshold": 0.1})


@pytest.mark.parametrize("beta", [0.1, 0.2])
def test_summary_fits_a_small_terminal(beta):
    summary = dict.fromkeys(report.METRICS, 0.123456) | {"beta": beta}
    summary["intervals_95"] = dict.fromkeys(report.METRICS, (0.1, 0.2))
    lines = printed(summary).splitlines()
    assert max(map(len, lines)) <= 80
    # Two lines a metric, none wrapped: title, blank, header, rule, and a blank at the end.
    assert len(lines) == 2 * len(report.METRICS) + 5
