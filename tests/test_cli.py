"""The command line: flags, precedence, one-line errors, exit statuses, nothing slow imported too early."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surprisal_jax import __version__
from surprisal_jax.cli import main
from surprisal_jax.config import ExperimentConfig, InputError, ReconstructionLossConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "x.yaml"
    path.write_text("beta: 0.2\nmodel:\n  width: 32\n")
    return str(path)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ExperimentConfig, str]]:
    """What `main` handed to the run, instead of running it."""
    calls: list[tuple[ExperimentConfig, str]] = []
    replace_run(monkeypatch, lambda config, name: calls.append((config, name)))
    return calls


def replace_run(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    module = types.ModuleType("surprisal_jax.run")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "surprisal_jax.run", module)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, without its beginning."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n") and err.count("\n") == 1 and err.isascii()
    assert err.startswith("train.py: error: ")
    return err.removeprefix("train.py: error: ").rstrip("\n")


# Flags that work


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--raw-reconstruction-weight", "raw_weight"),
        ("--baseline-normalized-reconstruction-weight", "baseline_normalized_weight"),
        ("--example-normalized-reconstruction-weight", "example_normalized_weight"),
        ("--token-weighted-reconstruction-weight", "token_weighted_weight"),
        ("--normalized-token-weighted-reconstruction-weight", "normalized_token_weighted_weight"),
        (
            "--normalized-inverse-token-weighted-reconstruction-weight",
            "normalized_inverse_token_weighted_weight",
        ),
        ("--token-weighted-reconstruction-alpha", "token_weight_alpha"),
    ],
)
def test_the_seven_reconstruction_flags(
    config_file: str, runs: list[tuple[ExperimentConfig, str]], flag: str, field: str
) -> None:
    assert main(["--config", config_file, flag, "2.5"]) == 0
    ((config, _),) = runs
    assert config.reconstruction == ReconstructionLossConfig(**{field: 2.5})


def test_flags_win_over_the_file_and_the_file_over_defaults(
    config_file: str, runs: list[tuple[ExperimentConfig, str]]
) -> None:
    assert main(["--config", config_file]) == 0
    assert main(["--beta", "1e-4", "--config", config_file, "--model.num-layers=1"]) == 0
    (plain, name), (changed, _) = runs
    assert (plain.beta, plain.model.width, plain.model.num_layers) == (0.2, 32, 2)
    assert (changed.beta, changed.model.width, changed.model.num_layers) == (1e-4, 32, 1)
    assert name == "x"


def test_every_kind_of_flag(config_file: str, runs: list[tuple[ExperimentConfig, str]]) -> None:
    flags = (
        "--num-latents 4 --latent-scope group --posterior closed_form --model.qk-norm true "
        "--model.tied-embeddings false --data.group-size 4 --reference.steps 7 "
        "--reference.learning-rate 1e+4 --data-seed none --data-parallel 2 --run-dir 12 --data.path none "
        "--disentangle.weight-decay .1"
    )
    assert main(["--config", config_file, *flags.split()]) == 0
    ((config, _),) = runs
    assert (config.num_latents, config.latent_scope, config.posterior) == (4, "group", "closed_form")
    assert config.model.qk_norm is True and config.model.tied_embeddings is False
    assert (config.data.group_size, config.reference.steps, config.reference.learning_rate) == (4, 7, 1e4)
    assert (config.data_seed, config.data_parallel, config.run_dir, config.data.path) == (None, 2, "12", None)
    assert config.disentangle.weight_decay == 0.1


def test_none_takes_back_what_the_file_says(tmp_path: Path, runs: list[tuple[ExperimentConfig, str]]) -> None:
    path = tmp_path / "y.yaml"
    path.write_text("data_seed: 3\nrun_dir: here\n")
    assert main(["--config", str(path), "--data-seed", "none", "--run-dir", "none"]) == 0
    assert (runs[0][0].data_seed, runs[0][0].run_dir) == (None, None)


# Mistakes

BAD_FLAGS = [
    ("--beta -1", "--beta: got -1, expected a number >= 0"),
    ("--beta=-1", "--beta: got -1, expected a number >= 0"),
    ("--beta -1e-4", "--beta: got -0.0001, expected a number >= 0"),
    ("--beta -inf", "--beta: got '-inf', expected a number >= 0"),
    ("--beta nan", "--beta: got 'nan', expected a number >= 0"),
    ("--beta 1e999", "--beta: got inf, expected a finite number >= 0"),
    ("--beta fast", "--beta: got 'fast', expected a number >= 0"),
    ("--beta none", "--beta: got none, expected a number >= 0"),
    ("--beta=", "--beta: got '', expected a number >= 0"),
    ("--beta", "--beta: got no value, expected a number >= 0"),
    ("--beta --seed 1", "--beta: got no value, expected a number >= 0"),
    ("--beta 1 --beta 2", "--beta: given twice, first '1', then '2', expected once"),
    ("--data-seed=", "--data-seed: got '', expected an integer from 0 to 4294967295, or none"),
    ("--num-latents 1", "--num-latents: got 1, expected an integer from 2 to 64"),
    ("--num-latents 3.0", "--num-latents: got 3.0, expected an integer from 2 to 64"),
    ("--num-latents 03", "--num-latents: got '03', expected an integer from 2 to 64"),
    ("--model.qk-norm on", "--model.qk-norm: got 'on', expected true or false"),
    ("--model.qk-norm", "--model.qk-norm: got no value, expected true or false"),
    ("--latent-scope author", "--latent-scope: got 'author', expected one of example, group"),
    (
        "--token-weighted-reconstruction-alpha -1",
        "--token-weighted-reconstruction-alpha: got -1, expected a number >= 0",
    ),
    (
        "--raw-reconstruction-weight 0",
        "--raw-reconstruction-weight: got 0.0 for this and every other reconstruction weight, expected one > 0",
    ),
    ("--task none", "--task: got task none with data.path none, expected a task or a data file"),
    (
        "--model.num-kv-heads 3",
        "--model.num-kv-heads: got num_heads 4 with num_kv_heads 3, "
        "expected num_heads to be a multiple of num_kv_heads",
    ),
    (
        "--latent-scope group --data.group-size 5",
        "--latent-scope: got disentangle.batch_size 32 with latent_scope 'group' and data.group_size 5, "
        "expected disentangle.batch_size to be a multiple of 5",
    ),
    # unknown ones; no flag may be shortened
    ("--betta 1", "unknown flag --betta, did you mean --beta?"),
    ("--bet 1", "unknown flag --bet, did you mean --beta?"),
    ("--num_latents=3", "unknown flag --num_latents, did you mean --num-latents?"),
    ("-beta 1", "unknown flag -beta, did you mean --beta?"),
    ("--reference.step 1", "unknown flag --reference.step, did you mean --reference.steps?"),
    (
        "--learning-rate 1",
        "unknown flag --learning-rate, did you mean --reference.learning-rate or --disentangle.learning-rate?",
    ),
    (
        "--reconstruction.token-weighted-weight 2",
        "unknown flag --reconstruction.token-weighted-weight, did you mean --token-weighted-reconstruction-weight?",
    ),
    ("--hlep", "unknown flag --hlep, did you mean --help?"),
    ("--xyzzy 1", "unknown flag --xyzzy, expected a flag that --help lists"),
    ("more", "got 'more', expected only flags, such as --config FILE"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=[flags for flags, _ in BAD_FLAGS])
def test_a_mistaken_flag_is_one_line_and_status_2(
    config_file: str,
    runs: list[tuple[ExperimentConfig, str]],
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    assert main(["--config", config_file, *flags.split()]) == 2
    assert error_line(capsys) == message
    assert runs == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config: got nothing, expected a YAML file such as configs/grid_pathfinding.yaml"),
        (
            ["--beta", "1"],
            "--config: got nothing, expected a YAML file such as configs/grid_pathfinding.yaml",
        ),
        (["--config"], "--config: got no value, expected a YAML file such as configs/grid_pathfinding.yaml"),
        (["--config="], "--config: got '', expected a YAML file such as configs/grid_pathfinding.yaml"),
        (["--config", "a", "--config", "b"], "--config: given twice, first 'a', then 'b', expected once"),
        (["--confg", "a"], "unknown flag --confg, did you mean --config?"),
        (["--config", "no.yaml"], "no.yaml: No such file or directory, expected a YAML file"),
        (["--config", "no\n\x1b.yaml"], "no  .yaml: No such file or directory, expected a YAML file"),
    ],
)
def test_the_configuration_file_is_required(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(argv) == 2
    assert error_line(capsys) == message


def test_a_mistake_in_the_file_names_file_field_and_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "y.yaml"
    path.write_text("disentangle:\n  learning_rate: fast\n")
    assert main(["--config", str(path)]) == 2
    assert error_line(capsys) == f"{path}: disentangle.learning_rate: got 'fast', expected a number > 0"


def test_a_mistake_found_by_the_run_is_one_line(
    config_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: ExperimentConfig, name: str) -> None:
        raise InputError("traces.jsonl: line 3: y: got\nnothing")

    replace_run(monkeypatch, run)
    assert main(["--config", config_file]) == 2
    assert error_line(capsys) == "traces.jsonl: line 3: y: got nothing"


def test_ctrl_c_says_how_to_go_on(
    config_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: ExperimentConfig, name: str) -> None:
        raise KeyboardInterrupt

    replace_run(monkeypatch, run)
    assert main(["--config", config_file]) == 130
    assert capsys.readouterr().err == "train.py: interrupted; the same command resumes the run\n"


def test_a_defect_keeps_its_traceback(config_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: ExperimentConfig, name: str) -> None:
        raise ValueError("not the user's")

    replace_run(monkeypatch, run)
    with pytest.raises(ValueError, match="not the user's"):
        main(["--config", config_file])


def test_the_installed_command_speaks_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/surprisal-jax"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("surprisal-jax: error: --config: got nothing")


# Help


def test_help_is_complete_and_opens_with_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("example: python train.py --config configs/")
    assert max(map(len, text.splitlines())) <= 80
    for title in ("run:", "reconstruction:", "model:", "data:", "reference:", "disentangle:", "logging:"):
        assert f"\n{title}\n" in text
    flat = " ".join(text.split())
    for entry in (
        "--beta NUMBER weight of KL(posterior || router), in nats [number >= 0; default 0.1]",
        "--posterior closed_form|amortized ",
        "--task TEXT task the traces come from; none needs data.path [one of grid_pathfinding",
        "--model.qk-norm true|false RMSNorm on queries and keys [default false]",
        "--disentangle.steps INTEGER optimizer updates of this stage [integer >= 1; default 600]",
        "--reference.steps INTEGER optimizer updates of this stage [integer >= 1; default 3000]",
        "--token-weighted-reconstruction-alpha NUMBER ",
    ):
        assert entry in flat, entry


def test_help_and_version_win_over_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--betta", "1", "-h"]) == 0
    assert capsys.readouterr().out.startswith("example: ")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"surprisal-jax {__version__}\n"


# In a process of its own


def run_train(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "train.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("argv", "status", "error"),
    [
        (["--help"], 0, ""),
        (
            ["--config", "configs/grid_pathfinding.yaml", "--beta", "-1"],
            2,
            "train.py: error: --beta: got -1, expected a number >= 0\n",
        ),
        (
            ["--config", "configs/none.yaml"],
            2,
            "train.py: error: configs/none.yaml: No such file or directory, expected a YAML file\n",
        ),
        (
            ["--config", "configs/grid_pathfinding.yaml", "--bta", "1"],
            2,
            "train.py: error: unknown flag --bta, did you mean --beta?\n",
        ),
    ],
    ids=["help", "value", "file", "flag"],
)
def test_status_and_stderr_of_the_process(argv: list[str], status: int, error: str) -> None:
    before = os.times()
    process = run_train(*argv)
    after = os.times()
    assert (process.returncode, process.stderr) == (status, error)
    # Processor time: the wall clock of a busy machine says nothing. Importing jax alone takes more than this.
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 0.5


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--config", "configs/grid_pathfinding.yaml", "--beta", "-1"],
        ["--config", "configs/none.yaml"],
    ],
    ids=["help", "value", "file"],
)
def test_nothing_slow_is_imported_before_the_run(argv: list[str]) -> None:
    script = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit:\n"
        "    print('MODULES', *sys.modules)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "MODULES" in process.stdout, process.stderr
    modules = process.stdout.rpartition("MODULES ")[2].split()
    assert "surprisal_jax.config" in modules
    heavy = {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "scipy", "matplotlib", "rich", "chex"}
    assert {name.partition(".")[0] for name in modules} & heavy == set()
