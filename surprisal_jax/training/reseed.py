"""Split and re-seed: what takes training out of the optimum in which two strategies share a latent.

Of K latents that start almost equal, the first contrast between strategies (say, one against the two others) takes
some to its one side and some to its other by chance. Where two latents landed on the side of one strategy, they go on
as equals, and one latent keeps the two others for good: nothing in the objective moves a latent across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from surprisal_jax.training.state import TrainState

#: A latent with less than this share of an even usage is dead.
DEAD_SHARE = 0.1
#: Two draws of z from the posterior of one example agree this often, given the first: 1/2 where two latents are equal.
SETTLED_AGREEMENT = 0.6
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
