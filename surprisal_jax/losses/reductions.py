"""Sums that cross devices, masked sums and divisions that cannot give NaN: the only place where losses are reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import chex
import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Shaped


#: A mapped axis (`pmap`, `vmap` or `shard_map`), several, or none.
AxisName: TypeAlias = str | tuple[str, ...] | None


def all_sum(x: Shaped[Array, "*dims"], axis_name: AxisName = None) -> Shaped[Array, "*dims"]:
    """`x` summed over the mapped axes (`pmap`, `vmap` or `shard_map`), or `x` itself where there are none.

    Under `jit` over global arrays leave `axis_name` at None: sums over the batch are global there already.
    """
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def select(mask: Shaped[Array, "*dims"], values: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`values` where the mask is true and exactly 0 elsewhere, whatever stands there: a NaN times 0 is still a NaN."""
    return jnp.where(mask.astype(bool), values, jnp.zeros_like(values))


def masked_mean_over_examples(
    values: Float[Array, "*dims"], example_mask: Shaped[Array, "*dims"], axis_name: AxisName = None
) -> Float[Array, ""]:
    """Mean of per-example values over the examples that count; sum and count are both summed over devices first.

    Args:
      values: `[...]`, one value an example; what stands off the mask is not read.
      example_mask: `[...]`, true for the examples that count. With none, the mean and its gradient are 0.
      axis_name: the mapped axis over which the batch is split, if it is.

    Returns:
      A float32 scalar, the same on every device of `axis_name`.
    """
    chex.assert_equal_shape([values, example_mask])
    total = all_sum(jnp.sum(select(example_mask, values.astype(jnp.float32))), axis_name)
    count = all_sum(jnp.sum(example_mask.astype(jnp.float32)), axis_name)
    return total / jnp.maximum(count, 1.0)


def ratio_or_one(numerator: Float[Array, "*dims"], denominator: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`numerator / denominator`, and 1 where the denominator is 0."""
    is_zero: Bool[Array, "*dims"] = denominator == 0
    return jnp.where(is_zero, 1.0, numerator / jnp.where(is_zero, 1.0, denominator))


def floored_divisor(value: Float[Array, "*dims"], divisor_floor: float | Float[Array, ""]) -> Float[Array, "*dims"]:
    """`max(value, divisor_floor)` under `stop_gradient`, in float32: what a reconstruction term is divided by, in
    nats."""
    value = jnp.asarray(value, jnp.float32)
    return jax.lax.stop_gradient(jnp.maximum(value, jnp.asarray(divisor_floor, jnp.float32)))
