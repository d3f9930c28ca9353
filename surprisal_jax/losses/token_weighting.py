"""Where the reconstruction loss is put: alignment of the reference's surprisal, surprisal shares, and the bundle of
both."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import chex
import jax
import jax.numpy as jnp

from surprisal_jax.losses.reductions import ratio_or_one, select

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped


class TokenWeighting(NamedTuple):
    """Token weights and the reference's losses under them. Every leaf is float32 and under `stop_gradient`.

    Attributes:
      token_weights: `[..., T-1]`, `pi_t = m_t b_t^alpha / sum_s m_s b_s^alpha`.
      inverse_token_weights: `[..., T-1]`, `rho_t`, the same with `-alpha` and `b` floored.
      aligned_base_token_nll: `[..., T-1]` nats, `b` on the conditioned sequence's positions, 0 off the mask.
      example_base_loss: `[...]` nats, masked mean of `b`.
      token_weighted_base_loss: `[...]` nats, `sum pi b`.
      inverse_token_weighted_base_loss: `[...]` nats, `sum rho b`.
      token_concentration_factor: `[...]`, `token_weighted_base_loss / example_base_loss`; 1 where every b is 0.
      inverse_token_base_scale_factor: `[...]`, `inverse_token_weighted_base_loss / example_base_loss`; 1 where every b
        is 0.
    """

    token_weights: Float[Array, "*batch T-1"]
    inverse_token_weights: Float[Array, "*batch T-1"]
    aligned_base_token_nll: Float[Array, "*batch T-1"]
    example_base_loss: Float[Array, "*batch"]
    token_weighted_base_loss: Float[Array, "*batch"]
    inverse_token_weighted_base_loss: Float[Array, "*batch"]
    token_concentration_factor: Float[Array, "*batch"]
    inverse_token_base_scale_factor: Float[Array, "*batch"]


def token_weighted_masked_nll_per_example(
    token_nll: Float[Array, "*batch T-1"],
    mask: Shaped[Array, "*batch T-1"],
    token_weights: Float[Array, "*batch T-1"] | None = None,
) -> Float[Array, "*batch"]:
    """One loss an example: `sum_t w_t l_t` over supervised positions, in nats.

    Args:
      token_nll: `[..., T-1]`; what stands off the mask, NaN too, has no influence on value or gradient.
      mask: `[..., T-1]`, true at the supervised positions (`loss_mask[..., 1:]`).
      token_weights: `[..., T-1]`, used as they are (they sum to 1 an example for this package's weights). None: the
        uniform mean, `u_t = m_t / sum m`.

    Returns:
      `[...]` float32; 0 where no token is supervised.
    """
    chex.assert_equal_shape([token_nll, mask] if token_weights is None else [token_nll, mask, token_weights])
    supervised_nll = select(mask, token_nll.astype(jnp.float32))
    if token_weights is None:
        count = jnp.sum(mask.astype(bool), axis=-1, dtype=jnp.float32)
        return jnp.sum(supervised_nll, axis=-1) / jnp.maximum(count, 1.0)
    return jnp.sum(supervised_nll * select(mask, token_weights.astype(jnp.float32)), axis=-1)


def align_to_conditioned(
    values: Float[Array, "*batch S-1"],
    source_mask: Shaped[Array, "*batch S-1"],
    target_mask: Shaped[Array, "*batch T-1"],
    alignment_offsets: Int[Array, "*batch"],
) -> tuple[Float[Array, "*batch T-1"], Shaped[Array, "*batch T-1"]]:
    """Per-position values of the z-free sequence on the positions of the conditioned one.

    Conditioned position j reads z-free position `j - alignment_offsets`. `take_along_axis` wraps negative indices and
    fills past the end, so the index is clipped and what was clipped is masked; that no supervised target is lost is
    checked on the host, where a batch is built.

    Args:
      values: `[..., S-1]` on z-free positions.
      source_mask: `[..., S-1]`, true where the z-free position is supervised.
      target_mask: `[..., T-1]`, true where the conditioned position is supervised.
      alignment_offsets: `[...]` integers, one an example; may be negative.

    Returns:
      `(values, mask)`, both `[..., T-1]`: true in the mask where both sides are supervised; 0 in the values elsewhere.
    """
    chex.assert_equal_shape([values, source_mask])
    chex.assert_equal_shape_prefix([values, target_mask, alignment_offsets], alignment_offsets.ndim)
    chex.assert_rank(target_mask, values.ndim)
    length = values.shape[-1]
    # int32 whatever comes in: a position does not fit int8, and unsigned offsets would wrap.
    positions = jax.lax.broadcasted_iota(jnp.int32, target_mask.shape, target_mask.ndim - 1)
    source = positions - alignment_offsets[..., None].astype(jnp.int32)
    index = jnp.clip(source, 0, length - 1)
    inside = (source >= 0) & (source < length)
    mask = inside & target_mask.astype(bool) & jnp.take_along_axis(source_mask.astype(bool), index, axis=-1)
    return select(mask, jnp.take_along_axis(select(source_mask, values), index, axis=-1)), mask


def surprisal_share_weights(
    token_nll: Float[Array, "*batch T-1"], mask: Shaped[Array, "*batch T-1"], alpha: float | Float[Array, ""]
) -> Float[Array, "*batch T-1"]:
    """`pi_t = m_t b_t^alpha / sum_s m_s b_s^alpha`, in log space, under `stop_gradient`.

    Limits, for any finite alpha: `alpha = 0` is exactly uniform, also where `b = 0`; with `alpha > 0` a `b` of 0 has no
    weight unless all are 0, which is uniform; with `alpha < 0` the zeros share all the weight evenly.

    Args:
      token_nll: `[..., T-1]` nats, at least 0; -0.0 counts as 0. Not read off the mask.
      mask: `[..., T-1]`.
      alpha: the temper, a scalar; may be traced.

    Returns:
      `[..., T-1]` float32, summing to 1 an example; all 0 where no token is supervised.
    """
    chex.assert_equal_shape([token_nll, mask])
    chex.assert_rank(alpha, 0)
    mask = mask.astype(bool)
    alpha = jax.lax.stop_gradient(jnp.asarray(alpha, jnp.float32))
    surprisal = jax.lax.stop_gradient(jnp.where(mask, token_nll.astype(jnp.float32), 1.0))
    is_zero = surprisal <= 0
    positive, zero = mask & ~is_zero, mask & is_zero
    # The positions that share the weight; a power of 0 never enters the arithmetic.
    dominant = jnp.where(alpha > 0, positive, jnp.where(alpha < 0, zero, mask))
    active = jnp.where(jnp.any(dominant, axis=-1, keepdims=True), dominant, mask)
    finite = jnp.minimum(surprisal, jnp.finfo(jnp.float32).max)
    log_surprisal = jnp.log(jnp.where(is_zero, 1.0, finite))
    # The extreme that wins is subtracted before the product with alpha, which then cannot overflow to inf - inf.
    sign = jnp.where(alpha < 0, -1.0, 1.0)
    top = jnp.max(jnp.where(active, sign * log_surprisal, -jnp.inf), axis=-1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    powers = jnp.where(active, jnp.exp(jnp.abs(alpha) * (sign * log_surprisal - top)), 0.0)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers / jnp.where(total == 0, 1.0, total)


def compute_token_weighting(
    base_token_nll: Float[Array, "*batch S-1"],
    base_mask: Shaped[Array, "*batch S-1"],
    conditioned_mask: Shaped[Array, "*batch T-1"],
    alignment_offsets: Int[Array, "*batch"],
    alpha: float | Float[Array, ""],
    *,
    inverse_nll_floor: float | Float[Array, ""] = 1e-6,
    weight_source: Float[Array, "*batch T-1"] | None = None,
    token_weight_mix: float | Float[Array, ""] = 1.0,
) -> TokenWeighting:
    """The bundle of token weights from the reference's surprisal: align first, then normalise.

    `token_weights = mix pi + (1 - mix) u` with `u_t = m_t / sum m`, and `pi`, `rho` made from `weight_source` where it
    is given; the base losses are those of `b` under these weights in any case.

    Args:
      base_token_nll: `[..., S-1]` nats, `b` on z-free positions, as from `score_reference`.
      base_mask: `[..., S-1]`, supervised z-free positions.
      conditioned_mask: `[..., T-1]`, supervised conditioned positions.
      alignment_offsets: `[...]`, see `align_to_conditioned`.
      alpha: the temper, a scalar; may be traced.
      inverse_nll_floor: nats; `rho` uses `max(b, floor)`, since a float32 NLL of exactly 0 is rounding noise. 0 is the
        exact limit.

    Returns:
      `TokenWeighting`, every leaf float32 and under `stop_gradient`. An example without a supervised token has weights
      and losses 0 and factors 1.
    """
    surprisal, mask = align_to_conditioned(
        jax.lax.stop_gradient(base_token_nll.astype(jnp.float32)), base_mask, conditioned_mask, alignment_offsets
    )
    surprisal = jnp.where(surprisal <= 0, 0.0, surprisal)
    source = surprisal if weight_source is None else jax.lax.stop_gradient(weight_source.astype(jnp.float32))
    chex.assert_equal_shape([source, mask])
    chex.assert_rank(token_weight_mix, 0)
    mix = jnp.asarray(token_weight_mix, jnp.float32)
    uniform = mask / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32), 1.0)
    # Selected, not only added: at 1 the weights are the shares to the last bit.
    shares = surprisal_share_weights(source, mask, alpha)
    token_weights = jnp.where(mix == 1.0, shares, mix * shares + (1.0 - mix) * uniform)
    floor = jnp.asarray(inverse_nll_floor, jnp.float32)
    inverse_token_weights = surprisal_share_weights(jnp.maximum(source, floor), mask, -alpha)
    example_base_loss = token_weighted_masked_nll_per_example(surprisal, mask)
    token_weighted_base_loss = token_weighted_masked_nll_per_example(surprisal, mask, token_weights)
    inverse_token_weighted_base_loss = token_weighted_masked_nll_per_example(surprisal, mask, inverse_token_weights)
    bundle = TokenWeighting(
        token_weights=token_weights,
        inverse_token_weights=inverse_token_weights,
        aligned_base_token_nll=surprisal,
        example_base_loss=example_base_loss,
        token_weighted_base_loss=token_weighted_base_loss,
        inverse_token_weighted_base_loss=inverse_token_weighted_base_loss,
        token_concentration_factor=ratio_or_one(token_weighted_base_loss, example_base_loss),
        inverse_token_base_scale_factor=ratio_or_one(inverse_token_weighted_base_loss, example_base_loss),
    )
    return jax.lax.stop_gradient(bundle)
