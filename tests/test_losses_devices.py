"""One device, jit over global arrays, pmap, shard_map and scan give one value and one gradient.

The batch is uneven on purpose: the eight devices hold 2, 2, 1, 2, 0, 1, 2, 1 examples that count, so a mean of device
means, a mean of micro-batch means and a gradient that is summed twice all give another number.
"""

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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from surprisal_jax.losses import (
    ObjectiveTerms,
    ReconstructionTerms,
    all_sum,
    categorical_kl,
    closed_form_log_posterior,
    compute_token_weighting,
    inter_latent_divergence_from_hidden,
    masked_mean_over_examples,
    masked_token_nll_from_hidden,
    reconstruction_terms,
    weighted_total,
)

# one worker: the compiled steps are shared by the tests
pytestmark = pytest.mark.xdist_group("losses_devices")

DEVICES, PER_DEVICE, LATENTS, LENGTH, WIDTH, VOCABULARY = 8, 2, 3, 6, 4, 7
BATCH = DEVICES * PER_DEVICE
COUNTED = [2, 2, 1, 2, 0, 1, 2, 1]
BETA = 0.3
COEFFICIENTS = {
    "raw": 1.0,
    "baseline_normalized": 0.5,
    "example_normalized": 0.25,
    "token_weighted": 2.0,
    "normalized_token_weighted": 0.125,
    "normalized_inverse_token_weighted": 0.75,
}
C_BASE = 0.9
Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def draw_params() -> Params:
    rng = np.random.default_rng(0)
    return {
        "embedding": jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32),
        "latents": jnp.asarray(rng.normal(size=(LATENTS, WIDTH)), jnp.float32),
        "unembedding": jnp.asarray(rng.normal(size=(WIDTH, VOCABULARY)), jnp.float32),
        "router": jnp.asarray(rng.normal(size=(VOCABULARY, LATENTS)), jnp.float32),
    }


def draw_batch() -> Batch:
    rng = np.random.default_rng(1)
    loss_mask = rng.random((BATCH, LENGTH)) < 0.6
    loss_mask[:, 0], loss_mask[:, 2] = False, True
    example_mask = np.concatenate([[True] * count + [False] * (PER_DEVICE - count) for count in COUNTED])
    base_nll = np.exp(rng.normal(size=(BATCH, LENGTH - 1))).astype(np.float32)
    # rows that do not count: on even ones no token is supervised and b holds anything, odd ones look like any other
    padding = ~example_mask & (np.arange(BATCH) % 2 == 0)
    assert padding.any() and (~example_mask & ~padding).any()
    base_nll[padding] = np.nan
    loss_mask[padding] = False
    return {
        "tokens": jnp.asarray(rng.integers(0, VOCABULARY, (BATCH, LENGTH)), jnp.int32),
        "loss_mask": jnp.asarray(loss_mask),
        "base_nll": jnp.asarray(base_nll),
        "example_mask": jnp.asarray(example_mask),
    }


def hidden_states(params: Params, tokens: jax.Array) -> jax.Array:
    return jnp.tanh(params["embedding"][tokens][:, None] + params["latents"][None, :, None])


def per_example(params: Params, batch: Batch) -> jax.Array:
    """The objective of every example: closed-form posterior over enumerated latents, six terms and KL."""
    tokens, loss_mask = batch["tokens"], batch["loss_mask"]
    local = tokens.shape[0]
    hidden = hidden_states(params, tokens)
    per_latent = functools.partial(jnp.broadcast_to, shape=(local, LATENTS, LENGTH))
    nll = masked_token_nll_from_hidden(
        hidden, params["unembedding"], per_latent(tokens[:, None]), per_latent(loss_mask[:, None]), chunk_size=7
    )
    mask = loss_mask[:, 1:]
    weighting = compute_token_weighting(batch["base_nll"], mask, mask, jnp.zeros((local,), jnp.int32), 1.0)
    by_latent = reconstruction_terms(nll, mask, weighting, C_BASE, latent_axis=-2)
    log_router = jax.nn.log_softmax(params["router"][tokens[:, 0]])
    names = {f"{name}_reconstruction_loss": jnp.float32(value) for name, value in COEFFICIENTS.items()}
    coefficients = ReconstructionTerms(**names)
    log_q = closed_form_log_posterior(log_router, weighted_total(by_latent, coefficients), BETA)
    terms = ObjectiveTerms(
        reconstruction=jax.tree.map(lambda leaf: jnp.sum(jnp.exp(log_q) * leaf, -1), by_latent),
        prior_kl=categorical_kl(log_q, log_router),
        inter_latent_divergence=None,
        posterior_entropy=None,
        router_marginal_kl=None,
        posterior_fit=None,
    )
    return weighted_total(
        terms,
        ObjectiveTerms(
            reconstruction=coefficients,
            prior_kl=jnp.float32(BETA),
            inter_latent_divergence=None,
            posterior_entropy=None,
            router_marginal_kl=None,
            posterior_fit=None,
        ),
    )


