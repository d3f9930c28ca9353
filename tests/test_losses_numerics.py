"""Values where float32, masks, labels and shapes go wrong, against float64 loops or a number worked out by hand."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from surprisal_jax.losses import (
    ObjectiveTerms,
    ReconstructionTerms,
    TokenWeighting,
    align_to_conditioned,
    all_sum,
    categorical_kl,
    closed_form_log_posterior,
    compute_token_weighting,
    inter_latent_divergence,
    inter_latent_divergence_from_hidden,
    masked_mean_over_examples,
    masked_token_nll_from_hidden,
    masked_token_nll_per_position,
    reconstruction_terms,
    score_reference,
    surprisal_share_weights,
    token_weighted_masked_nll_per_example,
    weighted_total,
)

TERMS = (
    "raw",
    "baseline_normalized",
    "example_normalized",
    "token_weighted",
    "normalized_token_weighted",
    "normalized_inverse_token_weighted",
)
LEAVES = (
    "token_weights",
    "inverse_token_weights",
    "aligned_base_token_nll",
    "example_base_loss",
    "token_weighted_base_loss",
    "inverse_token_weighted_base_loss",
    "token_concentration_factor",
    "inverse_token_base_scale_factor",
)
POISONS = [float("nan"), float("inf"), float("-inf")]
POISON_IDS = ["nan", "inf", "minus_inf"]


def floats(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float64).astype(np.float32))


def bools(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, bool))


def term_names(values: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}_reconstruction_loss": values[name] for name in TERMS}


# compiled once a shape and shared by the tests: eager calls would compile every operation by itself
compiled_nll = jax.jit(masked_token_nll_per_position)
compiled_nll_from_hidden = jax.jit(masked_token_nll_from_hidden, static_argnames=("chunk_size", "precision"))
compiled_weights = jax.jit(surprisal_share_weights)
compiled_weighting = jax.jit(compute_token_weighting, static_argnames="inverse_nll_floor")
compiled_alignment = jax.jit(align_to_conditioned)
compiled_mean = jax.jit(token_weighted_masked_nll_per_example)
compiled_kl = jax.jit(categorical_kl)
compiled_divergence = jax.jit(inter_latent_divergence)
compiled_divergence_from_hidden = jax.jit(inter_latent_divergence_from_hidden, static_argnames="chunk_size")
compiled_posterior = jax.jit(closed_form_log_posterior)


def nll_from_logits(logits: jax.Array, tokens: Any, loss_mask: Any) -> np.ndarray:
    return np.asarray(compiled_nll(logits, jnp.asarray(tokens), bools(loss_mask)))


def weighting_of(b: Any, mask: Any, alpha: float, offset: Any = 0, **keywords: float) -> TokenWeighting:
    """The bundle where the conditioned sequence is the z-free one, moved by `offset`."""
    b, mask = floats(b), bools(mask)
    offsets = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), b.shape[:-1])
    return compiled_weighting(b, mask, mask, offsets, floats(alpha), **keywords)


def nll_of_row(logits: Any, target: int) -> np.ndarray:
    """One scored position."""
    row = jnp.asarray(logits)
    return nll_from_logits(jnp.stack([row, row]), [0, target], [0, 1])


# shift, labels, dtype


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_position_t_scores_token_t_plus_1(source: str) -> None:
    """Four tokens have three targets; a logit of ln 9 against 9 zeros has probability 1/2."""
    tokens = jnp.asarray([0, 1, 2, 3])
    # position 0 prefers token 1, position 1 token 2, position 2 token 3; position 3 has no target
    logits = np.zeros((4, 10), np.float32)
    logits[[0, 1, 2, 3], [1, 2, 3, 4]] = math.log(9)
    if source == "logits":
        nll = compiled_nll(jnp.asarray(logits), tokens, bools([1, 1, 1, 1]))
    else:
        nll = compiled_nll_from_hidden(jnp.asarray(logits), jnp.eye(10), tokens, bools([1, 1, 1, 1]), chunk_size=2)
    assert nll.shape == (3,) and nll.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(nll), [math.log(2)] * 3, rtol=1e-6)


def test_the_mask_is_cut_like_the_targets() -> None:
    """tokens [10, 11, 12, 13] with mask [0, 0, 1, 0]: only 12 is scored, at position 1."""
    logits = np.zeros((4, 20), np.float32)
    logits[1, 12] = 3.0
    logits[2, 13] = 5.0
    nll = nll_from_logits(jnp.asarray(logits), [10, 11, 12, 13], [0, 0, 1, 0])
    np.testing.assert_allclose(nll, [0, math.log(math.exp(3) + 19) - 3, 0], rtol=1e-6)


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_labels_off_the_mask_do_not_matter(source: str) -> None:
    rng = np.random.default_rng(0)
    hidden, unembedding = floats(rng.normal(size=(2, 4, 3))), floats(rng.normal(size=(3, 7)))
    tokens = np.array([[0, 1, 2, 6], [3, 4, 5, 0]])
    loss_mask = np.array([[0, 1, 0, 1], [0, 0, 1, 0]], bool)

    def loss(hidden: jax.Array, unembedding: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        if source == "hidden":
            nll = masked_token_nll_from_hidden(hidden, unembedding, tokens, jnp.asarray(loss_mask), chunk_size=4)
        else:
            logits = jnp.einsum("btd,dv->btv", hidden, unembedding, precision="highest")
            nll = masked_token_nll_per_position(logits, tokens, jnp.asarray(loss_mask))
        return jnp.sum(nll), nll

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    clean = step(hidden, unembedding, jnp.asarray(tokens, jnp.int32))
    for label in (-1, -100, 7, 10**6, np.iinfo(np.int32).min, np.iinfo(np.int32).max):
        dirty = step(hidden, unembedding, jnp.asarray(np.where(loss_mask, tokens, label), jnp.int32))
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
        assert np.all(np.asarray(dirty[1])[~loss_mask[:, 1:]] == 0)
        assert np.all(np.asarray(dirty[1])[loss_mask[:, 1:]] > 0)


def test_bfloat16_logits_are_read_in_float32() -> None:
    """Cross entropy computed in bfloat16 gives 4.71875 here."""
    key = jax.random.key(42)
    logits = jax.random.uniform(key, (8, 100), jnp.bfloat16)
    labels = jax.random.randint(key, (8,), 0, 100)
    tokens = jnp.stack([jnp.zeros_like(labels), labels], axis=-1)
    found = compiled_nll(jnp.stack([logits, logits], axis=1), tokens, jnp.ones((8, 2), bool))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(float(found[0, 0]), 4.7054095, rtol=2e-7)
    wide = np.asarray(logits).astype(np.float64)
    expected = [reference.nll_of_logits(wide[row], int(labels[row])) for row in range(8)]
    np.testing.assert_allclose(np.asarray(found)[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_half_precision_hidden_states_give_float32_losses(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2, 5, 16)), dtype)
    unembedding = jnp.asarray(rng.normal(size=(16, 11)), dtype)
    tokens, loss_mask = jnp.asarray(rng.integers(0, 11, (2, 5))), bools([[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]])
    nll = compiled_nll_from_hidden(hidden, unembedding, tokens, loss_mask, chunk_size=3)
    assert nll.dtype == jnp.float32
    logits = np.asarray(hidden).astype(np.float64) @ np.asarray(unembedding).astype(np.float64)
    expected = reference.loop_over_leading(reference.token_nll_per_position, (2, 1, 1), logits, tokens, loss_mask)
    np.testing.assert_allclose(np.asarray(nll), expected, rtol=1e-5, atol=1e-6)

    divergence = compiled_divergence_from_hidden(
        hidden, unembedding, loss_mask[0], jnp.asarray([0.1, 0.2, 0.3, 0.4], dtype), chunk_size=3
    )
    assert divergence.dtype == jnp.float32
    weights = np.asarray(jnp.asarray([0.1, 0.2, 0.3, 0.4], dtype)).astype(np.float64)
    np.testing.assert_allclose(
        float(divergence), reference.latent_divergence(logits, loss_mask[0].tolist(), weights), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_leaf_of_the_bundle_is_float32(dtype: Any) -> None:
    b = jnp.asarray([[0.5, 1.5, 3.0], [0.25, 2.0, 0.0]], dtype)
    mask, offsets = bools([[1, 1, 1], [1, 1, 0]]), jnp.zeros((2,), jnp.int32)
    weighting = compiled_weighting(b, mask, mask, offsets, 1.0)
    assert len(jax.tree.leaves(weighting)) == 8
    for leaf in jax.tree.leaves(weighting):
        assert leaf.dtype == jnp.float32
    for row in range(2):
        expected = reference.token_weighting(np.asarray(b[row]).astype(np.float64), np.asarray(mask[row]), 1.0)
        for name, value in expected.items():
            np.testing.assert_allclose(
                np.asarray(getattr(weighting, name))[row], value, rtol=3e-6, atol=1e-12, err_msg=name
            )


# small, large and signed values of the NLL


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_nll_of_a_near_certain_target(source: str) -> None:
    """By subtraction this is 0, by log_softmax 6.199e-6."""
    logits = floats([[1e4, 1e4 - 12], [1e4, 1e4 - 12]])
    if source == "logits":
        nll = nll_from_logits(logits, [0, 0], [0, 1])
    else:
        nll = compiled_nll_from_hidden(logits, jnp.eye(2), jnp.asarray([0, 0]), bools([0, 1]), chunk_size=1)
    np.testing.assert_allclose(np.asarray(nll), [6.1442e-6], rtol=1e-4)
    np.testing.assert_allclose(np.asarray(nll), [math.log1p(math.exp(-12))], rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "target"),
    [
        ([1.0, 2.0, 3.0], 0),
        ([1.0, 2.0, 3.0], 1),
        ([1.0, 2.0, 3.0], 2),
        ([3.0, 3.0, 3.0], 1),  # a tie with the target
        ([1e4 + 1, 1e4 + 2, 1e4 + 3], 0),
        ([1e4 + 1, 1e4 + 2, 1e4 + 3], 2),
        ([-1e4 + 1, -1e4 + 2, -1e4 + 3], 1),
        ([0.0, 100.0, 50.0], 0),  # exp(100) overflows float32
        ([0.0, 1e4, -1e4], 2),
        ([20.0, 0.0, 0.0, 0.0], 0),
        ([16.0, 15.5, -20.0], 0),
        ([80.0, 0.0, 0.0], 0),  # 3.6e-35
        ([5.0, -math.inf, -math.inf, 4.0], 0),
        ([5.0, -math.inf, -math.inf, 4.0], 3),
        ([3e38, -3e38, 1.0], 0),
        ([-3e38, 0.0, 0.0], 1),
    ],
)
def test_nll_against_float64(logits: list[float], target: int) -> None:
    found = nll_of_row(floats(logits), target)
    expected = reference.nll_of_logits(reference.as_float64(logits), target)
    np.testing.assert_allclose(found, [expected], rtol=1e-6, atol=1e-37)
    assert not np.signbit(found[0])


def test_nll_of_an_impossible_target_is_infinite_not_nan() -> None:
    np.testing.assert_array_equal(nll_of_row(floats([0.0, -math.inf, 1.0]), 1), [math.inf])


def test_nll_is_accurate_over_random_logits_of_every_scale() -> None:
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(40, 9, 12)) * 10.0 ** rng.uniform(-2, 1.5, size=(40, 1, 1))).astype(np.float32)
    tokens, loss_mask = rng.integers(0, 12, (40, 9)), rng.random((40, 9)) < 0.7
    tokens[::2, 1:] = logits[::2, :-1].argmax(-1)
    found = nll_from_logits(jnp.asarray(logits), tokens, loss_mask)
    expected = reference.loop_over_leading(
        reference.token_nll_per_position, (2, 1, 1), logits.astype(np.float64), tokens, loss_mask
    )
    assert expected[expected > 0].min() < 1e-8 < 30 < expected.max()
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_minus_zero_is_never_returned(source: str) -> None:
    logits = floats([[1e4, 0.0], [0.0, 200.0], [-5.0, 5.0], [0.0, 0.0]])
    for tokens in ([0, 0, 1, 0], [1, 0, 1, 1]):
        for loss_mask in ([1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]):
            if source == "logits":
                nll = compiled_nll(logits, jnp.asarray(tokens), bools(loss_mask))
            else:
                nll = compiled_nll_from_hidden(logits, jnp.eye(2), jnp.asarray(tokens), bools(loss_mask), chunk_size=2)
            assert not np.any(np.signbit(np.asarray(nll)))
    assert float(nll_of_row(floats([1e4, 0.0]), 0)[0]) == 0.0


def test_minus_zero_as_a_base_nll_counts_as_zero() -> None:
    plus, minus = (weighting_of([zero, 1.0, 3.0], [1, 1, 1], 1.0, inverse_nll_floor=0.0) for zero in (0.0, -0.0))
    for name in LEAVES:
        left, right = np.asarray(getattr(minus, name)), np.asarray(getattr(plus, name))
        np.testing.assert_array_equal(left, right, err_msg=name)
        assert not np.any(np.signbit(left)), name
    np.testing.assert_array_equal(np.asarray(minus.inverse_token_weights), [1, 0, 0])


# weights


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize(
    "b",
    [
        [0.0, 1.0, 3.0, 9.0],
        [0.0, 0.0, 0.0, 0.0],
        [3e38, 1.0, 2.0, 5.0],
        [3e38, 3e38, 0.0, 1e-38],
        [1e-30, 1e30, 1.0, 0.0],
        [math.inf, 1.0, 0.0, 2.0],
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 0]], ids=str)
def test_alpha_zero_is_exactly_uniform(b: list[float], mask: list[int], zero: float) -> None:
    expected = np.asarray(mask, np.float32) / np.float32(sum(mask))
    np.testing.assert_array_equal(np.asarray(compiled_weights(floats(b), bools(mask), zero)), expected)
    weighting = weighting_of(b, mask, zero)
    np.testing.assert_array_equal(np.asarray(weighting.token_weights), expected)
    np.testing.assert_array_equal(np.asarray(weighting.inverse_token_weights), expected)
    if max(b) < 1e30:
        supervised = [float(np.float32(value)) for value, flag in zip(b, mask, strict=True) if flag]
        mean = sum(supervised) / len(supervised)
        for name in ("example_base_loss", "token_weighted_base_loss", "inverse_token_weighted_base_loss"):
            np.testing.assert_allclose(float(getattr(weighting, name)), mean, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(float(weighting.token_concentration_factor), 1, rtol=1e-6)
        np.testing.assert_allclose(float(weighting.inverse_token_base_scale_factor), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("b", "alpha", "expected"),
    [
        ([50.0, 1e4], 24.0, [5.96e-56, 1.0]),
        ([50.0, 1e4], -24.0, [1.0, 5.96e-56]),
        ([1e-6, 1e-6], 8.0, [0.5, 0.5]),
        ([1e-6, 1e-6], -8.0, [0.5, 0.5]),
        ([1e-30, 1e-30], 2.0, [0.5, 0.5]),
        ([1e-30, 1.0], -2.0, [1.0, 1e-60]),
        ([1e30, 2e30], 1.0, [1 / 3, 2 / 3]),
        ([0.0, 0.0], 24.0, [0.5, 0.5]),
        ([0.0, 0.0], -24.0, [0.5, 0.5]),
        ([0.0, 1e-20], 8.0, [0.0, 1.0]),
        ([0.0, 1e-20], -8.0, [1.0, 0.0]),
        ([1.0, 1.0 + 2**-20], 1e6, [0.27815753, 0.72184247]),
    ],
    ids=str,
)
def test_extreme_powers(b: list[float], alpha: float, expected: list[float]) -> None:
    weights = np.asarray(compiled_weights(floats(b), bools([1, 1]), alpha))
    # at alpha 1e6 one ulp of log b moves a weight by percent: there only the order and the sum are float32's to keep
    rtol = 0.05 if alpha == 1e6 else reference.relative_tolerance(b, [1, 1], alpha)
    np.testing.assert_allclose(weights, expected, rtol=rtol, atol=1e-30)
    np.testing.assert_allclose(weights.sum(), 1, atol=1e-6)


@pytest.mark.parametrize("alpha", [-24.0, -8.0, -1.0, -0.5, 0.0, 0.25, 1.0, 3.0, 8.0, 24.0])
def test_bundle_against_float64_over_random_surprisals(alpha: float) -> None:
    rng = np.random.default_rng(3)
    b = np.exp(rng.uniform(-14, 4, size=(6, 2, 9))).astype(np.float32)
    b[rng.random(b.shape) < 0.15] = 0
    mask = rng.random(b.shape) < 0.7
    mask[0, 0] = False
    weighting = weighting_of(b, mask, alpha)
    for row in np.ndindex(b.shape[:-1]):
        values = b[row].astype(np.float64)
        expected = reference.token_weighting(values, mask[row], alpha)
        rtol = reference.relative_tolerance(np.maximum(values, 1e-6), mask[row], alpha)
        for name, value in expected.items():
            # a sum of b can carry the weights' error of its largest summand only
            np.testing.assert_allclose(
                np.asarray(getattr(weighting, name))[row], value, rtol=rtol, atol=1e-28, err_msg=f"{name} {row}"
            )


def test_weights_are_normalised_per_example_and_not_over_the_batch() -> None:
    b = floats([[1.0, 2.0, 3.0], [1e3, 1e-3, 5.0]])
    mask = bools([[1, 1, 0], [0, 1, 1]])
    together = np.asarray(compiled_weights(b, mask, 2.0))
    for row in range(2):
        alone = np.asarray(compiled_weights(b[row], mask[row], 2.0))
        np.testing.assert_allclose(together[row], alone, rtol=1e-6)
        np.testing.assert_allclose(together[row].sum(), 1, rtol=1e-6)


def test_concentration_is_one_plus_the_squared_coefficient_of_variation() -> None:
    rng = np.random.default_rng(4)
    b = np.exp(rng.normal(0, 2, size=(50, 12))).astype(np.float32)
    mask = rng.random(b.shape) < 0.6
    mask[:, 0] = True
    weighting = weighting_of(b, mask, 1.0)
    factor = np.asarray(weighting.token_concentration_factor)
    for row in range(50):
        supervised = b[row, mask[row]].astype(np.float64)
        identity = 1 + supervised.var() / supervised.mean() ** 2
        np.testing.assert_allclose(factor[row], identity, rtol=5e-6)
        assert 1 - 1e-5 <= factor[row] <= len(supervised) * (1 + 1e-5)
    example = np.asarray(weighting.example_base_loss)
    np.testing.assert_allclose(example * factor, np.asarray(weighting.token_weighted_base_loss), rtol=1e-6)
    inverse_factor = np.asarray(weighting.inverse_token_base_scale_factor)
    inverse = np.asarray(weighting.inverse_token_weighted_base_loss)
    np.testing.assert_allclose(example * inverse_factor, inverse, rtol=1e-6)


def test_the_two_factors_have_no_floor_in_nats() -> None:
    weighting = weighting_of([1e-9, 3e-9], [1, 1], 1.0, inverse_nll_floor=0.0)
    np.testing.assert_allclose(float(weighting.token_concentration_factor), 1.25, rtol=3e-6)
    np.testing.assert_allclose(float(weighting.inverse_token_base_scale_factor), 0.75, rtol=3e-6)


def test_the_inverse_floor_is_a_floor_and_not_an_addition() -> None:
    for floor, expected in ((0.1, [0.8, 0.2]), (1.0, [2 / 3, 1 / 3])):
        weighting = weighting_of([0.5, 2.0], [1, 1], 1.0, inverse_nll_floor=floor)
        np.testing.assert_allclose(np.asarray(weighting.inverse_token_weights), expected, rtol=2e-6)
        np.testing.assert_allclose(np.asarray(weighting.token_weights), [0.2, 0.8], rtol=2e-6)
        np.testing.assert_allclose(
            float(weighting.inverse_token_weighted_base_loss), expected[0] * 0.5 + expected[1] * 2, rtol=2e-6
        )


def test_one_trace_serves_twenty_alphas() -> None:
    traces = []

    @jax.jit
    def bundle(b: jax.Array, mask: jax.Array, alpha: jax.Array) -> TokenWeighting:
        traces.append(alpha)
        return compute_token_weighting(b, mask, mask, jnp.zeros((), jnp.int32), alpha)

    b, mask = floats([0.5, 1.5, 3.0]), bools([1, 1, 1])
    alphas = [0.0, -0.0, *np.linspace(-3, 8, 18)]
    assert len(alphas) == 20
    for alpha in alphas:
        expected = reference.power_weights([0.5, 1.5, 3.0], [1, 1, 1], float(alpha))
        np.testing.assert_allclose(np.asarray(bundle(b, mask, float(alpha)).token_weights), expected, rtol=1e-5)
    assert len(traces) == 1


def test_a_sweep_of_alphas_runs_under_vmap() -> None:
    alphas = [0.0, 0.5, 1.0, 4.0, 24.0]
    b, mask = [[0.5, 1.5, 3.0], [0.0, 0.0, 2.0]], [[1, 1, 1], [1, 1, 0]]
    sweep = jax.jit(jax.vmap(compute_token_weighting, in_axes=(None, None, None, None, 0)))(
        floats(b), bools(mask), bools(mask), jnp.zeros((2,), jnp.int32), floats(alphas)
    )
    assert sweep.token_weights.shape == (5, 2, 3)
    for index, alpha in enumerate(alphas):
        for row in range(2):
            expected = reference.token_weighting(b[row], mask[row], alpha)
            for name, value in expected.items():
                found = np.asarray(getattr(sweep, name))[index, row]
                np.testing.assert_allclose(found, value, rtol=3e-5, atol=1e-20, err_msg=name)


# masks


@functools.cache
def everything_under_a_mask(dtype: str) -> Any:
    rng = np.random.default_rng(5)
    logits, unembedding = floats(rng.normal(size=(2, 3, 5, 7))), floats(rng.normal(size=(7, 6)))
    tokens = jnp.asarray(rng.integers(0, 6, (2, 3, 5)))
    nll = floats(rng.random((2, 4)))

    @jax.jit
    def everything(mask: jax.Array) -> Any:
        per_latent = jnp.broadcast_to(mask[:, None], (2, 3, 5))
        scored = mask[:, 1:]
        offsets = jnp.asarray([0, 1], jnp.int32)
        weighting = compute_token_weighting(nll, scored, scored, offsets, 1.0)
        return (
            masked_token_nll_per_position(logits, tokens, per_latent),
            masked_token_nll_from_hidden(logits, unembedding, tokens, per_latent, chunk_size=8),
            token_weighted_masked_nll_per_example(nll, scored),
            token_weighted_masked_nll_per_example(nll, scored, weighting.token_weights),
            align_to_conditioned(nll, scored, scored, offsets)[0],
            surprisal_share_weights(nll, scored, 2.0),
            weighting,
            reconstruction_terms(nll, scored, weighting, 0.5),
            inter_latent_divergence(logits, mask, weighting.token_weights),
            inter_latent_divergence_from_hidden(logits, unembedding, mask, weighting.token_weights, chunk_size=8),
            score_reference(lambda params, tokens: params, logits, tokens, per_latent),
            masked_mean_over_examples(nll[:, 0], mask[:, 1]),
        )

    return everything(jnp.asarray([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]], dtype))


@pytest.mark.xdist_group("losses_masks")
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_masks_of_any_dtype(dtype: str) -> None:
    """0/1 masks of any dtype mean what the boolean ones mean, to the bit."""
    expected, found = everything_under_a_mask("bool"), everything_under_a_mask(dtype)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_fractional_weights_beside_an_integer_mask_stay_fractional() -> None:
    found = compiled_mean(floats([4.0, 8.0, 100.0]), jnp.asarray([1, 1, 0]), floats([0.25, 0.75, 0.0]))
    assert float(found) == 7.0


def test_the_mean_counts_what_it_sums() -> None:
    """Masked entries are in neither the numerator nor the denominator."""
    nll, mask = floats([[1.0, 100.0], [1.0, -50.0]]), bools([[1, 0], [1, 0]])
    value, gradient = jax.jit(
        jax.value_and_grad(
            lambda nll: masked_mean_over_examples(token_weighted_masked_nll_per_example(nll, mask), jnp.ones(2, bool))
        )
    )(nll)
    assert float(value) == 1.0
    np.testing.assert_array_equal(np.asarray(gradient), [[0.5, 0], [0.5, 0]])
    # three counted tokens of loss 1 and an excluded one
    found = compiled_mean(floats([1.0, 1.0, 1.0, 7.0]), bools([1, 1, 1, 0]))
    np.testing.assert_allclose(float(found), 1.0, rtol=1e-7)


def test_weights_off_the_mask_do_not_count() -> None:
    mask = jnp.asarray([1, 1, 0], jnp.float32)
    for weight in (5.0, math.nan, math.inf):
        assert float(compiled_mean(floats([4.0, 8.0, 100.0]), mask, floats([0.25, 0.75, weight]))) == 7.0
        logits = floats([[[2.0, 0.0]] * 4, [[0.0, 0.0]] * 4])
        found = compiled_divergence(logits, jnp.pad(mask, (1, 0)), floats([0.25, 0.75, weight]))
        expected = reference.jsd(np.array([[2.0, 0.0], [0.0, 0.0]]))
        np.testing.assert_allclose(float(found), expected, rtol=1e-5)


LOSSES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., jax.Array]]] = {}


def loss(values_shape: tuple[int, ...], mask_shape: tuple[int, ...]) -> Callable[..., Any]:
    def register(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        LOSSES[function.__name__] = (values_shape, mask_shape, function)
        return function

    return register


TOKENS = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 1, 1, 1, 1]])
UNEMBEDDING = np.random.default_rng(6).normal(size=(5, 5)).astype(np.float32)
WEIGHTS = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]], np.float32)
# each maps (values, boolean mask over its scored positions, a differentiable scale) to a scalar


@loss((3, 5, 5), (3, 4))
def nll_of_logits(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    nll = masked_token_nll_per_position(values * scale, jnp.asarray(TOKENS), jnp.pad(mask, ((0, 0), (1, 0))))
    return jnp.sum(nll * WEIGHTS)


@loss((3, 5, 5), (3, 4))
def nll_of_hidden(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    loss_mask = jnp.pad(mask, ((0, 0), (1, 0)))
    nll = masked_token_nll_from_hidden(values, UNEMBEDDING * scale, jnp.asarray(TOKENS), loss_mask, chunk_size=5)
    return jnp.sum(nll * WEIGHTS)


@loss((3, 4), (3, 4))
def uniform_mean(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.sum(token_weighted_masked_nll_per_example(values * scale, mask))


@loss((3, 4), (3, 4))
def weighted_mean(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.sum(token_weighted_masked_nll_per_example(values * scale, mask, jnp.asarray(WEIGHTS)))


@loss((3, 4), (3, 4))
def shares(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.sum(surprisal_share_weights(jnp.abs(values), mask, 2.0) * WEIGHTS) * scale


@loss((3, 4), (3, 4))
def bundle_off_the_source_mask(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    offsets = jnp.asarray([0, 1, -1], jnp.int32)
    weighting = compute_token_weighting(jnp.abs(values) * scale, mask, jnp.ones((3, 4), bool), offsets, 1.0)
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(weighting)) * scale


@loss((3, 4), (3, 4))
def bundle_off_the_target_mask(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    offsets = jnp.zeros((3,), jnp.int32)
    weighting = compute_token_weighting(jnp.abs(values) * scale, jnp.ones((3, 4), bool), mask, offsets, 1.0)
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(weighting)) * scale


@loss((3, 4), (3, 4))
def aligned(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    offsets = jnp.asarray([1, 0, -1], jnp.int32)
    return jnp.sum(align_to_conditioned(values * scale, mask, jnp.ones((3, 6), bool), offsets)[0] ** 2)


@loss((3, 4), (3, 4))
def six_terms(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    weighting = compute_token_weighting(jnp.asarray(WEIGHTS), mask, mask, jnp.zeros((3,), jnp.int32), 1.0)
    terms = reconstruction_terms(values * scale, mask, weighting, 0.5)
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(terms))


@loss((3, 5, 5), (4,))
def divergence_of_logits(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    return inter_latent_divergence(values * scale, jnp.pad(mask, (1, 0)), jnp.asarray(WEIGHTS[0]))


@loss((3, 5, 5), (4,))
def divergence_of_hidden(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    loss_mask = jnp.pad(mask, (1, 0))
    return inter_latent_divergence_from_hidden(
        values, UNEMBEDDING * scale, loss_mask, jnp.asarray(WEIGHTS[0]), chunk_size=3
    )


@loss((4,), (4,))
def mean_over_examples(values: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    return masked_mean_over_examples(values * scale, mask)


def masks_for(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    row = np.array([1, 0, 1, 0], bool)
    partial = np.stack([row, ~row, np.zeros(4, bool)]) if len(shape) == 2 else row
    return partial, np.zeros(shape, bool)


def spread(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Where `values` of this shape are used: the mask's positions; the last of T positions scores nothing."""
    if mask.shape == shape:
        return mask
    used = np.concatenate([mask, np.zeros((*mask.shape[:-1], 1), bool)], -1)
    return np.broadcast_to(used[..., None] if used.ndim == 2 else used[None, :, None], shape)


