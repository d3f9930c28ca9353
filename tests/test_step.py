"""The latent step: what moves what, what is compiled how often, and one device against many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from step_fixture import CONFIG, StepFixture, assert_trees_close

from surprisal_jax import losses
from surprisal_jax.data import bucket_of_rows, cut_to_bucket, gather
from surprisal_jax.training.sharding import (
    BATCH_AXES,
    compile_with_pmap,
    make_mesh,
    put_batch,
    put_on_mesh,
)
from surprisal_jax.training.stages import Workplace
from surprisal_jax.training.step import Hyperparameters

DEVICES = 8

SETTINGS = {
    "closed form, group": {},
    "closed form, example": {"latent_scope": "example"},
    "amortized, group": {"posterior": "amortized", "posterior_entropy_weight": 0.3},
    "amortized, example": {"posterior": "amortized", "latent_scope": "example", "posterior_entropy_weight": 0.3},
}
settings = pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS.keys())


def zero_like(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


def test_a_batch_cut_to_its_bucket_has_the_same_value_and_gradient() -> None:
    fixture = StepFixture()
    arrays = {name: values for name, values in fixture.batch.items() if name != "example_mask"}
    buckets = bucket_of_rows(arrays, 8)
    shortest = np.argsort(buckets)[: np.sum(buckets < 8)]
    batch = gather({name: values[shortest] for name, values in arrays.items()}, np.asarray([0, 1, 2, -1, 4, 5]))
    cut = cut_to_bucket(batch, 7, 8)
    assert cut["suffix_tokens"].shape[1] < batch["suffix_tokens"].shape[1]
    (expected, _), gradient = fixture.value_and_gradient(batch)
    (value, _), cut_gradient = fixture.value_and_gradient(cut)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_trees_close(cut_gradient, gradient, 1e-6)


def test_a_row_that_fills_a_batch_up_fits_its_bucket_too() -> None:
    """It repeats row 0, here the longest."""
    fixture = StepFixture(length_buckets=8, data_parallel=1)
    arrays = {name: values for name, values in fixture.batch.items() if name != "example_mask"}
    order = np.argsort(-bucket_of_rows(arrays, 8))
    arrays = {name: values[order] for name, values in arrays.items()}
    place = Workplace(fixture.config, SimpleNamespace(arrays=arrays), make_mesh(fixture.config))
    batch = place.gather_here(arrays, np.asarray([15, 14, 13, -1]))
    assert (batch["prefix_lengths"] <= batch["prefix_tokens"].shape[1]).all()
    whole = place.gather_here(arrays, np.asarray([15, 14, 13, 12]))
    assert whole["suffix_tokens"].shape[1] < batch["suffix_tokens"].shape[1] == arrays["suffix_tokens"].shape[1]


# ---------------------------------------------------------------------------------------------- what the terms are


@settings
def test_total_and_terms_from_loops_in_float64(changes: dict[str, Any]) -> None:
    """The whole objective again, example by example, from the step's own NLL, router and network logits."""
    fixture = StepFixture(**changes)
    config, batch = fixture.config, fixture.batch
    params = fixture.params()
    (total, (means, usage, _)), _ = fixture.value_and_gradient()
    latent = jax.jit(fixture.step.enumerate_latents)(params["model"], batch, fixture.hyperparameters)
    log_router = np.asarray(latent.log_router, np.float64)
    divergence = np.asarray(
        losses.inter_latent_divergence_from_hidden(
            latent.hidden, latent.unembedding, batch["suffix_loss_mask"], latent.weighting.token_weights, chunk_size=9
        ),
        np.float64,
    )
    evaluation = jax.jit(fixture.step.evaluate)(params, batch, fixture.hyperparameters)
    network = np.asarray(evaluation.log_posterior, np.float64)  # per example, normalised
    leaves = {name: np.asarray(leaf, np.float64) for name, leaf in latent.terms._asdict().items()}
    weights = config.reconstruction
    order = (
        weights.raw_weight,
        weights.baseline_normalized_weight,
        weights.example_normalized_weight,
        weights.token_weighted_weight,
        weights.normalized_token_weighted_weight,
        weights.normalized_inverse_token_weighted_weight,
    )
    reconstruction = sum(weight * leaf for weight, leaf in zip(order, leaves.values(), strict=True))
    counted = batch["example_mask"] & batch["suffix_loss_mask"].any(axis=1)
    size = 2 if config.latent_scope == "group" else 1
    names = [*leaves, "prior_kl", "posterior_entropy", "inter_latent_divergence", "posterior_fit"]
    sums = dict.fromkeys(names, 0.0)
    usage_sum = np.zeros(config.num_latents)
    for first in range(0, len(counted), size):
        members = [i for i in range(first, first + size) if counted[i]]
        evidence = sum(
            (
                log_router[i] - reconstruction[i] / config.beta if config.posterior == "closed_form" else network[i]
                for i in members
            ),
            start=np.zeros(config.num_latents),
        )
        q = np.exp(evidence - evidence.max())
        q /= q.sum()
        entropy = -sum(p * np.log(p) for p in q if p > 0)
        for i in members:
            for name, leaf in leaves.items():
                sums[name] += (q * leaf[i]).sum()
            sums["prior_kl"] += -(q * log_router[i]).sum() - entropy / len(members)
            sums["posterior_entropy"] += entropy
            sums["inter_latent_divergence"] += divergence[i]
            sums["posterior_fit"] += sum(p * (np.log(p) - n) for p, n in zip(q, network[i], strict=True) if p > 0)
            usage_sum += q
    count = counted.sum()
    mean_router = np.exp(log_router[counted]).mean(axis=0)
    marginal = (mean_router * np.log(mean_router * config.num_latents)).sum()
    expected = {name: value / count for name, value in sums.items()}
    for name in leaves:
        np.testing.assert_allclose(getattr(means.reconstruction, name), expected[name], rtol=2e-5)
    for name in ("prior_kl", "posterior_entropy", "inter_latent_divergence"):
        np.testing.assert_allclose(getattr(means, name), expected[name], rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(means.router_marginal_kl, marginal, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(usage, usage_sum / count, rtol=2e-5)
    value = sum(weight * expected[name] for weight, name in zip(order, leaves, strict=True))
    value += config.beta * expected["prior_kl"] + config.posterior_entropy_weight * expected["posterior_entropy"]
    value += config.router_marginal_kl_weight * marginal
    value -= config.inter_latent_divergence_weight * expected["inter_latent_divergence"]
    if config.posterior == "closed_form":
        np.testing.assert_allclose(means.posterior_fit, expected["posterior_fit"], rtol=2e-5)
        value += config.posterior_fit_weight * expected["posterior_fit"]
    else:
        assert means.posterior_fit is None
    np.testing.assert_allclose(total, value, rtol=2e-5)


@pytest.mark.parametrize("scope", ["example", "group"])
def test_closed_form_gradient_is_that_of_the_free_energy(scope: str) -> None:
    """Envelope theorem, through the models: q* is detached and yet the gradient is that of the minimum over q."""
    fixture = StepFixture(
        latent_scope=scope, inter_latent_divergence_weight=0.0, router_marginal_kl_weight=0.0, posterior_fit_weight=0.0
    )
    batch, beta = fixture.batch, fixture.config.beta

    def free_energy(params: Any) -> jax.Array:
        latent = fixture.step.enumerate_latents(params["model"], batch, fixture.hyperparameters)
        counted = latent.example_mask[:, None]
        evidence = jnp.where(counted, latent.log_router - latent.reconstruction / beta, 0.0)
        size = 2 if scope == "group" else 1
        grouped = evidence.reshape(-1, size, evidence.shape[-1]).sum(axis=1)
        used = latent.example_mask.reshape(-1, size).any(axis=1)
        return -beta * jnp.sum(jnp.where(used, jax.nn.logsumexp(grouped, axis=-1), 0.0)) / jnp.sum(latent.example_mask)

    (total, _), gradient = fixture.value_and_gradient()
    expected_value, expected = jax.jit(jax.value_and_grad(free_energy))(fixture.params())
    np.testing.assert_allclose(total, expected_value, rtol=1e-5)
    assert_trees_close(gradient["model"], expected["model"], 1e-6)


def test_posterior_fit_moves_the_network_alone() -> None:
    without = StepFixture(posterior_fit_weight=0.0).value_and_gradient()[1]
    fitted = StepFixture(posterior_fit_weight=1.0).value_and_gradient()[1]
    assert_trees_close(fitted["model"], without["model"], 0.0)
    assert all(float(jnp.abs(leaf).max()) == 0.0 for leaf in jax.tree.leaves(without["posterior"]))
    assert any(float(jnp.abs(leaf).max()) > 0.0 for leaf in jax.tree.leaves(fitted["posterior"]))


def test_amortized_posterior_is_not_detached() -> None:
    gradient = StepFixture(posterior="amortized").value_and_gradient()[1]
    assert float(jnp.abs(gradient["posterior"]["head"]["kernel"]).max()) > 0.0


def test_members_of_a_group_share_their_posterior_and_examples_do_not() -> None:
    """Permuting examples across groups changes the group objective; the example objective is blind to it."""
    order = np.asarray([2, 1, 0, *range(3, 16)])
    for scope, same in (("group", False), ("example", True)):
        fixture = StepFixture(latent_scope=scope)
        permuted = {name: value[order] for name, value in fixture.batch.items()}
        (first, _), _ = fixture.value_and_gradient()
        (second, _), _ = fixture.value_and_gradient(permuted)
        assert (abs(float(first) - float(second)) < 1e-5) is same


# ------------------------------------------------------------------------------------------------ reference scoring


def test_online_and_cached_scoring_agree() -> None:
    cached, online = StepFixture(), StepFixture(reference_scoring="online")
    (value, metrics), gradient = cached.value_and_gradient()
    (online_value, online_metrics), online_gradient = online.value_and_gradient(online.online_batch, online.reference)
    np.testing.assert_allclose(online_value, value, rtol=1e-6)
    assert_trees_close(online_metrics, metrics, 1e-6)
    assert_trees_close(online_gradient, gradient, 1e-6)


def test_no_gradient_reaches_the_reference() -> None:
    fixture = StepFixture(reference_scoring="online")

    def loss(reference: Any) -> jax.Array:
        return fixture.step.loss(fixture.params(), fixture.online_batch, fixture.hyperparameters, reference)[0]

    gradient = jax.jit(jax.grad(loss))(fixture.reference)
    assert all(np.array_equal(leaf, np.zeros_like(leaf)) for leaf in jax.tree.leaves(gradient))


def test_the_reference_is_not_donated_and_does_not_share_buffers_with_the_state() -> None:
    """The generator starts from the reference's weights; ten donated steps later these are what they were."""
    fixture = StepFixture(reference_scoring="online")
    fixture._params["model"] = fixture.reference
    before = jax.tree.map(np.array, fixture.reference)
    compiled, mesh = fixture.compiled(1)
    state, reference = put_on_mesh(fixture.state(), mesh), put_on_mesh(fixture.reference, mesh)
    for _ in range(10):
        state, _ = compiled(state, put_batch(fixture.online_batch, mesh), fixture.hyperparameters, reference)
    jax.tree.map(np.testing.assert_array_equal, fixture.reference, before)
    jax.tree.map(np.testing.assert_array_equal, reference, before)
    assert not np.array_equal(state.params["model"]["embedding"], before["embedding"])


def test_cached_step_takes_no_reference_parameter() -> None:
    fixture = StepFixture()
    compiled, mesh = fixture.compiled(1)
    arguments = (fixture.state(), put_batch(fixture.batch, mesh), fixture.hyperparameters, None)
    lowered = compiled.lower(*arguments)
    count = len(jax.tree.leaves(arguments[:3]))
    assert len(jax.tree.leaves(lowered.in_avals)) == count


def test_reference_logits_are_float32_at_precision_highest_and_training_logits_at_theirs() -> None:
    """Read from the jaxpr: with bfloat16 compute too, the logit matmuls give float32 at the precision asked for."""
    model = replace(CONFIG.model, compute_dtype="bfloat16", logit_precision="default")
    fixture = StepFixture(reference_scoring="online", model=model, inter_latent_divergence_weight=0.0)
    jaxpr = jax.make_jaxpr(fixture.step.loss)(
        fixture.params(), fixture.online_batch, fixture.hyperparameters, fixture.reference
    )
    found = {}
    for equation in _equations(jaxpr.jaxpr):
        if equation.primitive.name == "dot_general" and equation.outvars[0].aval.shape[-1] == fixture.vocabulary.size:
            assert equation.outvars[0].aval.dtype == jnp.float32
            rank = len(equation.outvars[0].aval.shape)
            found[rank] = equation.params["precision"]
    highest = jax.lax.Precision.HIGHEST
    assert found[3] == (highest, highest)  # the reference: [B, S, V]
    assert found[2] in (None, (jax.lax.Precision.DEFAULT,) * 2)  # the generator: [chunk, V]


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def test_nothing_of_vocabulary_size_is_kept_for_all_latents() -> None:
    """No array of the value-and-gradient program has B * K * U or more rows of V."""
    fixture = StepFixture()
    batch, length = fixture.batch["suffix_tokens"].shape
    rows = batch * fixture.config.num_latents * (length - 1)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *a: fixture.step.loss(*a)[0]))(
        fixture.params(), fixture.batch, fixture.hyperparameters
    )
    sizes = [
        int(np.prod(variable.aval.shape[:-1]))
        for equation in _equations(jaxpr.jaxpr)
        for variable in equation.outvars
        if getattr(variable.aval, "shape", ()) and variable.aval.shape[-1] == fixture.vocabulary.size
    ]
    assert sizes and max(sizes) < rows


