"""Kullback-Leibler and Jensen-Shannon divergence, in nats, float32, in forms that stay right near 0."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp

from surprisal_jax.losses.reductions import select
from surprisal_jax.losses.token_nll import logits_from_hidden, map_chunks

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Shaped


def categorical_kl(log_q: Float[Array, "*batch K"], log_p: Float[Array, "*batch K"]) -> Float[Array, "*batch"]:
    """`KL(q || p) = sum_k q_k (log q_k - log p_k)`, in nats; the first argument is the distribution averaged over.

    Args:
      log_q, log_p: `[..., K]` log-probabilities, normalised; -inf is allowed.

    Returns:
      `[...]` float32. `0 log 0 = 0`, also where p is 0 as well; +inf where p is 0 and q is not. Gradients flow to both
      and are finite wherever the value is.
    """
    chex.assert_equal_shape([log_q, log_p])
    log_q, log_p = log_q.astype(jnp.float32), log_p.astype(jnp.float32)
    empty = jnp.isneginf(log_q)
    # Where q is 0 both inputs are replaced before the subtraction: -inf - -inf would be NaN, in the gradient too.
    difference = jnp.where(empty, 0.0, log_q) - jnp.where(empty, 0.0, log_p)
    return jnp.sum(jnp.exp(log_q) * difference, axis=-1)


def inter_latent_divergence(
    logits: Float[Array, "*batch K T V"],
    loss_mask: Shaped[Array, "*batch T"],
    token_weights: Float[Array, "*batch T-1"],
) -> Float[Array, "*batch"]:
    """`sum_t pi_t JSD_t`, the Jensen-Shannon divergence of the K latent-conditioned next-token distributions, uniform
    mixture.

    Args:
      logits: `[..., K, T, V]`; position t predicts token t + 1, so the last position is not used.
      loss_mask: `[..., T]` per token, shared by the latents.
      token_weights: `[..., T-1]`, zero off the mask.

    Returns:
      `[...]` float32 nats, between 0 and `ln K` where the weights sum to 1. The gradient flows to the logits alone.
    """
    chex.assert_rank(logits, loss_mask.ndim + 2)
    rows, flat_mask, weights = _rows_by_latent(logits, loss_mask, token_weights)
    return jnp.sum(weights * _jensen_shannon(rows, flat_mask).reshape(weights.shape), axis=-1)


def inter_latent_divergence_from_hidden(
    hidden: Float[Array, "*batch K T D"],
    unembedding: Float[Array, "D V"],
    loss_mask: Shaped[Array, "*batch T"],
    token_weights: Float[Array, "*batch T-1"],
    *,
    chunk_size: int,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
) -> Float[Array, "*batch"]:
    """`inter_latent_divergence(hidden @ unembedding, ...)` with at most `chunk_size` rows of logits alive.

    A row is one position of one latent, so a chunk holds `chunk_size // K` positions (at least one); it is recomputed
    in the backward pass. Arguments and result are those of `inter_latent_divergence` and
    `masked_token_nll_from_hidden`.

    Raises:
      ValueError: `chunk_size` below 1.
    """
    chex.assert_rank(hidden, loss_mask.ndim + 2)
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected at least 1")
    rows, flat_mask, weights = _rows_by_latent(hidden, loss_mask, token_weights)

    def chunk_divergence(
        chunk: tuple[Float[Array, "C K D"], Shaped[Array, " C"]], matrix: Float[Array, "D V"]
    ) -> Float[Array, " C"]:
        chunk_rows, chunk_mask = chunk
        return _jensen_shannon(logits_from_hidden(chunk_rows, matrix, precision), chunk_mask)

    positions = max(chunk_size // hidden.shape[-3], 1)
    divergence = map_chunks(chunk_divergence, (rows, flat_mask), unembedding, positions)
    return jnp.sum(weights * divergence.reshape(weights.shape), axis=-1)


def _rows_by_latent(
    values: Float[Array, "*batch K T F"],
    loss_mask: Shaped[Array, "*batch T"],
    token_weights: Float[Array, "*batch T-1"],
) -> tuple[Float[Array, "N K F"], Shaped[Array, " N"], Float[Array, "*batch T-1"]]:
    """Scored positions as rows `[N, K, F]`, zeroed off the mask, with the flat mask and the detached float32
    weights."""
    mask = loss_mask[..., 1:].astype(bool)
    chex.assert_equal_shape([mask, token_weights])
    by_position = jnp.moveaxis(values[..., :-1, :], -3, -2)
    chex.assert_equal_shape_prefix([by_position, mask], mask.ndim)
    weights = select(mask, jax.lax.stop_gradient(token_weights.astype(jnp.float32)))
    rows = by_position.reshape(-1, *by_position.shape[-2:])
    flat_mask = mask.reshape(-1)
    return select(jnp.broadcast_to(flat_mask[:, None, None], rows.shape), rows), flat_mask, weights


def _jensen_shannon(logits: Float[Array, "N K V"], mask: Shaped[Array, " N"]) -> Float[Array, " N"]:
    """JSD over K, one a row, as `mean_k sum_v m (exp(d) d - expm1(d))` with `d = log p_k - log m`.

    Each summand is >= 0 and of second order in d, so nothing cancels; the difference of entropies is 5e-6 off in
    float32 and goes negative. d itself is formed from differences between latents, never from two log-probabilities of
    size ln V: near collapse it is 1e-4 and a rounding of 1e-6 would be seen. Every shift (of one
    latent's logits, or of one word's over the latents) leaves the distributions as they are and carries no gradient.
    """
    logits = select(jnp.broadcast_to(mask[:, None, None], logits.shape), logits.astype(jnp.float32))
    num_latents = logits.shape[-2]
    # A large offset of one latent's logits would leave its rounding in the normaliser.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    logits = logits - jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    shift = jax.lax.stop_gradient(jnp.max(logits, axis=-2, keepdims=True))
    shift = jnp.where(jnp.isneginf(shift), 0.0, shift)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    reference = jax.lax.stop_gradient(jnp.max(log_normalizer, axis=-2, keepdims=True))
    relative = (logits - shift) - (log_normalizer - reference)
    top = jax.lax.stop_gradient(jnp.max(relative, axis=-2, keepdims=True))
    nowhere = jnp.isneginf(top)
    relative = jnp.where(nowhere, 0.0, relative - jnp.where(nowhere, 0.0, top))
    log_mixture = jnp.log1p(jnp.sum(jnp.expm1(relative), axis=-2, keepdims=True) / num_latents)
    mixture = jnp.where(nowhere, 0.0, jnp.exp(shift + jnp.where(nowhere, 0.0, top) - reference + log_mixture))
    absent = jnp.isneginf(relative)
    # p_k = 0 contributes exactly m: the limit of exp(d) d - expm1(d), with d replaced before the product 0 * -inf.
    d = jnp.where(absent, 0.0, relative) - log_mixture
    summand = jnp.where(absent, 1.0, jnp.exp(d) * d - jnp.expm1(d))
    divergence = jnp.sum(mixture * jnp.sum(summand, axis=-2, keepdims=True), axis=(-2, -1)) / num_latents
    return jnp.minimum(divergence, math.log(num_latents))