@functools.cache
def value_and_gradients(name: str) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(LOSSES[name][2], argnums=(0, 2)))


@pytest.mark.parametrize("poison", POISONS, ids=POISON_IDS)
@pytest.mark.parametrize("name", list(LOSSES))
def test_what_is_masked_changes_neither_value_nor_gradient(name: str, poison: float) -> None:
    shape, mask_shape, _ = LOSSES[name]
    mask = masks_for(mask_shape)[0]
    used = spread(mask, shape)
    values = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    step = value_and_gradients(name)
    # a 0/1 float mask: XLA turns a product with a converted boolean into a select and would hide a `* mask`
    zero_one = jnp.asarray(mask, jnp.float32)
    clean = step(jnp.asarray(values), zero_one, 1.5)
    dirty = step(jnp.asarray(np.where(used, values, np.float32(poison))), zero_one, 1.5)
    assert np.isfinite(float(clean[0])) and float(clean[0]) != 0
    assert float(dirty[0]) == float(clean[0])
    (gradient, scale_gradient), (clean_gradient, clean_scale_gradient) = dirty[1], clean[1]
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(clean_gradient))
    np.testing.assert_array_equal(np.asarray(gradient)[~used], 0)
    # elsewhere the scale multiplies the poison itself, outside of the loss: NaN times a cotangent of 0
    if name in ("nll_of_hidden", "divergence_of_hidden"):
        assert float(scale_gradient) == float(clean_scale_gradient)