# ---------------------------------------------------------------------------------------------------- compilations


def test_twenty_settings_of_alpha_and_every_coefficient_are_one_compilation() -> None:
    fixture = StepFixture()
    traces = 0

    def counted(*arguments: Any) -> Any:
        nonlocal traces
        traces += 1
        return fixture.step.loss(*arguments)[0]

    compiled = jax.jit(counted)
    params, values = fixture.params(), []
    for i in range(20):
        coefficients = jax.tree.map(lambda c, i=i: c * (1 + 0.1 * i), fixture.hyperparameters.coefficients)
        hyperparameters = fixture.hyperparameters._replace(
            coefficients=coefficients, token_weight_alpha=jnp.float32(0.25 * i), c_base=jnp.float32(0.5 + i)
        )
        values.append(float(compiled(params, fixture.batch, hyperparameters)))
    assert traces == 1 and compiled._cache_size() == 1
    assert len(set(values)) == 20


def test_a_sweep_runs_under_vmap() -> None:
    fixture = StepFixture()
    alphas = jnp.asarray([0.0, 1.0, 3.0])

    def at(alpha: jax.Array) -> jax.Array:
        hyperparameters = fixture.hyperparameters._replace(token_weight_alpha=alpha)
        return fixture.step.loss(fixture.params(), fixture.batch, hyperparameters)[0]

    one = jax.jit(at)
    np.testing.assert_allclose(jax.jit(jax.vmap(at))(alphas), [float(one(alpha)) for alpha in alphas], rtol=1e-6)


