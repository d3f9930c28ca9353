"""Gradients against float64 formulas, exact zeros through `stop_gradient`, and the envelope identity."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from surprisal_jax.losses import (
    ReconstructionTerms,
    TokenWeighting,
    align_to_conditioned,
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


def floats(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float64).astype(np.float32))


def bools(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, bool))


def assert_all_exactly_zero(tree: Any) -> None:
    leaves = jax.tree.leaves(tree)
    assert leaves
    for leaf in leaves:
        np.testing.assert_array_equal(np.asarray(leaf), 0)


# token NLL


def weighted_nll(logits: jax.Array, tokens: jax.Array, loss_mask: jax.Array, cotangent: jax.Array) -> jax.Array:
    return jnp.sum(cotangent * masked_token_nll_per_position(logits, tokens, loss_mask))


nll_gradient = jax.jit(jax.grad(weighted_nll))


def test_nll_gradient_is_softmax_minus_onehot() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(6, 5, 7)) * 10.0 ** rng.uniform(-1, 1, size=(6, 1, 1))).astype(np.float32)
    tokens, loss_mask = rng.integers(0, 7, (6, 5)), rng.random((6, 5)) < 0.7
    tokens[:2, 1:] = logits[:2, :-1].argmax(-1)  # targets that are the maximum, and targets that are not
    tokens[2:4, 1:] = logits[2:4, :-1].argmin(-1)
    cotangent = rng.normal(size=(6, 4)).astype(np.float32)
    found = np.asarray(nll_gradient(logits, tokens, loss_mask, cotangent))
    expected = reference.loop_over_leading(
        reference.token_nll_logit_gradient,
        (2, 1, 1, 1),
        logits.astype(np.float64),
        tokens,
        loss_mask,
        cotangent.astype(np.float64),
    )
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=1e-7)
    np.testing.assert_array_equal(found[:, -1], 0)
    np.testing.assert_array_equal(found[:, :-1][~loss_mask[:, 1:]], 0)


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize(
    "logits",
    [
        [12.0, 0.0, -5.0],
        [1e4, 1e4 - 12, 0.0],
        [30.0, 3.0, -4.0],
        [60.0, 0.0, 1.0],
        [5.0, 5.0, -20.0],
        [16.0, 0.0, -50.0],
    ],
    ids=str,
)
def test_gradient_keeps_its_relative_accuracy_where_the_target_is_near_certain(
    logits: list[float], source: str
) -> None:
    """p_y - 1 by subtraction has steps of 6e-8; the gradient of the target's own logit is as small as the others'."""
    expected = reference.nll_logit_gradient(np.asarray(logits), 0)
    rows, tokens, loss_mask = floats([logits, logits]), jnp.asarray([0, 0]), bools([0, 1])
    if source == "logits":
        found = nll_gradient(rows, tokens, loss_mask, floats([1.0]))
    else:
        found = hidden_gradients(1)(rows, jnp.eye(len(logits)), tokens, loss_mask, floats([1.0]))[0]
    np.testing.assert_allclose(np.asarray(found)[0], expected, rtol=3e-6, atol=1e-37)
    np.testing.assert_array_equal(np.asarray(found)[1], 0)


def test_gradient_at_impossible_tokens_is_zero_and_finite() -> None:
    logits = floats([[5.0, -math.inf, -math.inf, 4.0]] * 2)
    for target in (0, 3):
        found = np.asarray(nll_gradient(logits, jnp.asarray([0, target]), bools([0, 1]), floats([1.0])))
        expected = reference.nll_logit_gradient(np.array([5.0, -1e5, -1e5, 4.0]), target)
        np.testing.assert_allclose(found[0], expected, rtol=2e-6)


def test_gradient_of_bfloat16_logits_has_their_dtype_and_float32_accuracy() -> None:
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(4, 9)) * 3, jnp.bfloat16)
    tokens, loss_mask = jnp.asarray([0, 3, 1, 8]), bools([0, 1, 1, 1])
    found = nll_gradient(logits, tokens, loss_mask, jnp.ones((3,)))
    assert found.dtype == jnp.bfloat16
    expected = reference.token_nll_logit_gradient(
        np.asarray(logits).astype(np.float64), [0, 3, 1, 8], [0, 1, 1, 1], np.ones(3)
    )
    # one rounding to bfloat16, at the end
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), expected, rtol=2**-8, atol=1e-6)


# from hidden states


def weighted_nll_from_hidden(
    hidden: jax.Array,
    unembedding: jax.Array,
    tokens: jax.Array,
    loss_mask: jax.Array,
    cotangent: jax.Array,
    chunk_size: int,
) -> jax.Array:
    nll = masked_token_nll_from_hidden(hidden, unembedding, tokens, loss_mask, chunk_size=chunk_size)
    return jnp.sum(cotangent * nll)


@functools.cache
def hidden_gradients(chunk_size: int) -> Callable[..., Any]:
    return jax.jit(jax.grad(functools.partial(weighted_nll_from_hidden, chunk_size=chunk_size), argnums=(0, 1)))


@jax.jit
def gradients_through_logits(
    hidden: jax.Array, unembedding: jax.Array, tokens: jax.Array, loss_mask: jax.Array, cotangent: jax.Array
) -> Any:
    def objective(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
        logits = jnp.einsum("...d,dv->...v", hidden, unembedding, precision="highest")
        return weighted_nll(logits, tokens, loss_mask, cotangent)

    return jax.grad(objective, argnums=(0, 1))(hidden, unembedding)


def draw(dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    """Cotangents differ by token; the last row has nothing supervised and its hidden states are large."""
    rng = np.random.default_rng(2)
    hidden = rng.normal(size=(3, 6, 5))
    hidden[-1] *= 50
    unembedding = rng.normal(size=(5, 11))
    tokens, loss_mask = rng.integers(0, 11, (3, 6)), rng.random((3, 6)) < 0.7
    loss_mask[-1] = False
    cotangent = rng.normal(size=(3, 5)).astype(np.float32)
    return jnp.asarray(hidden, dtype), jnp.asarray(unembedding, dtype), tokens, loss_mask, cotangent


def float64_gradients(
    hidden: Any, unembedding: Any, tokens: Any, loss_mask: Any, cotangent: Any
) -> tuple[np.ndarray, np.ndarray]:
    hidden, unembedding = np.asarray(hidden).astype(np.float64), np.asarray(unembedding).astype(np.float64)
    logit_gradient = reference.loop_over_leading(
        reference.token_nll_logit_gradient,
        (2, 1, 1, 1),
        hidden @ unembedding,
        tokens,
        loss_mask,
        np.asarray(cotangent, np.float64),
    )
    return logit_gradient @ unembedding.T, np.einsum("btd,btv->dv", hidden, logit_gradient)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 15, 64])
def test_gradients_from_hidden_equal_those_through_logits(chunk_size: int) -> None:
    arguments = draw()
    found = hidden_gradients(chunk_size)(*arguments)
    for left, right, exact in zip(
        found, gradients_through_logits(*arguments), float64_gradients(*arguments), strict=True
    ):
        assert np.abs(exact).max() > 0.5
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(left), exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found[0])[-1], 0)
    np.testing.assert_array_equal(np.asarray(found[0])[:, -1], 0)


def test_gradients_from_hidden_under_vmap_over_latents() -> None:
    hidden, unembedding, tokens, loss_mask, cotangent = draw()
    stacked = jnp.stack([hidden, 0.5 * hidden, -hidden])
    step = functools.partial(weighted_nll_from_hidden, chunk_size=4)
    batched = jax.jit(jax.vmap(jax.grad(step, argnums=(0, 1)), in_axes=(0, None, None, None, None)))
    found = batched(stacked, unembedding, tokens, loss_mask, cotangent)
    for latent in range(3):
        exact = float64_gradients(stacked[latent], unembedding, tokens, loss_mask, cotangent)
        for left, right in zip(found, exact, strict=True):
            np.testing.assert_allclose(np.asarray(left[latent]), right, rtol=1e-5, atol=1e-5)


def test_gradients_of_bfloat16_hidden_states_are_summed_in_float32() -> None:
    """One rounding at the end: 300 rows added in bfloat16 would be off by percents."""
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(1, 301, 4)) + 1, jnp.bfloat16)
    unembedding = jnp.asarray(0.1 * rng.normal(size=(4, 6)), jnp.bfloat16)
    tokens, loss_mask = rng.integers(0, 6, (1, 301)), np.ones((1, 301), bool)
    cotangent = np.full((1, 300), 1.0, np.float32)
    found = hidden_gradients(8)(hidden, unembedding, tokens, loss_mask, cotangent)
    exact = float64_gradients(hidden, unembedding, tokens, loss_mask, cotangent)
    for left, right in zip(found, exact, strict=True):
        assert left.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(left).astype(np.float64), right, rtol=2**-7, atol=2**-9)


# nothing flows through the reference


def weighting_inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    b = floats([[0.5, 1.5, 3.0, 2.0], [0.0, 2.0, 0.0, 9.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    mask = bools([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    return b, mask, jnp.asarray([0, 1, -1, 0], jnp.int32)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 8.0, -1.0])
def test_every_leaf_of_the_bundle_has_an_exactly_zero_gradient(alpha: float) -> None:
    b, mask, offsets = weighting_inputs()
    found = leaf_jacobians(b, mask, offsets, alpha)
    assert len(jax.tree.leaves(found)) == 2 * len(LEAVES)
    assert_all_exactly_zero(found)


@jax.jit
def leaf_jacobians(b: jax.Array, mask: jax.Array, offsets: jax.Array, alpha: Any) -> Any:
    """Of every leaf by itself, in b and in alpha: a sum of leaves could cancel."""

    def leaf(name: str, b: jax.Array, alpha: Any) -> jax.Array:
        return getattr(compute_token_weighting(b, mask, mask, offsets, alpha), name)

    return {name: jax.jacrev(functools.partial(leaf, name), argnums=(0, 1))(b, alpha) for name in LEAVES}


def test_shares_have_an_exactly_zero_gradient() -> None:
    b, mask, _ = weighting_inputs()
    assert_all_exactly_zero(jax.jit(jax.jacrev(lambda b: surprisal_share_weights(b, mask, 1.0)))(b))


def test_alignment_by_itself_passes_gradients_where_it_reads() -> None:
    """It is a gather: what stops the gradient is the bundle, visibly."""
    values, ones = floats([1.0, 2.0, 3.0]), bools([1, 1, 1])
    gradient = jax.jit(
        jax.grad(lambda v: jnp.sum(align_to_conditioned(v, ones, ones, jnp.asarray(1))[0] * floats([5, 6, 7])))
    )
    np.testing.assert_array_equal(np.asarray(gradient(values)), [6, 7, 0])


def test_reference_parameters_have_an_exactly_zero_gradient() -> None:
    hidden, unembedding, tokens, loss_mask, cotangent = draw()

    def apply(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return jnp.einsum("btd,dv->btv", params["hidden"], params["unembedding"]) * params["scale"]

    params = {"hidden": hidden, "unembedding": unembedding, "scale": jnp.float32(1.3)}
    scored = loss_mask[:, 1:]

    def direct(params: Any) -> jax.Array:
        return jnp.sum(cotangent * score_reference(apply, params, tokens, loss_mask))

    def through_the_objective(params: Any) -> jax.Array:
        b = score_reference(apply, params, tokens, loss_mask)
        weighting = compute_token_weighting(b, scored, scored, jnp.zeros((3,), jnp.int32), 1.0)
        terms = reconstruction_terms(
            jnp.abs(cotangent), scored, weighting, masked_mean_over_examples(b[:, 0], scored[:, 0])
        )
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(terms))

    for objective in (direct, through_the_objective):
        value, gradients = jax.jit(jax.value_and_grad(objective))(params)
        assert float(value) != 0
        assert_all_exactly_zero(gradients)


def test_the_generator_trains_where_it_shares_the_reference_parameters() -> None:
    """Same parameters in both places: only the generator's side counts."""
    hidden, unembedding, tokens, loss_mask, _ = draw()
    scored = jnp.asarray(loss_mask[:, 1:])

    def objective(params: jax.Array, reference_params: jax.Array) -> jax.Array:
        b = score_reference(lambda p, tokens: jnp.einsum("btd,dv->btv", hidden, p), reference_params, tokens, loss_mask)
        weighting = compute_token_weighting(b, scored, scored, jnp.zeros((3,), jnp.int32), 1.0)
        nll = masked_token_nll_from_hidden(hidden, params, tokens, loss_mask, chunk_size=4)
        return jnp.sum(token_weighted_masked_nll_per_example(nll, scored, weighting.token_weights))

    apart = jax.jit(jax.grad(objective))(unembedding, unembedding)
    shared = jax.jit(jax.grad(lambda params: objective(params, params)))(unembedding)
    assert np.abs(np.asarray(apart)).max() > 0.1
    np.testing.assert_allclose(np.asarray(shared), np.asarray(apart), rtol=1e-6, atol=1e-7)


