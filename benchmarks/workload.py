"""The real latent step on random tokens of a given shape: what the programs here measure and compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surprisal_jax.config import ExperimentConfig
from surprisal_jax.models.latent import PosteriorNetwork
from surprisal_jax.models.transformer import Decoder, new_module
from surprisal_jax.sequences import SPECIAL_TOKENS
from surprisal_jax.training.state import TrainState
from surprisal_jax.training.step import Hyperparameters, LatentStep, make_hyperparameters, make_latent_step

C_BASE = 1.0


class Arguments(NamedTuple):
    """What a step is called with; under `jax.eval_shape` the shapes of it."""

    state: TrainState
    batch: dict[str, Any]
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class Workload:
    """A configuration on sequences of one length: every prefix and every suffix is full."""

    config: ExperimentConfig
    vocabulary: int
    prefix: int  # tokens of <bos> <x> x </x> <z>
    suffix: int  # tokens of <z_k> </z> <y> y </y> <eos>

    def step(self) -> LatentStep:
        """The static half; no parameter is made for it."""
        found: list[LatentStep] = []

        def define(key: jax.Array) -> None:
            (decoder, _), (posterior, _) = self._modules(key)
            first = len(SPECIAL_TOKENS)
            latent_ids = tuple(range(first, first + self.config.num_latents))
            found.append(make_latent_step(self.config, decoder, posterior, latent_ids))

        jax.eval_shape(define, jax.random.key(0))
        return found[0]

    def arguments(self) -> Arguments:
        """State, batch with cached scores, and hyperparameters, drawn from one seed."""
        key = jax.random.key(0)
        (_, model), (_, posterior) = self._modules(key)
        state = TrainState.create({"model": model, "posterior": posterior}, self.step().optimizer, key)
        return Arguments(state, self.batch(), make_hyperparameters(self.config, C_BASE))

    def reference(self) -> Any:
        """Parameters of a reference of the same size."""
        return self._modules(jax.random.key(1))[0][1]

    def batch(self) -> dict[str, Any]:
        """Tokens, masks, offsets and the reference's NLL of a batch."""
        rows, z_free = self.config.disentangle.batch_size, self.prefix + self.suffix - 3
        keys = jax.random.split(jax.random.key(2), 3)
        x = jax.random.randint(keys[0], (rows, self.prefix), len(SPECIAL_TOKENS), self.vocabulary)
        y = jax.random.randint(keys[1], (rows, self.suffix), len(SPECIAL_TOKENS), self.vocabulary)
        return {
            "prefix_tokens": x,
            "prefix_lengths": jnp.full(rows, self.prefix),
            "suffix_tokens": y,
            "suffix_loss_mask": jnp.broadcast_to(jnp.arange(self.suffix) >= 3, y.shape),
            # Without <z>, <z_k> and </z>.
            "z_free_tokens": jnp.concatenate([x[:, :-1], y[:, 2:]], axis=1),
            "z_free_loss_mask": jnp.broadcast_to(jnp.arange(z_free) >= self.prefix, (rows, z_free)),
            "alignment_offsets": jnp.full(rows, 3 - self.prefix),
            "example_mask": jnp.ones(rows, bool),
            "base_token_nll": jax.random.exponential(keys[2], (rows, z_free - 1)),
        }

    def _modules(self, key: jax.Array) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        model, again = self.config.model, self.config.rematerialize
        latents = self.config.num_latents
        return (
            new_module(lambda rngs: Decoder(model, self.vocabulary, rematerialize=again, rngs=rngs), key),
            new_module(
                lambda rngs: PosteriorNetwork(model, self.vocabulary, latents, rematerialize=again, rngs=rngs), key
            ),
        )
