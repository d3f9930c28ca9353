"""Value and gradient of a mean over a batch that lies on many devices and is computed in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from surprisal_jax import losses
from surprisal_jax.losses import AxisName

Array = jax.Array
Batch = Mapping[str, Array]

#: `(params, batch, *others, axis_name=) -> (mean over the counted examples of the global batch, means beside it)`.
Loss = Callable[..., tuple[Array, Any]]


class Step(Protocol):
    """What a training step is made of: a loss, the examples it is a mean over, and what becomes of the gradient."""

    @property
    def micro_batches(self) -> int: ...

    @property
    def loss(self) -> Loss: ...

    def counted(self, batch: Batch) -> Array: ...

    def update(self, state: Any, value: Any, gradients: Any) -> tuple[Any, Any]: ...


def value_and_gradient(
    step: Step, params: Any, batch: Batch, others: tuple[Any, ...], axis_name: AxisName = None
) -> tuple[tuple[Array, Any], Any]:
    """`jax.value_and_grad` of `step.loss`, one micro-batch after another.

    The mean over the batch is the sum of the micro-batches' means, each times its share of the counted examples: with
    padded rows the micro-batches count differently. What is no mean over examples (`router_marginal_kl`) is averaged by
    the same shares.

    Returns:
      `((value, aux), gradients)`, float32. Over devices the value is global, and the gradient is what this device's
      rows add to it, times the number of devices: its mean over them is the gradient.
    """
    differentiate = jax.value_and_grad(step.loss, has_aux=True)
    if step.micro_batches == 1:
        return differentiate(params, batch, *others, axis_name=axis_name)

    def parts(x: Array) -> Array:
        return x.reshape(step.micro_batches, -1, *x.shape[1:])

    counts = losses.all_sum(jnp.sum(parts(step.counted(batch)).astype(jnp.float32), axis=-1), axis_name)
    shares = counts / jnp.maximum(jnp.sum(counts), 1.0)

    def add(total: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
        micro_batch, share = part
        result = differentiate(params, micro_batch, *others, axis_name=axis_name)
        return jax.tree.map(lambda sum_, x: sum_ + share * x, total, result), None

    split = jax.tree.map(parts, dict(batch))
    first = jax.tree.map(lambda x: x[0], split)
    shapes = jax.eval_shape(lambda: differentiate(params, first, *others, axis_name=axis_name))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    result: tuple[tuple[Array, Any], Any]
    result, _ = jax.lax.scan(add, zeros, (split, shares))
    return result


def train_step(
    step: Step, state: Any, batch: Batch, others: tuple[Any, ...], axis_name: AxisName = None
) -> tuple[Any, Any]:
    """One update, on one device or on each device of a mapped axis."""
    value, gradients = value_and_gradient(step, state.params, batch, others, axis_name)
    if axis_name is not None:
        gradients = jax.lax.pmean(gradients, axis_name)
    return step.update(state, value, gradients)
