"""What lies where on a mesh, and what crosses it: read from the compiled program of the real step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from step_fixture import CONFIG, StepFixture, assert_trees_close

from benchmarks.program import Collective, collectives, trip_weighted_bytes
from surprisal_jax.config import InputError
from surprisal_jax.models.transformer import Decoder, new_module
from surprisal_jax.training.gradients import value_and_gradient
from surprisal_jax.training.sharding import (
    PARAMETER_AXES,
    make_mesh,
    parameter_specs,
    put_batch,
    put_on_mesh,
    rows_here,
)


def lowered(fixture: StepFixture, data_parallel: int, fsdp: int) -> Any:
    compiled, mesh = fixture.compiled(data_parallel, fsdp)
    return compiled.lower(
        put_on_mesh(fixture.state(), mesh), put_batch(fixture.batch, mesh), fixture.hyperparameters, None
    ).compile()


def parameter_bytes(fixture: StepFixture) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(fixture.params()))


# ------------------------------------------------------------------------------------------------------ what is split


def test_every_parameter_and_moment_has_a_rule() -> None:
    model = replace(CONFIG.model, qkv_bias=True, qk_norm=True, tied_embeddings=False)
    state = StepFixture(model=model).state()
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        known = "/".join(names[-2:]) in PARAMETER_AXES or names[-1] in PARAMETER_AXES
        assert known or leaf.ndim == 0, names


def test_the_width_is_split_and_stacked_runs_keep_their_axis() -> None:
    fixture = StepFixture()
    specs = parameter_specs(fixture.state())
    assert specs.params["model"]["embedding"] == PartitionSpec(None, "fsdp")
    block = specs.params["posterior"]["decoder"]["blocks"][0]
    assert block["attention"]["query"]["kernel"] == PartitionSpec("fsdp", None)
    assert block["mlp_norm"]["scale"] == PartitionSpec("fsdp")
    assert specs.step == PartitionSpec() and specs.rng == PartitionSpec()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), fixture.params())
    assert parameter_specs(stacked)["model"]["embedding"] == PartitionSpec(None, None, "fsdp")


@pytest.mark.parametrize("fsdp", [8])
def test_a_device_holds_its_share_of_parameters_and_moments(fsdp: int) -> None:
    fixture = StepFixture()
    whole = lowered(fixture, 1, 1).memory_analysis().argument_size_in_bytes
    batch = sum(value.nbytes for value in fixture.batch.values())
    part = lowered(fixture, 1, fsdp).memory_analysis().argument_size_in_bytes
    assert part - batch / fsdp == pytest.approx((whole - batch) / fsdp, rel=0.1)


def test_a_process_makes_the_rows_of_its_devices() -> None:
    mesh = make_mesh(replace(CONFIG, data_parallel=2, fsdp=4))
    np.testing.assert_array_equal(rows_here(16, mesh), np.arange(16))
    placed = put_batch({"rows": np.arange(16)}, mesh)["rows"]
    assert [shard.data.tolist() for shard in placed.addressable_shards] == [[i, i + 1] for i in range(0, 16, 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fsdp": 16, "disentangle": replace(CONFIG.disentangle, batch_size=32)},
            "fsdp: got 16, expected at most 8, the devices there are",
        ),
        (
            {"data_parallel": 4, "fsdp": 4, "disentangle": replace(CONFIG.disentangle, batch_size=32)},
            "data_parallel: got 4 with fsdp 4, expected at most 2: 8 devices are there",
        ),
        (
            {"data_parallel": None, "fsdp": 2, "micro_batches": 2},
            "disentangle.batch_size: got 16, expected a multiple of 8 devices x 2 micro-batches x 2 examples a group"
            " (see data_parallel)",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        make_mesh(replace(CONFIG, **changes))
    assert str(error.value) == message


# ----------------------------------------------------------------------------------------------- what crosses the mesh


@pytest.mark.parametrize("num_latents", [2, 8])
def test_every_gradient_is_reduced_once_whatever_the_number_of_latents(num_latents: int) -> None:
    fixture = StepFixture(num_latents=num_latents)
    moved = trip_weighted_bytes(collectives(lowered(fixture, 8, 1).as_text()))
    assert set(moved) == {"all-reduce"}
    assert parameter_bytes(fixture) <= moved["all-reduce"] <= 1.05 * parameter_bytes(fixture)


@pytest.mark.parametrize("changes", [{"chunk_size": 10}, {"micro_batches": 2, "latent_scope": "example"}])
def test_chunks_and_micro_batches_reduce_no_gradient_of_their_own(changes: dict[str, Any]) -> None:
    fixture = StepFixture(**changes)
    found = collectives(lowered(fixture, 8, 1).as_text())
    assert trip_weighted_bytes(found)["all-reduce"] <= 1.05 * parameter_bytes(fixture)


def test_a_split_parameter_is_gathered_once_and_its_gradient_scattered_once() -> None:
    for chunk_size in (10, 50):
        fixture = StepFixture(chunk_size=chunk_size)
        moved = trip_weighted_bytes(collectives(lowered(fixture, 1, 8).as_text()))
        whole = parameter_bytes(fixture)
        assert moved["all-gather"] <= whole
        assert whole * 0.95 <= moved["reduce-scatter"] + moved["all-reduce"] <= 1.05 * whole


def test_the_number_of_devices_changes_neither_collectives_nor_bytes() -> None:
    fixture = StepFixture()
    found = [collectives(lowered(fixture, count, 1).as_text()) for count in (2, 4, 8)]
    assert len({len(of_count) for of_count in found}) == 1
    assert len({tuple(trip_weighted_bytes(of_count).items()) for of_count in found}) == 1


def test_collectives_in_a_loop_count_every_trip() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def summed(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, row: (c + jax.lax.psum(row, "data"), None), jnp.zeros(6), x)[0]

    mapped = jax.shard_map(
        summed, mesh=mesh, in_specs=PartitionSpec(None, "data"), out_specs=PartitionSpec("data"), check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.zeros((5, 48))).compile().as_text()
    assert collectives(text) == [Collective("all-reduce", 5, 24)]
    assert trip_weighted_bytes(collectives(text)) == {"all-reduce": 120}


# --------------------------------------------------------------------------------- less at once, and the same numbers


@pytest.mark.parametrize("scope", ["example", "group"])
def test_micro_batches_give_the_values_and_gradients_of_the_batch(scope: str) -> None:
    """With rows that do not count unevenly spread over the parts: a plain mean of means would be off."""
    fixture = StepFixture(latent_scope=scope, router_marginal_kl_weight=0.0)
    (value, metrics), gradient = fixture.value_and_gradient()
    step = replace(fixture.step, micro_batches=4)
    (parts_value, parts_metrics), parts_gradient = jax.jit(
        lambda params: value_and_gradient(step, params, fixture.batch, (fixture.hyperparameters, None))
    )(fixture.params())
    np.testing.assert_allclose(parts_value, value, rtol=1e-5)
    terms, usage, rates = metrics
    parts_terms, parts_usage, parts_rates = parts_metrics
    without = terms._replace(router_marginal_kl=None), parts_terms._replace(router_marginal_kl=None)
    assert_trees_close(without[1], without[0], 1e-5)
    assert_trees_close((parts_usage, parts_rates.example_base_loss), (usage, rates.example_base_loss), 1e-5)
    assert_trees_close(parts_gradient, gradient, 1e-5)


def test_rematerialisation_keeps_less_and_changes_nothing() -> None:
    model = replace(CONFIG.model, num_layers=3)
    tokens = jnp.arange(4 * 32).reshape(4, 32) % 20
    kept, values = [], []
    for rematerialize in (False, True):
        definition, params = new_module(
            lambda rngs, again=rematerialize: Decoder(model, 20, rematerialize=again, rngs=rngs), jax.random.key(0)
        )

        def loss(params: Any, definition: Any = definition) -> jax.Array:
            return jnp.mean(jnp.square(nnx.merge(definition, params)(tokens)))

        kept.append(sum(x.size for x in jax.tree.leaves(jax.vjp(loss, params)[1])))
        values.append(jax.jit(jax.value_and_grad(loss))(params))
    np.testing.assert_allclose(values[1][0], values[0][0], rtol=1e-6)
    assert_trees_close(values[1][1], values[0][1], 1e-5)
    assert kept[1] < 0.5 * kept[0]