# the six terms


def six_weights(b: np.ndarray, mask: np.ndarray, alpha: float, c_base: float) -> dict[str, np.ndarray]:
    """Each term is linear in the generator's NLL: its gradient is its weights over its divisor."""
    bundle = reference.token_weighting(b, mask, alpha)
    uniform = mask / mask.sum() if mask.any() else np.zeros(len(mask))
    return {
        "raw": uniform,
        "baseline_normalized": uniform / max(c_base, 1e-3),
        "example_normalized": uniform / max(bundle["example_base_loss"], 1e-3),
        "token_weighted": bundle["token_weights"],
        "normalized_token_weighted": bundle["token_weights"] / max(bundle["token_weighted_base_loss"], 1e-3),
        "normalized_inverse_token_weighted": bundle["inverse_token_weights"]
        / max(bundle["inverse_token_weighted_base_loss"], 1e-3),
    }


def test_gradients_of_the_six_terms_are_their_weights() -> None:
    b, mask, _ = weighting_inputs()
    nll = floats(np.random.default_rng(4).random((4, 3, 4)))
    c_base = 0.7

    @jax.jit
    def jacobians(nll: jax.Array, c_base: jax.Array) -> Any:
        weighting = compute_token_weighting(b, mask, mask, jnp.zeros((4,), jnp.int32), 1.5)

        def terms(nll: jax.Array, c_base: jax.Array) -> ReconstructionTerms:
            summed = reconstruction_terms(nll, mask, weighting, c_base, latent_axis=-2)
            return jax.tree.map(jnp.sum, summed)  # examples and latents do not mix

        return jax.jacrev(terms, argnums=(0, 1))(nll, c_base)

    found = jacobians(nll, c_base)
    for name in TERMS:
        by_nll, by_c_base = getattr(found, f"{name}_reconstruction_loss")
        assert float(by_c_base) == 0.0
        for row in range(4):
            expected = six_weights(np.asarray(b[row]).astype(np.float64), np.asarray(mask[row]), 1.5, c_base)[name]
            for latent in range(3):
                np.testing.assert_allclose(
                    np.asarray(by_nll)[row, latent], expected, rtol=1e-5, atol=1e-30, err_msg=name
                )


