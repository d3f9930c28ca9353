"""Splitting a mixed latent: which latent is drawn anew, at which, and what that changes of the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_fixture import CONFIG, StepFixture

from surprisal_jax.training.reseed import NOISE_SCALE, latent_to_reseed, reseed_latent


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
    fixture = StepFixture(num_latents=3)
    step, _ = fixture.compiled(1)
    state = fixture.state()
    for _ in range(2):
        state, _ = step(state, fixture.batch, fixture.hyperparameters, None)
    return fixture, state


def test_the_target_starts_near_the_source_and_nothing_else_moves(trained) -> None:
    fixture, state = trained
    ids = fixture.vocabulary.latent_ids
    new = reseed_latent(state, ids, 0, 2, jax.random.key(0))
    before, after = np.asarray(state.params["model"]["embedding"]), np.asarray(new.params["model"]["embedding"])
    others = np.delete(np.arange(len(before)), ids[0])
    np.testing.assert_array_equal(after[others], before[others])
    spread = np.delete(before, ids, axis=0).std()
    noise = after[ids[0]] - before[ids[2]]
    assert 0.3 * NOISE_SCALE * spread < noise.std() < 3 * NOISE_SCALE * spread
    for name in ("mu", "nu"):
        old_moment, moment = (np.asarray(optax_moment(s.opt_state["model"], name)["embedding"]) for s in (state, new))
        np.testing.assert_array_equal(moment[ids[0]], old_moment[ids[2]])
        np.testing.assert_array_equal(moment[others], old_moment[others])
        assert (old_moment[ids[0]] != old_moment[ids[2]]).any()
    # The rest is the very same.
    flat, new_flat = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(s)}
        for s in (state, new)
    )
    assert flat.keys() == new_flat.keys()
    changed = [
        name
        for name in flat
        if not jnp.array_equal(
            jax.random.key_data(flat[name]) if name == ".rng" else flat[name],
            jax.random.key_data(new_flat[name]) if name == ".rng" else new_flat[name],
        )
    ]
    assert all("embedding" in name and "model" in name for name in changed), changed


def test_an_untied_output_row_goes_along() -> None:
    from dataclasses import replace

    fixture = StepFixture(num_latents=3, model=replace(CONFIG.model, tied_embeddings=False))
    state, ids = fixture.state(), fixture.vocabulary.latent_ids
    new = reseed_latent(state, ids, 1, 0, jax.random.key(0))
    before, after = (np.asarray(s.params["model"]["output_embedding"]) for s in (state, new))
    np.testing.assert_array_equal(after[:, ids[1]], before[:, ids[0]])
    np.testing.assert_array_equal(np.delete(after, ids[1], 1), np.delete(before, ids[1], 1))


def optax_moment(opt_state: object, name: str) -> dict:
    found = [
        getattr(node, name)
        for node in jax.tree.leaves(opt_state, is_leaf=lambda n: hasattr(n, "mu"))
        if hasattr(node, "mu")
    ]
    assert len(found) == 1
    return found[0]