def test_a_term_that_is_off_is_not_in_the_program() -> None:
    def primitives(**changes: Any) -> int:
        fixture = StepFixture(**changes)
        jaxpr = jax.make_jaxpr(fixture.step.loss)(fixture.params(), fixture.batch, fixture.hyperparameters)
        return sum(1 for equation in _equations(jaxpr.jaxpr) if equation.primitive.name == "log1p")

    # The divergence is the one term of the step that takes log1p of the mixture beside the NLL's own.
    assert primitives(inter_latent_divergence_weight=0.0) < primitives(inter_latent_divergence_weight=0.1)


# ---------------------------------------------------------------------------------------------------- many devices


#: data_parallel x fsdp
MESHES = {"one device": (1, 1), "data": (DEVICES, 1), "data and fsdp": (2, 4), "fsdp": (1, DEVICES)}


def run_steps(kind: str, fixture: StepFixture, reference: Any, steps: int = 20) -> tuple[list[Any], Any]:
    """Metrics of every step, and the parameters after the first, by one of the ways to run the same step."""
    batch = fixture.online_batch if reference is not None else fixture.batch
    if kind == "pmap":
        compiled: Any = compile_with_pmap(fixture.step.train_step, DEVICES)
        placed: Any = {n: v.reshape(DEVICES, v.shape[0] // DEVICES, *v.shape[1:]) for n, v in batch.items()}
        state = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), fixture.state())
    else:
        if kind in MESHES:
            compiled, mesh = fixture.compiled(*MESHES[kind])
        else:
            mesh = make_mesh(replace(fixture.config, data_parallel=DEVICES))
            train_step: Any = fixture.step.train_step
            if kind == "shard_map":
                train_step = jax.shard_map(
                    partial(train_step, axis_name=BATCH_AXES),
                    mesh=mesh,
                    in_specs=(PartitionSpec(), PartitionSpec(BATCH_AXES), PartitionSpec(), PartitionSpec()),
                    out_specs=PartitionSpec(),
                    check_vma=False,
                )
            compiled = jax.jit(train_step)
        state, reference = put_on_mesh(fixture.state(), mesh), put_on_mesh(reference, mesh)
        placed = put_batch(batch, mesh)
    history, first_params = [], None
    for step in range(steps):
        state, metrics = compiled(state, placed, fixture.hyperparameters, reference)
        history.append(metrics)
        if step == 0:
            first_params = jax.tree.map(np.array, state.params)
    if kind == "pmap":
        history, first_params = jax.tree.map(lambda x: x[0], (history, first_params))
    return history, first_params


