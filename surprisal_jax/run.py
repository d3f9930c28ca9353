"""A run: data, then the four stages reference, score, disentangle and evaluate, each resumed, or skipped where its
result is there.

On disk, below `output_dir`:

    <task>-reference-<hash>/        what depends on data and reference alone, shared by all runs that agree on both
        data/                       the records of a generated task, as a user would give them
        identity.json  checkpoints/  metrics.jsonl  tensorboard/  scores/
    <name>-seed<seed>-<hash>/
        config.yaml  checkpoints/  metrics.jsonl  tensorboard/  summary.json  report.html  figures/
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from surprisal_jax import __version__
from surprisal_jax.config import (
    ExperimentConfig,
    InputError,
    config_differences,
    load_config,
    reference_settings,
    run_identity,
    save_config,
    to_dict,
)
from surprisal_jax.data import SPLITS, write_jsonl
from surprisal_jax.dataset import FORMAT_VERSION, Dataset, load_dataset, with_training_records
from surprisal_jax.evaluation.evaluate import (
    Evaluator,
    evaluate_run,
    floor_warnings,
    heat_rows,
    weighting_metrics,
    write_figures,
)
from surprisal_jax.evaluation.look import look_at_validation, look_before_training
from surprisal_jax.evaluation.page import write_report_page
from surprisal_jax.evaluation.report import print_summary, read_metrics
from surprisal_jax.evaluation.sampling import sample_traces
from surprisal_jax.files import write_json
from surprisal_jax.training.sharding import first_process_first, join_cluster, make_mesh
from surprisal_jax.training.stages import (
    Reference,
    Workplace,
    disentangle,
    latent_rows_at,
    score,
    start_disentangling,
    train_reference,
    weigh_records,
)
from surprisal_jax.training.step import Hyperparameters, make_hyperparameters


def run(config: ExperimentConfig, name: str = "run") -> Path:
    """Do whatever of the four stages is not done yet, and print the table.

    Args:
      config: validated.
      name: begins the name of the run's directory where `run_dir` is not given.

    Returns:
      The run's directory, which holds `summary.json`.

    Raises:
      InputError: bad data, or a directory that holds a run of another configuration. Nothing is compiled or overwritten
        then.
    """
    if config.distributed:
        join_cluster()
    _keep_programs(Path(config.output_dir))
    first = jax.process_index() == 0
    console = Console(quiet=not first)
    dataset = load_dataset(config)
    place = Workplace(config, dataset, make_mesh(config))
    directory = run_directory(config, name)

    def claim() -> tuple[Path, dict[str, Any]]:
        claim_run_directory(directory, config, dataset.latent_identity)
        return claim_reference_directory(config, dataset)

    reference_dir, identity = first_process_first("directories claimed", claim)
    devices = f"{place.mesh.size} device{'s' if place.mesh.size > 1 else ''}"
    console.print(
        f"{len(dataset.rows['train'])} training records of {dataset.task.name}, {config.num_latents} latents, {devices}"
        f"\nrun directory {directory}\nreference in  {reference_dir}",
        highlight=False,
        soft_wrap=True,
    )
    clock = Clock()
    prepared = prepare(place, reference_dir, identity, clock)
    place, reference, scores = prepared.place, prepared.reference, prepared.scores
    dataset = place.dataset
    hyperparameters = make_hyperparameters(config, reference.c_base)
    console.print(f"c_base {reference.c_base:.4f} nats, the reference's mean validation loss", highlight=False)
    weighting, warnings = judge_weighting(place, scores, hyperparameters, reference.c_base)
    threshold = weighting["collapse_threshold"]
    if threshold is not None and threshold > config.beta:
        console.print(f"collapse threshold {threshold:.3f} against beta {config.beta:g}", highlight=False)
    for warning in warnings:
        console.print(f"[yellow]warning[/]: {warning}", highlight=False)

    step, carry = start_disentangling(place, reference)
    evaluator = Evaluator(step, hyperparameters, dataset, scores, place.mesh)
    rows_at = latent_rows_at(place, step)

    def begin(carry: Mapping[str, Any]) -> Mapping[str, Any]:
        carry = look_before_training(evaluator, carry, config, rows_at)
        if "held_latents" in carry:
            kinds = int(np.max(carry["held_latents"])) + 1
            told = f"{kinds} kinds of groups" if kinds else "no two kinds of groups"
            console.print(f"the reference tells {told} apart", highlight=False)
        return carry

    def evaluate(carry: Mapping[str, Any], done: int) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        return look_at_validation(evaluator, carry, config, reference.c_base, done, rows_at)

    params = disentangle(place, step, carry, reference, scores, hyperparameters, directory, begin, evaluate)
    clock.ends("disentangle")
    summary_path = directory / "summary.json"
    if not summary_path.exists():
        report = evaluate_run(config, evaluator, params, weighting, reference.c_base, directory)
        clock.ends("evaluate")
        if not first:
            return directory
        curves = [reference_dir / "metrics.jsonl", directory / "metrics.jsonl"]
        write_figures(directory / "figures", dataset, report, curves)
        summary = {
            **report.metrics,
            "beta": config.beta,
            "c_base": reference.c_base,
            "task": dataset.task.name,
            "seed": config.seed,
            "num_latents": config.num_latents,
            "intervals_95": report.intervals,
            "latent_strategies": report.latent_strategies(dataset.task.strategies),
            "latents_by_strategies": None if report.table is None else report.table.tolist(),
            "strategies": list(dataset.task.strategies),
            "warnings": warnings,
            "seconds": clock.seconds,
            "compile_seconds": clock.compile_seconds,
            "reference_directory": str(reference_dir),
            "versions": {"surprisal_jax": __version__, "jax": jax.__version__},
            "config": to_dict(config),
        }
        lines = [line for path in curves for line in read_metrics(path)]
        write_report_page(directory / "report.html", summary, lines, heat_rows(dataset, report))
        # Last: it is what says that the stage is done.
        write_json(summary_path, summary)
    if first:
        print_summary(json.loads(summary_path.read_text()))
    console.print(f"summary and pictures in {directory}", highlight=False, soft_wrap=True)
    return directory


def _keep_programs(output_dir: Path) -> None:
    """Keep compiled programs beside the runs, where the user has not told jax of another directory."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(output_dir.absolute() / "compiled"))
        # The programs of evaluation are small and many.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class Clock:
    """Seconds of wall time by stage, in this process; `compile_seconds` are those of compiling, in all stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.compile_seconds = 0.0
        self._last = time.monotonic()
        # It stays registered: a process makes few of these.
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.compile_seconds = round(self.compile_seconds + duration_secs, 3)

    def ends(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = round(now - self._last, 3)
        self._last = now


@dataclass(frozen=True)
class Prepared:
    """What the disentangle stage starts from."""

    place: Workplace  # with the records that are trained on
    reference: Reference
    scores: dict[str, np.ndarray]


def prepare(place: Workplace, reference_dir: Path, identity: Mapping[str, Any], clock: Clock) -> Prepared:
    """The stages before the latents: the reference, the traces drawn from it where these are wanted, and its scores."""
    reference = train_reference(place, reference_dir)
    clock.ends("reference")
    scores_dir = reference_dir / "scores"
    if place.config.traces == "reference_samples":
        samples_dir = reference_dir / "samples"
        records = sample_traces(place.config, place.dataset, reference, place.mesh, samples_dir)
        dataset = with_training_records(place.dataset, records, place.config)
        place = replace(place, dataset=dataset)
        scores_dir, identity = samples_dir / "scores", {**identity, "data": dataset.identity}
        clock.ends("sample")
    scores = score(place, reference, scores_dir, identity)
    clock.ends("score")
    return Prepared(place, reference, scores)


def run_directory(config: ExperimentConfig, name: str) -> Path:
    """`run_dir`, or a directory whose name tells one configuration from another."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path(config.output_dir) / f"{name}-seed{config.seed}-{run_identity(config)}"