@pytest.mark.parametrize("name", list(LOSSES))
def test_no_supervised_token_gives_zero_and_zero_gradients(name: str) -> None:
    shape, mask_shape, _ = LOSSES[name]
    mask = masks_for(mask_shape)[1]
    values = np.random.default_rng(8).normal(size=shape).astype(np.float32)
    value, gradients = value_and_gradients(name)(jnp.asarray(values), jnp.asarray(mask, jnp.float32), 1.5)
    expected = 3 * 2 * 1.5 if name.startswith("bundle") else 0.0  # both ratios of each of three examples are 1
    assert float(value) == expected
    np.testing.assert_array_equal(np.asarray(gradients[0]), 0)
    assert float(gradients[1]) == (6.0 if name.startswith("bundle") else 0.0)


def test_no_supervised_token_anywhere_leaves_parameters_finite() -> None:
    def objective(params: dict[str, jax.Array], mask: jax.Array) -> jax.Array:
        nll = masked_token_nll_from_hidden(
            params["hidden"], params["unembedding"], jnp.asarray(TOKENS), mask, chunk_size=4
        )
        scored = mask[:, 1:]
        weighting = compute_token_weighting(nll, scored, scored, jnp.zeros((3,), jnp.int32), 1.0)
        total = weighted_total(
            reconstruction_terms(nll, scored, weighting, 0.0),
            ReconstructionTerms(**term_names(dict.fromkeys(TERMS, 1.0))),
        )
        return masked_mean_over_examples(total, jnp.any(scored, -1))

    params = {"hidden": jnp.ones((3, 5, 5)), "unembedding": jnp.asarray(UNEMBEDDING)}
    value, gradients = jax.jit(jax.value_and_grad(objective))(params, jnp.zeros((3, 5), bool))
    assert float(value) == 0.0
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(np.asarray(leaf), 0), gradients)


