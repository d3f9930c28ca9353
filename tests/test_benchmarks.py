"""The benchmarks compare what they say they compare: the same values, and every matrix product once a run."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.matmuls import products, replay
from benchmarks.step import RawStep, WholeSequencesStep, as_kind, workload
from benchmarks.timing import Row, Times, table
from surprisal_jax.config import ReconstructionLossConfig

TINY = workload(batch_size=2, prefix=5, suffix=7, width=64)


def test_whole_sequences_give_what_the_shared_prefix_gives() -> None:
    state, batch, hyperparameters = TINY.arguments()
    shared, whole = (
        jax.jit(as_kind(TINY.step(), kind).enumerate_latents)(state.params["model"], batch, hyperparameters)
        for kind in (type(TINY.step()), WholeSequencesStep)
    )
    np.testing.assert_allclose(shared.log_router, whole.log_router, atol=1e-5)
    np.testing.assert_allclose(shared.reconstruction, whole.reconstruction, rtol=1e-5)


def test_the_baseline_is_the_step_with_the_other_coefficients_at_0() -> None:
    config = replace(TINY.config, reconstruction=ReconstructionLossConfig())
    work = replace(TINY, config=config)
    state, batch, hyperparameters = work.arguments()
    total, baseline = (
        jax.jit(jax.value_and_grad(as_kind(work.step(), kind).loss, has_aux=True))(state.params, batch, hyperparameters)
        for kind in (type(work.step()), RawStep)
    )
    np.testing.assert_allclose(total[0][0], baseline[0][0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), total[1], baseline[1])


def test_products_of_loops_count_as_often_as_they_run() -> None:
    matrix = jnp.ones((4, 6))

    def program(x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ matrix @ matrix.T), None), x, length=3)
        return jax.jit(lambda v: v @ matrix)(y)

    found = products(program, jnp.ones((2, 4)))
    assert [product.times for product in found] == [3, 3, 1]
    assert [product.flops for product in found] == [3 * 2 * 2 * 4 * 6] * 2 + [2 * 2 * 4 * 6]
    assert [result.shape for result in replay(found)()] == [(3, 2, 6), (3, 2, 4), (2, 6)]


def test_a_ratio_is_judged_by_its_paired_median() -> None:
    times = Times({"a": [1.0, 4.0, 3.0], "b": [1.0, 2.0, 2.0]})
    row = Row("a to b", *times.ratio("a", "b"), at_most=1.2)
    assert (row.value, row.paired) == (1.0, 1.5) and row.verdict() == "missed"
    assert "| a to b | 1 | 1.500 | <= 1.2 | missed |" in table([row])
    assert Row("x", 0.5, at_least=0.4).verdict() == "met"


@pytest.mark.parametrize("at", [{"at_most": 1.0}, {"at_least": 1.0}])
def test_a_row_shows_its_target(at: dict[str, float]) -> None:
    assert Row("x", 1.0, **at).verdict() == "met" and "= 1" in table([Row("x", 1.0, **at)])
