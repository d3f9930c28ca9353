"""The three stages that train or score, each a function of data and configuration, resumable at any step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from surprisal_jax import losses
from surprisal_jax.config import ExperimentConfig
from surprisal_jax.data import batch_rows, bucket_of_rows, cut_to_bucket, evaluation_rows, gather, units
from surprisal_jax.dataset import Dataset
from surprisal_jax.models.latent import PosteriorNetwork, redraw_latent_embeddings
from surprisal_jax.models.transformer import Decoder, new_module
from surprisal_jax.training.loop import Evaluate, train
from surprisal_jax.training.progress import StageLog
from surprisal_jax.training.reference import ReferenceStep
from surprisal_jax.training.scores import ScoreCache
from surprisal_jax.training.sharding import (
    compile_over_rows,
    compile_step,
    first_process_first,
    over_mesh,
    put_on_mesh,
    put_rows,
    rows_here,
)
from surprisal_jax.training.state import TrainState, make_optimizer
from surprisal_jax.training.step import (
    Hyperparameters,
    LatentStep,
    logit_precision,
    make_latent_step,
    reference_score_names,
    weigh_batch,
)

# Independent streams of one seed.
_MODEL, _POSTERIOR_HEAD, _LATENT_EMBEDDINGS, _STATE = range(4)


def evaluation_batch(mesh: Mesh) -> int:
    """Examples a compiled call of scoring or evaluation: about 256, the same number on every device."""
    return -(-256 // mesh.size) * mesh.size


@dataclass(frozen=True)
class Workplace:
    """What every stage is given."""

    config: ExperimentConfig
    dataset: Dataset
    mesh: Mesh

    def training_rows(
        self, group_size: int, batch_size: int, seed: int, anchor_latents: np.ndarray | None = None
    ) -> Callable[[int], np.ndarray]:
        """The records that a step trains on, over all devices: int32 [batch_size], a pure function of the step.

        `anchor_latents` [N] says which records come in every batch.
        """
        train_rows = self.dataset.rows["train"]
        groups = units(self.dataset.split_records("train"), group_size)
        anchors = groups[:0]
        if anchor_latents is not None:
            anchored = np.append(anchor_latents[train_rows] >= 0, False)  # the last for a row of -1
            anchors = groups[anchored[groups].any(axis=1)]

        def rows(step: int) -> np.ndarray:
            within = batch_rows(groups, step, batch_size, seed, anchors)
            return np.where(within >= 0, train_rows[within], -1)

        return rows

    def gather_here(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        """This process's part of a batch of these rows, no longer than the bucket that holds all of them."""
        batch, buckets = gather(arrays, rows[rows_here(len(rows), self.mesh)]), self.config.length_buckets
        return batch if buckets == 1 else cut_to_bucket(batch, int(self._bucket_of_rows[rows].max()), buckets)

    @cached_property
    def _bucket_of_rows(self) -> np.ndarray:
        """With a last one for a row of -1, which repeats row 0."""
        buckets = bucket_of_rows(self.dataset.arrays, self.config.length_buckets)
        return np.append(buckets, buckets[0])

    def chunks(self, rows: np.ndarray) -> np.ndarray:
        """One pass over the given rows, in order, in batches, the last filled up with rows of -1."""
        return evaluation_rows(rows[:, None], evaluation_batch(self.mesh))


@dataclass(frozen=True)
class Reference:
    """The frozen reference, on the mesh. `c_base` is its mean validation loss, in nats."""

    step: ReferenceStep
    compiled_score: Callable[..., Any]
    params: dict[str, Any]
    c_base: float