# means over examples


def test_all_sum_of_a_scalar_on_one_device() -> None:
    assert float(all_sum(jnp.float32(2.5))) == 2.5


@pytest.mark.parametrize(
    ("values", "mask", "expected"),
    [
        ([1.0, 3.0, 3.0, 3.0], [1, 1, 1, 1], 2.5),
        ([1.0, 1.0, 0.0, 9.0], [1, 1, 1, 0], 2 / 3),
        ([1.0, 2.0, 3.0, 4.0], [0, 0, 0, 0], 0.0),
        ([[1.0, 2.0], [3.0, 4.0]], [[1, 0], [0, 1]], 2.5),
    ],
    ids=str,
)
def test_masked_mean_over_examples(values: Any, mask: Any, expected: float) -> None:
    found = jax.jit(masked_mean_over_examples)(floats(values), bools(mask))
    assert found.shape == () and found.dtype == jnp.float32
    np.testing.assert_allclose(float(found), expected, rtol=1e-7)


# alignment


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, -1, -2, -3, -4, 100, -100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("target_length", [3, 1, 6])
def test_alignment_never_wraps_clamps_or_fills(offset: int, target_length: int) -> None:
    values, source_mask = [1.0, 2.0, 3.0], [1, 1, 1]
    target_mask = [1] * target_length
    expected, expected_mask = reference.align(values, source_mask, target_mask, offset)
    found, mask = compiled_alignment(
        floats(values), bools(source_mask), bools(target_mask), jnp.asarray(offset, jnp.int32)
    )
    np.testing.assert_array_equal(np.asarray(found), expected)
    np.testing.assert_array_equal(np.asarray(mask).astype(bool), expected_mask)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_alignment_offsets_of_any_integer_dtype(dtype: Any) -> None:
    """Positions go past the range of a small offset dtype; nothing may wrap around into the source."""
    length = 300
    values = np.arange(1, length + 1, dtype=np.float32)
    ones = np.ones(length, bool)
    expected, expected_mask = reference.align(values, ones, ones, 3)
    found, mask = compiled_alignment(jnp.asarray(values), ones, ones, jnp.asarray(3, dtype))
    np.testing.assert_array_equal(np.asarray(found), expected)
    np.testing.assert_array_equal(np.asarray(mask).astype(bool), expected_mask)


