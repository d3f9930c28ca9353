"""One decoder family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qkv bias, query/key norms and tied embeddings are options, so that the small models trained here and Llama, Qwen2/2.5/3
and SmolLM shapes are the same code. Arrays have a branch axis N beside the batch: the prefix of an example has one
branch, its K suffixes have K, and every branch attends the one prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from surprisal_jax.config import ModelConfig

Array = jax.Array


class LayerCache(NamedTuple):
    """Keys and values of one layer: `[B, S, H, D]` where all branches share them, `[B, N, S, H, D]` where each has its
    own."""

    keys: Array
    values: Array


class Prefix(NamedTuple):
    """A computed prefix: hidden states `[B, P, D]`, the layers' caches, true lengths `[B]` (positions beyond are never
    attended), and the rotary position `[B]` of the first token of a suffix."""

    hidden: Array
    caches: tuple[LayerCache, ...]
    lengths: Array
    suffix_start: Array


class Attention(nnx.Module):
    """Grouped-query attention over the branch's own keys and, before them, over a prefix shared by the branches."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.compute_dtype)
        self.config = config
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(inputs: int, outputs: int, use_bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=use_bias, dtype=dtype, rngs=rngs)

        self.query = linear(config.width, query_width, config.qkv_bias)
        self.key = linear(config.width, kv_width, config.qkv_bias)
        self.value = linear(config.width, kv_width, config.qkv_bias)
        self.output = linear(query_width, config.width, False)
        if config.qk_norm:
            self.query_norm = nnx.RMSNorm(config.head_dim, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
            self.key_norm = nnx.RMSNorm(config.head_dim, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)

    def project(self, x: Array, positions: Array) -> tuple[Array, LayerCache]:
        """Rotated queries `[B, N, T, Hq, D]` and the cache of these positions `[B, N, T, Hkv, D]`."""
        config = self.config
        query = self.query(x).reshape(*x.shape[:-1], config.num_heads, config.head_dim)
        key = self.key(x).reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
        value = self.value(x).reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, positions, config.rope_theta), LayerCache(rotate(key, positions, config.rope_theta), value)

    def attend(self, query: Array, segments: Sequence[tuple[LayerCache, Array]]) -> Array:
        """One softmax over all segments; a segment is a cache and a mask that broadcasts to `[B, N, Hkv, G, T, S]`."""
        config = self.config
        groups = config.num_heads // config.num_kv_heads
        query = query.reshape(*query.shape[:-2], config.num_kv_heads, groups, config.head_dim) * config.head_dim**-0.5
        scores = []
        for cache, mask in segments:
            keys = "bshd" if cache.keys.ndim == 4 else "bnshd"
            score = jnp.einsum(f"bnthgd,{keys}->bnhgts", query, cache.keys, preferred_element_type=jnp.float32)
            scores.append(jnp.where(mask, score, jnp.finfo(jnp.float32).min))
        # Softmax in float32, whatever the compute dtype.
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(query.dtype)
        mixed, start = jnp.zeros((), query.dtype), 0
        for cache, _ in segments:
            values = "bshd" if cache.values.ndim == 4 else "bnshd"
            length = cache.values.shape[-3]
            part = weights[..., start : start + length]
            mixed = mixed + jnp.einsum(f"bnhgts,{values}->bnthgd", part, cache.values)
            start += length
        return self.output(mixed.reshape(*mixed.shape[:3], -1))


