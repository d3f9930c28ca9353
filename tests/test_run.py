"""Whole runs through `train.py` as a user starts them: real processes, real files, real SIGKILL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]

CACHE = tempfile.TemporaryDirectory(prefix="compiled-")

# One worker makes the run that most of these tests share.
pytestmark = pytest.mark.xdist_group("run")

METRICS = (
    "alignment_one_to_one",
    "local_strategy_coverage_mean",
    "local_strategy_full_coverage_rate",
    "mean_overall_final_answer_accuracy",
    "sampled_final_answer_accuracy",
    "posterior_alignment",
    "rho_recon",
    "permuted_latent_control",
    "collapse_threshold",
    "strategy_token_share",
)

TERMS = (
    "raw_reconstruction_loss",
    "baseline_normalized_reconstruction_loss",
    "example_normalized_reconstruction_loss",
    "token_weighted_reconstruction_loss",
    "normalized_token_weighted_reconstruction_loss",
    "normalized_inverse_token_weighted_reconstruction_loss",
    "prior_kl",
    "posterior_entropy",
    "router_marginal_kl",
    "posterior_fit",
    "total",
)


def command(config: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), "--config", str(config), *flags]


def environment() -> dict[str, str]:
    """As a user has it: one device, compiled with all optimisations. What one run compiled serves the others."""
    cache = {"JAX_COMPILATION_CACHE_DIR": CACHE.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **cache, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def start(config: Path, *flags: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(config, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    if check:
        assert result.returncode == 0, result.stderr[-3000:]
    return result


def start_and_kill(config: Path, metrics: Path, stage: str, step: int, *flags: str) -> None:
    """SIGKILL the run as soon as its metrics file has a line of this stage at or beyond the step."""
    process = subprocess.Popen(command(config, *flags), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    try:
        while time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it could be killed"
            if any(line["stage"] == stage and line["step"] >= step for line in lines_of(metrics)):
                break
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


def lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def only(parent: Path, pattern: str) -> Path:
    (found,) = parent.glob(pattern)
    return found


def final_parameters(directory: Path) -> list[np.ndarray]:
    """Every array of the newest checkpoint, read by Orbax without the project's help."""
    import orbax.checkpoint as ocp

    newest = max((p for p in (directory / "checkpoints").iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    state = ocp.StandardCheckpointer().restore((newest / "state").absolute())
    return [np.asarray(state[name]) for name in sorted(state)]


@pytest.fixture(scope="module")
def config() -> Path:
    return ROOT / "tests" / "data" / "small.yaml"


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output directory of one undisturbed run, and what it printed."""
    output = tmp_path_factory.mktemp("finished")
    return output, start(config, "--output-dir", str(output)).stdout


def test_a_run_leaves_every_metric_term_and_picture(finished: tuple[Path, str]) -> None:
    output, printed = finished
    run, reference = only(output, "small-seed0-*"), only(output, "grid_pathfinding-reference-*")
    summary = json.loads((run / "summary.json").read_text())
    for name in METRICS:
        assert isinstance(summary[name], float) and np.isfinite(summary[name]), name
        assert name in printed
    low, high = summary["intervals_95"]["alignment_one_to_one"]
    assert 0 <= low <= summary["alignment_one_to_one"] <= high <= 1
    assert summary["closed_form_posterior_alignment"] is not None
    disentangle = lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in disentangle] == [5, 10, 15, 20, 25, 30]
    assert all(term in line for line in disentangle for term in TERMS)
    steps = [line["step"] for line in lines_of(reference / "metrics.jsonl") if line["stage"] == "reference"]
    assert steps == [5, 10, 15, 20, 25, 30]
    for picture in ("latents_by_strategies", "training_curves", "token_heat_map"):
        assert (run / "figures" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").rglob("events.out.tfevents.*"))
    scores = np.load(only(reference, "scores") / "base_token_nll.npy")
    records = sum(
        len((reference / "data" / f"{s}.jsonl").read_text().splitlines()) for s in ("train", "validation", "test")
    )
    assert scores.shape[0] == records and np.isfinite(scores).all() and (scores >= 0).all()
    for stage in ("reference", "score", "disentangle", "evaluate"):
        assert stage in printed


def test_the_same_command_again_does_nothing_and_other_flags_share_the_reference(
    finished: tuple[Path, str], config: Path
) -> None:
    output, _ = finished
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    printed = start(config, "--output-dir", str(output)).stdout
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == before
    assert "alignment_one_to_one" in printed
    flags = ("--token-weighted-reconstruction-weight", "0", "--disentangle.steps", "10")
    start(config, "--output-dir", str(output), *flags)
    assert len(list(output.glob("small-seed0-*"))) == 2 and len(list(output.glob("grid_pathfinding-reference-*"))) == 1
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_killed_in_two_stages_and_started_again_it_ends_with_the_same_bits(
    finished: tuple[Path, str], config: Path, tmp_path: Path
) -> None:
    output, _ = finished
    run = next(
        path.parent
        for path in output.glob("small-seed0-*/summary.json")
        if json.loads(path.read_text())["config"]["disentangle"]["steps"] == 30
    )
    reference = only(output, "grid_pathfinding-reference-*")
    flags = ("--output-dir", str(tmp_path))
    start_and_kill(config, tmp_path / reference.name / "metrics.jsonl", "reference", 15, *flags)
    start_and_kill(config, tmp_path / run.name / "metrics.jsonl", "disentangle", 15, *flags)
    start(config, *flags, "--profile", "true")
    assert list((tmp_path / run.name / "profile" / "disentangle").rglob("*.xplane.pb"))
    for directory in (reference, run):
        expected, found = final_parameters(directory), final_parameters(tmp_path / directory.name)
        assert len(expected) == len(found) > 10
        for left, right in zip(expected, found, strict=True):
            np.testing.assert_array_equal(left, right)
    for directory in (reference, run):
        training = [
            [line for line in lines_of(parent / directory.name / "metrics.jsonl") if line["stage"] != "score"]
            for parent in (output, tmp_path)
        ]
        ignored = ("time", "steps_per_second")
        left, right = ([{k: v for k, v in line.items() if k not in ignored} for line in lines] for lines in training)
        assert left == right


def test_a_users_file_runs_through_the_same_command(config: Path, tmp_path: Path) -> None:
    """The example file of real traces, and a file of characters without strategies or groups."""
    flags = ("--output-dir", str(tmp_path), "--task", "none", "--reference.steps", "10", "--disentangle.steps", "10")
    start(config, *flags, "--data.path", "examples/traces.jsonl")
    summary = json.loads((only(tmp_path, "small-seed0-*") / "summary.json").read_text())
    assert summary["strategies"] == sorted(summary["strategies"]) and len(summary["strategies"]) == 3
    assert summary["posterior_alignment"] is not None and summary["sampled_final_answer_accuracy"] is None

    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"x": f"{i:03d}", "y": f"{i * 7 % 100:02d}"}) + "\n" for i in range(200)))
    other = tmp_path / "characters"
    flags = ("--output-dir", str(other), *flags[2:], "--latent-scope", "example")
    start(config, *flags, "--data.path", str(own), "--data.tokenization", "characters")
    summary = json.loads((only(other, "small-seed0-*") / "summary.json").read_text())
    assert summary["alignment_one_to_one"] is None and np.isfinite(summary["rho_recon"])


def test_the_strategies_of_a_file_change_no_bit_of_the_parameters(config: Path, tmp_path: Path) -> None:
    """They are for the evaluation: without the field the reference and the run end with the same parameters."""
    lines = [json.loads(line) for line in (ROOT / "examples" / "traces.jsonl").read_text().splitlines()]
    for name, given in (("with", lines), ("without", [{**line, "strategy": None} for line in lines])):
        text = (json.dumps({k: v for k, v in line.items() if v is not None}) + "\n" for line in given)
        (tmp_path / f"{name}.jsonl").write_text("".join(text))
        flags = ("--task", "none", "--reference.steps", "10", "--disentangle.steps", "10")
        start(config, "--output-dir", str(tmp_path / name), *flags, "--data.path", str(tmp_path / f"{name}.jsonl"))
    assert "strategy" not in (tmp_path / "without.jsonl").read_text()
    for pattern in ("small-seed0-*", "*-reference-*"):
        left, right = (final_parameters(only(tmp_path / name, pattern)) for name in ("with", "without"))
        assert len(left) == len(right) > 10
        for one, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(one, other)
    summaries = [
        json.loads((only(tmp_path / n, "small-seed0-*") / "summary.json").read_text()) for n in ("with", "without")
    ]
    assert summaries[0]["rho_recon"] == summaries[1]["rho_recon"]
    assert summaries[0]["alignment_one_to_one"] is not None and summaries[1]["alignment_one_to_one"] is None


def test_a_run_on_traces_drawn_from_the_reference(finished: tuple[Path, str], config: Path, tmp_path: Path) -> None:
    """One y for each training x, drawn once, beside the reference; without groups and labels."""
    output, _ = finished
    flags = ("--output-dir", str(output), "--traces", "reference_samples", "--latent-scope", "example")
    run = tmp_path / "run"
    # So little trained, the reference hardly writes a trace that ends: enough do.
    printed = start(config, *flags, "--disentangle.steps", "10", "--run-dir", str(run)).stdout
    assert "sample" in printed
    samples = only(output, "grid_pathfinding-reference-*") / "samples"
    drawn = [json.loads(line) for line in (samples / "samples.jsonl").read_text().splitlines()]
    train = lines_of(samples.parent / "data" / "train.jsonl")
    assert 0 < len(drawn) <= len(train)
    assert {record["x"] for record in drawn} <= {record["x"] for record in train}
    assert all(record.keys() == {"x", "y"} for record in drawn)
    scores = np.load(samples / "scores" / "base_token_nll.npy")
    others = len(lines_of(samples.parent / "data" / "validation.jsonl")) + len(
        lines_of(samples.parent / "data" / "test.jsonl")
    )
    assert scores.shape[0] == len(drawn) + others and np.isfinite(scores).all()
    assert np.isfinite(json.loads((run / "summary.json").read_text())["rho_recon"])
    # Another run on them draws none.
    before = (samples / "samples.jsonl").stat().st_mtime_ns
    start(config, *flags, "--disentangle.steps", "5", "--run-dir", str(tmp_path / "other"))
    assert (samples / "samples.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--data.path", "examples/traces.jsonl"), "task grid_pathfinding"),
        (("--data-parallel", "3"), "--data-parallel"),
        (("--data.path", "{bad}", "--task", "none"), "line 1: y"),
    ],
)
def test_bad_data_is_one_line_before_anything_is_compiled(
    config: Path, tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"x": "1 2", "y": ""}\n')
    output = tmp_path / "output"
    given = [flag.format(bad=bad) for flag in flags]
    result = start(config, "--output-dir", str(output), *given, check=False)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert expected.strip("-").replace("-", "_") in result.stderr.replace("-", "_")
    assert not output.exists()


def test_a_run_directory_of_another_configuration_is_left_alone(
    finished: tuple[Path, str], config: Path, tmp_path: Path
) -> None:
    output, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(next(output.glob("small-seed0-*")), copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    result = start(config, "--output-dir", str(output), "--run-dir", str(copy), "--beta", "0.2", check=False)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "beta" in result.stderr and "--run-dir" in result.stderr
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
