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
from surprisal_jax.evaluation.evaluate import Evaluator
from surprisal_jax.evaluation.look import look_at_validation, look_before_training
from surprisal_jax.run import Clock, claim_reference_directory, prepare
from surprisal_jax.training.loop import train
from surprisal_jax.training.reseed import SPLIT_SCALE, cluster_groups, latent_to_reseed, reseed_latent, split_direction
from surprisal_jax.training.sharding import compile_step, make_mesh, over_mesh
from surprisal_jax.training.stages import Workplace, latent_batch_at, latent_rows_at, start_disentangling
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


def grouped_gradients(strategies: np.ndarray, group_size: int = 2) -> np.ndarray:
    """Gradients in 12 dimensions: what differs from record to record is a hundred times the strategy's part, and one
    record in fifty is far out."""
    rng = np.random.default_rng(1)
    shape = (len(strategies), group_size, 12)
    own = rng.normal(size=shape) @ np.diag([100.0] * 6 + [1.0] * 6)
    means = np.zeros((3, 12))
    means[1, 7], means[2, 8] = 3.0, 3.0
    far = np.where(rng.random(shape[:2]) < 0.02, 1000.0, 1.0)
    return (own + means[strategies][:, None]) * far[..., None] @ rng.normal(size=(12, 12))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("group_size", [2, 4])
def test_groups_are_told_apart_by_what_their_records_agree_on(count: int, group_size: int) -> None:
    strategies = np.random.default_rng(0).integers(0, count, 1500)
    gradients = grouped_gradients(strategies, group_size)
    present = np.ones(gradients.shape[:2], bool)
    clusters = cluster_groups(gradients, present, 5)
    assert clusters.max() + 1 == count, "as many clusters as there are strategies, not as many as are allowed"
    table = np.zeros((count, count))
    np.add.at(table, (clusters, strategies), 1)
    assert table.max(axis=1).sum() / len(strategies) > 0.97
    assert len(set(table.argmax(axis=1))) == count
    assert (np.diff(np.bincount(clusters)) <= 0).all(), "the largest first"
    assert cluster_groups(gradients, present, 2).max() == 1, "no more than are allowed"


def test_the_clusters_do_not_depend_on_the_embeddings_coordinates() -> None:
    gradients = grouped_gradients(np.random.default_rng(0).integers(0, 3, 1500))
    present = np.ones(gradients.shape[:2], bool)
    turned = gradients @ np.random.default_rng(5).normal(size=(12, 12)) + 7.0
    assert np.mean(cluster_groups(turned, present, 3) == cluster_groups(gradients, present, 3)) > 0.98


def test_a_short_group_counts_with_the_record_it_has() -> None:
    # The rarer strategy is the smaller cluster, and the boundary lies off the middle.
    strategies = (np.random.default_rng(0).random(1500) < 0.3).astype(int)
    gradients, present = grouped_gradients(strategies, 4), np.ones((1500, 4), bool)
    present[:100, 1:] = False
    gradients[:100, 1:] = np.nan
    clusters = cluster_groups(gradients, present, 2)
    assert np.mean(clusters == strategies) > 0.95
    assert np.mean(clusters[:100] == strategies[:100]) > 0.85


def test_there_is_one_cluster_where_records_of_a_group_have_nothing_in_common() -> None:
    gradients = grouped_gradients(np.zeros(1500, int))
    assert not cluster_groups(gradients, np.ones((1500, 2), bool), 3).any()
    # Two clear clusters of records that groups do not share are none of groups.
    side = np.random.default_rng(3).integers(0, 2, (1500, 2, 1))
    assert not cluster_groups(gradients + 1000.0 * side, np.ones((1500, 2), bool), 3).any()


def test_few_groups_are_not_told_apart_by_chance() -> None:
    found = [
        cluster_groups(np.random.default_rng(seed).normal(size=(count, 2, 16)), np.ones((count, 2), bool), 3).any()
        for seed in range(20)
        for count in (15, 64, 200)
    ]
    assert np.mean(found) < 0.1


def test_where_the_weights_are_of_the_models_surprisal_the_gradients_are_of_all_latents_weights() -> None:
    reconstruction = replace(CONFIG.reconstruction, token_weight_source="model_surprisal", token_weighted_weight=2.0)
    fixture = StepFixture(num_latents=3, reconstruction=reconstruction)
    params, row = fixture.params()["model"], fixture.vocabulary.latent_ids[1]
    gradients = np.asarray(fixture.step.latent_gradients(params, fixture.batch, fixture.hyperparameters, 1))

    def total(embedding: jax.Array) -> jax.Array:
        moved = {**params, "embedding": params["embedding"].at[row].set(embedding)}
        return fixture.step.enumerate_latents(moved, fixture.batch, fixture.hyperparameters).reconstruction[0, 1]

    np.testing.assert_allclose(gradients[0], jax.grad(total)(params["embedding"][row]), rtol=1e-4, atol=1e-6)