def test_divisors_carry_no_gradient_even_when_the_bundle_does() -> None:
    """A caller may hand over a bundle that is not detached: dividing by it must not train it."""
    nll, mask = floats([0.5, 1.5]), bools([1, 1])

    def terms(scale: jax.Array) -> ReconstructionTerms:
        weighting = TokenWeighting(
            token_weights=floats([0.25, 0.75]),
            inverse_token_weights=floats([0.75, 0.25]),
            aligned_base_token_nll=floats([1.0, 3.0]),
            example_base_loss=2.0 * scale,
            token_weighted_base_loss=2.5 * scale,
            inverse_token_weighted_base_loss=1.5 * scale,
            token_concentration_factor=1.25 * scale,
            inverse_token_base_scale_factor=0.75 * scale,
        )
        return reconstruction_terms(nll, mask, weighting, 0.5 * scale)

    values, gradients = jax.jit(lambda scale: (terms(scale), jax.jacrev(terms)(scale)))(jnp.float32(1.0))
    np.testing.assert_allclose(
        [float(getattr(values, f"{name}_reconstruction_loss")) for name in TERMS],
        [1, 2, 0.5, 1.25, 0.5, 0.5],
        rtol=2e-6,
    )
    assert_all_exactly_zero(gradients)


def test_weighted_total_passes_gradients_to_terms_and_coefficients() -> None:
    terms = {"a": floats([1.0, 2.0]), "nested": {"b": floats([3.0, 4.0]), "off": None}}
    coefficients = {"a": floats(0.5), "nested": {"b": floats(-2.0), "off": None}}
    by_terms, by_coefficients = jax.jit(jax.grad(lambda t, c: jnp.sum(weighted_total(t, c)), argnums=(0, 1)))(
        terms, coefficients
    )
    np.testing.assert_allclose(np.asarray(by_terms["a"]), [0.5, 0.5])
    np.testing.assert_allclose(np.asarray(by_terms["nested"]["b"]), [-2, -2])
    assert float(by_coefficients["a"]) == 3.0 and float(by_coefficients["nested"]["b"]) == 7.0


