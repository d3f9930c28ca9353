"""What a training step carries: parameters, optimizer state, step and RNG."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from surprisal_jax.config import DisentangleConfig, ReferenceConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree; `params` and `opt_state` are dictionaries of the same keys, one entry a network."""

    params: dict[str, Any]
    opt_state: dict[str, Any]
    step: jax.Array
    rng: jax.Array

    @classmethod
    def create(cls, params: dict[str, Any], optimizer: optax.GradientTransformation, rng: jax.Array) -> TrainState:
        # A copy: the step donates its state, and a donated buffer that the reference shares would be deleted under it.
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
        opt_state = {name: optimizer.init(network) for name, network in params.items()}
        return cls(params, opt_state, jnp.zeros((), jnp.int32), rng)

    def apply_gradients(self, gradients: dict[str, Any], optimizer: optax.GradientTransformation) -> TrainState:
        """One update a network: each has its own gradient norm, so that clipping one never scales another."""
        params, opt_state = {}, {}
        for name, gradient in gradients.items():
            updates, opt_state[name] = optimizer.update(gradient, self.opt_state[name], self.params[name])
            params[name] = optax.apply_updates(self.params[name], updates)
        return TrainState(params, opt_state, self.step + 1, self.rng)


def make_optimizer(config: ReferenceConfig | DisentangleConfig) -> optax.GradientTransformation:
    """AdamW under a global-norm clip; linear warm-up, then a cosine to a tenth of the learning rate."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=0.1 * config.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(schedule, b2=0.99, weight_decay=config.weight_decay),
    )
