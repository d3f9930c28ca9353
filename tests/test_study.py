"""The study: its plan, its tables, and that members trained together are what each is alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from surprisal_jax.config import ExperimentConfig, load_config, run_identity
from surprisal_jax.study.__main__ import main
from surprisal_jax.study.members import by_program, program_of, run_members
from surprisal_jax.study.plan import PLAN, SETTINGS, Member, configuration, members
from surprisal_jax.study.table import CURVE_COLUMNS, RESULT_COLUMNS, append_rows, current_rows, read_rows

pytestmark = pytest.mark.xdist_group("study")

SMALL = Path(__file__).parent / "data" / "small.yaml"


def test_every_run_of_the_plan_is_there_once_and_its_configuration_is_valid():
    planned = list(members())
    assert len(planned) == len(set(planned))
    for block in PLAN:
        for setting in block.settings:
            assert Member(block.tasks[0], block.seeds[0], setting) in planned
    for setting in SETTINGS:
        config = configuration(Member("sorting_algorithms", 3, setting), "somewhere")
        assert (config.task, config.seed, config.output_dir) == ("sorting_algorithms", 3, "somewhere")


def test_settings_at_equal_total_weight():
    """The total weight of the reconstruction is 3 where token weighting is compared with none."""
    for setting in ("default", "token weight 0", "token_weighted alone", "alpha 0"):
        weights = configuration(Member("grid_pathfinding", 0, setting), "runs").reconstruction
        assert weights.raw_weight + weights.token_weighted_weight == 3.0, setting


def test_groups_of_4_have_as_many_records():
    config = configuration(Member("sorting_algorithms", 0, "groups of 4"), "runs")
    plain = configuration(Member("sorting_algorithms", 0, "default"), "runs")
    assert config.data.group_size * config.data.train_groups == plain.data.group_size * plain.data.train_groups


def test_what_is_traced_does_not_part_programs():
    def of(**changes: object) -> ExperimentConfig:
        return program_of(replace(ExperimentConfig(posterior="closed_form"), **changes))  # type: ignore[arg-type]

    weights = ExperimentConfig().reconstruction
    assert of() == of(beta=0.3) == of(reconstruction=replace(weights, token_weight_alpha=2.0, token_weight_mix=0.5))
    assert of(inter_latent_divergence_weight=0.1) == of(inter_latent_divergence_weight=0.2) != of()
    assert of(reconstruction=replace(weights, token_weight_source="uniform")) != of()
    assert of(anchors=1) != of() and of(latent_scope="group") != of() and of(seed=1) != of()


def test_rows_of_another_configuration_are_run_again(tmp_path: Path):
    path = tmp_path / "results.csv"
    row = dict.fromkeys(RESULT_COLUMNS, "") | {"task": "t", "seed": 1, "setting": "a, b", "identity": "old"}
    append_rows(path, RESULT_COLUMNS, [row])
    append_rows(path, RESULT_COLUMNS, [{**row, "setting": "c"}])
    assert [r["setting"] for r in read_rows(path)] == ["a, b", "c"]
    known = {Member("t", 1, "a, b"): "old", Member("t", 1, "c"): "new"}
    assert list(current_rows(path, known)) == [Member("t", 1, "a, b")]
    assert read_rows(tmp_path / "none.csv") == []


def test_writers_take_turns(tmp_path: Path):
    path = tmp_path / "curves.csv"
    rows = [dict.fromkeys(CURVE_COLUMNS, "x" * 500) for _ in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: append_rows(path, CURVE_COLUMNS, rows), range(16)))
    assert read_rows(path) == rows * 16


def test_members_of_one_program_are_what_each_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Each member holds its groups otherwise.
    monkeypatch.setattr(
        "surprisal_jax.evaluation.look.cluster_groups", lambda g, *_: (np.abs(g[:, 0, 0]) * 1e6).astype(int) % 3
    )
    small = {"data_parallel": 1, "disentangle.steps": 20, "disentangle.reseed_until": 5}
    settings = ("default", "alpha 2", "amortized", "anchors 1")
    configs = {
        Member("grid_pathfinding", 0, setting): load_config(
            SMALL, {**small, **SETTINGS[setting], "output_dir": str(tmp_path / "runs")}
        )
        for setting in settings
    }
    assert [len(program) for program in by_program(configs)] == [2, 1, 1]
    run_members(configs, tmp_path / "together")
    together = {row["setting"]: row for row in read_rows(tmp_path / "together" / "results.csv")}
    assert set(together) == set(settings)
    alone_config = {member: config for member, config in configs.items() if member.setting == "alpha 2"}
    run_members(alone_config, tmp_path / "alone")
    (alone,) = read_rows(tmp_path / "alone" / "results.csv")
    for name in ("rho_recon", "collapse_threshold", "strategy_token_share", "posterior_alignment_best_map"):
        assert float(alone[name]) == pytest.approx(float(together["alpha 2"][name]), rel=1e-4), name
    assert together["alpha 2"]["rho_recon"] != together["default"]["rho_recon"]
    assert together["default"]["members"] == "2" and alone["members"] == "1"
    assert alone["identity"] == run_identity(next(iter(alone_config.values())))
    curves = read_rows(tmp_path / "together" / "curves.csv")
    assert [row["step"] for row in curves if row["setting"] == "default"] == ["10", "20"]
    table = json.loads(together["default"]["latents_by_strategies"])
    assert len(table) == 3 and len(table[0]) == 3


def test_the_command_runs_nothing_that_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    member = Member("grid_pathfinding", 10, "default")
    row = dict.fromkeys(RESULT_COLUMNS, "")
    row |= {**vars(member), "identity": run_identity(configuration(member, "runs"))}
    append_rows(tmp_path / "results.csv", RESULT_COLUMNS, [row])
    flags = ["--output", str(tmp_path), "--block", "everywhere", "--seed", "10", "--setting", "default", "--hours", "0"]
    assert main(flags) == 0
    assert capsys.readouterr().out.startswith("6 runs, 1 done; 5 references to go")


def test_a_killed_study_leaves_no_worker_behind(tmp_path: Path):
    """A worker that trained on would write the same checkpoints as the command's next call."""
    flags = ["--output", str(tmp_path), "--runs", str(tmp_path / "runs"), "--block", "everywhere", "--workers", "1"]
    study = subprocess.Popen([sys.executable, "-m", "surprisal_jax.study", *flags], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("log/*.txt")):
            assert time.monotonic() < deadline and study.poll() is None
            time.sleep(0.05)
    finally:
        study.kill()
    # The pipe ends when nobody holds it any more.
    study.communicate(timeout=60)
    assert study.returncode == -9