def test_alignment_keeps_the_two_masks_and_reads_row_by_row() -> None:
    rng = np.random.default_rng(9)
    values = rng.random((4, 3, 5)).astype(np.float32) + 1
    source_mask, target_mask = rng.random((4, 3, 5)) < 0.7, rng.random((4, 3, 7)) < 0.7
    offsets = rng.integers(-4, 6, (4, 3))
    found, mask = compiled_alignment(
        jnp.asarray(values), jnp.asarray(source_mask), jnp.asarray(target_mask), jnp.asarray(offsets)
    )
    assert found.shape == mask.shape == (4, 3, 7)
    for row in np.ndindex(4, 3):
        expected, expected_mask = reference.align(values[row], source_mask[row], target_mask[row], int(offsets[row]))
        np.testing.assert_array_equal(np.asarray(found)[row], expected.astype(np.float32))
        np.testing.assert_array_equal(np.asarray(mask)[row].astype(bool), expected_mask)


def test_a_supervised_position_without_a_source_has_weight_zero() -> None:
    """The rest is normalised over what is left."""
    for offset, expected in ((3, [0, 0, 0]), (-1, [0.4, 0.6, 0]), (2, [0, 0, 1]), (-(2**31), [0, 0, 0])):
        weighting = weighting_of([1.0, 2.0, 3.0], [1, 1, 1], 1.0, offset)
        np.testing.assert_allclose(np.asarray(weighting.token_weights), expected, rtol=2e-6)
        inverse = np.asarray(weighting.inverse_token_weights)
        assert np.all(np.isfinite(inverse)) and np.all((inverse > 0) == (np.asarray(expected) > 0))


def test_weighting_in_suffix_coordinates() -> None:
    """Negative offsets: the conditioned suffix starts four tokens later in the z-free sequence of row 1."""
    b = floats([[9.0, 9.0, 1.0, 3.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0, 2.0, 6.0]])
    base_mask = bools([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]])
    conditioned_mask = bools([[0, 0, 1, 1], [0, 0, 1, 1]])
    weighting = compiled_weighting(b, base_mask, conditioned_mask, jnp.asarray([0, -2], jnp.int32), 1.0)
    np.testing.assert_array_equal(np.asarray(weighting.aligned_base_token_nll), [[0, 0, 1, 3], [0, 0, 2, 6]])
    np.testing.assert_allclose(np.asarray(weighting.token_weights), [[0, 0, 0.25, 0.75], [0, 0, 0.25, 0.75]], rtol=2e-6)
    np.testing.assert_allclose(np.asarray(weighting.example_base_loss), [2, 4], rtol=1e-7)


# from hidden states


def draw(shape: tuple[int, ...] = (3, 6), width: int = 5, vocabulary: int = 11, seed: int = 10) -> Any:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(*shape, width)).astype(np.float32)
    unembedding = rng.normal(size=(width, vocabulary)).astype(np.float32)
    tokens = rng.integers(0, vocabulary, shape)
    loss_mask = rng.random(shape) < 0.7
    loss_mask[..., 0] = False
    loss_mask[-1] = False  # a row with nothing supervised
    return hidden, unembedding, tokens, loss_mask


@pytest.mark.parametrize(
    ("shape", "chunk_size"),
    [((3, 6), 1), ((3, 6), 3), ((3, 6), 7), ((3, 6), 15), ((3, 6), 64), ((6,), 2), ((2, 3, 4), 7)],
    ids=str,
)
def test_nll_from_hidden_equals_nll_from_logits(shape: tuple[int, ...], chunk_size: int) -> None:
    hidden, unembedding, tokens, loss_mask = draw(shape)
    if len(shape) == 1:
        loss_mask = np.array([0, 1, 1, 0, 1, 1], bool)
    logits = hidden.astype(np.float64) @ unembedding.astype(np.float64)
    expected = reference.loop_over_leading(reference.token_nll_per_position, (2, 1, 1), logits, tokens, loss_mask)
    found = compiled_nll_from_hidden(hidden, unembedding, tokens, loss_mask, chunk_size=chunk_size)
    assert found.shape == (*shape[:-1], shape[-1] - 1)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(found), nll_from_logits(floats(logits), tokens, loss_mask), rtol=1e-5, atol=1e-6
    )