def train_reference(place: Workplace, directory: Path) -> Reference:
    """Train the entangled model of the z-free sequence; keep it at its best validation loss."""
    config, dataset = place.config, place.dataset
    key = jax.random.key(config.effective_reference_seed)
    definition, params = new_module(
        lambda rngs: Decoder(config.model, dataset.vocabulary.size, rematerialize=config.rematerialize, rngs=rngs),
        jax.random.fold_in(key, _MODEL),
    )
    step = ReferenceStep(
        definition,
        make_optimizer(config.reference),
        config.micro_batches,
        config.chunk_size,
        logit_precision(config.model),
    )
    compiled_score = compile_over_rows(step.score, place.mesh, batched=(False, True))
    arrays = z_free(dataset.arrays)
    validation = place.chunks(dataset.rows["validation"])

    def evaluate(carry: Mapping[str, Any], done: int) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        loss = mean_base_loss(compiled_score, carry["state"].params["model"], arrays, validation, place.mesh)
        if loss < float(carry["best_loss"]):
            # A copy, as the next step consumes the state.
            best = jax.tree.map(lambda x: x.copy(), carry["state"].params["model"])
            carry = {**carry, "best_params": best, "best_loss": np.float32(loss)}
        return carry, {"validation_loss": loss}

    rows_at = place.training_rows(1, config.reference.batch_size, config.effective_reference_seed)
    carry = train(
        "reference",
        {
            "state": TrainState.create({"model": params}, step.optimizer, jax.random.fold_in(key, _STATE)),
            "best_params": params,
            "best_loss": np.float32(np.inf),
        },
        train_step=compile_step(over_mesh(step, place.mesh)),
        batch_at=lambda carry, step: place.gather_here(arrays, rows_at(step)),
        begin=lambda carry: carry,
        evaluate=evaluate,
        evaluate_every=config.reference.evaluate_every,
        total_steps=config.reference.steps,
        batch_size=config.reference.batch_size,
        directory=directory,
        mesh=place.mesh,
        logging=config.logging,
        profile=config.profile,
    )
    return Reference(step, compiled_score, carry["best_params"], float(carry["best_loss"]))


def score(
    place: Workplace, reference: Reference, directory: Path, identity: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """What the token weights need of the reference: name -> float32 [N, S-1], of every record of every split, each
    scored once."""
    names = reference_score_names(place.config.reconstruction.token_weight_source)
    # b keeps the directory to itself, so that runs with and without the rest share it.
    return {name: _score(place, reference, name, _score_directory(directory, name), identity) for name in names}


def _score_directory(directory: Path, name: str) -> Path:
    return directory if name == "base_token_nll" else directory / name


def _score(
    place: Workplace, reference: Reference, name: str, directory: Path, identity: Mapping[str, Any]
) -> np.ndarray:
    arrays = z_free(place.dataset.arrays)
    count, length = arrays["z_free_tokens"].shape

    def open_cache() -> ScoreCache:
        return ScoreCache(directory, name, identity, (count, length - 1))

    cache = first_process_first(f"{name} opened", open_cache)
    if cache.rows_done == count:
        return cache.read()
    compiled = reference.compiled_score
    if name != "base_token_nll":
        compiled = compile_over_rows(partial(reference.step.score, name=name), place.mesh, batched=(False, True))
    remaining = place.chunks(np.arange(cache.rows_done, count, dtype=np.int32))
    with StageLog("score", len(remaining), 0, directory, log_every=1) as log:
        for index, rows in enumerate(remaining):
            values = np.asarray(compiled(reference.params, put_rows(arrays, rows, place.mesh)))[rows >= 0]
            if jax.process_index() == 0:
                cache.append(values)
            log.log(index + 1, {})
    return first_process_first(f"{name} written", lambda: open_cache().read())


def weigh_records(
    place: Workplace, scores: Mapping[str, np.ndarray], rows: np.ndarray, hyperparameters: Hyperparameters
) -> losses.TokenWeighting:
    """The token weighting of the given records, as the step will compute it, as host arrays."""

    def weigh(batch: Mapping[str, jax.Array], hyperparameters: Hyperparameters) -> losses.TokenWeighting:
        return weigh_batch(batch, hyperparameters, place.config.reconstruction.token_weight_source)

    compiled = compile_over_rows(weigh, place.mesh, batched=(True, False))
    names = ("z_free_loss_mask", "suffix_loss_mask", "alignment_offsets")
    arrays = {**{name: place.dataset.arrays[name] for name in names}, **scores}
    parts = [
        jax.device_get(compiled(put_rows(arrays, chunk, place.mesh), hyperparameters)) for chunk in place.chunks(rows)
    ]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(rows)], *parts)
    assert isinstance(joined, losses.TokenWeighting)
    return joined


