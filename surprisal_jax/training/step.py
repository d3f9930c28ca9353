"""The latent-variable step: the one place where models meet losses.

`train_step(state, batch, hyperparameters, reference_params)` is a plain function. `sharding.py` compiles it;
`axis_name` is given only where the batch is split by `pmap` or `shard_map`. The comments carry shapes: B examples, K
latents, U suffix tokens, S z-free tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from surprisal_jax import losses
from surprisal_jax.config import ExperimentConfig, ModelConfig
from surprisal_jax.losses import AxisName, ObjectiveTerms, ReconstructionTerms
from surprisal_jax.models.latent import PosteriorNetwork, branch_tokens, router_log_probs, suffix_start
from surprisal_jax.models.transformer import Decoder
from surprisal_jax.training.gradients import train_step
from surprisal_jax.training.state import TrainState, make_optimizer

Array = jax.Array
Batch = Mapping[str, Array]


class Hyperparameters(NamedTuple):
    """Everything that may change without a new compilation: scalars, all traced. `coefficients.prior_kl` is beta."""

    coefficients: ObjectiveTerms
    token_weight_alpha: Any
    token_weight_mix: Any
    c_base: Any
    inverse_nll_floor: Any
    divisor_floor: Any


class FloorRates(NamedTuple):
    """How often each floor acts: shares of the supervised tokens (the first) and of the examples (the others)."""

    inverse_nll: Array
    example_base_loss: Array
    token_weighted_base_loss: Array
    inverse_token_weighted_base_loss: Array


class StepMetrics(NamedTuple):
    """The loss pytree at its natural positive values, the total, and what is watched beside it. Means over the global
    batch."""

    total: Array
    terms: ObjectiveTerms
    posterior_usage: Array  # [K], the mean of q
    gradient_norm: dict[str, Array]
    floor_rates: FloorRates


class LatentEnumeration(NamedTuple):
    """One pass over B examples and K latents."""

    example_mask: Array  # [B], the examples with a supervised token
    weighting: losses.TokenWeighting
    log_router: Array  # [B, K]
    terms: ReconstructionTerms  # leaves [B, K]
    reconstruction: Array  # [B, K], the coefficient-weighted total of the six terms
    hidden: Array  # [B, K, U, D]
    unembedding: Array  # [D, V]


class Evaluation(NamedTuple):
    """Per-example quantities without gradient, for the host."""

    weighting: losses.TokenWeighting
    log_posterior: Array  # [B, K], the network
    closed_form_log_posterior: Array  # [B, K]
    raw_reconstruction_loss: Array  # [B, K], nats


@dataclass(frozen=True)
class LatentStep:
    """What is static in the step: changing any of it is a new program."""

    decoder: nnx.GraphDef[Decoder]
    posterior: nnx.GraphDef[PosteriorNetwork]
    latent_ids: tuple[int, ...]
    optimizer: optax.GradientTransformation
    closed_form: bool
    group_size: int  # 1: a latent of its own for every example
    online_reference: bool
    inter_latent_divergence: bool
    anchored: bool
    token_weight_source: str
    micro_batches: int
    chunk_size: int
    logit_precision: jax.lax.Precision

    def train_step(
        self,
        state: TrainState,
        batch: Batch,
        hyperparameters: Hyperparameters,
        reference_params: Any = None,
        *,
        axis_name: AxisName = None,
    ) -> tuple[TrainState, StepMetrics]:
        """One update of router, generator and posterior. Pure; the state may be donated, the reference never.

        Args:
          state: parameters under the keys `model` (router and generator) and `posterior`.
          batch: the fields of `SequenceArrays` with a leading axis B, `example_mask` [B], with cached scoring
            the `REFERENCE_SCORES` that the weights need [B, S-1], with anchors `anchor_latents` [B] (-1: none). Rows of
            one group are neighbours.
          hyperparameters: traced scalars.
          reference_params: the frozen reference, with online scoring only.
          axis_name: the mapped axes over which B is split, under `pmap` or `shard_map(check_vma=False)`.
        """
        return train_step(self, state, batch, (hyperparameters, reference_params), axis_name)

    def counted(self, batch: Batch) -> Array:
        """`[B]`, the examples that `loss` is a mean over."""
        return batch["example_mask"] & jnp.any(batch["suffix_loss_mask"][:, 1:], axis=-1)

    def update(
        self, state: TrainState, value: tuple[Array, tuple[ObjectiveTerms, Array, FloorRates]], gradients: Any
    ) -> tuple[TrainState, StepMetrics]:
        """The state after one update, and the metrics of the step."""
        total, (terms, usage, rates) = value
        norms = {name: optax.tree.norm(gradient) for name, gradient in gradients.items()}
        return state.apply_gradients(gradients, self.optimizer), StepMetrics(total, terms, usage, norms, rates)

    def loss(
        self,
        params: Mapping[str, Any],
        batch: Batch,
        hyperparameters: Hyperparameters,
        reference_params: Any = None,
        *,
        axis_name: AxisName = None,
    ) -> tuple[Array, tuple[ObjectiveTerms, Array, FloorRates]]:
        """The coefficient-weighted total over the global batch, and the terms, the posterior's usage and the floor
        rates."""
        coefficients = hyperparameters.coefficients
        latent = self.enumerate_latents(params["model"], batch, hyperparameters, reference_params)
        example_mask, log_router, reconstruction = latent.example_mask, latent.log_router, latent.reconstruction
        network = nnx.merge(self.posterior, params["posterior"])
        network_logits = network(batch["z_free_tokens"], batch["z_free_loss_mask"])  # [B, K]
        groups = (-1, self.group_size)
        group_mask = example_mask.reshape(groups)  # [B / G, G]

        def grouped(x: Array) -> Array:
            return x.reshape(*groups, *x.shape[1:])

        if self.closed_form:
            log_q = losses.closed_form_log_posterior(
                grouped(log_router), grouped(reconstruction), coefficients.prior_kl, group_mask=group_mask
            )
        else:
            log_q = losses.amortized_log_posterior(grouped(network_logits), group_mask=group_mask)
        if self.anchored:
            in_group = jnp.where(group_mask, grouped(batch["anchor_latents"]), -1)
            latents = jnp.max(in_group, axis=-1)[:, None, None]  # [B / G, 1, 1]
            is_anchor = jnp.broadcast_to(latents >= 0, (*group_mask.shape, 1)).reshape(-1)  # [B]
            every_latent = jnp.arange(log_q.shape[-1])[None, None, :]
            certain = jnp.where(every_latent == latents, 0.0, -jnp.inf)
            log_q = jnp.where(latents >= 0, certain, log_q)
        prior_kl = losses.prior_kl(log_q, grouped(log_router), group_mask=group_mask).reshape(-1)
        log_q = log_q.reshape(log_router.shape)
        posterior_fit = None
        if self.closed_form or self.anchored:
            target = jax.lax.stop_gradient(log_q)
            posterior_fit = losses.categorical_kl(target, jax.nn.log_softmax(network_logits, axis=-1))
            if not self.closed_form:  # fitted where an anchor fixes it, and nowhere else
                posterior_fit = jnp.where(is_anchor, posterior_fit, 0.0)
        terms = ObjectiveTerms(
            reconstruction=losses.expectation_under_posterior(latent.terms, log_q),
            prior_kl=prior_kl,
            inter_latent_divergence=losses.inter_latent_divergence_from_hidden(
                latent.hidden,
                latent.unembedding,
                batch["suffix_loss_mask"],
                latent.weighting.token_weights,
                chunk_size=self.chunk_size,
                precision=self.logit_precision,
            )
            if self.inter_latent_divergence
            else None,
            posterior_entropy=losses.categorical_entropy(log_q),
            posterior_fit=posterior_fit,
        )  # leaves [B]
        means = losses.mean_over_examples(terms, example_mask, axis_name)._replace(
            router_marginal_kl=losses.router_marginal_kl(log_router, example_mask, axis_name)
        )
        usage = jax.vmap(losses.masked_mean_over_examples, in_axes=(1, None, None))(
            jnp.exp(log_q), example_mask, axis_name
        )
        rates = floor_rates(
            latent.weighting, batch["suffix_loss_mask"][:, 1:], example_mask, hyperparameters, axis_name
        )
        return losses.weighted_total(means, coefficients), (means, usage, rates)

    def enumerate_latents(
        self, params: Any, batch: Batch, hyperparameters: Hyperparameters, reference_params: Any = None
    ) -> LatentEnumeration:
        """Weights, router and the six terms under every latent: one prefix an example, K suffixes on it."""
        mask = batch["suffix_loss_mask"][:, 1:]
        decoder = nnx.merge(self.decoder, params)
        hidden, log_router, token_nll = self.branches(decoder, batch)
        weighting = weigh_batch(
            {**batch, **self.reference_scores(batch, reference_params)},
            hyperparameters,
            self.token_weight_source,
            losses.marginal_token_nll(token_nll, log_router, mask)
            if self.token_weight_source == "model_surprisal"
            else None,
        )
        terms = losses.reconstruction_terms(
            token_nll,
            mask,
            weighting,
            hyperparameters.c_base,
            latent_axis=-2,
            divisor_floor=hyperparameters.divisor_floor,
        )
        return LatentEnumeration(
            example_mask=self.counted(batch),
            weighting=weighting,
            log_router=log_router,
            terms=terms,
            reconstruction=losses.weighted_total(terms, hyperparameters.coefficients.reconstruction),
            hidden=hidden,
            unembedding=decoder.unembedding,
        )

    def branches(self, decoder: Decoder, batch: Batch) -> tuple[Array, Array, Array]:
        """Under every latent the hidden states [B, K, U, D] and NLL [B, K, U-1] of the suffix, and the router [B, K]
        between them."""
        tokens = branch_tokens(batch["suffix_tokens"], self.latent_ids)  # [B, K, U]
        hidden, log_router = self.hidden_states(decoder, batch, tokens)
        token_nll = losses.masked_token_nll_from_hidden(
            hidden,
            decoder.unembedding,
            tokens,
            jnp.broadcast_to(batch["suffix_loss_mask"][:, None, :], tokens.shape),
            chunk_size=self.chunk_size,
            precision=self.logit_precision,
        )
        return hidden, log_router, token_nll

    def hidden_states(self, decoder: Decoder, batch: Batch, tokens: Array) -> tuple[Array, Array]:
        """Hidden states of the suffixes [B, K, U], on a prefix that is computed once, and the router."""
        lengths = batch["prefix_lengths"]
        prefix = decoder.prefix(batch["prefix_tokens"], lengths, suffix_start(lengths))
        return decoder.suffix(tokens, prefix), router_log_probs(decoder, prefix, self.latent_ids)

    def evaluate(self, params: Mapping[str, Any], batch: Batch, hyperparameters: Hyperparameters) -> Evaluation:
        """What evaluation reads of each example, one latent an example, from stored scores whatever the step does."""
        latent = replace(self, online_reference=False).enumerate_latents(params["model"], batch, hyperparameters)
        network = nnx.merge(self.posterior, params["posterior"])
        logits = network(batch["z_free_tokens"], batch["z_free_loss_mask"])
        return Evaluation(
            weighting=latent.weighting,
            log_posterior=losses.amortized_log_posterior(logits),
            closed_form_log_posterior=losses.closed_form_log_posterior(
                latent.log_router, latent.reconstruction, hyperparameters.coefficients.prior_kl
            ),
            raw_reconstruction_loss=latent.terms.raw_reconstruction_loss,
        )

    def latent_gradients(self, params: Any, batch: Batch, hyperparameters: Hyperparameters, latent: Array) -> Array:
        """How each example would move one latent's embedding: the gradients of its reconstruction total under that
        latent, [B, D], from stored scores."""
        row = jnp.asarray(self.latent_ids)[latent]
        # Only that latent; where the weights are of the current model's surprisal, they need all.
        alone = self.token_weight_source != "model_surprisal"
        latent_ids: Any = (row,) if alone else self.latent_ids
        step = replace(self, online_reference=False, latent_ids=latent_ids)

        def reconstruction(embedding: Array, example: Batch) -> Array:
            moved = {**params, "embedding": params["embedding"].at[row].set(embedding)}
            enumerated = step.enumerate_latents(moved, jax.tree.map(lambda x: x[None], example), hyperparameters)
            return enumerated.reconstruction[0, 0 if alone else latent]

        gradients: Array = jax.vmap(jax.grad(reconstruction), (None, 0))(params["embedding"][row], batch)
        return gradients

    def reference_scores(self, batch: Batch, reference_params: Any) -> dict[str, Array]:
        """What the weights need of the reference, on z-free positions [B, S-1]: stored in the batch, or the frozen
        reference run inside this program."""
        names = reference_score_names(self.token_weight_source)
        if not self.online_reference:
            return {name: batch[name] for name in names}
        return {
            name: REFERENCE_SCORES[name](
                reference_apply(self.decoder), reference_params, batch["z_free_tokens"], batch["z_free_loss_mask"]
            )
            for name in names
        }


#: What may be stored of the reference, by the name of its array.
REFERENCE_SCORES = {"base_token_nll": losses.score_reference, "base_token_entropy": losses.predictive_entropy}


def reference_score_names(token_weight_source: str) -> tuple[str, ...]:
    """The arrays of the reference that a source of token weights needs: `b` always, since the base losses are of it."""
    return tuple(REFERENCE_SCORES) if token_weight_source == "reference_entropy" else ("base_token_nll",)


def weigh_batch(
    batch: Batch, hyperparameters: Hyperparameters, source: str, model_surprisal: Array | None = None
) -> losses.TokenWeighting:
    """Alignment and token weights of a batch, on suffix positions.

    `model_surprisal` None stands for `b`: the model that is trained starts as the reference.
    """
    z_free_mask, mask, offsets = (
        batch["z_free_loss_mask"][:, 1:],
        batch["suffix_loss_mask"][:, 1:],
        batch["alignment_offsets"],
    )
    weight_source = None
    if source == "reference_entropy":
        weight_source, _ = losses.align_to_conditioned(batch["base_token_entropy"], z_free_mask, mask, offsets)
    elif source == "model_surprisal":
        weight_source = model_surprisal
    elif source == "uniform":
        weight_source = jnp.ones(mask.shape, jnp.float32)
    return losses.compute_token_weighting(
        batch["base_token_nll"],
        z_free_mask,
        mask,
        offsets,
        hyperparameters.token_weight_alpha,
        inverse_nll_floor=hyperparameters.inverse_nll_floor,
        weight_source=weight_source,
        token_weight_mix=hyperparameters.token_weight_mix,
    )


def reference_apply(decoder: nnx.GraphDef[Decoder]) -> Any:
    """`(params, tokens) -> logits` of the reference, the logit matmul at precision HIGHEST: what `score_reference`
    takes."""

    def apply(params: Any, tokens: Array) -> Array:
        model = nnx.merge(decoder, params)
        return losses.logits_from_hidden(model(tokens), model.unembedding, jax.lax.Precision.HIGHEST)

    return apply


def make_latent_step(
    config: ExperimentConfig,
    decoder: nnx.GraphDef[Decoder],
    posterior: nnx.GraphDef[PosteriorNetwork],
    latent_ids: tuple[int, ...],
) -> LatentStep:
    """The static half of the step that a configuration asks for."""
    return LatentStep(
        decoder=decoder,
        posterior=posterior,
        latent_ids=latent_ids,
        optimizer=make_optimizer(config.disentangle),
        closed_form=config.posterior == "closed_form",
        group_size=config.data.group_size if config.latent_scope == "group" else 1,
        online_reference=config.reference_scoring == "online",
        inter_latent_divergence=config.inter_latent_divergence_weight != 0,
        anchored=config.anchors > 0 or config.holds_groups,
        token_weight_source=config.reconstruction.token_weight_source,
        micro_batches=config.micro_batches,
        chunk_size=config.chunk_size,
        logit_precision=logit_precision(config.model),
    )


def logit_precision(config: ModelConfig) -> jax.lax.Precision:
    return jax.lax.Precision[config.logit_precision.upper()]


def make_hyperparameters(config: ExperimentConfig, c_base: float) -> Hyperparameters:
    """The traced half: coefficients in the structure of the terms, with None where a term is not in the program."""
    weights = config.reconstruction

    def scalar(value: float) -> Array:
        return jnp.asarray(value, jnp.float32)

    coefficients = ObjectiveTerms(
        reconstruction=ReconstructionTerms(
            raw_reconstruction_loss=scalar(weights.raw_weight),
            baseline_normalized_reconstruction_loss=scalar(weights.baseline_normalized_weight),
            example_normalized_reconstruction_loss=scalar(weights.example_normalized_weight),
            token_weighted_reconstruction_loss=scalar(weights.token_weighted_weight),
            normalized_token_weighted_reconstruction_loss=scalar(weights.normalized_token_weighted_weight),
            normalized_inverse_token_weighted_reconstruction_loss=scalar(
                weights.normalized_inverse_token_weighted_weight
            ),
        ),
        prior_kl=scalar(config.beta),
        inter_latent_divergence=scalar(-config.inter_latent_divergence_weight)
        if config.inter_latent_divergence_weight
        else None,
        posterior_entropy=scalar(config.posterior_entropy_weight),
        router_marginal_kl=scalar(config.router_marginal_kl_weight),
        posterior_fit=scalar(config.posterior_fit_weight)
        if config.posterior == "closed_form" or config.anchors or config.holds_groups
        else None,
    )
    return Hyperparameters(
        coefficients=coefficients,
        token_weight_alpha=scalar(weights.token_weight_alpha),
        token_weight_mix=scalar(weights.token_weight_mix),
        c_base=scalar(c_base),
        inverse_nll_floor=scalar(config.inverse_nll_floor),
        divisor_floor=scalar(config.divisor_floor),
    )


def floor_rates(
    weighting: losses.TokenWeighting,
    mask: Array,
    example_mask: Array,
    hyperparameters: Hyperparameters,
    axis_name: AxisName,
) -> FloorRates:
    def rate(below: Array, counted: Array) -> Array:
        return losses.masked_mean_over_examples(below.astype(jnp.float32), counted, axis_name)

    floor = hyperparameters.divisor_floor
    return FloorRates(
        inverse_nll=rate(weighting.aligned_base_token_nll < hyperparameters.inverse_nll_floor, mask),
        example_base_loss=rate(weighting.example_base_loss < floor, example_mask),
        token_weighted_base_loss=rate(weighting.token_weighted_base_loss < floor, example_mask),
        inverse_token_weighted_base_loss=rate(weighting.inverse_token_weighted_base_loss < floor, example_mask),
    )