# divergences


def test_kl_gradient_against_float64() -> None:
    """In logits: d/d(q logits) = q (log q - log p - KL), d/d(p logits) = p - q."""
    rng = np.random.default_rng(5)
    q_logits, p_logits = (rng.normal(size=(4, 5)).astype(np.float32) * 2 for _ in range(2))

    def objective(q_logits: jax.Array, p_logits: jax.Array) -> jax.Array:
        return jnp.sum(categorical_kl(jax.nn.log_softmax(q_logits), jax.nn.log_softmax(p_logits)))

    by_q, by_p = jax.jit(jax.grad(objective, argnums=(0, 1)))(q_logits, p_logits)
    for row in range(4):
        log_q = reference.log_softmax(q_logits[row].astype(np.float64))
        log_p = reference.log_softmax(p_logits[row].astype(np.float64))
        q, p = np.exp(log_q), np.exp(log_p)
        np.testing.assert_allclose(np.asarray(by_q)[row], q * (log_q - log_p - reference.kl(log_q, log_p)), atol=1e-6)
        np.testing.assert_allclose(np.asarray(by_p)[row], p - q, atol=1e-6)


def test_kl_gradient_with_zero_targets_is_finite() -> None:
    """Value 0.22217; with optax's form the gradient is NaN at the two zeros."""
    logits = floats([0.5, 1.0, 2.0, -1.0])
    with np.errstate(divide="ignore"):
        log_q = floats(np.log([0.0, 0.4, 0.6, 0.0]))

    def objective(log_q: jax.Array, logits: jax.Array) -> jax.Array:
        return categorical_kl(log_q, jax.nn.log_softmax(logits))

    value, (by_q, by_p) = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))(log_q, logits)
    np.testing.assert_allclose(float(value), 0.22217, rtol=2e-5)
    assert np.all(np.isfinite(np.asarray(by_q)))
    p = reference.softmax(np.array([0.5, 1.0, 2.0, -1.0]))
    np.testing.assert_allclose(np.asarray(by_p), p - np.array([0, 0.4, 0.6, 0]), atol=1e-6)