def start_disentangling(place: Workplace, reference: Reference) -> tuple[LatentStep, dict[str, Any]]:
    """The step, and what the stage carries from update to update as it starts.

    `state`: router, generator and posterior, from the reference's weights. Where a split may hold groups to a latent,
    `held_latents` int32 [evaluate_every, batch_size] as well: the latents of the records of the coming batches, -1
    where the posterior is free.
    """
    config, vocabulary = place.config, place.dataset.vocabulary
    key = jax.random.key(config.seed)
    definition, posterior = new_module(
        lambda rngs: PosteriorNetwork(
            config.model, vocabulary.size, config.num_latents, rematerialize=config.rematerialize, rngs=rngs
        ),
        jax.random.fold_in(key, _POSTERIOR_HEAD),
    )
    posterior["decoder"] = reference.params
    embedding = redraw_latent_embeddings(
        reference.params["embedding"],
        vocabulary.latent_ids,
        config.disentangle.latent_embedding_scale,
        jax.random.fold_in(key, _LATENT_EMBEDDINGS),
    )
    step = make_latent_step(config, reference.step.decoder, definition, tuple(vocabulary.latent_ids))
    params = {"model": {**reference.params, "embedding": embedding}, "posterior": posterior}
    carry: dict[str, Any] = {"state": TrainState.create(params, step.optimizer, jax.random.fold_in(key, _STATE))}
    if config.holds_groups:
        carry["held_latents"] = nothing_held(config)
    return step, carry


def nothing_held(config: ExperimentConfig) -> np.ndarray:
    """`held_latents` where every posterior is free."""
    return np.full((config.disentangle.evaluate_every, config.disentangle.batch_size), -1, np.int32)


def latent_rows_at(place: Workplace, step: LatentStep) -> Callable[[int], np.ndarray]:
    """The records of a disentangle step, over all devices."""
    batch_size, seed = place.config.disentangle.batch_size, place.config.seed
    return place.training_rows(step.group_size, batch_size, seed, place.dataset.anchor_latents)


def latent_batch_at(
    place: Workplace, step: LatentStep, scores: Mapping[str, np.ndarray], rows_at: Callable[[int], np.ndarray]
) -> Callable[[Mapping[str, Any], int], dict[str, np.ndarray]]:
    """The batch of a disentangle step. Where runs of one program are stacked, `held_latents` has a leading axis for
    them, and `anchor_latents` of the batch a last one."""
    arrays = {**place.dataset.arrays, **({} if step.online_reference else scores)}
    if place.config.anchors:
        arrays["anchor_latents"] = place.dataset.anchor_latents

    def batch_at(carry: Mapping[str, Any], index: int) -> dict[str, np.ndarray]:
        batch = place.gather_here(arrays, rows_at(index))
        if "held_latents" in carry:
            held = np.asarray(carry["held_latents"])
            held = held[..., index % held.shape[-2], rows_here(held.shape[-1], place.mesh)]
            batch["anchor_latents"] = np.moveaxis(held, -1, 0)
        return batch

    return batch_at


def disentangle(
    place: Workplace,
    step: LatentStep,
    carry: dict[str, Any],
    reference: Reference,
    scores: Mapping[str, np.ndarray],
    hyperparameters: Hyperparameters,
    directory: Path,
    begin: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    evaluate: Evaluate,
) -> dict[str, Any]:
    """Train router, generator and posterior; their parameters, on the mesh, under the keys `model` and `posterior`."""
    config = place.config
    compiled = compile_step(over_mesh(step, place.mesh))
    frozen = reference.params if step.online_reference else None
    # Once, and not in every step.
    hyperparameters = put_on_mesh(hyperparameters, place.mesh)
    carry = train(
        "disentangle",
        carry,
        train_step=lambda state, batch: compiled(state, batch, hyperparameters, frozen),
        batch_at=latent_batch_at(place, step, scores, latent_rows_at(place, step)),
        begin=begin,
        evaluate=evaluate,
        evaluate_every=config.disentangle.evaluate_every,
        total_steps=config.disentangle.steps,
        batch_size=config.disentangle.batch_size,
        directory=directory,
        mesh=place.mesh,
        logging=config.logging,
        profile=config.profile,
    )
    params: dict[str, Any] = carry["state"].params
    return params


def z_free(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the reference reads."""
    return {name: arrays[name] for name in ("z_free_tokens", "z_free_loss_mask")}


def mean_base_loss(
    compiled_score: Callable[..., Any],
    params: Any,
    arrays: Mapping[str, np.ndarray],
    chunks: np.ndarray,
    mesh: Mesh,
) -> float:
    """Mean over examples of `example_base_loss`, in float64 on the host: the same for any batch size."""
    total, count = 0.0, 0
    for rows in chunks:
        token_nll = np.asarray(compiled_score(params, put_rows(arrays, rows, mesh)), np.float64)[rows >= 0]
        supervised = arrays["z_free_loss_mask"][rows[rows >= 0], 1:].sum(axis=1)
        total += float((token_nll.sum(axis=1) / np.maximum(supervised, 1)).sum())
        count += int((supervised > 0).sum())
    return total / count
