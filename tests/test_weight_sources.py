"""Where token weights come from, and how much of them: against float64 loops written from the equations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from surprisal_jax import losses

B, K, T, V = 3, 4, 6, 7
MASK = np.array([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def apply_fn(params: jax.Array, tokens: jax.Array) -> jax.Array:
    return params[tokens]


TABLE = 3 * random(V, V, seed=1)
TOKENS = np.random.default_rng(2).integers(0, V, (B, T))
LOSS_MASK = np.concatenate([np.zeros((B, 1), bool), MASK], axis=1)


def test_predictive_entropy_is_the_entropy_of_the_next_token():
    expected = np.zeros((B, T - 1))
    for b in range(B):
        for t in range(T - 1):
            if MASK[b, t]:
                p = np.exp(TABLE[TOKENS[b, t]].astype(np.float64))
                p /= p.sum()
                expected[b, t] = -sum(value * np.log(value) for value in p)
    for function in (losses.predictive_entropy, jax.jit(losses.predictive_entropy, static_argnums=0)):
        actual = function(apply_fn, TABLE, TOKENS, LOSS_MASK)
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=0)


def test_predictive_entropy_limits():
    certain = np.full((V, V), -np.inf, np.float32)
    certain[:, 2] = 0.0
    np.testing.assert_array_equal(losses.predictive_entropy(apply_fn, jnp.asarray(certain), TOKENS, LOSS_MASK), 0.0)
    even = losses.predictive_entropy(apply_fn, jnp.zeros((V, V)), TOKENS, LOSS_MASK)
    np.testing.assert_allclose(even[MASK], np.log(V), rtol=1e-6)


def test_predictive_entropy_is_the_mean_surprisal_under_the_model():
    """sum_v p(v) b(v), with b from `score_reference` on every possible next token."""
    tokens = np.stack([np.full(V, 3), np.arange(V)], axis=1)
    b = np.asarray(losses.score_reference(apply_fn, TABLE, tokens, np.ones_like(tokens, bool)), np.float64)[:, 0]
    entropy = losses.predictive_entropy(apply_fn, TABLE, tokens[:1], np.ones((1, 2), bool))
    np.testing.assert_allclose(entropy[0, 0], (np.exp(-b) * b).sum(), rtol=1e-6)


def test_no_gradient_reaches_the_reference():
    gradient = jax.grad(lambda table: losses.predictive_entropy(apply_fn, table, TOKENS, LOSS_MASK).sum())(TABLE)
    np.testing.assert_array_equal(gradient, 0.0)


TOKEN_NLL = np.abs(2 * random(B, K, T - 1, seed=3))
LOG_ROUTER = np.asarray(jax.nn.log_softmax(random(B, K, seed=4)))


def marginal(b: int) -> list[float]:
    """-log sum_z p(z) prod_{s <= t} p_s(z) + log sum_z p(z) prod_{s < t} p_s(z), products in float64."""
    joint, result = np.exp(LOG_ROUTER[b].astype(np.float64)), []
    joint /= joint.sum()
    for t in range(T - 1):
        before = joint.sum()
        if MASK[b, t]:
            joint = joint * np.exp(-TOKEN_NLL[b, :, t].astype(np.float64))
            result.append(-np.log(joint.sum() / before))
        else:
            result.append(0.0)
    return result


def test_marginal_token_nll_is_the_chain_rule_of_the_mixture():
    expected = np.asarray([marginal(b) for b in range(B)])
    masked = np.where(MASK[:, None, :], TOKEN_NLL, np.nan)  # what stands off the mask is not read
    for function in (
        losses.marginal_token_nll,
        jax.jit(losses.marginal_token_nll),
        jax.vmap(losses.marginal_token_nll),
    ):
        np.testing.assert_allclose(function(masked, LOG_ROUTER, MASK), expected, rtol=2e-5, atol=1e-7)


def test_marginal_token_nll_sums_to_the_nll_of_the_sequence():
    whole = -jax.nn.logsumexp(LOG_ROUTER - np.where(MASK[:, None], TOKEN_NLL, 0).sum(-1), axis=-1)
    np.testing.assert_allclose(
        losses.marginal_token_nll(TOKEN_NLL, LOG_ROUTER, MASK).sum(-1), whole, rtol=1e-5, atol=1e-6
    )


def test_latents_that_agree_have_their_own_nll_as_marginal():
    shared = np.abs(random(B, 1, T - 1, seed=5)) * 1e-4
    actual = losses.marginal_token_nll(np.broadcast_to(shared, (B, K, T - 1)), LOG_ROUTER, MASK)
    np.testing.assert_allclose(actual[MASK], shared[:, 0][MASK], rtol=0, atol=3e-7)


def test_marginal_token_nll_has_the_gradient_of_the_mixture():
    mask = np.ones((1, 3), bool)
    nll, router = np.abs(random(1, 2, 3, seed=6)), np.log(np.array([[0.3, 0.7]], np.float32))
    gradient = jax.grad(lambda x: losses.marginal_token_nll(x, router, mask).sum())(nll)
    responsibility = jax.nn.softmax(router - nll.sum(-1), axis=-1)  # of the sum over t, the sequence's NLL
    np.testing.assert_allclose(gradient, np.broadcast_to(responsibility[..., None], nll.shape), rtol=1e-5)


SOURCE = np.abs(random(B, T - 1, seed=7)) + 0.1
BASE = np.abs(random(B, T - 1, seed=8)) + 0.1


def bundle(**changes: object) -> losses.TokenWeighting:
    return losses.compute_token_weighting(BASE, MASK, MASK, np.zeros(B, np.int32), 1.5, **changes)  # type: ignore[arg-type]


def expected_weights(source: np.ndarray, alpha: float, mix: float) -> np.ndarray:
    weights = np.zeros((B, T - 1))
    for b in range(B):
        total = sum(float(source[b, t]) ** alpha for t in range(T - 1) if MASK[b, t])
        for t in range(T - 1):
            if MASK[b, t]:
                weights[b, t] = mix * float(source[b, t]) ** alpha / total + (1 - mix) / MASK[b].sum()
    return weights


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("source", [None, SOURCE], ids=["b", "other"])
def test_weights_are_made_from_their_source_and_mixed(source, mix):
    weighting = bundle(weight_source=source, token_weight_mix=mix)
    given = BASE if source is None else source
    expected = expected_weights(given, 1.5, mix)
    np.testing.assert_allclose(weighting.token_weights, expected, rtol=2e-6, atol=1e-8)
    np.testing.assert_allclose(
        weighting.inverse_token_weights, expected_weights(given, -1.5, 1.0), rtol=2e-6, atol=1e-8
    )
    # The base losses are those of b, whatever weighs them.
    np.testing.assert_allclose(weighting.token_weighted_base_loss, (expected * BASE).sum(-1), rtol=2e-6)
    np.testing.assert_allclose(weighting.example_base_loss, bundle().example_base_loss)
    np.testing.assert_array_equal(weighting.aligned_base_token_nll, bundle().aligned_base_token_nll)


def test_defaults_change_no_bit():
    jax.tree.map(np.testing.assert_array_equal, bundle(), bundle(weight_source=BASE, token_weight_mix=1.0))


def test_a_uniform_source_is_alpha_0():
    flat = bundle(weight_source=np.ones((B, T - 1), np.float32))
    np.testing.assert_allclose(flat.token_weights, expected_weights(BASE, 0.0, 1.0), rtol=1e-6)
    np.testing.assert_allclose(flat.token_weights, bundle(token_weight_mix=0.0).token_weights, rtol=1e-6)


def test_sources_are_detached_and_the_mix_is_traced_once():
    def weights(source: jax.Array, mix: jax.Array) -> jax.Array:
        return (bundle(weight_source=source, token_weight_mix=mix).token_weights * SOURCE).sum()

    np.testing.assert_array_equal(jax.grad(weights)(SOURCE, 0.5), 0.0)
    np.testing.assert_array_equal(jax.grad(weights, argnums=1)(SOURCE, 0.5), 0.0)
    compiled = jax.jit(weights)
    for mix in (0.0, 0.25, 1.0):
        compiled(SOURCE, jnp.float32(mix))
    assert compiled._cache_size() == 1