class Stage:
    """The disentangle stage of the small run at its start."""

    def __init__(self, directory: Path, **changes: object) -> None:
        short = {"reference.steps": 5, "reference.evaluate_every": 5, "disentangle.reseed_until": 10}
        small = Path(__file__).parent / "data" / "small.yaml"
        self.config = load_config(small, {**short, "data_parallel": 1, "output_dir": str(directory), **changes})
        self.dataset = load_dataset(self.config)
        claimed, identity = claim_reference_directory(self.config, self.dataset)
        place = Workplace(self.config, self.dataset, make_mesh(self.config))
        prepared = prepare(place, claimed, identity, Clock())
        self.place, self.c_base = prepared.place, prepared.reference.c_base
        self.step, self.carry = start_disentangling(self.place, prepared.reference)
        self.hyperparameters = make_hyperparameters(self.config, self.c_base)
        self.evaluator = Evaluator(self.step, self.hyperparameters, self.dataset, prepared.scores, self.place.mesh)
        self.rows_at = latent_rows_at(self.place, self.step)
        self.batch_at = latent_batch_at(self.place, self.step, prepared.scores, self.rows_at)

    def look(self, done: int, carry: object = None) -> tuple[dict, dict]:
        return look_at_validation(self.evaluator, carry or self.carry, self.config, self.c_base, done, self.rows_at)


def test_a_look_at_the_validation_set_draws_it_anew_only_in_time(tmp_path: Path, monkeypatch) -> None:
    stage = Stage(tmp_path, latent_scope="example")
    seen = []

    def choice(log_q: np.ndarray, loss: np.ndarray) -> tuple[int, int]:
        seen.append((log_q.shape, loss.shape))
        return 1, 0

    monkeypatch.setattr("surprisal_jax.evaluation.look.latent_to_reseed", choice)
    same, metrics = stage.look(11)
    assert same["state"] is stage.carry["state"] and "reseeded_latent" not in metrics and not seen
    new, metrics = stage.look(10)
    assert seen == [((24, 3), (24, 3))]
    assert (metrics["reseeded_latent"], metrics["reseeded_at_latent"]) == (1, 0)
    rows = np.asarray(stage.dataset.vocabulary.latent_ids)
    before, after = (np.asarray(c["state"].params["model"]["embedding"])[rows] for c in (stage.carry, new))
    np.testing.assert_allclose(after[0] + after[1], 2 * before[0], rtol=1e-5, atol=1e-6)
    assert np.abs(after[0] - after[1]).max() > 1e-4
    np.testing.assert_array_equal(after[2], before[2])
    assert "held_latents" not in new and "anchor_latents" not in stage.batch_at(new, 0), "no groups, nothing to hold"


def test_the_groups_of_a_split_latent_are_held_to_their_sides_until_the_next_look(tmp_path: Path, monkeypatch) -> None:
    stage = Stage(tmp_path)
    asked = []

    def sides(gradients: np.ndarray, present: np.ndarray, most: int) -> np.ndarray:
        asked.append((gradients.shape, most))
        return np.arange(len(gradients)) % most

    monkeypatch.setattr("surprisal_jax.evaluation.look.cluster_groups", sides)
    monkeypatch.setattr("surprisal_jax.evaluation.look.latent_to_reseed", lambda *_: (2, 1))
    begun = look_before_training(stage.evaluator, stage.carry, stage.config, stage.rows_at)
    every = stage.config.disentangle.evaluate_every
    assert asked == [((64, 2, 16), 3)], "each of the 64 groups once"
    coming = np.stack([stage.rows_at(i) for i in range(every)])
    ranks = {group: rank for rank, group in enumerate(dict.fromkeys(coming[:, ::2].reshape(-1).tolist()))}
    expected = np.vectorize(lambda row: ranks[row] % 3)(np.repeat(coming[:, ::2], 2, axis=1))
    np.testing.assert_array_equal(begun["held_latents"], expected)
    for index in (0, 9):
        np.testing.assert_array_equal(stage.batch_at(begun, index)["anchor_latents"], expected[index])

    split, metrics = stage.look(10, begun)
    assert (metrics["reseeded_latent"], metrics["reseeded_at_latent"]) == (2, 1)
    held = split["held_latents"].reshape(-1, 2)
    np.testing.assert_array_equal(held[:, 0], held[:, 1])
    rows = np.concatenate([stage.rows_at(10 + i) for i in range(every)])
    read = stage.evaluator.read(stage.carry["state"].params, rows).closed_form_log_posterior
    at_source = read.reshape(-1, 2, 3).sum(axis=1).argmax(axis=1) == 1
    assert 0 < at_source.sum() < len(at_source)
    np.testing.assert_array_equal(held[:, 0] >= 0, at_source)
    everything = np.concatenate([stage.rows_at(10 + i) for i in range(256)])
    evidence = stage.evaluator.read(stage.carry["state"].params, everything).closed_form_log_posterior
    in_source = evidence.reshape(-1, 2, 3).sum(axis=1).argmax(axis=1) == 1
    ranks = {row: i for i, row in enumerate(dict.fromkeys(everything[::2][in_source].tolist()))}
    assert len(ranks) == asked[1][0][0], "the groups of the source, and no others, are told apart"
    sides_of = np.asarray([ranks[row] % 2 for row in rows[::2][at_source].tolist()])
    np.testing.assert_array_equal(held[at_source, 0], np.where(sides_of == 1, 2, 1))
    np.testing.assert_array_equal(stage.batch_at(split, 13)["anchor_latents"], split["held_latents"][3])

    free, _ = stage.look(20, split)
    assert (free["held_latents"] == -1).all()
    monkeypatch.setattr("surprisal_jax.evaluation.look.cluster_groups", lambda g, *_: np.zeros(len(g), int))
    unchanged, metrics = stage.look(10, begun)
    assert unchanged["state"] is begun["state"] and "reseeded_latent" not in metrics
    assert (unchanged["held_latents"] == -1).all()


