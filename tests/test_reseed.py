"""Splitting a mixed latent: which latent is drawn anew, at which, and what that changes of the state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_fixture import CONFIG, StepFixture

from surprisal_jax.config import load_config
from surprisal_jax.dataset import load_dataset
from surprisal_jax.evaluation.evaluate import Evaluator, look_at_validation
from surprisal_jax.run import Clock, claim_reference_directory, prepare
from surprisal_jax.training.reseed import SPLIT_SCALE, latent_to_reseed, reseed_latent, split_direction
from surprisal_jax.training.sharding import make_mesh
from surprisal_jax.training.stages import Workplace, start_disentangling
from surprisal_jax.training.step import make_hyperparameters


def posterior(rows: list[list[float]]) -> np.ndarray:
    return np.log(np.maximum(np.asarray(rows), 1e-9))


def losses(per_latent: list[float], count: int) -> np.ndarray:
    return np.tile(per_latent, (count, 1))


ONE, TWO, THREE, DOUBLE = [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.5, 0.5, 0]


@pytest.mark.parametrize(
    ("q", "loss", "expected"),
    [
        # Every latent has its use, also a rare one.
        ([ONE, TWO, THREE], [1.0, 2.0, 3.0], None),
        ([ONE] * 50 + [TWO] * 47 + [THREE] * 4, [1.0, 2.0, 3.0], None),
        # The merged optimum: 0 and 1 share one strategy, 2 keeps two.
        ([DOUBLE, THREE, THREE], [0.1, 0.1, 0.7], (0, 2)),
        ([[0.6, 0.4, 0], THREE, THREE], [0.1, 0.1, 0.7], (1, 2)),
        # A dead latent, and the loss is the larger in total, not a example.
        ([ONE, ONE, ONE, TWO], [0.5, 1.0, 9.0], (2, 0)),
        ([ONE, TWO, TWO, TWO], [0.5, 1.0, 9.0], (2, 1)),
        # The two that are alike are already where the loss is: they need time.
        ([DOUBLE, DOUBLE, THREE], [0.7, 0.7, 0.1], None),
        # Nothing is settled yet.
        ([[0.4, 0.3, 0.3]] * 3, [1.0, 2.0, 3.0], None),
    ],
)
def test_which_latent_is_drawn_anew(q: list[list[float]], loss: list[float], expected: tuple[int, int] | None) -> None:
    assert latent_to_reseed(posterior(q), losses(loss, len(q))) == expected


def test_the_choice_follows_the_latents_names() -> None:
    q, loss = posterior([DOUBLE, THREE, THREE]), losses([0.1, 0.2, 0.7], 3)
    order = [2, 0, 1]  # latent i of the new naming is order[i] of the old
    target, source = latent_to_reseed(q[:, order], loss[:, order]) or (-1, -1)
    assert (order[target], order[source]) == (0, 2)


@pytest.fixture(scope="module")
def trained() -> tuple[StepFixture, object]:
    """A state whose optimizer's moments differ from row to row, as after some updates."""
    fixture = StepFixture(num_latents=3)
    state, rng = fixture.state(), np.random.default_rng(0)
    moments = jax.tree.map(
        lambda leaf: jnp.asarray(rng.random(leaf.shape), leaf.dtype) if leaf.ndim else leaf, state.opt_state
    )
    state = replace(state, opt_state=moments)
    return fixture, state


