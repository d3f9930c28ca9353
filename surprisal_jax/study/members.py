"""Runs of one task and seed that share the reference: those of one program are trained together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from surprisal_jax import __version__
from surprisal_jax.config import ExperimentConfig, ReconstructionLossConfig, run_identity
from surprisal_jax.dataset import load_dataset
from surprisal_jax.evaluation.evaluate import Evaluator, evaluate_run
from surprisal_jax.evaluation.look import look_at_validation, look_before_training
from surprisal_jax.evaluation.report import METRICS
from surprisal_jax.run import Clock, claim_reference_directory, judge_weighting, prepare
from surprisal_jax.study.plan import Member
from surprisal_jax.study.table import CURVE_COLUMNS, RESULT_COLUMNS, SECONDS, append_rows
from surprisal_jax.training.sharding import compile_step, make_mesh, over_mesh, put_batch, put_on_mesh
from surprisal_jax.training.stages import Workplace, latent_batch_at, latent_rows_at, start_disentangling
from surprisal_jax.training.step import make_hyperparameters

#: A curve's points: step, and the validation metrics by name.
Curve = list[tuple[int, Mapping[str, float]]]


def program_of(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration without what is traced: members with equal ones are one program, on the same batches."""
    weights = ReconstructionLossConfig(token_weight_source=config.reconstruction.token_weight_source)
    return replace(
        config,
        reconstruction=weights,
        beta=1.0,
        # Whether the term is in the program is static, its weight is not.
        inter_latent_divergence_weight=float(config.inter_latent_divergence_weight > 0),
        posterior_entropy_weight=0.0,
        router_marginal_kl_weight=0.0,
        posterior_fit_weight=1.0,
        inverse_nll_floor=1e-6,
        divisor_floor=1e-3,
    )


def by_program(configs: Mapping[Member, ExperimentConfig]) -> list[dict[Member, ExperimentConfig]]:
    """The members of one program together, in their order."""
    programs: dict[ExperimentConfig, dict[Member, ExperimentConfig]] = {}
    for member, config in configs.items():
        programs.setdefault(program_of(config), {})[member] = config
    return list(programs.values())


def run_members(configs: Mapping[Member, ExperimentConfig], output: Path) -> None:
    """Train members that share a reference, one program after another, and add their rows to the tables."""
    for program in by_program(configs):
        for member, result in train_members(program).items():
            about = {**asdict(member), "identity": run_identity(program[member])}
            row = {
                **about,
                **{name: result.metrics.get(name) for name in METRICS},
                "latents_by_strategies": json.dumps(result.table),
                "members": len(program),
                **{f"seconds_{stage}": result.seconds.get(stage) for stage in SECONDS},
                "surprisal_jax": __version__,
                "jax": jax.__version__,
            }
            curve = [
                {
                    **about,
                    "step": step,
                    "posterior_alignment": metrics.get("validation_posterior_alignment"),
                    "rho_recon": metrics["validation_rho_recon"],
                }
                for step, metrics in result.curve
            ]
            append_rows(output / "curves.csv", CURVE_COLUMNS, curve)
            # Last: its row says that the member is done.
            append_rows(output / "results.csv", RESULT_COLUMNS, [row])


@dataclass(frozen=True)
class Result:
    """What one member gave. `seconds` by stage; all but `evaluate` is of its program's members together."""

    metrics: dict[str, float | None]
    table: list[list[float]] | None  # latents x strategies
    curve: Curve
    seconds: dict[str, float]


def train_members(configs: Mapping[Member, ExperimentConfig]) -> dict[Member, Result]:
    """Train and evaluate members of one program."""
    first = next(iter(configs.values()))
    dataset = load_dataset(first)
    directory, identity = claim_reference_directory(first, dataset)
    clock = Clock()
    prepared = prepare(Workplace(first, dataset, make_mesh(first)), directory, identity, clock)
    place, c_base, mesh = prepared.place, prepared.reference.c_base, prepared.place.mesh
    step, start = start_disentangling(place, prepared.reference)
    hyperparameters = [make_hyperparameters(config, c_base) for config in configs.values()]
    frozen = prepared.reference.params if step.online_reference else None
    stacked = _stacked(hyperparameters, mesh)
    rows_at = latent_rows_at(place, step)
    batch_at = latent_batch_at(place, step, prepared.scores, rows_at)
    whole = Evaluator(step, hyperparameters[0], place.dataset, prepared.scores, mesh)
    evaluators = [whole.under(each) for each in hyperparameters]
    curves: list[Curve] = [[] for _ in configs]
    begun = [
        look_before_training(evaluator, start, config, rows_at)
        for config, evaluator in zip(configs.values(), evaluators, strict=True)
    ]
    carry = _stacked(begun, mesh)
    compiled = compile_step(_over_members(over_mesh(step, mesh), "held_latents" in carry, len(configs)))
    for done in range(1, first.disentangle.steps + 1):
        carry["state"], _ = compiled(carry["state"], put_batch(batch_at(carry, done - 1), mesh), stacked, frozen)
        if done % first.disentangle.evaluate_every == 0 or done == first.disentangle.steps:
            looked = []
            for member, (config, evaluator) in enumerate(zip(configs.values(), evaluators, strict=True)):
                of_member = _member(carry, member)
                of_member, metrics = look_at_validation(evaluator, of_member, config, c_base, done, rows_at)
                looked.append(of_member)
                curves[member].append((done, metrics))
            carry = _stacked(looked, mesh)
    clock.ends("disentangle")
    results = {}
    for member, (name, config) in enumerate(configs.items()):
        weighting, _ = judge_weighting(replace(place, config=config), prepared.scores, hyperparameters[member], c_base)
        params = _member(carry["state"].params, member)
        report = evaluate_run(config, evaluators[member], params, weighting, c_base, directory)
        clock.ends("evaluate")
        table = None if report.table is None else report.table.round(4).tolist()
        results[name] = Result(report.metrics, table, curves[member], dict(clock.seconds))
    return results


def _over_members(train_step: Callable[..., Any], held: bool, members: int) -> Callable[..., Any]:
    """`train_step` of every member, whose states and hyperparameters have a leading axis for them. They see the same
    batch; which groups are held is each one's own."""
    # Matrix products with a batch axis are slow on CPUs, and fill an accelerator that small models leave idle.
    at_once = None if jax.default_backend() == "cpu" else members

    def over_members(states: Any, batch: Mapping[str, Any], hyperparameters: Any, frozen: Any) -> Any:
        own = {"anchor_latents": jnp.moveaxis(batch["anchor_latents"], -1, 0)} if held else {}

        def of_member(arguments: tuple[Any, Any, Any]) -> Any:
            state, own, hyperparameters = arguments
            return train_step(state, {**batch, **own}, hyperparameters, frozen)

        return jax.lax.map(of_member, (states, own, hyperparameters), batch_size=at_once)

    return over_members


def _stacked(trees: Sequence[Any], mesh: Mesh) -> Any:
    return put_on_mesh(jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees), mesh)


def _member(tree: Any, member: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[member], tree)