def sub_jaxprs(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from sub_jaxprs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from sub_jaxprs(item)


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in sub_jaxprs(parameter):
                yield from equations(inner)


def nll_objective(chunk_size: int, **keywords: Any) -> Callable[..., jax.Array]:
    def objective(hidden: jax.Array, unembedding: jax.Array, tokens: jax.Array, loss_mask: jax.Array) -> jax.Array:
        return jnp.sum(
            masked_token_nll_from_hidden(hidden, unembedding, tokens, loss_mask, chunk_size=chunk_size, **keywords)
        )

    return objective


def divergence_objective(chunk_size: int) -> Callable[..., jax.Array]:
    def objective(hidden: jax.Array, unembedding: jax.Array, tokens: jax.Array, loss_mask: jax.Array) -> jax.Array:
        weights = jnp.ones_like(loss_mask[0, 1:], jnp.float32)
        return inter_latent_divergence_from_hidden(hidden, unembedding, loss_mask[0], weights, chunk_size=chunk_size)

    return objective


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("precision", [None, "DEFAULT", "HIGH", "HIGHEST"])
def test_logit_matmul_runs_at_the_precision_asked_for(dtype: Any, precision: str | None) -> None:
    """None: what a caller gets who asks for nothing."""
    hidden, unembedding, tokens, loss_mask = draw()
    keywords = {} if precision is None else {"precision": jax.lax.Precision[precision]}
    wanted = jax.lax.Precision[precision or "HIGHEST"]
    jaxpr = jax.make_jaxpr(jax.value_and_grad(nll_objective(4, **keywords), argnums=(0, 1)))(
        jnp.asarray(hidden, dtype), jnp.asarray(unembedding, dtype), tokens, loss_mask
    )
    products = [equation for equation in equations(jaxpr.jaxpr) if equation.primitive.name == "dot_general"]
    # forward and recomputed logits, and the two gradients
    assert len(products) >= 3
    for equation in products:
        asked = equation.params["precision"]
        asked = asked if isinstance(asked, tuple) else (asked, asked)
        assert set(asked) == {wanted} or (precision == "DEFAULT" and set(asked) == {None}), equation
        assert equation.outvars[0].aval.dtype == jnp.float32, equation


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_divergence_matmul_is_float32_at_highest_precision(dtype: Any) -> None:
    hidden, unembedding, tokens, loss_mask = draw()
    jaxpr = jax.make_jaxpr(divergence_objective(4))(
        jnp.asarray(hidden, dtype), jnp.asarray(unembedding, dtype), tokens, loss_mask
    )
    products = [equation for equation in equations(jaxpr.jaxpr) if equation.primitive.name == "dot_general"]
    assert products
    for equation in products:
        assert set(equation.params["precision"]) == {jax.lax.Precision.HIGHEST}, equation
        assert equation.outvars[0].aval.dtype == jnp.float32, equation


@pytest.mark.parametrize("objective", [nll_objective, divergence_objective], ids=["nll", "divergence"])
def test_no_array_of_rows_by_vocabulary(objective: Callable[[int], Callable[..., jax.Array]]) -> None:
    """Not in the program of value and gradient, and not in what the compiler makes of it."""
    latents, length, width, vocabulary, chunk = 4, 257, 4, 1024, 16
    rows = latents * (length - 1)
    hidden, unembedding, tokens, loss_mask = draw((latents, length), width, vocabulary)
    loss_mask[:] = True
    step = jax.jit(jax.value_and_grad(objective(chunk), argnums=(0, 1)))
    jaxpr = jax.make_jaxpr(step)(hidden, unembedding, tokens, loss_mask)
    sizes = {
        variable.aval.shape: math.prod(variable.aval.shape)
        for equation in equations(jaxpr.jaxpr)
        for variable in (*equation.invars, *equation.outvars)
        if hasattr(variable.aval, "shape")
    }
    largest = max(sizes, key=lambda shape: sizes[shape])
    assert sizes[largest] <= max(latents * chunk, width) * vocabulary, largest
    memory = step.lower(hidden, unembedding, tokens, loss_mask).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * vocabulary * 4 / 2


# the six terms


@pytest.mark.parametrize(
    ("batch", "latents", "latent_axis"),
    [((3,), 3, -2), ((3,), 3, 0), ((2, 3), 4, 1), ((3, 3), 3, -2)],
    ids=str,
)
def test_the_latent_axis_is_where_the_caller_says(batch: tuple[int, ...], latents: int, latent_axis: int) -> None:
    """With B == K every reading of the shapes type-checks, and only one is right."""
    rng = np.random.default_rng(11)
    positions = 4
    axis = latent_axis if latent_axis >= 0 else len(batch) + 2 + latent_axis
    nll = rng.random((*batch, latents, positions)).astype(np.float32)
    b = rng.random((*batch, positions)).astype(np.float32)
    mask = rng.random((*batch, positions)) < 0.7

    @jax.jit
    def terms_of(nll: jax.Array, b: jax.Array, mask: jax.Array) -> ReconstructionTerms:
        weighting = compute_token_weighting(b, mask, mask, jnp.zeros(batch, jnp.int32), 1.5)
        return reconstruction_terms(nll, mask, weighting, 0.8, latent_axis=latent_axis)

    terms = terms_of(np.moveaxis(nll, -2, axis), b, mask)
    for row in np.ndindex(*batch):
        bundle = reference.token_weighting(b[row].astype(np.float64), mask[row], 1.5)
        for latent in range(latents):
            expected = reference.reconstruction(nll[(*row, latent)].astype(np.float64), mask[row], bundle, 0.8)
            for name, value in term_names(expected).items():
                found = np.moveaxis(np.asarray(getattr(terms, name)), axis, -1)[(*row, latent)]
                np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-28, err_msg=name)


def test_terms_without_a_latent_axis() -> None:
    rng = np.random.default_rng(12)
    nll, b, mask = rng.random((3, 3, 4)).astype(np.float32), rng.random((3, 3, 4)), rng.random((3, 3, 4)) < 0.7
    weighting = weighting_of(b, mask, 0.5)
    terms = jax.jit(reconstruction_terms, static_argnames="divisor_floor")(
        jnp.asarray(nll), jnp.asarray(mask), weighting, jnp.float32(1e-5), divisor_floor=0.25
    )
    for row in np.ndindex(3, 3):
        bundle = reference.token_weighting(reference.as_float64(b[row]), mask[row], 0.5)
        expected = reference.reconstruction(nll[row].astype(np.float64), mask[row], bundle, 1e-5, 0.25)
        for name, value in term_names(expected).items():
            np.testing.assert_allclose(np.asarray(getattr(terms, name))[row], value, rtol=1e-5, err_msg=name)


# totals


def reconstruction_of(values: Any) -> ReconstructionTerms:
    return ReconstructionTerms(**term_names(dict(zip(TERMS, values, strict=True))))


def test_weighted_total_over_the_whole_objective() -> None:
    leaves = [floats([float(index), 10.0 * index]) for index in range(1, 7)]
    terms = ObjectiveTerms(
        reconstruction=reconstruction_of(leaves),
        prior_kl=floats([2.0, 3.0]),
        inter_latent_divergence=floats([0.5, 0.25]),
        posterior_entropy=floats([1.0, 0.0]),
        router_marginal_kl=floats([0.125, 1.0]),
        posterior_fit=floats([4.0, 8.0]),
    )
    coefficients = ObjectiveTerms(
        reconstruction=reconstruction_of([1.0, 0.5, 0.0, 2.0, 0.25, 0.0]),
        prior_kl=0.5,
        inter_latent_divergence=-2.0,
        posterior_entropy=0.0,
        router_marginal_kl=8.0,
        posterior_fit=1.0,
    )
    # 1 + 1 + 0 + 8 + 1.25 + 0 = 11.25, and ten times that
    expected = [11.25 + 1 - 1 + 0 + 1 + 4, 112.5 + 1.5 - 0.5 + 0 + 8 + 8]
    for function in (weighted_total, jax.jit(weighted_total)):
        np.testing.assert_allclose(np.asarray(function(terms, coefficients)), expected, rtol=1e-6)


