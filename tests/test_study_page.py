"""The report of the study: its numbers are those of the tables, and it loads nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from surprisal_jax.evaluation.report import METRICS
from surprisal_jax.study.page import paired_difference, steps_to_aligned, study_page
from surprisal_jax.study.plan import FROZEN, Member, members
from surprisal_jax.study.table import SECONDS


def row(**values: object) -> dict[str, str]:
    whole = {"identity": "id", "members": "1", "surprisal_jax": "0.1.0", "jax": "0.10.2", "latents_by_strategies": ""}
    whole |= dict.fromkeys([*METRICS, *(f"seconds_{stage}" for stage in SECONDS)], "")
    return whole | {name: str(value) for name, value in values.items()}


def rows_of(setting: str, values: list[float], task: str = "grid_pathfinding") -> dict[Member, dict[str, str]]:
    return {Member(task, seed, setting): row(alignment_one_to_one=value) for seed, value in enumerate(values)}


def test_paired_differences_are_of_the_same_task_and_seed():
    rows = rows_of("default", [1.0, 0.9, 0.8]) | rows_of("amortized", [0.4, 0.6])
    rows |= rows_of("amortized", [0.1], "sorting_algorithms")  # has no pair
    found = paired_difference(rows, "default", "amortized", "alignment_one_to_one")
    assert found is not None and found.pairs == 2 and found.interval is None
    assert found.mean == pytest.approx(0.45)
    opposite = paired_difference(rows, "amortized", "default", "alignment_one_to_one")
    assert opposite is not None and opposite.mean == pytest.approx(-0.45)
    assert paired_difference(rows, "default", "K = 2", "alignment_one_to_one") is None
    assert paired_difference(rows, "default", "amortized", "rho_recon") is None, "undefined values are no zeros"


def test_the_interval_is_the_percentile_bootstrap_over_pairs():
    values = [0.0, 0.1, 0.5, 0.2, 0.3, 0.9]
    rows = rows_of("default", values) | rows_of("amortized", [0.0] * 6)
    found = paired_difference(rows, "default", "amortized", "alignment_one_to_one")
    scipy_stats = pytest.importorskip("scipy.stats")
    expected = scipy_stats.bootstrap(
        (np.asarray(values),), np.mean, n_resamples=20000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert found is not None and found.interval == pytest.approx(tuple(expected), abs=0.02)
    assert paired_difference(rows, "default", "amortized", "alignment_one_to_one") == found, "the same every time"
    backwards = dict(reversed(rows.items()))
    assert paired_difference(backwards, "default", "amortized", "alignment_one_to_one") == found, "in whatever order"
    opposite = paired_difference(rows, "amortized", "default", "alignment_one_to_one")
    assert opposite.interval == (-found.interval[1], -found.interval[0])


def test_steps_to_aligned():
    assert steps_to_aligned([(50, 0.3), (100, 0.96), (150, 0.9)]) == 100
    assert steps_to_aligned([(50, 0.3)]) is None


class Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "img", "object"):
            self.found.append(tag)
        self.found += [f"{name}={value}" for name, value in attrs if name in ("src", "href") and value[:1] != "#"]


def whole_study() -> tuple[dict[Member, dict[str, str]], list[dict[str, str]]]:
    rng = np.random.default_rng(0)
    rows, curves = {}, []
    for member in members():
        values = {name: f"{rng.uniform(0.3, 1):.4f}" for name in METRICS}
        seconds = {f"seconds_{stage}": f"{rng.uniform(1, 100):.1f}" for stage in SECONDS}
        num_latents = {"K = 2": 2, "K = 5": 5}.get(member.setting, 3)
        table = json.dumps([[float(s == k % 3) for s in range(3)] for k in range(num_latents)])
        rows[member] = row(**values, **seconds, latents_by_strategies=table)
        about = {**vars(member), "identity": "id"}
        curves += [{**about, "step": str(s), "posterior_alignment": str(s / 400)} for s in (200, 400)]
    return rows, curves


def test_the_page_has_every_run_and_loads_nothing():
    rows, curves = whole_study()
    page = study_page(rows, curves)
    for member, of_member in rows.items():
        assert f"{float(of_member['alignment_one_to_one']):.3f}" in page, member
    loads = Loads()
    loads.feed(page)
    assert not loads.found and "default-src 'none'" in page
    text = re.sub(r"<[^>]*>", "", page)
    frozen = [rows[Member(task, seed, "default")] for task in FROZEN.tasks for seed in FROZEN.seeds]
    aligned = sum(float(of_member["alignment_one_to_one"]) >= 0.95 for of_member in frozen)
    lowest = min(float(of_member["alignment_one_to_one"]) for of_member in frozen)
    assert f"alignment_one_to_one is at least 0.95 in {aligned} of 30 runs, the lowest {lowest:.3f}." in text
    minutes = [sum(float(of_member[f"seconds_{stage}"]) for stage in SECONDS) / 60 for of_member in frozen]
    assert f"took {min(minutes):.1f} to {max(minutes):.1f} minutes of one core (30 runs)" in text
    assert "latent 3 is surplus" in text and "No latent is mapped to" in text
    assert study_page(rows, curves) == page


def test_members_of_one_program_share_the_hours_of_all_stages_but_evaluate():
    stages = {f"seconds_{stage}": 3600.0 for stage in SECONDS}
    rows = {Member("grid_pathfinding", 10, "default"): row(alignment_one_to_one=1, members=4, **stages)}
    page = study_page(rows, [])
    table = re.sub(r"<[^>]*>", " ", page[page.index(">Time<") :])
    for stage in SECONDS:
        hours = 1.0 if stage == "evaluate" else 0.25
        assert re.search(rf"\b{stage}\s+{hours:.2f}\s+1\b", table), stage


def test_only_runs_that_trained_their_reference_alone_have_a_time():
    stages = {f"seconds_{stage}": 60.0 for stage in SECONDS}
    seeds = iter(FROZEN.seeds)
    rows = {
        Member("grid_pathfinding", next(seeds), "default"): row(alignment_one_to_one=1, **values)
        for values in (stages, {**stages, "members": 3}, {**stages, "seconds_score": 0.01}, {})
    }
    assert "took 5.0 to 5.0 minutes of one core (1 runs)" in study_page(rows, [])


def test_collapse_is_counted_by_the_posterior():
    values = {"collapse_threshold": 0.5, "alignment_one_to_one": 0.5}
    rows = {
        Member("grid_pathfinding", 10, "default"): row(**values, rho_recon=0.3),
        Member("grid_pathfinding", 10, "amortized"): row(**values, rho_recon=0.99),
        Member("grid_pathfinding", 11, "amortized"): row(**values, rho_recon=0.5),
        Member("grid_pathfinding", 10, "beta 0.01"): row(**values, rho_recon=0.95),
    }
    cells = re.findall(r"<td[^>]*>([^<]*)</td>|<th scope=.row.[^>]*>([^<]*)</th>", study_page(rows, []))
    flat = " ".join(left or right for left, right in cells)
    for line in (
        "closed_form 3 to 10 1 0 0.00",
        "closed_form 10 and more 1 1 1.00",  # judged against its own beta
        "amortized 3 to 10 2 1 0.50",
    ):
        assert line in flat


def test_a_study_that_has_hardly_begun_has_a_page():
    assert "0 of" in study_page({}, [])
    (member, of_member), *_ = whole_study()[0].items()
    page = study_page({member: of_member}, [])
    assert "1 of" in page and "are not run yet" in page
