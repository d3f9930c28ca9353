"""All terms of the objective, the posterior over latents, and the dot product with the coefficients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from surprisal_jax.losses.divergence import categorical_kl
from surprisal_jax.losses.reconstruction import ReconstructionTerms
from surprisal_jax.losses.reductions import AxisName, all_sum, masked_mean_over_examples, select

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Shaped


class ObjectiveTerms(NamedTuple):
    """The terms of `E_q[R(z)] + beta KL(q || router) + ...`, at their natural positive values, or their coefficients.

    A term that is not in the program is None, in the terms and in the coefficients alike.

    Attributes:
      reconstruction: the six terms, averaged over q.
      prior_kl: `KL(q || router)` over the K latents, nats; coefficient beta.
      inter_latent_divergence: nats, at most `ln K`; its coefficient is minus the configured weight.
      posterior_entropy: `H(q)`, nats.
      router_marginal_kl: `KL(mean router over the global batch || uniform)`, nats.
      posterior_fit: `KL(q* || q_xi)`, nats; moves the posterior network alone. With the closed-form posterior, or
        where groups are held to a latent.
    """

    reconstruction: ReconstructionTerms
    prior_kl: Any
    inter_latent_divergence: Any = None
    posterior_entropy: Any = None
    router_marginal_kl: Any = None
    posterior_fit: Any = None


def weighted_total(terms: Any, coefficients: Any) -> Float[Array, "*batch"]:
    """`sum_i coefficients_i * terms_i` over two pytrees of one structure.

    Args:
      terms: leaves of one shape `[...]`.
      coefficients: the same structure, scalar leaves; may be traced. None stands for a term that is absent from both.

    Returns:
      `[...]`, the shape of the leaves of `terms`.

    Raises:
      ValueError or TypeError: the structures differ, as jax finds out.
    """
    products = jax.tree.leaves(jax.tree.map(lambda term, coefficient: coefficient * term, terms, coefficients))
    chex.assert_equal_shape(products)
    total: Float[Array, "*batch"] = products[0]
    for product in products[1:]:
        total = total + product
    return total


def closed_form_log_posterior(
    log_router: Float[Array, "*batch K"],
    reconstruction: Float[Array, "*batch K"],
    beta: float | Float[Array, ""],
    *,
    group_mask: Shaped[Array, "*batch"] | None = None,
) -> Float[Array, "*batch K"]:
    """`log q* = log_softmax(log router - R / beta)`: the minimiser of `E_q[R] + beta KL(q || router)` over all q.

    Args:
      log_router: `[..., K]` log-probabilities.
      reconstruction: `[..., K]` nats, R: the coefficient-weighted total of the six terms under each latent.
      beta: above 0; a scalar, may be traced.
      group_mask: None: every example has a latent of its own. Else `[..., G]`, the leading shape of the arguments, true
        for the examples that count: the last leading axis holds the examples of one group, which share z, so
        `log router - R / beta` is summed over it.

    Returns:
      `[..., K]` float32 under `stop_gradient`; within a group the same for every example.
    """
    chex.assert_equal_shape([log_router, reconstruction])
    evidence = log_router.astype(jnp.float32) - reconstruction.astype(jnp.float32) / beta
    return jax.lax.stop_gradient(amortized_log_posterior(jax.lax.stop_gradient(evidence), group_mask=group_mask))


def amortized_log_posterior(
    logits: Float[Array, "*batch K"], *, group_mask: Shaped[Array, "*batch"] | None = None
) -> Float[Array, "*batch K"]:
    """`log_softmax` of the posterior network's logits, summed over the examples of a group where z belongs to the
    group.

    Args and returns are those of `closed_form_log_posterior`; here the gradient flows to the logits.
    """
    logits = logits.astype(jnp.float32)
    if group_mask is not None:
        chex.assert_equal_shape_prefix([logits, group_mask], group_mask.ndim)
        counted = select(jnp.broadcast_to(group_mask[..., None], logits.shape), logits)
        logits = jnp.broadcast_to(jnp.sum(counted, axis=-2, keepdims=True), logits.shape)
    return jax.nn.log_softmax(logits, axis=-1)


def expectation_under_posterior(terms: Any, log_q: Float[Array, "*batch K"]) -> Any:
    """`E_q[term]` of every leaf `[..., K]`, in float32; the gradient flows to both."""
    return jax.tree.map(lambda leaf: jnp.sum(jnp.exp(log_q) * leaf, axis=-1), terms)


def categorical_entropy(log_q: Float[Array, "*batch K"]) -> Float[Array, "*batch"]:
    """`H(q) = -sum_k q_k log q_k`, nats, with `0 log 0 = 0` in value and gradient."""
    return -jnp.sum(jnp.exp(log_q) * jnp.where(jnp.isneginf(log_q), 0.0, log_q), axis=-1)


def prior_kl(
    log_q: Float[Array, "*batch K"],
    log_router: Float[Array, "*batch K"],
    *,
    group_mask: Shaped[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """`KL(q || router)`, one an example; in a group of n examples the entropy of the shared q counts once, 1/n an
    example.

    Summed over a group this is `sum_i CE(q, router_i) - H(q)`, so that `E_q[R] + beta prior_kl` has
    `closed_form_log_posterior` as its minimiser and the free energy `-beta logsumexp(sum_i (log router_i - R_i /
    beta))` as its minimum, and every router is still fitted to the frequency of z given its own x.

    Args:
      log_q, log_router: `[..., K]`.
      group_mask: as in `closed_form_log_posterior`; None is a group of one.

    Returns:
      `[...]` nats, at least 0 up to rounding (some 1e-7).
    """
    divergence = categorical_kl(log_q, log_router)
    if group_mask is None:
        return divergence
    members = jnp.sum(group_mask.astype(jnp.float32), axis=-1, keepdims=True)
    return divergence + (1.0 - 1.0 / jnp.maximum(members, 1.0)) * categorical_entropy(log_q)


def router_marginal_kl(
    log_router: Float[Array, "*batch K"], example_mask: Shaped[Array, "*batch"], axis_name: AxisName = None
) -> Float[Array, ""]:
    """`KL(mean router || uniform)`, the mean over the counted examples of the global batch; a scalar, nats.

    With gradient accumulation the batch is the micro-batch: the term is not linear in the examples.
    """
    counted = select(jnp.broadcast_to(example_mask[..., None], log_router.shape), jnp.exp(log_router))
    num_latents = log_router.shape[-1]
    total = all_sum(jnp.sum(counted.reshape(-1, num_latents), axis=0), axis_name)
    count = all_sum(jnp.sum(example_mask.astype(jnp.float32)), axis_name)
    mean = jnp.where(count > 0, total / jnp.maximum(count, 1.0), 1.0 / num_latents)
    log_mean = jnp.log(jnp.where(mean > 0, mean, 1.0))
    return jnp.sum(mean * (log_mean + math.log(num_latents)))


def mean_over_examples(terms: Any, example_mask: Shaped[Array, "*batch"], axis_name: AxisName = None) -> Any:
    """Every leaf `[...]` of a pytree averaged over the examples that count, over all devices of `axis_name`."""
    return jax.tree.map(lambda leaf: masked_mean_over_examples(leaf, example_mask, axis_name), terms)