class Block(nnx.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.compute_dtype)
        self.attention_norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.gate = nnx.Linear(config.width, config.mlp_width, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(config.width, config.mlp_width, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, config.width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Array, positions: Array, prefix: Sequence[tuple[LayerCache, Array]], causal: Array
    ) -> tuple[Array, LayerCache]:
        """`[B, N, T, D]` after this layer and the cache of these positions, which attend the prefix's and their own."""
        query, own = self.attention.project(self.attention_norm(x), positions)
        x = x + self.attention.attend(query, [*prefix, (own, causal)])
        return self.feed_forward(x), own

    def feed_forward(self, x: Array) -> Array:
        y = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """A causal language model that ends at its final hidden states; logits are `hidden @ unembedding`."""

    def __init__(
        self, config: ModelConfig, vocabulary_size: int, *, rematerialize: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        self.rematerialize = rematerialize
        scale = config.width**-0.5
        self.embedding = nnx.Param(scale * jax.random.normal(rngs.params(), (vocabulary_size, config.width)))
        if not config.tied_embeddings:
            self.output_embedding = nnx.Param(scale * jax.random.normal(rngs.params(), (config.width, vocabulary_size)))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(
            config.width, epsilon=config.norm_epsilon, dtype=jnp.dtype(config.compute_dtype), rngs=rngs
        )

    @property
    def unembedding(self) -> Array:
        """`[D, V]`, float32."""
        return self.embedding[...].T if self.config.tied_embeddings else self.output_embedding[...]

    def __call__(self, tokens: Array) -> Array:
        """Hidden states `[B, T, D]` of right-padded sequences `[B, T]`: causality alone keeps padding out of real
        positions."""
        return self._forward(tokens[:, None, :], jnp.arange(tokens.shape[-1])[None, None, :])[0][:, 0]

    def prefix(self, tokens: Array, lengths: Array, suffix_start: Array | None = None) -> Prefix:
        """The shared prefix `[B, P]`, right-padded, with true lengths `[B]`, where suffixes start unless told."""
        hidden, caches = self._forward(tokens[:, None, :], jnp.arange(tokens.shape[-1])[None, None, :])
        shared = tuple(LayerCache(cache.keys[:, 0], cache.values[:, 0]) for cache in caches)
        return Prefix(hidden[:, 0], shared, lengths, lengths if suffix_start is None else suffix_start)

    def suffix(self, tokens: Array, prefix: Prefix) -> Array:
        """Hidden states `[B, N, U, D]` of N branches `[B, N, U]`, whose positions count from `suffix_start`."""
        return self._forward(tokens, self._suffix_positions(tokens.shape[-1], prefix), prefix)[0]

    def empty_cache(self, batch: int, branches: int, length: int) -> tuple[LayerCache, ...]:
        """Zeroed caches `[B, N, U, H, D]` for `decode_step`."""
        config = self.config
        shape = (batch, branches, length, config.num_kv_heads, config.head_dim)
        zeros = jnp.zeros(shape, jnp.dtype(config.compute_dtype))
        return tuple(LayerCache(zeros, zeros) for _ in range(config.num_layers))

    def decode_step(
        self, tokens: Array, index: Array, prefix: Prefix, caches: tuple[LayerCache, ...]
    ) -> tuple[Array, tuple[LayerCache, ...]]:
        """Hidden states `[B, N, D]` of the suffix tokens `[B, N]` at suffix position `index`, and the caches with them
        written in."""
        positions = self._suffix_positions(1, prefix) + index
        x = self._embed(tokens[..., None])
        length = caches[0].keys.shape[-3]
        seen = (jnp.arange(length) <= index)[None, None, None, None, None, :]
        updated = []
        for block, cache in zip(self.blocks, caches, strict=True):
            query, new = block.attention.project(block.attention_norm(x), positions)
            own = LayerCache(
                *(
                    jax.lax.dynamic_update_slice_in_dim(old, entry, index, axis=2)
                    for old, entry in zip(cache, new, strict=True)
                )
            )
            updated.append(own)
            x = x + block.attention.attend(query, [*self._prefix_segments(prefix, len(updated) - 1), (own, seen)])
            x = block.feed_forward(x)
        return self.norm(x)[..., 0, :], tuple(updated)

    def _forward(
        self, tokens: Array, positions: Array, prefix: Prefix | None = None
    ) -> tuple[Array, tuple[LayerCache, ...]]:
        x = self._embed(tokens)
        length = tokens.shape[-1]
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None, None, None]
        caches = []
        for layer, block in enumerate(self.blocks):
            # Kept for the backward pass: the layer's input and, as suffixes attend them, a prefix's keys and values.
            compute = jax.checkpoint(block.__call__) if self.rematerialize else block
            segments = self._prefix_segments(prefix, layer) if prefix is not None else []
            x, own = compute(x, positions, segments, causal)
            caches.append(own)
        return self.norm(x), tuple(caches)

    def _embed(self, tokens: Array) -> Array:
        return self.embedding[...][tokens].astype(self.config.compute_dtype)

    @staticmethod
    def _suffix_positions(length: int, prefix: Prefix) -> Array:
        return prefix.suffix_start[:, None, None] + jnp.arange(length)[None, None, :]

    @staticmethod
    def _prefix_segments(prefix: Prefix, layer: int) -> list[tuple[LayerCache, Array]]:
        within = jnp.arange(prefix.hidden.shape[1])[None, :] < prefix.lengths[:, None]
        return [(prefix.caches[layer], within[:, None, None, None, None, :])]


def new_module(build: Callable[[nnx.Rngs], nnx.Module], key: Array) -> tuple[nnx.GraphDef[Any], dict[str, Any]]:
    """A module's static definition and its initial parameters as plain nested dictionaries.

    `nnx.merge` puts them together again. All parameters are drawn by one compiled program rather than one a shape.
    """
    definitions = []

    def draw(key: Array) -> dict[str, Any]:
        definition, state = nnx.split(build(nnx.Rngs(params=key)), nnx.Param)
        definitions.append(definition)
        parameters: dict[str, Any] = nnx.to_pure_dict(state)
        return parameters

    parameters = jax.jit(draw)(key)
    return definitions[0], parameters


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary positions on `[B, N, T, H, D]`, halves rotated against each other; angles in float32 whatever the dtype of
    x."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