def test_weighted_total_with_terms_that_are_off() -> None:
    terms = ObjectiveTerms(
        reconstruction=ReconstructionTerms(
            **{**term_names(dict.fromkeys(TERMS)), "raw_reconstruction_loss": floats([1.0, 2.0])}
        ),
        prior_kl=floats([2.0, 3.0]),
        inter_latent_divergence=None,
        posterior_entropy=None,
        router_marginal_kl=None,
        posterior_fit=None,
    )
    coefficients = ObjectiveTerms(
        reconstruction=ReconstructionTerms(
            **{**term_names(dict.fromkeys(TERMS)), "raw_reconstruction_loss": floats(3.0)}
        ),
        prior_kl=floats(0.1),
        inter_latent_divergence=None,
        posterior_entropy=None,
        router_marginal_kl=None,
        posterior_fit=None,
    )
    for function in (weighted_total, jax.jit(weighted_total)):
        np.testing.assert_allclose(np.asarray(function(terms, coefficients)), [3.2, 6.3], rtol=1e-6)


def test_weighted_total_does_not_drop_a_term_without_a_coefficient() -> None:
    terms = {"kept": floats(1.0), "forgotten": floats(2.0)}
    with pytest.raises((ValueError, TypeError)):
        weighted_total(terms, {"kept": floats(1.0), "forgotten": None})


def test_changing_coefficients_does_not_recompile() -> None:
    traces = []

    @jax.jit
    def total(terms: ReconstructionTerms, coefficients: ReconstructionTerms) -> jax.Array:
        traces.append(None)
        return weighted_total(terms, coefficients)

    terms = reconstruction_of([floats(float(index)) for index in range(6)])
    for weight in (0.0, 0.5, 1.0, 2.0):
        found = total(terms, reconstruction_of([weight] * 6))
        np.testing.assert_allclose(float(found), 15 * weight, rtol=1e-6)
    assert len(traces) == 1


# divergences


def log(values: Any) -> jax.Array:
    with np.errstate(divide="ignore"):
        return floats(np.log(np.asarray(values, np.float64)))


