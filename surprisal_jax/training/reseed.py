"""Split and re-seed: what takes training out of the optimum in which two strategies share a latent.

Of K latents that start almost equal, the first contrast between strategies (say, one against the two others) takes
some to its one side and some to its other by chance. Where two latents landed on the side of one strategy, they go on
as equals, and one latent keeps the two others for good: nothing in the objective moves a latent across.

Which examples of the shared latent belong together is read from how they would move its embedding. Where records come
in groups of one strategy, its part of these gradients is what the records of a group have in common (`cluster_groups`),
and the groups are held to their sides for some updates. Without groups there is only the direction in which examples
differ most (`split_direction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.cluster.vq
import scipy.linalg
from numpy.typing import ArrayLike

from surprisal_jax.training.state import TrainState

#: A latent with less than this share of an even usage is dead.
DEAD_SHARE = 0.1
#: Two draws of z from the posterior of one example agree this often, given the first: 1/2 where two latents are equal.
SETTLED_AGREEMENT = 0.6
#: Correlation between records of a group above which an axis tells the groups apart.
AGREEMENT = 0.1
#: Groups of the coming batches that are looked at, at least; an axis has as many numbers as the embedding.
COMING_GROUPS = 2048
#: Updates for which groups are held, at most.
HELD_UPDATES = 50
#: How far the two parts of a split latent move, relative to the other tokens' embeddings.
SPLIT_SCALE = 0.1


def latent_to_reseed(log_posterior: ArrayLike, reconstruction: ArrayLike) -> tuple[int, int] | None:
    """Which latent does nothing, and which should be split instead.

    A latent does nothing where hardly any example has it, or where the posterior cannot tell it from another one. To be
    split is the latent that carries most of the loss. While the posterior is sure of no latent, none is split.

    Args:
      log_posterior: [N, K], `log q(z | x, y)` over many examples.
      reconstruction: [N, K] nats, the loss under each latent.

    Returns:
      (target, source): the latent to draw anew and the one to draw it at; None where every latent has its use, or none
      is settled.
    """
    q = np.exp(np.asarray(log_posterior, np.float64))
    share = q.mean(axis=0)
    agreement = (q**2).mean(axis=0) / np.maximum(share, 1e-12)
    dead = share < DEAD_SHARE / q.shape[1]
    settled = ~dead & (agreement >= SETTLED_AGREEMENT)
    if settled.all() or not settled.any():
        return None
    loss = (q * np.asarray(reconstruction, np.float64)).mean(axis=0)
    source = int(np.argmax(np.where(dead, -np.inf, loss)))
    target = int(np.argmin(np.where(settled, np.inf, share)))
    with_target = (q * q[:, [target]]).mean(axis=0)
    with_target[target] = -np.inf
    doubled = int(np.argmax(with_target))
    # Where these two share already what is to be split, they need no more than time to part.
    if not dead[target] and source in (target, doubled):
        return None
    return target, source


def split_direction(gradients: ArrayLike, weights: ArrayLike) -> np.ndarray:
    """The direction in which the examples of a latent disagree most about where its embedding should go.

    At the optimum of a latent that two strategies share, their mean gradients are opposite: what is left of the loss is
    what tells them apart.

    Args:
      gradients: [N, D], of each example's loss with respect to the embedding.
      weights: [N], the posterior of the latent.

    Returns:
      [D], of length 1: the first principal axis of the weighted gradients.
    """
    gradients, weights = np.asarray(gradients, np.float64), np.asarray(weights, np.float64)
    centred = gradients - np.average(gradients, axis=0, weights=weights)
    _, _, axes = np.linalg.svd(np.sqrt(weights)[:, None] * centred, full_matrices=False)
    axis: np.ndarray = axes[0]
    return axis


def cluster_groups(gradients: np.ndarray, present: np.ndarray, most: int) -> np.ndarray:
    """Groups by what their records agree on in how they would move one latent's embedding.

    The records of a group share the strategy and differ in x, so what they agree on is the strategy: the canonical
    correlations between them give the axes, and k-means on the groups' means along these the clusters. No label is
    read. A few records have gradients many times as long as the others and would decide the axes alone, so each counts
    for at most the median length (`_whitened`). Strategies whose means lie on a line or in a plane make fewer axes than
    there are strategies less one; some then share a cluster, until they are split.

    Args:
      gradients: [N, G, D], of each record's loss with respect to the latent's embedding.
      present: bool [N, G], False where a group has fewer records.
      most: clusters at most.

    Returns:
      int [N], the cluster of each group, the largest cluster first. There is one more than there are axes along which
      the records of a group agree, on the half of the groups that the axis was not fitted to, by `AGREEMENT` or, of few
      groups, more than chance gives: one cluster where nothing tells the groups apart.
    """
    gradients = gradients.astype(np.float64)
    present = present & np.isfinite(gradients).all(axis=-1)
    # What groups tell they tell by their pairs.
    groups = int((present.sum(axis=1) > 1).sum())
    one = np.zeros(len(present), int)
    if groups < 16:
        return one
    # No more directions than the groups can tell from chance.
    white = _whitened(gradients[present], max(most - 1, groups // 8))
    if white is None:
        return one
    x = np.zeros((*present.shape, white.shape[1]))
    x[present] = white
    halves = (x[::2], present[::2]), (x[1::2], present[1::2])
    agreement = np.mean([_correlations(*of, _axes(*by)[:, : most - 1]) for of, by in (halves, halves[::-1])], axis=0)
    # A correlation of N pairs that have nothing in common has a standard deviation of about N^-1/2.
    count = int(np.argmin(np.append(agreement, -np.inf) >= max(AGREEMENT, 3.0 / groups**0.5)))
    if count == 0:
        return one
    axes = _axes(x, present)[:, :count]
    along = x.sum(axis=1) / np.maximum(present.sum(axis=1), 1)[:, None] @ axes
    along *= np.sqrt(np.maximum(_correlations(x, present, axes), 0.0)) / along.std(axis=0)
    fits = [scipy.cluster.vq.kmeans2(along, count + 1, minit="++", rng=seed) for seed in range(16)]
    _, clusters = min(fits, key=lambda fit: float(((along - fit[0][fit[1]]) ** 2).sum()))
    order = np.argsort(-np.bincount(clusters, minlength=count + 1), kind="stable")
    result: np.ndarray = np.argsort(order)[clusters]
    return result


def _whitened(records: np.ndarray, directions: int) -> np.ndarray | None:
    """Records [P, D] in the units of their own scatter, along its largest directions, and none longer than the median.

    Centre and scatter are of the shortened records, whose lengths depend on them: a few rounds settle it, which is an
    M-estimate of scatter. None where most records are the same, which leaves no unit.
    """
    weights = np.ones((len(records), 1))
    centre = np.median(records, axis=0)
    for _ in range(5):
        centred = records - centre
        _, lengths, axes = np.linalg.svd(weights * centred, full_matrices=False)
        kept = np.flatnonzero(lengths > 1e-6 * lengths[0])[:directions]
        white = centred @ (axes[kept].T / lengths[kept])
        length = np.linalg.norm(white, axis=1, keepdims=True)
        median = np.median(length)
        if not median > 0:
            return None
        weights = np.minimum(1.0, median / np.maximum(length, np.finfo(np.float64).tiny))
        centre = np.average(records, axis=0, weights=weights[:, 0])
    white *= weights
    centred_again: np.ndarray = white - white.mean(axis=0)
    return centred_again


def _covariances(x: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[D, D] each, between two records of a group and of one record; centred records [N, G, D], zero where there is
    none."""
    total = np.einsum("ngd,nge->de", x, x)
    sums, count = x.sum(axis=1), present.sum(axis=1)
    return (sums.T @ sums - total) / max(int((count * (count - 1)).sum()), 1), total / max(int(count.sum()), 1)


