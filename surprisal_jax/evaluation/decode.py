"""Decoding, greedy or sampled: one prefix, K branches with a key-value cache, one compiled loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from surprisal_jax.models.latent import router_log_probs
from surprisal_jax.models.transformer import Decoder

Array = jax.Array


def decode_branches(
    decoder: nnx.GraphDef[Decoder],
    params: Any,
    prefix_tokens: Array,
    prefix_lengths: Array,
    *,
    latent_ids: Sequence[int],
    forced_ids: Sequence[int],
    eos_id: int,
    max_new_tokens: int,
    suffix_start: Array | None = None,
    sampling_keys: Array | None = None,
) -> tuple[Array, Array]:
    """A continuation of each x under each latent: of tokens that are the most likely ones, or drawn.

    Args:
      decoder, params: the generator, split.
      prefix_tokens: `[B, P]`, right-padded `<bos> <x> x </x> <z>`.
      prefix_lengths: `[B]`.
      latent_ids: K token ids; branch k starts with the k-th.
      forced_ids: what follows the latent token: `</z> <y>`.
      eos_id: decoding of a branch ends with it; the loop ends when every branch has, or after `max_new_tokens`.
      suffix_start: `[B]`, the rotary position of a branch's first token; None: the true end of the prefix.
      sampling_keys: `[B]`, draw every token from the model's distribution, one key an example, so that a sample does
        not depend on the batch it is in; None: greedy.

    Returns:
      `(tokens [B, K, max_new_tokens], log_router [B, K])`; after its first `eos_id` a branch holds `eos_id`.
    """
    model = nnx.merge(decoder, params)
    prefix = model.prefix(prefix_tokens, prefix_lengths, suffix_start)
    batch, branches, head = prefix_tokens.shape[0], len(latent_ids), 1 + len(forced_ids)
    length = head + max_new_tokens
    latents = jnp.asarray(latent_ids, prefix_tokens.dtype)
    start = jnp.concatenate(
        [
            jnp.broadcast_to(latents[None, :, None], (batch, branches, 1)),
            jnp.broadcast_to(jnp.asarray(forced_ids, prefix_tokens.dtype), (batch, branches, len(forced_ids))),
            jnp.full((batch, branches, max_new_tokens), eos_id, prefix_tokens.dtype),
        ],
        axis=-1,
    )

    def unfinished(carry: tuple[Array, Array, Array, Any]) -> Array:
        index, _, ended, _ = carry
        return (index < length - 1) & ~jnp.all(ended)

    def advance(carry: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        index, tokens, ended, caches = carry
        current = jax.lax.dynamic_index_in_dim(tokens, index, axis=-1, keepdims=False)
        hidden, caches = model.decode_step(current, index, prefix, caches)
        logits = jnp.einsum(
            "bkd,dv->bkv", hidden.astype(jnp.float32), model.unembedding, precision=jax.lax.Precision.HIGHEST
        )
        if sampling_keys is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(sampling_keys, index)
            logits += jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
        planned = jax.lax.dynamic_index_in_dim(tokens, index + 1, axis=-1, keepdims=False)
        chosen = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        following = jnp.where((index + 1 < head) | ended, planned, chosen)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, following, index + 1, axis=-1)
        return index + 1, tokens, ended | ((index + 1 >= head) & (following == eos_id)), caches

    carry = (
        jnp.zeros((), jnp.int32),
        start,
        jnp.zeros((batch, branches), bool),
        model.empty_cache(batch, branches, length),
    )
    _, tokens, _, _ = jax.lax.while_loop(unfinished, advance, carry)
    return tokens[..., head:], router_log_probs(model, prefix, latent_ids)