def loss(params: Params, batch: Batch, axis_name: str | None = None) -> jax.Array:
    return masked_mean_over_examples(per_example(params, batch), batch["example_mask"], axis_name)


def reference_loss(params: Params, batch: Batch) -> float:
    """The same in float64, one example after another."""
    wide = {name: np.asarray(value).astype(np.float64) for name, value in params.items()}
    values = []
    for row in range(BATCH):
        if not batch["example_mask"][row]:
            continue
        tokens, loss_mask = np.asarray(batch["tokens"][row]), np.asarray(batch["loss_mask"][row])
        hidden = np.tanh(wide["embedding"][tokens][None] + wide["latents"][:, None])
        logits = hidden @ wide["unembedding"]
        bundle = reference.token_weighting(np.asarray(batch["base_nll"][row]).astype(np.float64), loss_mask[1:], 1.0)
        log_router = reference.log_softmax(wide["router"][tokens[0]])
        totals = []
        for latent in range(LATENTS):
            nll = reference.token_nll_per_position(logits[latent], tokens, loss_mask)
            terms = reference.reconstruction(nll, loss_mask[1:], bundle, C_BASE)
            totals.append(math.fsum(COEFFICIENTS[name] * terms[name] for name in COEFFICIENTS))
        log_q = reference.log_posterior(log_router, totals, BETA)
        values.append(reference.variational_objective(log_q, log_router, totals, BETA))
    assert len(values) == sum(COUNTED)
    return math.fsum(values) / len(values)


def mesh() -> Mesh:
    assert jax.device_count() == DEVICES, "conftest simulates eight devices"
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def shard(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x.reshape(DEVICES, PER_DEVICE, *x.shape[1:]), batch)


Step = Callable[[Params, Batch], tuple[jax.Array, Params]]