@pytest.mark.parametrize(
    "changes",
    [SETTINGS["closed form, group"], {**SETTINGS["amortized, example"], "reference_scoring": "online"}],
    ids=["closed form, group, cached", "amortized, example, online"],
)
def test_one_device_equals_many(changes: dict[str, Any]) -> None:
    """Terms and gradient of step 1 to 1e-5, losses of 20 steps to 1e-4, on 8 devices: as the stages compile it, over
    every mesh; left to the partitioner; under pmap; and as a whole under a user's shard_map.

    Under SGD, and not Adam, which would hide a factor of the gradient: at rate 1 it is the parameters' change.
    """
    # At 0.05 the loss rises again after twelve steps, and amplifies rounding a hundredfold.
    rate = 0.02
    fixture = StepFixture(**changes)
    fixture.step = replace(fixture.step, optimizer=optax.sgd(rate))
    online = fixture.step.online_reference
    reference = fixture.reference if online else None
    _, gradient = fixture.value_and_gradient(fixture.online_batch if online else None, reference)
    expected, _ = run_steps("one device", fixture, reference)
    kinds = ("data and fsdp", "pmap") if online else ("data", "data and fsdp", "fsdp", "jit", "pmap", "shard_map")
    for kind in kinds:
        history, first_params = run_steps(kind, fixture, reference)
        assert_trees_close(history[0], expected[0], 1e-5)
        np.testing.assert_allclose([m.total for m in history], [m.total for m in expected], rtol=1e-4)
        change = jax.tree.map(lambda new, old: (np.asarray(old) - new) / rate, first_params, fixture.params())
        assert_trees_close(change, gradient, 1e-5)
    assert float(expected[-1].total) < float(expected[0].total)