def _axes(x: np.ndarray, present: np.ndarray) -> np.ndarray:
    """[D, D], the directions of the largest correlations between records of a group, as columns."""
    between, within = _covariances(x, present)
    ridge = 1e-6 * np.trace(within) / len(within) + np.finfo(np.float64).tiny
    _, vectors = scipy.linalg.eigh(between, within + ridge * np.eye(len(within)))
    axes: np.ndarray = vectors[:, ::-1]
    return axes


def _correlations(x: np.ndarray, present: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """[number of axes], between records of a group."""
    between, within = _covariances(x @ axes, present)
    correlations: np.ndarray = np.diag(between) / np.maximum(np.diag(within), np.finfo(np.float64).tiny)
    return correlations


def reseed_latent(
    state: TrainState, latent_ids: Sequence[int], target: int, source: int, direction: ArrayLike
) -> TrainState:
    """`state` with the target at the source's embedding, the two moved apart, and the optimizer's moments of the
    target's row as the source's.

    They move opposite ways. Were the source left where it is, the other would be a little worse for every example; a
    posterior that a tenth of a nat decides would give it none, and it would die again.

    Args:
      state: parameters of the decoder under the key `model`.
      latent_ids: tokens of the latents.
      target, source: latents, as `latent_to_reseed` gives them.
      direction: [D], of length 1.
    """
    to, at = latent_ids[target], latent_ids[source]

    def copied(path: Any, leaf: jax.Array) -> jax.Array:
        names = [getattr(entry, "key", None) for entry in path]
        if "embedding" in names:
            return leaf.at[to].set(leaf[at])
        if "output_embedding" in names:
            return leaf.at[:, to].set(leaf[:, at])
        return leaf

    model = jax.tree_util.tree_map_with_path(copied, state.params["model"])
    embedding = model["embedding"]
    others = jnp.delete(embedding, jnp.asarray(latent_ids), axis=0, assume_unique_indices=True)
    length = SPLIT_SCALE * jnp.std(others) * embedding.shape[1] ** 0.5
    apart = length * jnp.asarray(direction, embedding.dtype)
    model = {**model, "embedding": embedding.at[to].add(apart).at[at].add(-apart)}
    moments = jax.tree_util.tree_map_with_path(copied, state.opt_state["model"])
    return replace(state, params={**state.params, "model": model}, opt_state={**state.opt_state, "model": moments})
