"""Vocabulary-sized work in chunks against the plain form: memory (exact) and time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import Row, measure
from surprisal_jax import losses

Array = jax.Array

POSITIONS, WIDTH, VOCABULARY = 2048, 256, 32768
JSD_POSITIONS, JSD_WIDTH, JSD_VOCABULARY, LATENTS = 256, 128, 16384, 4


def nll_inputs() -> tuple[Array, Array, Array, Array, Array]:
    """Hidden states, unembedding, tokens, mask, and weights that differ from token to token."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (POSITIONS + 1, WIDTH))
    unembedding = jax.random.normal(keys[1], (WIDTH, VOCABULARY)) / WIDTH**0.5
    tokens = jax.random.randint(keys[2], (POSITIONS + 1,), 0, VOCABULARY)
    return hidden, unembedding, tokens, jnp.ones(POSITIONS + 1, bool), jax.random.uniform(keys[3], (POSITIONS,))


def plain_nll(hidden: Array, unembedding: Array, tokens: Array, mask: Array) -> Array:
    logits = jnp.einsum("td,dv->tv", hidden, unembedding, precision=jax.lax.Precision.HIGHEST)
    return losses.masked_token_nll_per_position(logits, tokens, mask)


def chunked_nll(chunk_size: int) -> Callable[..., Array]:
    return partial(losses.masked_token_nll_from_hidden, chunk_size=chunk_size)


def nll_program(nll: Callable[..., Array]) -> Any:
    """Value and gradient of a weighted sum of the NLL."""

    def weighted(hidden: Array, unembedding: Array, tokens: Array, mask: Array, weights: Array) -> Array:
        return jnp.sum(weights * nll(hidden, unembedding, tokens, mask))

    return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1)))


def jsd_inputs(latents: int = LATENTS) -> tuple[Array, Array, Array, Array]:
    keys = jax.random.split(jax.random.key(1), 3)
    hidden = jax.random.normal(keys[0], (latents, JSD_POSITIONS + 1, JSD_WIDTH))
    unembedding = jax.random.normal(keys[1], (JSD_WIDTH, JSD_VOCABULARY)) / JSD_WIDTH**0.5
    weights = jax.random.uniform(keys[2], (JSD_POSITIONS,))
    return hidden, unembedding, jnp.ones(JSD_POSITIONS + 1, bool), weights / jnp.sum(weights)


def plain_jsd(hidden: Array, unembedding: Array, mask: Array, weights: Array) -> Array:
    """The full form in log space: `mean_k KL(p_k || m)` with all log-probabilities at once."""
    logits = jnp.einsum("ktd,dv->ktv", hidden, unembedding, precision=jax.lax.Precision.HIGHEST)
    log_p = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    log_m = jax.nn.logsumexp(log_p, axis=0) - jnp.log(log_p.shape[0])
    divergence = jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_m[None]), axis=-1), axis=0)
    return jnp.sum(jnp.where(mask[1:], weights * divergence, 0.0))


def jsd_program(divergence: Callable[..., Array]) -> Any:
    return jax.jit(jax.value_and_grad(divergence, argnums=(0, 1)))


def temporary(program: Any, inputs: tuple[Array, ...]) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    return int(program.lower(*inputs).compile().memory_analysis().temp_size_in_bytes)


def rows(rounds: int = 20) -> list[Row]:
    inputs = nll_inputs()
    forms = {"plain": plain_nll, **{f"chunk {size}": chunked_nll(size) for size in (256, 64)}}
    programs = {name: nll_program(form) for name, form in forms.items()}
    memory = {name: temporary(program, inputs) for name, program in programs.items()}
    times = measure({name: partial(program, *inputs) for name, program in programs.items()}, rounds)
    shape = f"{POSITIONS} positions, D {WIDTH}, V {VOCABULARY}"
    result = [
        Row(f"NLL, {shape}: memory, chunk 256 to plain", memory["chunk 256"] / memory["plain"], at_most=1 / 7.5),
        Row(f"NLL, {shape}: memory, chunk 64 to plain", memory["chunk 64"] / memory["plain"], at_most=1 / 12),
        Row(f"NLL, {shape}: time, chunk 256 to plain", *times.ratio("chunk 256", "plain"), at_most=1.35),
        Row(f"NLL, {shape}: time, chunk 64 to plain", *times.ratio("chunk 64", "plain")),
    ]
    inputs_jsd = jsd_inputs()
    programs = {
        "plain": jsd_program(plain_jsd),
        "chunk 32": jsd_program(partial(losses.inter_latent_divergence_from_hidden, chunk_size=32)),
    }
    memory = {name: temporary(program, inputs_jsd) for name, program in programs.items()}
    times = measure({name: partial(program, *inputs_jsd) for name, program in programs.items()}, rounds)
    shape = f"{JSD_POSITIONS} positions, D {JSD_WIDTH}, V {JSD_VOCABULARY}, K {LATENTS}"
    result += [
        Row(
            f"JSD, {shape}: memory, chunk 32 to full log-space form",
            memory["chunk 32"] / memory["plain"],
            at_most=1 / 8,
        ),
        Row(f"JSD, {shape}: time, chunk 32 to full form", *times.ratio("chunk 32", "plain"), at_most=0.9),
    ]
    return result