@pytest.mark.parametrize(
    ("q", "p", "expected"),
    [
        ([0.9, 0.1], [0.5, 0.5], 0.368064),
        ([0.5, 0.5], [0.9, 0.1], 0.510826),
        ([0.5, 0.5], [0.5, 0.5], 0.0),  # cross entropy would be ln 2
        ([0.0, 0.5, 0.5], [0.0, 0.25, 0.75], 0.143841),  # shared zeros
        ([0.0, 1.0], [0.5, 0.5], math.log(2)),
        ([1.0, 0.0], [1.0, 0.0], 0.0),
        ([0.5, 0.5], [1.0, 0.0], math.inf),
    ],
    ids=str,
)
def test_kl_in_nats_and_in_this_direction(q: list[float], p: list[float], expected: float) -> None:
    found = float(compiled_kl(log(q), log(p)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_kl_with_zero_targets() -> None:
    log_p = jax.nn.log_softmax(floats([0.5, 1.0, 2.0, -1.0]))
    np.testing.assert_allclose(float(compiled_kl(log([0.0, 0.4, 0.6, 0.0]), log_p)), 0.22217, rtol=2e-5)
    # the prediction may be 0 where the target is
    masked = jax.nn.log_softmax(floats([-math.inf, 1.0, 2.0, -math.inf]))
    expected = reference.kl(np.log([1e-300, 0.4, 0.6, 1e-300]), reference.log_softmax(np.array([-1e9, 1.0, 2.0, -1e9])))
    np.testing.assert_allclose(float(compiled_kl(log([0.0, 0.4, 0.6, 0.0]), masked)), expected, rtol=1e-5)


def test_kl_keeps_the_leading_axes() -> None:
    rng = np.random.default_rng(13)
    q, p = (np.log(rng.dirichlet(np.ones(3), size=(2, 3))).astype(np.float32) for _ in range(2))
    found = compiled_kl(jnp.asarray(q), jnp.asarray(p))
    assert found.shape == (2, 3)
    expected = reference.loop_over_leading(reference.kl, (1, 1), q.astype(np.float64), p.astype(np.float64))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=2e-6)


def test_kl_is_float32_for_half_precision_inputs() -> None:
    q, p = (jnp.log(jnp.asarray(values, jnp.bfloat16)) for values in ([0.9, 0.1], [0.5, 0.5]))
    found = compiled_kl(q, p)
    assert found.dtype == jnp.float32
    expected = reference.kl(np.asarray(q).astype(np.float64), np.asarray(p).astype(np.float64))
    np.testing.assert_allclose(float(found), expected, rtol=1e-5)


def divergence(logits: Any, form: str = "logits") -> float:
    """JSD of [K, V] at one scored position of weight 1."""
    logits = jnp.asarray(np.asarray(logits, np.float64).astype(np.float32))
    stacked = jnp.stack([logits, jnp.zeros_like(logits)], axis=1)
    if form == "hidden":
        identity = jnp.eye(logits.shape[-1])
        return float(compiled_divergence_from_hidden(stacked, identity, bools([0, 1]), floats([1.0]), chunk_size=1))
    return float(compiled_divergence(stacked, bools([0, 1]), floats([1.0])))


def test_jsd_mixes_probabilities_and_not_log_probabilities() -> None:
    """Over log-probabilities this is 2.2516, above ln 2."""
    np.testing.assert_allclose(divergence(np.log([[0.99, 0.01], [0.01, 0.99]])), 0.637146, rtol=1e-5)


@pytest.mark.parametrize("latents", [3, 16])
def test_jsd_of_equal_distributions_is_zero(latents: int) -> None:
    rng = np.random.default_rng(14)
    row = rng.normal(size=(9, 12)) * np.array([0.1, 1.0, 10.0, 100.0] * 3)
    row[3, 8] = -math.inf
    loss_mask, weights = bools([1] * 9), jnp.ones(8)
    for logits in (row, row + np.array([0, 5, -7, 1e3, 0, 0, 2, 0, 0])[:, None]):
        found = float(compiled_divergence(floats(np.tile(logits, (latents, 1, 1))), loss_mask, weights))
        assert 0 <= found <= 1e-9


@pytest.mark.parametrize("latents", [2, 7])
def test_jsd_is_between_zero_and_log_k(latents: int) -> None:
    rng = np.random.default_rng(15)
    per_position_of = jax.jit(jax.vmap(inter_latent_divergence, in_axes=(None, None, 0)))
    for scale in (1e-6, 1e-4, 1e-2, 1.0, 100.0, 1e4):
        logits = floats(rng.normal(size=(latents, 20, 11)) * scale + rng.normal(size=(1, 20, 11)))
        per_position = np.asarray(per_position_of(logits, bools([1] * 20), jnp.eye(19)))
        total = float(compiled_divergence(logits, bools([1] * 20), jnp.ones(19)))
        assert per_position.min() >= 0
        assert per_position.max() <= math.log(latents) * (1 + 1e-6)
        np.testing.assert_allclose(total, per_position.sum(), rtol=1e-5)
        if scale >= 1e-2:
            wide = np.asarray(logits).astype(np.float64)
            expected = [reference.jsd(wide[:, position]) for position in range(19)]
            np.testing.assert_allclose(per_position, expected, rtol=1e-3 if scale < 1 else 1e-5, atol=1e-12)
    one_hot = np.where(np.eye(latents) > 0, 0.0, -math.inf)
    np.testing.assert_allclose(divergence(one_hot), math.log(latents), rtol=1e-6)
    assert divergence(one_hot) <= math.log(latents) * (1 + 1e-6)


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("offsets", [None, [0, 0, 0], [1000, 1000, 1000], [100, 0, -20]], ids=str)
def test_jsd_at_one_ten_millionth(offsets: list[float] | None, form: str) -> None:
    """The difference of entropies is 5e-6 off here, and negative."""
    rng = np.random.default_rng(19)
    for _ in range(4):
        if offsets is None:
            logits = (rng.normal(size=(1, 24)) + 5.5e-4 * rng.normal(size=(3, 24))).astype(np.float32)
        else:  # on a grid on which adding the offset is exact
            logits = rng.integers(-24, 24, size=(1, 24)) / 8 + rng.integers(-8, 8, size=(3, 24)) / 8192
            logits = logits + np.asarray(offsets)[:, None]
            np.testing.assert_array_equal(logits.astype(np.float32).astype(np.float64), logits)
        expected = reference.jsd(logits.astype(np.float64))
        assert 3e-8 < expected < 3e-7
        np.testing.assert_allclose(divergence(logits, form), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("logits", "name"),
    [
        ([[0.0, -math.inf, 1.0], [2.0, -math.inf, 1.0]], "shared"),
        ([[0.0, -math.inf, 1.0], [2.0, 0.5, -math.inf]], "unshared"),
        ([[0.0, -math.inf, -math.inf], [-math.inf, 0.0, -math.inf], [0.0, 0.0, -math.inf]], "both"),
        ([[0.0, -200.0, 1.0], [2.0, -300.0, 1.0]], "underflowing"),
        ([[0.0, -1e4, 1.0], [2.0, 0.0, -3e38]], "far"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_jsd_with_impossible_tokens(logits: list[list[float]], name: str) -> None:
    expected = reference.jsd(np.maximum(np.asarray(logits), -1e5))
    np.testing.assert_allclose(divergence(logits), expected, rtol=1e-5)


def test_jsd_does_not_see_an_offset_of_one_latent() -> None:
    """Softmax does not; and on this grid of eighths and these offsets no addition rounds."""
    rng = np.random.default_rng(18)
    logits = rng.integers(-24, 24, size=(3, 20)) / 8
    expected = reference.jsd(logits)
    for offsets in ([0, 0, 0], [1e4, 1e4, 1e4], [100, 0, -100], [1e4, 0, -1e4], [0.5, 4096, -16384]):
        moved = logits + np.asarray(offsets)[:, None]
        np.testing.assert_array_equal(moved.astype(np.float32).astype(np.float64), moved)
        np.testing.assert_allclose(divergence(moved), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("batch", "chunk_size"), [((), None), ((3,), None), ((), 4), ((3,), 1), ((3,), 7), ((3,), 64)], ids=str
)
def test_divergence_against_float64(batch: tuple[int, ...], chunk_size: int | None) -> None:
    """K == B == T - 1 in some: the latent axis is the third from the end and nothing else. None: from logits."""
    rng = np.random.default_rng(16)
    latents, length, width, vocabulary = 3, 4, 5, 6
    hidden = rng.normal(size=(*batch, latents, length, width)).astype(np.float32)
    unembedding = rng.normal(size=(width, vocabulary)).astype(np.float32)
    loss_mask = rng.random((*batch, length)) < 0.7
    weights = rng.random((*batch, length - 1)).astype(np.float32)
    logits = hidden.astype(np.float64) @ unembedding.astype(np.float64)
    if chunk_size is None:
        found = compiled_divergence(floats(logits), loss_mask, weights)
    else:
        found = compiled_divergence_from_hidden(hidden, unembedding, loss_mask, weights, chunk_size=chunk_size)
    assert found.shape == batch
    expected = reference.loop_over_leading(
        reference.latent_divergence, (3, 1, 1), logits, loss_mask, weights.astype(np.float64)
    )
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=2e-6)


# the closed-form posterior


@pytest.mark.parametrize("beta", [1e-4, 0.1, 1.0, 100.0])
def test_closed_form_posterior_against_float64_and_perturbations(beta: float) -> None:
    rng = np.random.default_rng(17)
    log_router = np.log(rng.dirichlet(np.ones(4), size=(3, 2))).astype(np.float32)
    losses = rng.uniform(0, 5, size=(3, 2, 4)).astype(np.float32)
    found = compiled_posterior(jnp.asarray(log_router), jnp.asarray(losses), beta)
    assert found.shape == (3, 2, 4) and found.dtype == jnp.float32
    beta32 = float(np.float32(beta))
    for row in np.ndindex(3, 2):
        prior, loss_row = log_router[row].astype(np.float64), losses[row].astype(np.float64)
        expected = reference.log_posterior(prior, loss_row, beta32)
        # R / beta reaches 5e4, and its difference carries that number's rounding
        np.testing.assert_allclose(
            np.asarray(found)[row], expected, rtol=1e-6, atol=4 * reference.EPSILON32 * (5 / beta + 5)
        )
        ours = reference.log_softmax(np.asarray(found)[row].astype(np.float64))
        best = reference.variational_objective(ours, prior, loss_row, beta32)
        free_energy = -beta32 * (
            float(np.max(prior - loss_row / beta32))
            + math.log(np.sum(np.exp(prior - loss_row / beta32 - np.max(prior - loss_row / beta32))))
        )
        np.testing.assert_allclose(best, free_energy, rtol=1e-5)
        for scale in (0.01, 0.1, 1.0):
            other = reference.log_softmax(expected + scale * rng.normal(size=4))
            worse = reference.variational_objective(other, prior, loss_row, beta32)
            assert best <= worse + 1e-6 * max(1.0, abs(worse))


def test_closed_form_posterior_of_equal_losses_is_the_router() -> None:
    log_router = np.log([0.7, 0.2, 0.1]).astype(np.float32)
    found = compiled_posterior(jnp.asarray(log_router), jnp.full((3,), 2.0), 0.1)
    np.testing.assert_allclose(np.asarray(found), log_router, rtol=2e-5)


def test_closed_form_posterior_of_a_latent_the_router_excludes() -> None:
    found = np.asarray(compiled_posterior(log([0.5, 0.5, 0.0]), floats([1.0, 2.0, 0.0]), 1.0))
    np.testing.assert_allclose(np.exp(found), [1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0], rtol=1e-6)


def test_closed_form_posterior_is_float32_for_half_precision_inputs() -> None:
    found = compiled_posterior(jnp.zeros((3,), jnp.bfloat16), jnp.asarray([1.0, 2.0, 3.0], jnp.bfloat16), 1.0)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found), reference.log_softmax(np.array([-1.0, -2.0, -3.0])), rtol=1e-6)


# reference scoring and imports


def test_score_reference_is_the_nll_of_the_reference() -> None:
    hidden, unembedding, tokens, loss_mask = draw()
    seen = []

    def apply(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        seen.append(tokens.shape)
        return jnp.einsum("btd,dv->btv", params["hidden"], params["unembedding"], precision="highest")

    found = jax.jit(functools.partial(score_reference, apply))(
        {"hidden": hidden, "unembedding": unembedding}, tokens, loss_mask
    )
    assert seen == [tokens.shape]
    logits = hidden.astype(np.float64) @ unembedding.astype(np.float64)
    expected = reference.loop_over_leading(reference.token_nll_per_position, (2, 1, 1), logits, tokens, loss_mask)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)


def test_the_losses_import_nothing_but_jax_chex_and_the_standard_library() -> None:
    program = """
import json, sys
import jax, jax.numpy, jax.experimental, chex
before = set(sys.modules)
import surprisal_jax.losses
print(json.dumps([sorted(set(sys.modules) - before), sorted(sys.modules)]))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    new, everything = json.loads(finished.stdout)
    own = [name for name in new if name.split(".")[0] == "surprisal_jax"]
    assert "surprisal_jax.losses" in own
    assert [name for name in own if name != "surprisal_jax" and not name.startswith("surprisal_jax.losses")] == []
    foreign = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert foreign <= {"surprisal_jax", "jax", "jaxlib", "chex"}
    heavy = {"flax", "orbax", "optax", "surprisal_jax.config", "surprisal_jax.models"}
    assert heavy & set(everything) == set()