def test_the_two_part_where_the_source_was_and_nothing_else_moves(trained) -> None:
    fixture, state = trained
    ids = fixture.vocabulary.latent_ids
    direction = np.zeros(16)
    direction[3] = 1.0
    new = reseed_latent(state, ids, 0, 2, direction)
    before, after = np.asarray(state.params["model"]["embedding"]), np.asarray(new.params["model"]["embedding"])
    length = SPLIT_SCALE * np.delete(before, ids, axis=0).std() * 4.0
    np.testing.assert_allclose(after[ids[0]], before[ids[2]] + length * direction, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(after[ids[2]], before[ids[2]] - length * direction, rtol=1e-5, atol=1e-7)
    others = np.delete(np.arange(len(before)), [ids[0], ids[2]])
    np.testing.assert_array_equal(after[others], before[others])
    for name in ("mu", "nu"):
        old_moment, moment = (np.asarray(optax_moment(s.opt_state["model"], name)["embedding"]) for s in (state, new))
        np.testing.assert_array_equal(moment[ids[0]], old_moment[ids[2]])
        kept = np.delete(np.arange(len(before)), ids[0])
        np.testing.assert_array_equal(moment[kept], old_moment[kept])
        assert (old_moment[ids[0]] != old_moment[ids[2]]).any()
    old_leaves, leaves = (
        jax.tree_util.tree_leaves_with_path({"params": s.params, "opt_state": s.opt_state, "step": s.step})
        for s in (state, new)
    )
    for (path, old), (same_path, leaf) in zip(old_leaves, leaves, strict=True):
        assert path == same_path
        if "embedding" not in jax.tree_util.keystr(path) or "posterior" in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(old, leaf)


def test_an_untied_output_row_goes_along() -> None:
    fixture = StepFixture(num_latents=3, model=replace(CONFIG.model, tied_embeddings=False))
    state, ids = fixture.state(), fixture.vocabulary.latent_ids
    new = reseed_latent(state, ids, 1, 0, np.eye(16)[0])
    before, after = (np.asarray(s.params["model"]["output_embedding"]) for s in (state, new))
    np.testing.assert_array_equal(after[:, ids[1]], before[:, ids[0]])
    np.testing.assert_array_equal(np.delete(after, ids[1], 1), np.delete(before, ids[1], 1))


def test_the_split_is_along_what_tells_the_examples_of_the_latent_apart() -> None:
    rng = np.random.default_rng(0)
    contrast = rng.normal(size=8)
    contrast /= np.linalg.norm(contrast)
    side = np.where(rng.random(400) < 0.4, 1.0, -1.0)
    gradients = 5.0 + side[:, None] * contrast + 0.1 * rng.normal(size=(400, 8))
    # Examples of another latent differ much more, in another way.
    other = 30 * rng.normal(size=(400, 1)) * rng.normal(size=8)
    weights = np.concatenate([np.ones(400), np.full(400, 1e-9)])
    axis = split_direction(np.concatenate([gradients, other]), weights)
    assert np.linalg.norm(axis) == pytest.approx(1.0)
    assert abs(axis @ contrast) > 0.999


def test_the_latents_gradients_are_those_of_the_reconstruction_total(trained) -> None:
    fixture, _ = trained
    params = fixture.params()["model"]
    latent, row = 1, fixture.vocabulary.latent_ids[1]
    gradients = np.asarray(
        jax.jit(fixture.step.latent_gradients)(params, fixture.batch, fixture.hyperparameters, latent)
    )
    assert gradients.shape == (len(fixture.batch["example_mask"]), 16)

    def total(embedding: jax.Array, example: int) -> jax.Array:
        moved = {**params, "embedding": params["embedding"].at[row].set(embedding)}
        enumerated = fixture.step.enumerate_latents(moved, fixture.batch, fixture.hyperparameters)
        return enumerated.reconstruction[example, latent]

    expected_of = jax.jit(jax.grad(total))
    for example in (0, 7):
        expected = expected_of(params["embedding"][row], example)
        np.testing.assert_allclose(gradients[example], expected, rtol=1e-4, atol=1e-6)
    assert np.abs(gradients[0]).max() > 1e-3
    assert not gradients[4].any(), "an example that supervises nothing moves nothing"


def test_a_look_at_the_validation_set_draws_it_anew_only_in_time(tmp_path: Path, monkeypatch) -> None:
    small = Path(__file__).parent / "data" / "small.yaml"
    short = {"reference.steps": 5, "reference.evaluate_every": 5, "disentangle.reseed_until": 10, "data_parallel": 1}
    config = load_config(small, {**short, "output_dir": str(tmp_path)})
    dataset = load_dataset(config)
    directory, identity = claim_reference_directory(config, dataset)
    prepared = prepare(Workplace(config, dataset, make_mesh(config)), directory, identity, Clock())
    step, state = start_disentangling(prepared.place, prepared.reference)
    c_base = prepared.reference.c_base
    evaluator = Evaluator(step, make_hyperparameters(config, c_base), dataset, prepared.scores, prepared.place.mesh)
    seen = []

    def choice(log_q: np.ndarray, loss: np.ndarray) -> tuple[int, int]:
        seen.append((log_q.shape, loss.shape))
        return 1, 0

    monkeypatch.setattr("surprisal_jax.evaluation.evaluate.latent_to_reseed", choice)
    same, metrics = look_at_validation(evaluator, state, config, c_base, 11)
    assert same is state and "reseeded_latent" not in metrics and not seen
    new, metrics = look_at_validation(evaluator, state, config, c_base, 10)
    assert seen == [((24, 3), (24, 3))]
    assert (metrics["reseeded_latent"], metrics["reseeded_at_latent"]) == (1, 0)
    rows = np.asarray(dataset.vocabulary.latent_ids)
    before, after = (np.asarray(s.params["model"]["embedding"])[rows] for s in (state, new))
    np.testing.assert_allclose(after[0] + after[1], 2 * before[0], rtol=1e-5, atol=1e-6)
    assert np.abs(after[0] - after[1]).max() > 1e-4
    np.testing.assert_array_equal(after[2], before[2])


def optax_moment(opt_state: object, name: str) -> dict:
    found = [
        getattr(node, name)
        for node in jax.tree.leaves(opt_state, is_leaf=lambda n: hasattr(n, "mu"))
        if hasattr(node, "mu")
    ]
    assert len(found) == 1
    return found[0]