@functools.cache
def on_one_device() -> Step:
    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def by_jit_over_global_arrays() -> Step:
    replicated, split = NamedSharding(mesh(), PartitionSpec()), NamedSharding(mesh(), PartitionSpec("data"))
    step = jax.jit(jax.value_and_grad(loss), in_shardings=(replicated, split), out_shardings=replicated)

    def run(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        placed = jax.device_put(batch, split)
        assert len(placed["tokens"].addressable_shards) == DEVICES
        return step(jax.device_put(params, replicated), placed)

    return run


@functools.cache
def by_pmap() -> Step:
    """Under pmap the transpose of psum is psum: the gradient of the global mean comes out N times, so pmean it."""

    def step(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        value, gradients = jax.value_and_grad(loss)(params, batch, "data")
        return value, jax.lax.pmean(gradients, "data")

    mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0))

    def run(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        value, gradients = mapped(params, shard(batch))
        np.testing.assert_array_equal(np.asarray(value), float(value[0]))  # the same on every device
        return value[0], jax.tree.map(lambda leaf: leaf[0], gradients)

    return run


@functools.cache
def by_shard_map() -> Step:
    """With check_vma the gradients of replicated parameters arrive summed: no collective of ours."""
    step = jax.shard_map(
        lambda params, batch: jax.value_and_grad(loss)(params, batch, "data"),
        mesh=mesh(),
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    return jax.jit(step)


@functools.cache
def by_scan_over_micro_batches() -> Step:
    """Accumulation carries (sum, count) and divides once: the micro-batches count unequal numbers of examples."""

    def total(params: Params, micro: Batch) -> tuple[jax.Array, jax.Array]:
        counted = micro["example_mask"]
        return jnp.sum(jnp.where(counted, per_example(params, micro), 0.0)), jnp.sum(counted.astype(jnp.float32))

    def body(params: Params, carry: Any, micro: Batch) -> tuple[Any, None]:
        (value, count), gradients = jax.value_and_grad(total, has_aux=True)(params, micro)
        return jax.tree.map(jnp.add, carry, (value, count, gradients)), None

    @jax.jit
    def accumulate(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        start = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (value, count, gradients), _ = jax.lax.scan(functools.partial(body, params), start, shard(batch))
        return value / count, jax.tree.map(lambda leaf: leaf / count, gradients)

    return accumulate


@functools.cache
def expected() -> tuple[float, dict[str, np.ndarray]]:
    value, gradients = on_one_device()(draw_params(), draw_batch())
    gradients = jax.tree.map(np.asarray, gradients)
    # a NaN would equal a NaN in every comparison below
    assert np.isfinite(float(value)) and all(np.all(np.isfinite(leaf)) for leaf in gradients.values())
    assert all(np.abs(leaf).max() > 1e-3 for leaf in gradients.values())
    return float(value), gradients


def test_one_device_against_float64_loops() -> None:
    np.testing.assert_allclose(expected()[0], reference_loss(draw_params(), draw_batch()), rtol=1e-5)


def test_one_device_gradient_against_finite_differences_in_float64() -> None:
    """Along one direction in all parameters; q* minimises, so detaching it changes nothing of the first order."""
    params, batch = draw_params(), draw_batch()
    rng = np.random.default_rng(2)
    direction = {name: rng.normal(size=value.shape) for name, value in params.items()}
    values = []
    for sign in (1, -1):
        moved = {name: np.asarray(value, np.float64) + sign * 1e-4 * direction[name] for name, value in params.items()}
        values.append(reference_loss(moved, batch))
    slope = (values[0] - values[1]) / 2e-4
    found = sum(float(np.sum(leaf * direction[name])) for name, leaf in expected()[1].items())
    np.testing.assert_allclose(found, slope, rtol=1e-4)


@pytest.mark.parametrize(
    "build",
    [by_jit_over_global_arrays, by_pmap, by_shard_map, by_scan_over_micro_batches],
    ids=lambda build: build.__name__,
)
def test_value_and_gradient_equal_those_of_one_device(build: Callable[[], Step]) -> None:
    value, gradients = build()(draw_params(), draw_batch())
    expected_value, expected_gradients = expected()
    np.testing.assert_allclose(float(value), expected_value, rtol=1e-5)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected_gradients)
    for name, leaf in expected_gradients.items():
        np.testing.assert_allclose(np.asarray(gradients[name]), leaf, rtol=1e-5, atol=1e-5, err_msg=name)


def test_divergence_of_a_sharded_batch() -> None:
    """Replicated parameters and sharded rows meet in the scan over chunks, and in its backward pass."""
    params, batch = draw_params(), draw_batch()

    def divergence(params: Params, batch: Batch, axis_name: str | None = None) -> jax.Array:
        values = inter_latent_divergence_from_hidden(
            hidden_states(params, batch["tokens"]),
            params["unembedding"],
            batch["loss_mask"],
            jnp.ones_like(batch["loss_mask"][:, 1:], jnp.float32),
            chunk_size=6,
        )
        return masked_mean_over_examples(values, batch["example_mask"], axis_name)

    del params["router"]
    value, gradients = jax.jit(jax.value_and_grad(divergence))(params, batch)
    step = jax.shard_map(
        lambda params, batch: jax.value_and_grad(divergence)(params, batch, "data"),
        mesh=mesh(),
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    found, found_gradients = jax.jit(step)(params, batch)
    hidden = np.asarray(hidden_states(params, batch["tokens"])).astype(np.float64)
    logits = hidden @ np.asarray(params["unembedding"]).astype(np.float64)
    expected_value = [
        reference.latent_divergence(logits[row], np.asarray(batch["loss_mask"][row]), np.ones(LENGTH - 1))
        for row in range(BATCH)
        if batch["example_mask"][row]
    ]
    np.testing.assert_allclose(float(value), np.mean(expected_value), rtol=1e-5)
    np.testing.assert_allclose(float(found), float(value), rtol=1e-5)
    for name, leaf in gradients.items():
        assert np.abs(np.asarray(leaf)).max() > 1e-3
        np.testing.assert_allclose(np.asarray(found_gradients[name]), np.asarray(leaf), rtol=1e-5, atol=1e-5)


def test_the_number_of_examples_is_counted_over_devices_and_not_on_each() -> None:
    """Micro-batches of 1 example with loss 1 and 3 with loss 3: 2.5 and not 2.0. Two devices, six of them empty."""
    values = np.zeros((DEVICES, 3), np.float32)
    counted = np.zeros((DEVICES, 3), bool)
    values[0, 0], counted[0, 0] = 1, True
    values[1], counted[1] = 3, True
    values[2:] = np.nan
    found = jax.pmap(lambda v, m: masked_mean_over_examples(v, m, "data"), axis_name="data")(values, counted)
    np.testing.assert_allclose(np.asarray(found), 2.5, rtol=1e-7)


def test_no_example_on_any_device_gives_zero_and_zero_gradients() -> None:
    batch = draw_batch()
    batch["example_mask"] = jnp.zeros((BATCH,), bool)
    for build in (on_one_device, by_pmap, by_shard_map):
        value, gradients = build()(draw_params(), batch)
        assert float(value) == 0.0
        for leaf in jax.tree.leaves(gradients):
            np.testing.assert_array_equal(np.asarray(leaf), 0)


def test_gradient_of_the_mean_inside_a_mapped_axis() -> None:
    """In every local value: 1 over the number counted on all devices, and 0 for what does not count."""
    values = np.ones((DEVICES, PER_DEVICE), np.float32)
    counted = np.asarray(draw_batch()["example_mask"]).reshape(DEVICES, PER_DEVICE)
    whole = jax.jit(
        jax.grad(
            lambda v: jax.vmap(lambda v, m: masked_mean_over_examples(v, m, "data"), axis_name="data")(v, counted)[0]
        )
    )
    np.testing.assert_allclose(np.asarray(whole(values)), counted / counted.sum(), rtol=1e-6)


def test_all_sum_over_a_device_axis() -> None:
    found = jax.pmap(lambda x: all_sum(x, "data"), axis_name="data")(jnp.arange(float(DEVICES)))
    np.testing.assert_array_equal(np.asarray(found), [28.0] * DEVICES)