def test_kl_gradient_with_shared_zeros_is_finite() -> None:
    masked = floats([0.0, -math.inf, 0.0, -math.inf])

    def objective(q_logits: jax.Array, p_logits: jax.Array) -> jax.Array:
        return categorical_kl(jax.nn.log_softmax(q_logits + masked), jax.nn.log_softmax(p_logits + masked))

    q_logits, p_logits = floats([1.0, 5.0, 2.0, 0.0]), floats([0.5, 1.0, 0.0, 3.0])
    value, (by_q, by_p) = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))(q_logits, p_logits)
    log_q = reference.log_softmax(np.array([1.0, 2.0]))
    log_p = reference.log_softmax(np.array([0.5, 0.0]))
    np.testing.assert_allclose(float(value), reference.kl(log_q, log_p), rtol=1e-5)
    expected = np.exp(log_q) * (log_q - log_p - reference.kl(log_q, log_p))
    np.testing.assert_allclose(np.asarray(by_q), [expected[0], 0, expected[1], 0], atol=1e-6)
    by_p_expected = np.exp(log_p) - np.exp(log_q)
    np.testing.assert_allclose(np.asarray(by_p), [by_p_expected[0], 0, by_p_expected[1], 0], atol=1e-6)


def divergence_at_one_position(logits: jax.Array) -> jax.Array:
    stacked = jnp.stack([logits, jnp.zeros_like(logits)], axis=1)
    return inter_latent_divergence(stacked, bools([0, 1]), floats([1.0]))


