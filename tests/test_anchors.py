"""Labelled examples: which they are, how batches hold them, and what a fixed posterior does to the objective."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from step_fixture import CONFIG, StepFixture

from surprisal_jax.config import DataConfig, ExperimentConfig, InputError
from surprisal_jax.data import Record, batch_rows, generate_records
from surprisal_jax.dataset import make_dataset
from surprisal_jax.tasks import get_task

GRID = get_task("grid_pathfinding")
DATA = DataConfig(train_groups=20, validation_records=6, test_instances=3)
SPLITS = generate_records(GRID, DATA, seed=0)


def unlabelled(splits: dict[str, list[Record]]) -> dict[str, list[Record]]:
    return {name: [replace(record, strategy=None) for record in records] for name, records in splits.items()}


def test_the_first_labelled_examples_of_each_strategy_get_its_latent():
    dataset = make_dataset(SPLITS, GRID, ExperimentConfig(data=DATA, anchors=2))
    for latent, strategy in enumerate(GRID.strategies):
        of_strategy = [row for row in dataset.rows["train"] if dataset.records[row].strategy == strategy]
        np.testing.assert_array_equal(np.flatnonzero(dataset.anchor_latents == latent), of_strategy[:2])
    assert (dataset.anchor_latents >= 0).sum() == 6


def test_without_anchors_no_label_is_read():
    config = ExperimentConfig(data=DATA)
    with_labels, without = make_dataset(SPLITS, GRID, config), make_dataset(unlabelled(SPLITS), GRID, config)
    assert (with_labels.anchor_latents == -1).all()
    assert with_labels.identity == without.identity and with_labels.latent_identity == without.latent_identity
    for name, array in with_labels.arrays.items():
        np.testing.assert_array_equal(array, without.arrays[name])
    anchored = make_dataset(SPLITS, GRID, replace(config, anchors=1))
    assert anchored.identity == with_labels.identity, "the reference does not depend on anchors"
    assert anchored.latent_identity != with_labels.latent_identity


def test_too_few_labels_or_latents_are_an_input_error():
    with pytest.raises(InputError, match=r"anchors: got 500, expected at most \d+, the training records of rows_first"):
        make_dataset(SPLITS, GRID, ExperimentConfig(data=DATA, anchors=500))
    with pytest.raises(InputError, match=r"anchors: got 1, expected at most 0"):
        make_dataset(unlabelled(SPLITS), GRID, ExperimentConfig(data=DATA, anchors=1))
    with pytest.raises(InputError, match=r"num_latents: got 2 with anchors 1, expected at least 3"):
        make_dataset(SPLITS, GRID, ExperimentConfig(data=DATA, anchors=1, num_latents=2))


def test_anchors_take_turns_at_the_head_of_every_batch():
    units = np.arange(40, dtype=np.int32).reshape(20, 2)
    anchors = units[[3, 7, 11, 15, 19]]
    heads, rests = [], []
    for step in range(10):
        rows = batch_rows(units, step, 16, 0, anchors)
        assert rows.shape == (16,)
        heads.extend(rows[:4].reshape(2, 2)[:, 0].tolist())  # a quarter: two of eight units
        rests.extend(rows[4:].reshape(6, 2)[:, 0].tolist())
    assert heads == [6, 14, 22, 30, 38] * 4
    # The rest is the ordinary stream of epochs, nothing dropped or repeated.
    assert sorted(rests[:20]) == sorted(rests[20:40]) == list(range(0, 40, 2))
    np.testing.assert_array_equal(batch_rows(units, 5, 16, 0), batch_rows(units, 5, 16, 0, units[:0]))


def losses_of(fixture: StepFixture, anchor_latents: np.ndarray):
    return fixture.value_and_gradient({**fixture.batch, "anchor_latents": anchor_latents.astype(np.int32)})


@pytest.mark.parametrize("posterior", ["closed_form", "amortized"])
def test_a_fixed_posterior_reads_the_assigned_latent_alone(posterior):
    """With every group anchored: R of that latent, cross entropy of router and network, entropy 0."""
    fixture = StepFixture(replace(CONFIG, posterior=posterior, anchors=1))
    size = fixture.step.group_size
    groups = np.random.default_rng(0).integers(0, 3, len(fixture.batch["example_mask"]) // size)
    # One member of the group is labelled; the latent holds for all of it. (Example 4 supervises nothing.)
    anchor_latents = np.full((len(groups), size), -1)
    anchor_latents[:, 0] = groups
    anchor_latents[2] = -1, groups[2]
    (_, (terms, usage, _)), gradients = losses_of(fixture, anchor_latents.reshape(-1))

    latent = fixture.step.enumerate_latents(fixture.params()["model"], fixture.batch, fixture.hyperparameters)
    counted = np.asarray(latent.example_mask)
    chosen = np.repeat(groups, size)[counted]
    rows = np.flatnonzero(counted)
    np.testing.assert_allclose(
        terms.reconstruction.raw_reconstruction_loss,
        np.asarray(latent.terms.raw_reconstruction_loss)[rows, chosen].mean(),
        rtol=1e-5,
    )
    np.testing.assert_allclose(terms.prior_kl, -np.asarray(latent.log_router)[rows, chosen].mean(), rtol=1e-5)
    np.testing.assert_allclose(terms.posterior_entropy, 0.0, atol=1e-7)
    np.testing.assert_allclose(usage, np.bincount(chosen, minlength=3) / len(chosen), rtol=1e-6)
    network = fixture.step.evaluate(fixture.params(), fixture.batch, fixture.hyperparameters).log_posterior
    np.testing.assert_allclose(terms.posterior_fit, -np.asarray(network)[rows, chosen].mean(), rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("posterior", ["closed_form", "amortized"])
def test_groups_without_an_anchor_are_as_before(posterior):
    config = replace(CONFIG, posterior=posterior)
    plain, anchored = StepFixture(config), StepFixture(replace(config, anchors=1))
    none = np.full(len(plain.batch["example_mask"]), -1)
    (_, (before, *_)), gradient_before = plain.value_and_gradient()
    (_, (after, *_)), gradient_after = losses_of(anchored, none)
    if posterior == "amortized":
        assert before.posterior_fit is None
        np.testing.assert_array_equal(after.posterior_fit, 0.0)
        after = after._replace(posterior_fit=None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), before, after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradient_before, gradient_after)


def test_a_masked_member_anchors_nothing():
    fixture = StepFixture(replace(CONFIG, anchors=1))
    latents = np.full(len(fixture.batch["example_mask"]), -1)
    latents[~fixture.batch["example_mask"]] = 2  # as gather fills a short unit with row 0
    (masked, _), _ = losses_of(fixture, latents)
    (without, _), _ = losses_of(fixture, np.full_like(latents, -1))
    np.testing.assert_array_equal(masked, without)
