"""Router, generator and posterior: the latent-variable view of a decoder.

Router and generator are one decoder: the router is its next-token distribution after `<z>` restricted to the latent
tokens, the generator its suffixes `<z_k> </z> <y> y </y> <eos>`. All K latents are enumerated over one prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from surprisal_jax.config import ModelConfig
from surprisal_jax.models.transformer import Decoder, Prefix
from surprisal_jax.sequences import WHOLE_SEQUENCE_OFFSET

Array = jax.Array


class PosteriorNetwork(nnx.Module):
    """`q(z | x, y)`: a decoder of its own over the z-free sequence, its hidden states pooled over the supervised
    tokens, a linear head."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_size: int,
        num_latents: int,
        *,
        rematerialize: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.decoder = Decoder(config, vocabulary_size, rematerialize=rematerialize, rngs=rngs)
        self.head = nnx.Linear(config.width, num_latents, rngs=rngs)

    def __call__(self, tokens: Array, loss_mask: Array) -> Array:
        """Logits `[B, K]`, float32, for z-free sequences `[B, S]`; only the positions of y, `</y>` and `<eos>` are
        pooled."""
        hidden = jnp.where(loss_mask[..., None], self.decoder(tokens).astype(jnp.float32), 0.0)
        count = jnp.maximum(jnp.sum(loss_mask, axis=-1, dtype=jnp.float32), 1.0)
        return self.head(jnp.sum(hidden, axis=-2) / count[:, None])


def suffix_start(prefix_lengths: Array) -> Array:
    """The rotary position of `<z_k>`, `[B]`, such that every token of y stands where it stands in the z-free sequence.

    The generator starts from the reference's weights, whose attention from y to x goes by distance. With the tags
    between them counted, a reference that adds numbers by position starts from scratch (its loss grew tenfold); so the
    tags share the positions of the last tokens before y.
    """
    return prefix_lengths - WHOLE_SEQUENCE_OFFSET


def router_log_probs(decoder: Decoder, prefix: Prefix, latent_ids: Sequence[int]) -> Array:
    """`log p(z | x)`, `[B, K]` float32: the logits after `<z>`, the prefix's last token, over the latent tokens
    alone."""
    last = jnp.take_along_axis(prefix.hidden, (prefix.lengths - 1)[:, None, None], axis=1)[:, 0]
    latent_embeddings = decoder.unembedding[:, jnp.asarray(latent_ids)]
    logits = jnp.einsum("bd,dk->bk", last.astype(jnp.float32), latent_embeddings, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.log_softmax(logits, axis=-1)


def branch_tokens(suffix_tokens: Array, latent_ids: Sequence[int]) -> Array:
    """`[B, K, U]`: the suffix `[B, U]` once a latent, with `<z_k>` in its first place."""
    latents = jnp.asarray(latent_ids, suffix_tokens.dtype)
    batch, length = suffix_tokens.shape
    branches = jnp.broadcast_to(suffix_tokens[:, None, :], (batch, len(latent_ids), length))
    return branches.at[..., 0].set(jnp.broadcast_to(latents[None, :], branches.shape[:2]))


def redraw_latent_embeddings(embedding: Array, latent_ids: Sequence[int], scale: float, key: Array) -> Array:
    """The embedding `[V, D]` with the latent rows drawn anew: normal, `scale` times the standard deviation of the other
    rows.

    The reference never saw the latent tokens, so their rows are its initialisation. Small rows start the latents close
    together, which keeps the first posterior soft.
    """
    redrawn = jnp.asarray(latent_ids)
    spread = jnp.std(jnp.delete(embedding, redrawn, axis=0, assume_unique_indices=True))
    return embedding.at[redrawn].set(scale * spread * jax.random.normal(key, (len(latent_ids), embedding.shape[1])))