def divergence_at_one_position_from_hidden(logits: jax.Array) -> jax.Array:
    stacked = jnp.stack([logits, jnp.zeros_like(logits)], axis=1)
    identity = jnp.eye(logits.shape[-1])
    return inter_latent_divergence_from_hidden(stacked, identity, bools([0, 1]), floats([1.0]), chunk_size=1)


divergence_gradients = {
    "logits": jax.jit(jax.value_and_grad(divergence_at_one_position)),
    "hidden": jax.jit(jax.value_and_grad(divergence_at_one_position_from_hidden)),
}


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_jsd_gradient_at_one_ten_millionth(form: str) -> None:
    rng = np.random.default_rng(6)
    for _ in range(4):
        logits = (rng.normal(size=(1, 24)) + 5.5e-4 * rng.normal(size=(3, 24))).astype(np.float32)
        value, gradient = divergence_gradients[form](logits)
        expected = reference.jsd(logits.astype(np.float64))
        exact = reference.jsd_logit_gradient(logits.astype(np.float64))
        assert 3e-8 < expected < 3e-7
        np.testing.assert_allclose(float(value), expected, rtol=1e-3)
        error = np.linalg.norm(np.asarray(gradient) - exact) / np.linalg.norm(exact)
        assert error < 1e-3


def test_the_float64_jsd_gradient_is_the_derivative_of_the_float64_jsd() -> None:
    """The formula of the reference, by finite differences."""
    logits = np.random.default_rng(7).normal(size=(3, 4))
    exact = reference.jsd_logit_gradient(logits)
    for index in np.ndindex(3, 4):
        step = np.zeros((3, 4))
        step[index] = 1e-5
        slope = (reference.jsd(logits + step) - reference.jsd(logits - step)) / 2e-5
        np.testing.assert_allclose(slope, exact[index], atol=1e-9)


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("scale", [0.03, 1.0, 10.0])
def test_jsd_gradient_against_float64(scale: float, form: str) -> None:
    logits = (np.random.default_rng(8).normal(size=(3, 24)) * scale).astype(np.float32)
    _, gradient = divergence_gradients[form](logits)
    exact = reference.jsd_logit_gradient(logits.astype(np.float64))
    np.testing.assert_allclose(np.asarray(gradient), exact, rtol=1e-4, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize(
    "logits",
    [
        [[0.0, -math.inf, 1.0], [2.0, -math.inf, 1.0]],
        [[0.0, -math.inf, 1.0], [2.0, 0.5, -math.inf]],
        [[0.0, -math.inf, -math.inf], [-math.inf, 0.0, -math.inf], [0.0, 0.0, -math.inf]],
        [[0.0, -200.0, 1.0], [2.0, -300.0, 1.0]],
        [[1.0, 2.0, -math.inf], [1.0, 2.0, -math.inf]],
    ],
    ids=["shared", "unshared", "both", "underflowing", "equal"],
)
def test_jsd_gradient_with_impossible_tokens(logits: list[list[float]]) -> None:
    _, gradient = divergence_gradients["logits"](floats(logits))
    finite = np.maximum(np.asarray(logits), -1e3)
    mixture_is_zero = np.all(np.asarray(logits) < -100, axis=0)
    exact = np.zeros(finite.shape)
    exact[:, ~mixture_is_zero] = reference.jsd_logit_gradient(finite[:, ~mixture_is_zero])
    np.testing.assert_allclose(np.asarray(gradient), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_divergence_gradients_from_hidden_equal_those_through_logits(chunk_size: int) -> None:
    rng = np.random.default_rng(9)
    hidden = rng.normal(size=(2, 3, 5, 4)).astype(np.float32)
    unembedding = rng.normal(size=(4, 6)).astype(np.float32)
    loss_mask = np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]], bool)
    weights = rng.random((2, 4)).astype(np.float32)

    def from_hidden(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
        values = inter_latent_divergence_from_hidden(hidden, unembedding, loss_mask, weights, chunk_size=chunk_size)
        return jnp.sum(values * floats([1.0, 3.0]))

    found = jax.jit(jax.grad(from_hidden, argnums=(0, 1)))(hidden, unembedding)
    logits = hidden.astype(np.float64) @ unembedding.astype(np.float64)
    logit_gradient = np.zeros(logits.shape)
    for position in range(4):
        if loss_mask[0, position + 1]:
            logit_gradient[0, :, position] = weights[0, position] * reference.jsd_logit_gradient(logits[0, :, position])
    exact = logit_gradient @ unembedding.T.astype(np.float64), np.einsum("bktd,bktv->dv", hidden, logit_gradient)
    for left, right in zip(found, exact, strict=True):
        np.testing.assert_allclose(np.asarray(left), right, rtol=1e-5, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(found[0])[1], 0)


# the closed-form posterior


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_closed_form_posterior_has_an_exactly_zero_gradient(beta: float) -> None:
    log_router, losses = jnp.log(floats([0.5, 0.3, 0.2])), floats([1.0, 0.5, 2.0])
    found = jax.jit(jax.jacrev(closed_form_log_posterior, argnums=(0, 1, 2)))(log_router, losses, beta)
    assert_all_exactly_zero(found)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_envelope_identity(beta: float) -> None:
    """With q* detached, E_q[R] + beta KL(q || router) has the gradient of the free energy, and its value."""
    rng = np.random.default_rng(10)
    params = {
        "router": rng.normal(size=(2, 4)).astype(np.float32),
        "generator": rng.normal(size=(2, 4)).astype(np.float32),
    }

    def parts(params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jax.nn.log_softmax(params["router"]), 0.3 * jax.nn.softplus(params["generator"])

    def variational(params: dict[str, jax.Array]) -> jax.Array:
        log_router, losses = parts(params)
        log_q = closed_form_log_posterior(log_router, losses, beta)
        return jnp.sum(jnp.sum(jnp.exp(log_q) * losses, -1) + beta * categorical_kl(log_q, log_router))

    def free_energy(params: dict[str, jax.Array]) -> jax.Array:
        log_router, losses = parts(params)
        return jnp.sum(-beta * jax.nn.logsumexp(log_router - losses / beta, axis=-1))

    value, gradients = jax.jit(jax.value_and_grad(variational))(params)
    expected_value, expected = jax.jit(jax.value_and_grad(free_energy))(params)
    np.testing.assert_allclose(float(value), float(expected_value), rtol=1e-5)
    for name in params:
        assert np.abs(np.asarray(expected[name])).max() > 1e-3
        np.testing.assert_allclose(np.asarray(gradients[name]), np.asarray(expected[name]), rtol=0, atol=1e-6)


def test_posterior_fit_moves_the_network_alone() -> None:
    def fit(network: jax.Array, router: jax.Array, losses: jax.Array) -> jax.Array:
        log_q = closed_form_log_posterior(jax.nn.log_softmax(router), losses, 0.1)
        return categorical_kl(log_q, jax.nn.log_softmax(network))

    network, router, losses = floats([0.1, 0.2, 0.3]), floats([1.0, 0.0, -1.0]), floats([0.4, 0.5, 0.6])
    by_network, by_router, by_losses = jax.jit(jax.grad(fit, argnums=(0, 1, 2)))(network, router, losses)
    log_q = reference.log_posterior(reference.log_softmax(np.array([1.0, 0, -1])), [0.4, 0.5, 0.6], 0.1)
    expected = reference.softmax(np.array([0.1, 0.2, 0.3])) - np.exp(log_q)
    np.testing.assert_allclose(np.asarray(by_network), expected, atol=2e-6)
    assert_all_exactly_zero((by_router, by_losses))
