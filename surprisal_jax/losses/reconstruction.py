"""The six reconstruction terms: one per-token NLL, read with different weights and divisors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import chex
import jax
import jax.numpy as jnp

from surprisal_jax.losses.reductions import floored_divisor
from surprisal_jax.losses.token_weighting import TokenWeighting, token_weighted_masked_nll_per_example

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Shaped


class ReconstructionTerms(NamedTuple):
    """Six views of one reconstruction loss; with `l_t` the generator's NLL, `u_t = m_t / sum m`, all divisors detached
    and floored.

    The same structure holds the terms' coefficients. The published note names the stack; these definitions are this
    project's reading.

    Attributes:
      raw_reconstruction_loss: `sum u l`, nats.
      baseline_normalized_reconstruction_loss: `sum u l / c_base`.
      example_normalized_reconstruction_loss: `sum u l / example_base_loss`.
      token_weighted_reconstruction_loss: `sum pi l`, nats.
      normalized_token_weighted_reconstruction_loss: `sum pi l / token_weighted_base_loss`.
      normalized_inverse_token_weighted_reconstruction_loss: `sum rho l / inverse_token_weighted_base_loss`.
    """

    raw_reconstruction_loss: Float[Array, "*batch"]
    baseline_normalized_reconstruction_loss: Float[Array, "*batch"]
    example_normalized_reconstruction_loss: Float[Array, "*batch"]
    token_weighted_reconstruction_loss: Float[Array, "*batch"]
    normalized_token_weighted_reconstruction_loss: Float[Array, "*batch"]
    normalized_inverse_token_weighted_reconstruction_loss: Float[Array, "*batch"]


def reconstruction_terms(
    token_nll: Float[Array, "*batch T-1"],
    mask: Shaped[Array, "*batch T-1"],
    weighting: TokenWeighting,
    c_base: float | Float[Array, ""],
    *,
    latent_axis: int | None = None,
    divisor_floor: float | Float[Array, ""] = 1e-3,
) -> ReconstructionTerms:
    """All six terms, one value an example (and a latent).

    Args:
      token_nll: `[..., T-1]` nats; with `latent_axis`, one more axis there, such as `[B, K, T-1]` with
        `latent_axis=-2`.
      mask: `[..., T-1]`, without a latent axis.
      weighting: the bundle of the same examples, without a latent axis; detached again here.
      c_base: nats, a scalar: the mean over validation examples of `example_base_loss` under the best reference.
      latent_axis: where `token_nll` has its latent axis (never the last); None: it has none. Never inferred from
        shapes.
      divisor_floor: nats; every divisor is `max(value, divisor_floor)`, on the quantity itself and never on one factor
        of it.

    Returns:
      `ReconstructionTerms`, leaves `[...]` (with the latent axis), float32. The gradient flows to `token_nll` alone. An
      example without a supervised token has 0 in every leaf.

    Raises:
      ValueError: `latent_axis` is the token axis.
    """
    chex.assert_rank(c_base, 0)
    weighting = jax.lax.stop_gradient(weighting)
    base_losses = (
        weighting.example_base_loss,
        weighting.token_weighted_base_loss,
        weighting.inverse_token_weighted_base_loss,
    )
    per_position = (mask, weighting.token_weights, weighting.inverse_token_weights)
    if latent_axis is not None:
        from_the_end = latent_axis - token_nll.ndim if latent_axis >= 0 else latent_axis
        if from_the_end == -1:
            raise ValueError(f"latent_axis: got {latent_axis}, the token axis of token_nll {token_nll.shape}")
        chex.assert_rank(token_nll, mask.ndim + 1)
        shape = token_nll.shape
        per_position = jax.tree.map(lambda x: jnp.broadcast_to(jnp.expand_dims(x, from_the_end), shape), per_position)
        base_losses = jax.tree.map(lambda x: jnp.expand_dims(x, from_the_end + 1), base_losses)
    mask, token_weights, inverse_token_weights = per_position
    example_base_loss, token_weighted_base_loss, inverse_token_weighted_base_loss = (
        floored_divisor(loss, divisor_floor) for loss in base_losses
    )
    raw = token_weighted_masked_nll_per_example(token_nll, mask)
    token_weighted = token_weighted_masked_nll_per_example(token_nll, mask, token_weights)
    inverse_token_weighted = token_weighted_masked_nll_per_example(token_nll, mask, inverse_token_weights)
    return ReconstructionTerms(
        raw_reconstruction_loss=raw,
        baseline_normalized_reconstruction_loss=raw / floored_divisor(jnp.asarray(c_base), divisor_floor),
        example_normalized_reconstruction_loss=raw / example_base_loss,
        token_weighted_reconstruction_loss=token_weighted,
        normalized_token_weighted_reconstruction_loss=token_weighted / token_weighted_base_loss,
        normalized_inverse_token_weighted_reconstruction_loss=inverse_token_weighted / inverse_token_weighted_base_loss,
    )
