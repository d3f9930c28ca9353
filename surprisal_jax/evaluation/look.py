"""What happens between updates of the disentangle stage: to measure, and to keep strategies from sharing a latent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from surprisal_jax.config import ExperimentConfig
from surprisal_jax.evaluation import alignment
from surprisal_jax.evaluation.evaluate import Evaluator, rho_recon
from surprisal_jax.training.reseed import (
    COMING_GROUPS,
    HELD_UPDATES,
    cluster_groups,
    latent_to_reseed,
    reseed_latent,
    split_direction,
)
from surprisal_jax.training.sharding import as_first_process
from surprisal_jax.training.stages import nothing_held
from surprisal_jax.training.step import Evaluation

#: The records of a training step, over all devices.
RowsAt = Callable[[int], np.ndarray]


def look_before_training(
    evaluator: Evaluator, carry: Mapping[str, Any], config: ExperimentConfig, rows_at: RowsAt
) -> Mapping[str, Any]:
    """Where groups may be held, the first updates hold them to the clusters that the reference tells apart.

    Args:
      carry: as `start_disentangling` gives it.
      rows_at: of the stage, of whose batches the first are looked at.
    """
    if "held_latents" not in carry:
        return carry
    groups, order = _coming_groups(config, 0, rows_at)
    gradients = evaluator.latent_gradients(carry["state"].params, groups.reshape(-1), 0).reshape(*groups.shape, -1)
    clusters = as_first_process(cluster_groups(gradients, groups >= 0, config.num_latents))
    if not clusters.any():
        return carry
    return {**carry, "held_latents": _held(config, clusters[order])}


def look_at_validation(
    evaluator: Evaluator,
    carry: Mapping[str, Any],
    config: ExperimentConfig,
    c_base: float,
    done: int,
    rows_at: RowsAt,
) -> tuple[Mapping[str, Any], dict[str, float]]:
    """What happens every `evaluate_every` updates of the disentangle stage, after `done` of them.

    Returns:
      The carry, no group held any more unless a split holds it, and with a latent drawn anew where one does nothing
      and `reseed_until` allows it; `rho_recon`, the posterior against the strategies where these are known, and which
      latent was drawn anew at which.
    """
    dataset, state = evaluator.dataset, carry["state"]
    rows = dataset.rows["validation"]
    evaluation = evaluator.read(state.params, rows)
    metrics = {"validation_rho_recon": rho_recon(evaluation, c_base)}
    strategies = dataset.task.strategies
    known = [i for i, row in enumerate(rows) if dataset.records[row].strategy in strategies]
    if known:
        truth = np.asarray([strategies.index(str(dataset.records[rows[i]].strategy)) for i in known])
        latents = np.argmax(evaluation.log_posterior[known], axis=1)
        num_latents = evaluation.log_posterior.shape[1]
        metrics["validation_posterior_alignment"] = alignment.best_map_alignment(
            latents, truth, num_latents, len(strategies)
        )[0]
    if "held_latents" in carry:
        carry = {**carry, "held_latents": nothing_held(config)}
    if done <= config.disentangle.reseed_until:
        log_q = _log_posterior(config, evaluation)
        pair = latent_to_reseed(log_q, evaluation.raw_reconstruction_loss)
        if pair is not None:
            target, source = pair
            if "held_latents" in carry:
                split = _split_by_groups(evaluator, carry, config, done, rows_at, target, source)
            else:
                gradients = evaluator.latent_gradients(state.params, rows, source)
                direction = split_direction(gradients, np.exp(log_q[:, source]))
                split = {"state": reseed_latent(state, dataset.vocabulary.latent_ids, target, source, direction)}
            if split:
                carry = {**carry, **split}
                metrics |= {"reseeded_latent": target, "reseeded_at_latent": source}
    return carry, metrics


def _split_by_groups(
    evaluator: Evaluator,
    carry: Mapping[str, Any],
    config: ExperimentConfig,
    done: int,
    rows_at: RowsAt,
    target: int,
    source: int,
) -> dict[str, Any]:
    """What a split changes of the carry, the coming groups of the source held to its two sides; nothing where it has no
    two sides."""
    state = carry["state"]
    groups, order = _coming_groups(config, done, rows_at)
    read = evaluator.read(state.params, groups.reshape(-1))
    evidence = np.where((groups >= 0)[..., None], _log_posterior(config, read).reshape(*groups.shape, -1), 0.0)
    at_source = np.argmax(evidence.sum(axis=1), axis=1) == source
    shared = groups[at_source]
    if not len(shared):
        return {}
    gradients = evaluator.latent_gradients(state.params, shared.reshape(-1), source).reshape(*shared.shape, -1)
    sides = as_first_process(cluster_groups(gradients, shared >= 0, 2))
    if not sides.any():
        return {}
    at_source_side, at_target_side = (gradients[sides == side][shared[sides == side] >= 0].mean(0) for side in (0, 1))
    # Downhill for the target's side, seen from the source.
    direction = at_source_side - at_target_side
    latent_ids = evaluator.dataset.vocabulary.latent_ids
    latents = np.full(len(groups), -1)
    latents[at_source] = np.where(sides == 1, target, source)
    return {
        "state": reseed_latent(state, latent_ids, target, source, direction / np.linalg.norm(direction)),
        "held_latents": _held(config, latents[order]),
    }


def _log_posterior(config: ExperimentConfig, evaluation: Evaluation) -> np.ndarray:
    """[N, K], of the objective's posterior."""
    closed_form = config.posterior == "closed_form"
    return np.asarray(evaluation.closed_form_log_posterior if closed_form else evaluation.log_posterior)


def _coming_groups(config: ExperimentConfig, done: int, rows_at: RowsAt) -> tuple[np.ndarray, np.ndarray]:
    """The groups of the updates that may be held, and of some more where these are few: each once, [N, G], and
    which of them comes when. A group that came twice would agree with itself."""
    group_size, batch_size = config.data.group_size, config.disentangle.batch_size
    updates = max(_held_updates(config), -(-COMING_GROUPS * group_size // batch_size))
    coming = np.stack([rows_at(done + update) for update in range(updates)]).reshape(-1, group_size)
    _, first, order = np.unique(coming, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return coming[np.sort(first)], rank[order.reshape(-1)]


def _held(config: ExperimentConfig, latents: np.ndarray) -> np.ndarray:
    """`held_latents` from the latents of the coming groups [N], -1 where a group is free."""
    held = nothing_held(config)
    coming = held[: _held_updates(config)]
    coming[:] = np.repeat(latents, config.data.group_size)[: coming.size].reshape(coming.shape)
    return held


def _held_updates(config: ExperimentConfig) -> int:
    return min(HELD_UPDATES, config.disentangle.evaluate_every)