def claim_run_directory(directory: Path, config: ExperimentConfig, data_identity: str) -> None:
    """Make the directory this configuration's own, or find that it is.

    Raises:
      InputError: it holds something else; nothing is changed then.
    """
    config_path, data_path = directory / "config.yaml", directory / "data.json"
    if config_path.exists():
        differences = config_differences(to_dict(load_config(config_path)), to_dict(config))
        if differences:
            shown = ", ".join(differences[:4]) + (f" and {len(differences) - 4} more" if len(differences) > 4 else "")
            raise InputError(f"{directory}: holds a run of another configuration ({shown}); give another --run-dir")
        if data_path.exists() and json.loads(data_path.read_text())["identity"] != data_identity:
            raise InputError(
                f"{directory}: holds a run on other data than {config.data.path or config.task} has now, or of another "
                "version; give another --run-dir"
            )
    elif directory.exists() and any(directory.iterdir()):
        raise InputError(
            f"{directory}: got a directory with other files in it, expected a new one or a run of this project"
        )
    else:
        directory.mkdir(parents=True, exist_ok=True)
        save_config(config, config_path)
    if not data_path.exists():
        write_json(data_path, {"identity": data_identity})


def claim_reference_directory(config: ExperimentConfig, dataset: Dataset) -> tuple[Path, dict[str, Any]]:
    """The directory of the reference and its scores, named by everything they depend on, and that identity.

    Raises:
      InputError: the directory holds another reference.
    """
    identity = {
        "format_version": FORMAT_VERSION,
        "data": dataset.identity,
        **reference_settings(config),
        "jax": jax.__version__,
    }
    short = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    directory = Path(config.output_dir) / f"{dataset.task.name}-reference-{short}"
    path = directory / "identity.json"
    if path.exists():
        if json.loads(path.read_text()) != identity:
            raise InputError(
                f"{path}: got the identity of another reference, expected {short}; move the directory away"
            )
        return directory, identity
    directory.mkdir(parents=True, exist_ok=True)
    if config.data.path is None:
        (directory / "data").mkdir(exist_ok=True)
        for split in SPLITS:
            write_jsonl(directory / "data" / f"{split}.jsonl", dataset.split_records(split))
    write_json(path, identity)
    return directory, identity


#: Training records on which the weights are judged: means over them are known to a percent.
JUDGED_RECORDS = 8192


def judge_weighting(
    place: Workplace, scores: Mapping[str, np.ndarray], hyperparameters: Hyperparameters, c_base: float
) -> tuple[dict[str, float | None], list[str]]:
    """What the reference's scores say before any training: can z pay for itself, and how often do the floors act?

    Returns:
      `collapse_threshold` and `strategy_token_share` over the first training records, and warnings.
    """
    config = place.config
    rows = place.dataset.rows["train"][:JUDGED_RECORDS]
    weighting = weigh_records(place, scores, rows, hyperparameters)
    metrics = weighting_metrics(config, place.dataset, weighting, rows, c_base)
    threshold = metrics["collapse_threshold"]
    warnings = floor_warnings(config, weighting, place.dataset.arrays["suffix_loss_mask"][rows][:, 1:])
    if threshold is not None and threshold <= config.beta:
        warnings.append(
            f"collapse threshold {threshold:.3f} against beta {config.beta:g}: ignoring the latent is the optimum; "
            "raise a reconstruction weight or lower beta"
        )
    return metrics, warnings