def test_bfloat16_compute_stays_close_and_its_losses_are_float32() -> None:
    plain = StepFixture()
    half = StepFixture(model=replace(CONFIG.model, compute_dtype="bfloat16"))
    half.batch["base_token_nll"] = plain.batch["base_token_nll"]
    (value, _), _ = plain.value_and_gradient()
    (low, metrics), gradient = half.value_and_gradient()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((low, metrics, gradient)))
    assert low != value
    np.testing.assert_allclose(low, value, rtol=0.02)


def test_a_batch_without_any_supervised_token_changes_nothing_and_gives_no_nan() -> None:
    fixture = StepFixture(router_marginal_kl_weight=0.0)
    fixture.batch["suffix_loss_mask"][:] = False
    fixture.batch["z_free_loss_mask"][:] = False
    (value, metrics), gradient = fixture.value_and_gradient()
    assert float(value) == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(metrics))
    assert all(np.array_equal(leaf, np.zeros_like(leaf)) for leaf in jax.tree.leaves(gradient))


def test_hyperparameters_are_all_scalars() -> None:
    hyperparameters: Hyperparameters = StepFixture().hyperparameters
    assert all(leaf.shape == () and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(hyperparameters))


def test_step_is_a_plain_function_of_its_arguments() -> None:
    fixture = StepFixture()
    step = partial(jax.jit(fixture.step.train_step), fixture.state(), fixture.batch, fixture.hyperparameters)
    first, second = step(), step()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(first[1]), jax.tree.leaves(second[1]))
    assert int(first[0].step) == 1
