"""The configuration: defaults, strict YAML, one checker for every way in, contradictions, identities."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surprisal_jax.config import (
    DataConfig,
    DisentangleConfig,
    ExperimentConfig,
    InputError,
    LoggingConfig,
    ModelConfig,
    ReconstructionLossConfig,
    ReferenceConfig,
    all_settings,
    config_differences,
    load_config,
    run_identity,
    save_config,
    to_dict,
)
from surprisal_jax.tasks import TASK_NAMES

CONFIGS = Path(__file__).parent.parent / "configs"

# Written from the design, not from the code: a changed default has to be changed here on purpose.
DEFAULTS: dict[str, Any] = {
    "task": "grid_pathfinding",
    "num_latents": 3,
    "seed": 0,
    "data_seed": None,
    "reference_seed": None,
    "output_dir": "runs",
    "run_dir": None,
    "beta": 0.1,
    "posterior": "amortized",
    "latent_scope": "example",
    "anchors": 0,
    "traces": "dataset",
    "reference_scoring": "cached",
    "inter_latent_divergence_weight": 0.0,
    "posterior_entropy_weight": 0.0,
    "router_marginal_kl_weight": 0.0,
    "posterior_fit_weight": 1.0,
    "inverse_nll_floor": 1e-6,
    "divisor_floor": 1e-3,
    "chunk_size": 2048,
    "data_parallel": None,
    "fsdp": 1,
    "micro_batches": 1,
    "length_buckets": 1,
    "rematerialize": False,
    "distributed": False,
    "profile": False,
    "reconstruction": {
        "raw_weight": 1.0,
        "baseline_normalized_weight": 0.0,
        "example_normalized_weight": 0.0,
        "token_weighted_weight": 0.0,
        "normalized_token_weighted_weight": 0.0,
        "normalized_inverse_token_weighted_weight": 0.0,
        "token_weight_alpha": 1.0,
        "token_weight_source": "reference_surprisal",
        "token_weight_mix": 1.0,
    },
    "model": {
        "num_layers": 2,
        "width": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "mlp_width": 192,
        "rope_theta": 10000.0,
        "qkv_bias": False,
        "qk_norm": False,
        "tied_embeddings": True,
        "norm_epsilon": 1e-6,
        "compute_dtype": "float32",
        "logit_precision": "highest",
    },
    "data": {
        "path": None,
        "task_size": None,
        "tokenization": "whitespace",
        "group_size": 2,
        "train_groups": 8192,
        "validation_records": 512,
        "test_instances": 512,
        "max_tokens": 256,
    },
    "reference": {
        "steps": 3000,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "warmup_steps": 100,
        "weight_decay": 0.0,
        "max_gradient_norm": 1.0,
        "evaluate_every": 250,
    },
    "disentangle": {
        "steps": 600,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "warmup_steps": 20,
        "weight_decay": 0.0,
        "max_gradient_norm": 1.0,
        "evaluate_every": 50,
        "reseed_until": 0,
        "latent_embedding_scale": 0.5,
    },
    "logging": {"log_every": 10, "checkpoint_every": 100, "keep_checkpoints": 2},
}


def load_text(tmp_path: Path, text: str | bytes, **overrides: Any) -> ExperimentConfig:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(path, overrides)


def test_defaults_are_those_of_the_design() -> None:
    assert to_dict(ExperimentConfig()) == DEFAULTS
    assert {type(value) for value in to_dict(ExperimentConfig()).values()} <= {
        str, int, float, bool, dict, type(None)
    }  # fmt: skip


def test_every_setting_is_described() -> None:
    for item in all_settings().values():
        assert item.help and "\n" not in item.help, item.name
        assert item.check(item.default) == item.default, item.name


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),  # YAML 1.1 reads these two as text
        ("1e+4", 1e4),
        ("1E-4", 1e-4),
        ("1", 1.0),
        ("+1.5", 1.5),
        (".5", 0.5),
        ("2.", 2.0),
        ("1.0", 1.0),  # never clamped to something just below
        ("0", 0.0),
        ("-0.0", 0.0),
    ],
)
def test_numbers_of_a_file_and_of_a_flag(tmp_path: Path, text: str, value: float) -> None:
    for beta in (
        load_text(tmp_path, f"beta: {text}\n").beta,
        load_text(tmp_path, "seed: 0\n", beta=all_settings()["beta"].parse(text)).beta,
    ):
        assert isinstance(beta, float) and beta == value
        assert not np.signbit(beta)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", "7"),
        ("2026-01-02", "2026-01-02"),
        ("on", "on"),
        ("1e3", "1e3"),
        ("'none'", "none"),
        ('"a b"', "a b"),
        ("none", None),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_text_stays_as_written(tmp_path: Path, text: str, value: str | None) -> None:
    assert load_text(tmp_path, f"run_dir: {text}\n").run_dir == value


def test_values_from_python_are_brought_to_their_types() -> None:
    config = ExperimentConfig(beta=1, num_latents=np.int64(4))  # type: ignore[arg-type]
    assert type(config.beta) is float and type(config.num_latents) is int
    assert type(ModelConfig(rope_theta=np.float32(0.5)).rope_theta) is float  # type: ignore[arg-type]
    assert hash(config) == hash(dataclasses.replace(config))


def test_nested_sections_comments_and_a_byte_order_mark(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        b"\xef\xbb\xbf# a comment\nmodel: {width: 32, qk_norm: true}\nreference:\n  steps: 5  # few\n",
    )
    assert config.model == ModelConfig(width=32, qk_norm=True)
    assert config.reference == ReferenceConfig(steps=5)
    assert config.disentangle == DisentangleConfig()


def test_seeds_follow_seed_unless_given() -> None:
    config = ExperimentConfig(seed=7)
    assert (config.effective_data_seed, config.effective_reference_seed) == (7, 7)
    config = ExperimentConfig(seed=7, data_seed=0, reference_seed=2)
    assert (config.effective_data_seed, config.effective_reference_seed) == (0, 2)


# Mistakes in a file

AN_INTEGER_SEED = "expected an integer from 0 to 4294967295"
BAD_FILES: list[tuple[str | bytes, str]] = [
    # wrong types
    ("disentangle:\n  learning_rate: fast\n", "disentangle.learning_rate: got 'fast', expected a number > 0"),
    ("beta: true\n", "beta: got true, expected a number >= 0"),
    ("beta: '1e-4'\n", "beta: got '1e-4', expected a number >= 0"),
    ("beta:\n", "beta: got none, expected a number >= 0"),
    ("beta: [1, 2]\n", "beta: got a list, expected a number >= 0"),
    ("beta: {a: 1}\n", "beta: got a mapping, expected a number >= 0"),
    ("beta: 0x10\n", "beta: got '0x10', expected a number >= 0"),
    ("beta: 1:30\n", "beta: got '1:30', expected a number >= 0"),
    ("num_latents: 3.0\n", "num_latents: got 3.0, expected an integer from 2 to 64"),
    ("num_latents: true\n", "num_latents: got true, expected an integer from 2 to 64"),
    ("seed: 012\n", f"seed: got '012', {AN_INTEGER_SEED}"),
    ("seed: 1_000\n", f"seed: got '1_000', {AN_INTEGER_SEED}"),
    ("model:\n  qk_norm: on\n", "model.qk_norm: got 'on', expected true or false"),
    ("model:\n  qk_norm: yes\n", "model.qk_norm: got 'yes', expected true or false"),
    ("model:\n  qk_norm: 1\n", "model.qk_norm: got 1, expected true or false"),
    ("output_dir: null\n", "output_dir: got none, expected text"),
    (
        "run_dir: ''\n",
        "run_dir: got '', expected non-empty text without control characters, or none",
    ),
    (
        'output_dir: "a\\nb"\n',
        "output_dir: got 'a\\nb', expected non-empty text without control characters",
    ),
    ("data_parallel: all\n", "data_parallel: got 'all', expected an integer >= 1, or none"),
    ("posterior: closed\n", "posterior: got 'closed', expected one of closed_form, amortized"),
    ("latent_scope: 3\n", "latent_scope: got '3', expected one of example, group"),
    # ranges
    ("beta: -1\n", "beta: got -1, expected a number >= 0"),
    ("beta: .nan\n", "beta: got '.nan', expected a number >= 0"),
    ("beta: 1e999\n", "beta: got inf, expected a finite number >= 0"),
    ("beta: 1e39\n", "beta: got 1e+39, expected a number >= 0 that float32 can hold"),
    ("beta: 1e-40\n", "beta: got 1e-40, expected a number >= 0 that float32 can hold"),
    (
        "reconstruction:\n  token_weight_alpha: -0.5\n",
        "reconstruction.token_weight_alpha: got -0.5, expected a number >= 0",
    ),
    ("num_latents: 1\n", "num_latents: got 1, expected an integer from 2 to 64"),
    ("num_latents: 65\n", "num_latents: got 65, expected an integer from 2 to 64"),
    ("seed: -1\n", f"seed: got -1, {AN_INTEGER_SEED}"),
    ("seed: 4294967296\n", f"seed: got 4294967296, {AN_INTEGER_SEED}"),
    (
        "reference:\n  steps: 3000000000\n",
        "reference.steps: got 3000000000, expected an integer >= 1 and < 2**31",
    ),
    ("disentangle:\n  batch_size: 0\n", "disentangle.batch_size: got 0, expected an integer >= 1"),
    ("divisor_floor: 0\n", "divisor_floor: got 0, expected a number > 0"),
    # fields
    ("bata: 1\n", "line 1: unknown field 'bata', did you mean beta?"),
    ("num-latents: 3\n", "line 1: unknown field 'num-latents', did you mean num_latents?"),
    ("seed: 1\nmodle:\n  width: 3\n", "line 2: unknown field 'modle', did you mean model?"),
    ("model:\n  widht: 3\n", "line 2: unknown field 'model.widht', did you mean model.width?"),
    ("model.width: 3\n", "line 1: unknown field 'model.width', expected width inside the section model"),
    (
        "learning_rate: 1\n",
        "line 1: unknown field 'learning_rate', did you mean reference.learning_rate or disentangle.learning_rate?",
    ),
    (
        "token_weighted_reconstruction_weight: 2\n",
        "line 1: unknown field 'token_weighted_reconstruction_weight', did you mean "
        "reconstruction.token_weighted_weight?",
    ),
    (
        "logging:\n  xyz: 1\n",
        "line 2: unknown field 'logging.xyz', expected one of log_every, checkpoint_every, keep_checkpoints",
    ),
    ("xyz: 1\n", "line 1: unknown field 'xyz', expected a field that --help lists"),
    ("<<: {beta: 1}\n", "line 1: unknown field '<<', expected a field that --help lists"),
    ("seed: 1\nbeta: 1\nbeta: 2\n", "line 3: beta: given twice, first on line 2, expected once"),
    (
        "model:\n  width: 8\nseed: 1\nmodel:\n  width: 9\n",
        "line 4: model: given twice, first on line 1, expected once",
    ),
    (
        "model:\n  width: 8\n  width: 8\n",
        "line 3: model.width: given twice, first on line 2, expected once",
    ),
    ("model:\n", "model: got nothing, expected fields such as num_layers, indented, on the lines below"),
    ("model: 3\n", "model: got '3', expected fields such as num_layers, indented, on the lines below"),
    ("? [a]\n: 1\n", "line 1: got a list as a field's name, expected text"),
    # files
    ("", "the file is empty, expected fields such as 'beta: 0.1'"),
    ("# nothing\n---\n", "the file is empty, expected fields such as 'beta: 0.1'"),
    ("- beta\n", "line 1: got a list, expected fields such as 'beta: 0.1'"),
    ("beta\n", "line 1: got 'beta', expected fields such as 'beta: 0.1'"),
    ("beta: 1\n---\nbeta: 2\n", "line 2: a second document begins, expected one"),
    (b"beta: \xff\n", "byte 6 is not valid UTF-8, expected a UTF-8 text file"),
    (
        "run_dir: !!python/object/apply:os.system [exit]\n",
        "line 1: got the tag 'tag:yaml.org,2002:python/object/apply:os.system', expected a plain value",
    ),
    ("seed: !!int 3\n", "line 1: got the tag 'tag:yaml.org,2002:int', expected a plain value"),
    ("seed: &a 3\n", "line 1: got an anchor or alias (& or *), expected the value itself"),
    ("seed: 1\nbeta: *a\n", "line 2: got an anchor or alias (& or *), expected the value itself"),
    ("model:\n\twidth: 1\n", "line 2: not valid YAML: found character '\\t' that cannot start any token"),
    ("seed: 1\nbeta: \x01\n", "line 2: not valid YAML: special characters are not allowed"),
    ('run_dir: "\\U99999999"\n', "not valid YAML: an escape \\U... that names no character"),
    # contradictions
    (
        "posterior: closed_form\nbeta: 0\n",
        "beta: got beta 0.0 with posterior 'closed_form', expected a number > 0",
    ),
    (
        "posterior: closed_form\nposterior_entropy_weight: 0.1\n",
        "posterior_entropy_weight: got posterior_entropy_weight 0.1 with posterior 'closed_form', expected "
        "0, or posterior 'amortized' (the closed form is the minimiser without that term)",
    ),
    (
        "task: none\ndata: {path: a.jsonl, task_size: 5}\n",
        "data.task_size: got data.task_size 5 with task none, expected data.task_size none",
    ),
    (
        "traces: reference_samples\nlatent_scope: group\n",
        "traces: got traces 'reference_samples' with latent_scope 'group', expected latent_scope 'example' "
        "(each sample is drawn on its own and belongs to no group)",
    ),
    (
        "traces: reference_samples\nanchors: 1\n",
        "traces: got traces 'reference_samples' with anchors 1, expected anchors 0 (a sample has no label)",
    ),
    (
        "anchors: 1\nlatent_scope: group\ndisentangle:\n  batch_size: 6\n",
        "disentangle.batch_size: got disentangle.batch_size 6 with anchors 1, expected at least 8 "
        "(anchors take at most a quarter of a batch)",
    ),
    (
        "latent_scope: group\ndisentangle:\n  batch_size: 33\n",
        "disentangle.batch_size: got disentangle.batch_size 33 with latent_scope 'group' and "
        "data.group_size 2, expected disentangle.batch_size to be a multiple of 2",
    ),
    (
        "data_parallel: 3\nreference:\n  batch_size: 64\n",
        "reference.batch_size: got reference.batch_size 64 with data_parallel 3, expected "
        "reference.batch_size to be a multiple of 3",
    ),
    (
        "fsdp: 4\nmicro_batches: 3\n",
        "fsdp: got reference.batch_size 64 with fsdp 4 and micro_batches 3, expected reference.batch_size to "
        "be a multiple of 12",
    ),
    ("fsdp: 5\n", "fsdp: got fsdp 5 with model.width 64, expected fsdp to divide it"),
    (
        "data_parallel: 32\nlatent_scope: group\nreference:\n  batch_size: 64\n",
        "latent_scope: got disentangle.batch_size 32 with latent_scope 'group' and data.group_size 2 and "
        "data_parallel 32, expected disentangle.batch_size to be a multiple of 64",
    ),
    (
        "model:\n  num_heads: 4\n  num_kv_heads: 3\n",
        "model.num_heads: got num_heads 4 with num_kv_heads 3, expected num_heads to be a multiple of num_kv_heads",
    ),
    ("model:\n  head_dim: 15\n", "model.head_dim: got 15, expected an even integer >= 2"),
    (
        "reconstruction:\n  raw_weight: 0\n",
        "reconstruction.raw_weight: got 0.0 for this and every other reconstruction weight, expected one > 0",
    ),
    ("task: null\n", "task: got task none with data.path none, expected a task or a data file"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=[repr(text)[:50] for text, _ in BAD_FILES])
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, text)
    assert str(caught.value) == f"{tmp_path / 'x.yaml'}: {message}"


def test_an_unknown_task_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, "task: maze\n")
    known = ", ".join(TASK_NAMES)
    assert str(caught.value) == (
        f"{tmp_path / 'x.yaml'}: task: got 'maze', expected one of {known}, or none together with data.path"
    )
    assert load_text(tmp_path, "task: null\ndata: {path: a.jsonl}\n").task is None


def test_missing_files_and_directories(tmp_path: Path) -> None:
    for path, reason in [(tmp_path / "no.yaml", "No such file or directory"), (tmp_path, "Is a directory")]:
        with pytest.raises(InputError) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: {reason}, expected a YAML file"
    with pytest.raises(InputError, match="embedded null byte"):
        load_config("a\0b")


def test_an_alias_bomb_is_refused_before_it_grows(tmp_path: Path) -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    with pytest.raises(InputError, match="line 1: got an anchor"):
        load_text(tmp_path, "run_dir: &a0 [x]\n" + levels)


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, f"beta: {'9' * 10_000}z\n")
    message = str(caught.value).removeprefix(str(tmp_path))
    assert "99... (10003 characters), expected a number >= 0" in message and len(message) < 200


# The same mistake, whichever way it comes


@pytest.mark.parametrize(
    ("section", "cls", "field", "value", "problem"),
    [
        (None, ExperimentConfig, "beta", -1, "got -1, expected a number >= 0"),
        (None, ExperimentConfig, "beta", "much", "got 'much', expected a number >= 0"),
        (None, ExperimentConfig, "num_latents", 1, "got 1, expected an integer from 2 to 64"),
        (None, ExperimentConfig, "posterior", "exact", "got 'exact', expected one of closed_form, amortized"),
        ("disentangle", DisentangleConfig, "learning_rate", "fast", "got 'fast', expected a number > 0"),
        ("reference", ReferenceConfig, "steps", True, "got true, expected an integer >= 1"),
        ("model", ModelConfig, "head_dim", 15, "got 15, expected an even integer >= 2"),
        ("data", DataConfig, "group_size", 0, "got 0, expected an integer >= 1"),
        ("logging", LoggingConfig, "log_every", 2.5, "got 2.5, expected an integer >= 1"),
    ],
)
def test_file_flag_and_python_say_the_same(
    tmp_path: Path, section: str | None, cls: type, field: str, value: Any, problem: str
) -> None:
    name = f"{section}.{field}" if section else field
    text = {True: "true"}.get(value, str(value)) if value is True else str(value)
    with pytest.raises(InputError) as in_file:
        load_text(tmp_path, f"{section}:\n  {field}: {text}\n" if section else f"{field}: {text}\n")
    with pytest.raises(InputError) as in_flag:
        load_text(tmp_path, "seed: 0\n", **{name: value})
    with pytest.raises(InputError) as in_python:
        cls(**{field: value})
    assert str(in_file.value) == f"{tmp_path / 'x.yaml'}: {name}: {problem}"
    assert str(in_flag.value) == f"{'--' + name.replace('_', '-')}: {problem}"
    assert str(in_python.value) == f"{cls.__name__}.{field}: {problem}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, np.float32(np.nan), np.bool_(True), 1j, b"1"])
def test_python_values_that_are_no_number(value: Any) -> None:
    with pytest.raises(InputError, match=r"^ExperimentConfig\.beta: got .*expected a (finite )?number >= 0$") as caught:
        ExperimentConfig(beta=value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_section_has_to_be_its_dataclass() -> None:
    with pytest.raises(InputError, match=r"^ExperimentConfig\.model: got .*, expected a ModelConfig$"):
        ExperimentConfig(model={"width": 3})  # type: ignore[arg-type]


def test_replace_checks_again() -> None:
    with pytest.raises(InputError, match=r"beta 0\.0 with posterior 'closed_form'"):
        dataclasses.replace(ExperimentConfig(posterior="closed_form"), beta=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ExperimentConfig().beta = 3.0  # type: ignore[misc]


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    text = "beta: 0.2\nmodel: {width: 32}\n"
    config = load_text(tmp_path, text, **{"beta": 0.3, "reconstruction.token_weighted_weight": 2})
    assert (config.beta, config.model.width, config.model.num_layers) == (0.3, 32, 2)
    assert config.reconstruction == ReconstructionLossConfig(token_weighted_weight=2.0)
    # A wrong value in the file does not matter where an override replaces it.
    assert load_text(tmp_path, "beta: -1\n", beta=0.3).beta == 0.3
    with pytest.raises(InputError, match=r"^overrides: unknown field 'bata', did you mean beta\?$"):
        load_text(tmp_path, text, bata=1)


def test_a_contradiction_is_reported_where_the_flag_made_it(tmp_path: Path) -> None:
    for name, value, flag in [("posterior", "closed_form", "--posterior"), ("beta", 0, "--beta")]:
        file = "beta: 0\n" if name == "posterior" else "posterior: closed_form\n"
        with pytest.raises(InputError) as caught:
            load_text(tmp_path, file, **{name: value})
        assert str(caught.value) == f"{flag}: got beta 0.0 with posterior 'closed_form', expected a number > 0"


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InputError("a: b", fields=("a",), problem="b")))
    assert str(error) == "a: b"


# Files and identities


@pytest.mark.parametrize(
    "text", ["none", "1e-4", "on", "a: b # c", "naïve 😀", "C:\\x", "'\"", " lead", "x" * 300, "~"]
)
def test_text_survives_a_round_trip(tmp_path: Path, text: str) -> None:
    config = ExperimentConfig(run_dir=text, data=DataConfig(path=text))
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_a_saved_config_reads_back_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in [*10.0 ** rng.uniform(-37, 38, 20), 0.1 + 0.2, 1e-6, 3.4028234663852886e38]:
        config = ExperimentConfig(
            task=None,
            seed=2**32 - 1,
            data_seed=3,
            beta=number,
            data_parallel=4,
            data=DataConfig(path="a.jsonl", tokenization="characters"),
            model=ModelConfig(qk_norm=True, tied_embeddings=False),
        )
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(tmp_path / "saved.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["saved.yaml"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(ExperimentConfig(seed=1), tmp_path / "saved.yaml")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_config(ExperimentConfig(seed=2), tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml").seed == 1


#: How much is computed at once and where: not what.
EXECUTION = ("fsdp", "micro_batches", "length_buckets", "rematerialize", "profile")


def test_the_identity_is_the_hash_of_what_decides_the_result() -> None:
    counted = {
        k: v
        for k, v in DEFAULTS.items()
        if k not in ("output_dir", "run_dir", "logging", "data_parallel", "distributed", *EXECUTION)
    }
    counted |= {"data_seed": 0, "reference_seed": 0}
    text = json.dumps(counted, sort_keys=True, separators=(",", ":"))
    assert run_identity(ExperimentConfig()) == hashlib.sha256(text.encode()).hexdigest()[:8]


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"output_dir": "elsewhere", "run_dir": "here", "data_parallel": 4}, []),
        ({"logging": LoggingConfig(log_every=3)}, []),
        ({"data_seed": 0, "reference_seed": 0}, []),
        ({"beta": 0.2}, ["beta: 0.1 -> 0.2"]),
        ({"seed": 1}, ["seed: 0 -> 1", "data_seed: 0 -> 1", "reference_seed: 0 -> 1"]),
        ({"data_seed": 5}, ["data_seed: 0 -> 5"]),
        (
            {"task": None, "data": DataConfig(path="a.jsonl")},
            ["task: 'grid_pathfinding' -> none", "data.path: none -> 'a.jsonl'"],
        ),
        ({"model": ModelConfig(qk_norm=True)}, ["model.qk_norm: false -> true"]),
    ],
)
def test_identity_and_differences_agree(change: dict[str, Any], differences: list[str]) -> None:
    old, new = ExperimentConfig(), dataclasses.replace(ExperimentConfig(), **change)
    assert config_differences(to_dict(old), to_dict(new)) == differences
    assert (run_identity(old) == run_identity(new)) == (not differences)


def test_differences_with_a_field_only_one_side_knows() -> None:
    old = to_dict(ExperimentConfig())
    new = to_dict(ExperimentConfig())
    del old["beta"]
    new["model"]["extra"] = 3
    assert config_differences(old, new) == ["beta: absent -> 0.1", "model.extra: absent -> 3"]


# The files in configs/


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "grid_pathfinding",
            ExperimentConfig(
                posterior="closed_form",
                latent_scope="group",
                reconstruction=ReconstructionLossConfig(token_weighted_weight=2.0),
                disentangle=DisentangleConfig(steps=500, learning_rate=0.002, reseed_until=250),
            ),
        ),
        ("published", ExperimentConfig(reconstruction=ReconstructionLossConfig(token_weighted_weight=2.0))),
        (
            "traces",
            ExperimentConfig(
                task=None,
                data=DataConfig(path="examples/traces.jsonl"),
                posterior="closed_form",
                latent_scope="group",
                reconstruction=ReconstructionLossConfig(token_weighted_weight=2.0),
            ),
        ),
    ],
)
def test_configs(name: str, expected: ExperimentConfig) -> None:
    assert load_config(CONFIGS / f"{name}.yaml") == expected


def test_the_tasks_files_are_one_recipe() -> None:
    """The number of records and of steps and the model's size may follow the task, and nothing else."""
    recipes = []
    for task in TASK_NAMES:
        recipe = to_dict(load_config(CONFIGS / f"{task}.yaml"))
        assert recipe.pop("task") == task
        del recipe["data"]["train_groups"], recipe["reference"]["steps"], recipe["disentangle"]["steps"]
        del recipe["model"]["num_heads"], recipe["model"]["num_kv_heads"], recipe["model"]["head_dim"]
        recipes.append(recipe)
    assert all(recipe == recipes[0] for recipe in recipes)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_loads_and_says_what_it_gives_costs_and_its_command(path: Path) -> None:
    load_config(path)
    head = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "# gives:" in head and "# costs:" in head
    assert f"# run:   python train.py --config configs/{path.name}" in head