def test_with_anchors_the_labels_say_which_latent_is_which(tmp_path: Path) -> None:
    stage = Stage(tmp_path, anchors=1)
    assert "held_latents" not in stage.carry
    batch = stage.batch_at(stage.carry, 3)
    np.testing.assert_array_equal(batch["anchor_latents"], stage.dataset.anchor_latents[stage.rows_at(3)])
    assert (batch["anchor_latents"] >= 0).any()


def test_groups_are_held_for_50_updates_at_most(tmp_path: Path, monkeypatch) -> None:
    every = {"disentangle.evaluate_every": 60, "disentangle.steps": 120, "disentangle.reseed_until": 60}
    stage = Stage(tmp_path, **every)
    monkeypatch.setattr("surprisal_jax.evaluation.look.cluster_groups", lambda g, *_: np.arange(len(g)) % 3)
    held = look_before_training(stage.evaluator, stage.carry, stage.config, stage.rows_at)["held_latents"]
    assert held.shape == (60, 16) and (held[:50] >= 0).all() and (held[50:] == -1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_record_without_a_finite_gradient_says_nothing(bad: float) -> None:
    strategies = np.random.default_rng(0).integers(0, 2, 1500)
    gradients = grouped_gradients(strategies)
    gradients[::50, 1, 0] = bad
    clusters = cluster_groups(gradients, np.ones((1500, 2), bool), 2)
    agree = np.mean(clusters == strategies)
    assert max(agree, 1 - agree) > 0.95


def test_equal_gradients_are_one_cluster() -> None:
    gradients = np.zeros((100, 2, 8))
    assert not cluster_groups(gradients, np.ones((100, 2), bool), 3).any()
    gradients[:10] = np.random.default_rng(0).normal(size=(10, 2, 8))
    assert not cluster_groups(gradients, np.ones((100, 2), bool), 3).any()


def test_a_stage_stopped_between_looks_goes_on_with_what_is_held(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "surprisal_jax.evaluation.look.cluster_groups", lambda gradients, *_: np.arange(len(gradients)) % 3
    )
    stage = Stage(tmp_path / "reference")
    begun = []

    def trained(directory: Path, stop: int | None) -> np.ndarray:
        config = stage.config
        compiled = compile_step(over_mesh(stage.step, stage.place.mesh))

        def batch_at(carry: dict, index: int) -> dict:
            if index == stop:
                raise KeyboardInterrupt
            return stage.batch_at(carry, index)

        def begin(carry: dict) -> dict:
            begun.append(stop)
            return dict(look_before_training(stage.evaluator, carry, config, stage.rows_at))

        carry = train(
            "disentangle",
            # The step consumes the state.
            jax.tree.map(lambda leaf: leaf.copy(), stage.carry),
            train_step=lambda state, batch: compiled(state, batch, stage.hyperparameters, None),
            batch_at=batch_at,
            begin=begin,
            evaluate=lambda carry, done: stage.look(done, carry),
            evaluate_every=10,
            total_steps=12,
            batch_size=16,
            directory=directory,
            mesh=stage.place.mesh,
            logging=config.logging,
            profile=config.profile,
        )
        return np.asarray(carry["state"].params["model"]["embedding"])

    whole = trained(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", 7)
    np.testing.assert_array_equal(trained(tmp_path / "parts", None), whole)
    assert begun == [None, 7], "a resumed stage does not begin anew"


def optax_moment(opt_state: object, name: str) -> dict:
    found = [
        getattr(node, name)
        for node in jax.tree.leaves(opt_state, is_leaf=lambda n: hasattr(n, "mu"))
        if hasattr(node, "mu")
    ]
    assert len(found) == 1
    return found[0]
