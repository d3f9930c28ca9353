"""What each part of the latent step costs beside the step with the raw term and the KL alone, and what the shared
prefix saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.timing import Row, measure
from benchmarks.workload import Workload
from surprisal_jax import losses
from surprisal_jax.config import DisentangleConfig, ExperimentConfig, ModelConfig, ReconstructionLossConfig
from surprisal_jax.models.latent import suffix_start
from surprisal_jax.models.transformer import Decoder
from surprisal_jax.training.step import LatentStep

Array = jax.Array

SIX_TERMS: dict[str, Any] = {
    field.name: 1.0 for field in fields(ReconstructionLossConfig) if field.name.endswith("_weight")
}


def workload(batch_size: int = 8, prefix: int = 64, suffix: int = 64, width: int = 256, **changes: Any) -> Workload:
    """4 layers of width 256, 8,192 tokens, K = 4; smaller ones for the tests."""
    heads = width // 64
    config = ExperimentConfig(
        num_latents=4,
        model=ModelConfig(
            num_layers=4, width=width, num_heads=heads, num_kv_heads=heads, head_dim=64, mlp_width=3 * width
        ),
        chunk_size=256,
        disentangle=DisentangleConfig(batch_size=batch_size),
        reconstruction=ReconstructionLossConfig(**SIX_TERMS),
        **changes,
    )
    return Workload(config, 32 * width, prefix, suffix)


class RawStep(LatentStep):
    """The same step with `raw` and `prior_kl` alone in the program."""

    def loss(
        self,
        params: Mapping[str, Any],
        batch: Mapping[str, Array],
        hyperparameters: Any,
        reference_params: Any = None,
        *,
        axis_name: Any = None,
    ) -> tuple[Array, Any]:
        _, log_router, token_nll = self.branches(nnx.merge(self.decoder, params["model"]), batch)
        mask = jnp.broadcast_to(batch["suffix_loss_mask"][:, None, 1:], token_nll.shape)
        raw = losses.token_weighted_masked_nll_per_example(token_nll, mask)
        network = nnx.merge(self.posterior, params["posterior"])
        log_q = losses.amortized_log_posterior(network(batch["z_free_tokens"], batch["z_free_loss_mask"]))
        terms = (losses.expectation_under_posterior(raw, log_q), losses.prior_kl(log_q, log_router))
        means = losses.mean_over_examples(terms, self.counted(batch), axis_name)
        coefficients = hyperparameters.coefficients
        weights = (coefficients.reconstruction.raw_reconstruction_loss, coefficients.prior_kl)
        return losses.weighted_total(means, weights), (means, None, None)


class WholeSequencesStep(LatentStep):
    """The same step with x read once a latent."""

    def hidden_states(self, decoder: Decoder, batch: Mapping[str, Array], tokens: Array) -> tuple[Array, Array]:
        prefix, lengths = batch["prefix_tokens"], batch["prefix_lengths"]  # full, in these programs
        rows, latents, length = tokens.shape
        whole = jnp.concatenate([jnp.broadcast_to(prefix[:, None], (rows, latents, prefix.shape[1])), tokens], axis=-1)
        places = jnp.broadcast_to(jnp.arange(prefix.shape[1])[None], prefix.shape)
        positions = jnp.concatenate([places, suffix_start(lengths)[:, None] + jnp.arange(length)[None]], axis=1)
        hidden, _ = decoder._forward(whole, positions[:, None])
        after_z = hidden[:, 0, prefix.shape[1] - 1]
        embeddings = decoder.unembedding[:, jnp.asarray(self.latent_ids)]
        logits = jnp.einsum("bd,dk->bk", after_z, embeddings, precision=jax.lax.Precision.HIGHEST)
        return hidden[:, :, prefix.shape[1] :], jax.nn.log_softmax(logits, axis=-1)


def as_kind(step: LatentStep, kind: type[LatentStep]) -> LatentStep:
    """The step as one of the kinds above."""
    return kind(**{field.name: getattr(step, field.name) for field in fields(step)})


def training(step: LatentStep, work: Workload, reference: Any = None) -> Callable[[], Any]:
    """One update after another, the state consumed as in a run."""
    state, batch, hyperparameters = work.arguments()
    if step.online_reference:
        del batch["base_token_nll"]
    compiled = jax.jit(step.train_step, donate_argnums=0)
    held = [state]

    def update() -> Any:
        held[0], metrics = compiled(held[0], batch, hyperparameters, reference)
        return metrics.total

    return update


def parts(rounds: int, **shape: Any) -> list[Row]:
    work = workload(**shape)
    online = workload(reference_scoring="online", **shape)
    divergence = workload(inter_latent_divergence_weight=0.1, **shape)
    times = measure(
        {
            "raw": training(as_kind(work.step(), RawStep), work),
            "all": training(work.step(), work),
            "divergence": training(divergence.step(), divergence),
            "online": training(online.step(), online, online.reference()),
        },
        rounds,
    )
    beside = "to raw and prior_kl alone"
    return [
        Row(f"step: weights from cached scores and all six terms, {beside}", *times.ratio("all", "raw"), at_most=1.05),
        Row(
            f"step: the same, posterior entropy and router marginal KL, {beside} (one program)",
            *times.ratio("all", "raw"),
            at_most=1.08,
        ),
        Row(f"step: inter-latent divergence besides, {beside}", *times.ratio("divergence", "raw"), at_most=1.3),
        Row("step: cached to online reference", *times.ratio("all", "online"), at_most=0.9),
    ]


def prefix(rounds: int, **shape: Any) -> list[Row]:
    """A long x and a short y."""
    work = workload(**{"batch_size": 4, "prefix": 192, "suffix": 64, **shape})
    step = work.step()
    state, batch, hyperparameters = work.arguments()

    def generator(kind: type[LatentStep]) -> Callable[[], Any]:
        """Router and generator, forward and backward, without the posterior."""
        own = as_kind(step, kind)

        def total(params: Any) -> Array:
            enumerated = own.enumerate_latents(params, batch, hyperparameters)
            return jnp.mean(enumerated.reconstruction) + jnp.mean(enumerated.log_router[:, 0])

        return partial(jax.jit(jax.value_and_grad(total)), state.params["model"])

    shared, whole = generator(LatentStep), generator(WholeSequencesStep)
    value, expected = (float(each()[0]) for each in (shared, whole))
    if abs(value - expected) > 1e-4 * abs(expected):
        raise AssertionError(f"shared prefix: got {value}, whole sequences {expected}")
    times = measure(
        {
            "shared": shared,
            "whole": whole,
            "step": training(step, work),
            "whole step": training(as_kind(step, WholeSequencesStep), work),
        },
        rounds,
    )
    shown = f"{work.prefix} prefix and {work.suffix} suffix tokens, K {work.config.num_latents}"
    return [
        Row(f"shared prefix to whole sequences, {shown}: generator", *times.ratio("shared", "whole"), at_most=0.52),
        Row(f"shared prefix to whole sequences, {shown}: step", *times.ratio("step", "whole step"), at_most=0.68),
    ]
