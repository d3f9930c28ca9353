"""Per-position negative log-likelihood, from logits and straight from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp

from surprisal_jax.losses.reductions import select

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped


def masked_token_nll_per_position(
    logits: Float[Array, "*batch T V"], tokens: Int[Array, "*batch T"], loss_mask: Shaped[Array, "*batch T"]
) -> Float[Array, "*batch T-1"]:
    """`l_t = -log p(tokens[t + 1] | tokens[..t])` in nats, at the supervised positions.

    The shift by one is made here: position t of the result scores token t + 1 with the logits of position t.

    Args:
      logits: `[..., T, V]`, any float dtype; all arithmetic is in float32 (bfloat16 cross entropy is off by up to 0.07
        nats).
      tokens: `[..., T]` integer ids. Off the mask any value is allowed, -1 and -100 too: it is replaced before it is
        used.
      loss_mask: `[..., T]`, true for the tokens that are targets; `loss_mask[..., 0]` has no position that predicts it.

    Returns:
      `[..., T-1]` float32, never negative, exactly 0 off the mask. Gradients off the mask are exactly 0, also where the
      logits there are NaN.
    """
    chex.assert_equal_shape([tokens, loss_mask])
    chex.assert_equal_shape_prefix([logits, tokens], tokens.ndim)
    targets, mask = tokens[..., 1:], loss_mask[..., 1:].astype(bool)
    return _nll_from_logits(logits[..., :-1, :], targets, mask)


def masked_token_nll_from_hidden(
    hidden: Float[Array, "*batch T D"],
    unembedding: Float[Array, "D V"],
    tokens: Int[Array, "*batch T"],
    loss_mask: Shaped[Array, "*batch T"],
    *,
    chunk_size: int,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
) -> Float[Array, "*batch T-1"]:
    """`masked_token_nll_per_position(hidden @ unembedding, tokens, loss_mask)` with at most `chunk_size` rows of logits
    alive.

    A row is one scored position of one sequence (of one latent). Chunks are recomputed in the backward pass, so nothing
    of size `[..., T, V]` is kept, and every position may carry a cotangent of its own.

    Args:
      hidden: `[..., T, D]` final hidden states, any float dtype.
      unembedding: `[D, V]`.
      tokens, loss_mask: as in `masked_token_nll_per_position`.
      chunk_size: rows of `[V]` logits in memory at once; one chunk where it is at least the number of rows.
      precision: of the logit matmul, whose output is float32 always. A TPU multiplies float32 in bfloat16 passes unless
        told.

    Returns:
      `[..., T-1]` float32 nats, 0 off the mask.

    Raises:
      ValueError: `chunk_size` below 1.
    """
    chex.assert_equal_shape([tokens, loss_mask])
    chex.assert_equal_shape_prefix([hidden, tokens], tokens.ndim)
    chex.assert_rank(unembedding, 2)
    mask = loss_mask[..., 1:].astype(bool)
    # A NaN in a masked row of `hidden` would reach the gradient of the unembedding through the matmul: 0 * NaN.
    rows = select(jnp.broadcast_to(mask[..., None], hidden[..., :-1, :].shape), hidden[..., :-1, :])

    def chunk_nll(
        chunk: tuple[Float[Array, "C D"], Int[Array, " C"], Shaped[Array, " C"]], matrix: Float[Array, "D V"]
    ) -> Float[Array, " C"]:
        chunk_rows, chunk_targets, chunk_mask = chunk
        return _nll_from_logits(logits_from_hidden(chunk_rows, matrix, precision), chunk_targets, chunk_mask)

    flat = (rows.reshape(-1, rows.shape[-1]), tokens[..., 1:].reshape(-1), mask.reshape(-1))
    return map_chunks(chunk_nll, flat, unembedding, chunk_size).reshape(mask.shape)


def score_reference(
    apply_fn: Callable[[Any, Array], Array],
    params: Any,
    tokens: Int[Array, "*batch T"],
    loss_mask: Shaped[Array, "*batch T"],
) -> Float[Array, "*batch T-1"]:
    """`b_t`, the frozen reference's per-token NLL on the z-free sequence: nats, float32, no gradient.

    Args:
      apply_fn: `(params, tokens [..., T]) -> logits [..., T, V]`, deterministic, with the logit matmul at precision
        HIGHEST.
      params: the reference's parameters; their gradient through this function is exactly 0.
      tokens: `[..., T]` z-free sequences.
      loss_mask: `[..., T]`.

    Returns:
      `base_token_nll [..., T-1]` under `stop_gradient`, 0 off the mask.
    """
    # Stopping at the parameters as well keeps the reference's activations out of the backward pass.
    logits = apply_fn(jax.lax.stop_gradient(params), tokens)
    return jax.lax.stop_gradient(masked_token_nll_per_position(logits, tokens, loss_mask))


def predictive_entropy(
    apply_fn: Callable[[Any, Array], Array],
    params: Any,
    tokens: Int[Array, "*batch T"],
    loss_mask: Shaped[Array, "*batch T"],
) -> Float[Array, "*batch T-1"]:
    """`H_t = -sum_v p(v | x, y_<t) log p(v | x, y_<t)`: how open the frozen reference finds the next token, whatever it
    is.

    A source of token weights in place of the surprisal `b_t`, whose mean it is under the reference. Nats, float32, no
    gradient.

    Args and returns are those of `score_reference`.
    """
    chex.assert_equal_shape([tokens, loss_mask])
    logits = apply_fn(jax.lax.stop_gradient(params), tokens)[..., :-1, :].astype(jnp.float32)
    mask = loss_mask[..., 1:].astype(bool)
    chex.assert_equal_shape_prefix([logits, mask], mask.ndim)
    log_p = jax.nn.log_softmax(select(jnp.broadcast_to(mask[..., None], logits.shape), logits), axis=-1)
    # A token of probability 0 adds 0: -inf logits would make 0 * -inf.
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isneginf(log_p), 0.0, log_p), axis=-1)
    return jax.lax.stop_gradient(select(mask, jnp.maximum(entropy, 0.0)))


def marginal_token_nll(
    token_nll: Float[Array, "*batch K T-1"],
    log_router: Float[Array, "*batch K"],
    mask: Shaped[Array, "*batch T-1"],
) -> Float[Array, "*batch T-1"]:
    """`-log sum_z p(z | x, y_<t) p(y_t | x, z, y_<t)`: the surprisal of router and generator together, z unknown.

    With `c_t(z) = log p(z | x) - sum_{s <= t} l_s(z)` and `p(z | x, y_<t) = softmax_z c_{t-1}`. Over t it sums to
    `-log p(y | x)`. The model that is being trained gives a source of token weights in place of the frozen reference.

    Args:
      token_nll: `[..., K, T-1]` nats, the generator under each latent.
      log_router: `[..., K]` log-probabilities.
      mask: `[..., T-1]`, without a latent axis; what stands off it is not read.

    Returns:
      `[..., T-1]` float32 nats, 0 off the mask, with the gradient to both arguments.
    """
    chex.assert_equal_shape_prefix([token_nll, log_router], log_router.ndim)
    chex.assert_equal_shape([token_nll[..., 0, :], mask])
    on_mask = jnp.broadcast_to(mask[..., None, :], token_nll.shape)
    token_nll = select(on_mask, token_nll.astype(jnp.float32))
    log_router = log_router[..., None].astype(jnp.float32)
    before = jnp.pad(jnp.cumsum(token_nll, axis=-1)[..., :-1], [(0, 0)] * (token_nll.ndim - 1) + [(1, 0)])
    log_posterior = jax.nn.log_softmax(log_router - before, axis=-2)
    return select(mask, jnp.maximum(-jax.nn.logsumexp(log_posterior - token_nll, axis=-2), 0.0))


def logits_from_hidden(
    hidden: Float[Array, "*batch D"], unembedding: Float[Array, "D V"], precision: jax.lax.PrecisionLike
) -> Float[Array, "*batch V"]:
    """The logit matmul: float32 in and out, at an explicit precision, whatever the dtype of the hidden states.

    With bfloat16 operands the gradient of the unembedding would be rounded to bfloat16 once a chunk. On a TPU the
    precision alone decides how many bfloat16 passes a float32 product takes, so DEFAULT costs the same.
    """
    return jnp.einsum(
        "...d,dv->...v",
        hidden.astype(jnp.float32),
        unembedding.astype(jnp.float32),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def map_chunks(function: Callable[..., Array], rows: Any, shared: Array, chunk_size: int) -> Array:
    """`function(rows, shared)` over chunks of at most `chunk_size` rows, recomputed in the backward pass.

    Args:
      function: `(rows, shared) -> [C, ...]`, independent row by row.
      rows: a pytree of arrays `[N, ...]`, split into chunks.
      shared: an array that every chunk reads. It is passed on in float32, in which its cotangents are summed over the
        chunks: hundreds of bfloat16 additions would be off by percents.
      chunk_size: the most rows at once. The last chunk is padded with zeros, which `function` must bear.

    Returns:
      `[N, ...]`.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected at least 1")
    count = jax.tree.leaves(rows)[0].shape[0]
    checkpointed: Callable[..., Array] = jax.checkpoint(function, prevent_cse=False)
    shared = shared.astype(jnp.float32)
    if count <= chunk_size:
        return checkpointed(rows, shared)
    num_chunks = -(-count // chunk_size)
    padding = num_chunks * chunk_size - count

    def to_chunks(x: Array) -> Array:
        padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(num_chunks, chunk_size, *x.shape[1:])

    chunks = jax.tree.map(to_chunks, rows)
    _, results = jax.lax.scan(lambda carry, chunk: (carry, checkpointed(chunk, shared)), None, chunks)
    return results.reshape(num_chunks * chunk_size, *results.shape[2:])[:count]


def _nll_from_logits(
    logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"], mask: Shaped[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """`-log_softmax(l)_y`, as `log1p(sum_{v != y} exp(l_v - l_y))` where the target attains the maximum.

    The second form keeps the relative precision of a small NLL and of its gradient. Where the target is not the
    maximum, the distance `max l - l_y` and the log of a sum of at least 1 are added, and nothing cancels.
    """
    logits = select(jnp.broadcast_to(mask[..., None], logits.shape), logits.astype(jnp.float32))
    targets = jnp.where(mask, targets, 0)[..., None]
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1, keepdims=True)
    target_is_top = jax.lax.stop_gradient(target_logit) >= maximum
    pivot = jnp.where(target_is_top, target_logit, maximum)
    total = jnp.sum(jnp.where(is_target & target_is_top, 0.0, jnp.exp(logits - pivot)), axis=-1, keepdims=True)
    # Both branches are guarded on their input: log(0) of the one not taken would make a NaN gradient.
    when_top = jnp.log1p(jnp.where(target_is_top, total, 0.0))
    otherwise = pivot - target_logit + jnp.log(jnp.where(target_is_top, 1.0, total))
    return select(mask, jnp.squeeze(jnp.where(target_is_top, when_top, otherwise), axis=-1))
