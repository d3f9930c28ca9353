"""The entangled reference: a language model of the z-free sequence, trained on y alone, then frozen and scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx

from surprisal_jax import losses
from surprisal_jax.losses import AxisName
from surprisal_jax.models.transformer import Decoder
from surprisal_jax.training.gradients import train_step
from surprisal_jax.training.state import TrainState
from surprisal_jax.training.step import REFERENCE_SCORES, reference_apply

Array = jax.Array
Batch = Mapping[str, Array]


@dataclass(frozen=True)
class ReferenceStep:
    """What is static in training and scoring the reference."""

    decoder: nnx.GraphDef[Decoder]
    optimizer: optax.GradientTransformation
    micro_batches: int
    chunk_size: int
    logit_precision: jax.lax.Precision

    def train_step(
        self, state: TrainState, batch: Batch, *, axis_name: AxisName = None
    ) -> tuple[TrainState, dict[str, Array]]:
        """One update on the mean over examples of the masked mean NLL of y, `</y>` and `<eos>`."""
        return train_step(self, state, batch, (), axis_name)

    def loss(
        self, params: Mapping[str, Any], batch: Batch, *, axis_name: AxisName = None
    ) -> tuple[Array, dict[str, Array]]:
        """The mean over the counted examples of the global batch, nats, and nothing beside it."""
        model = nnx.merge(self.decoder, params["model"])
        tokens, loss_mask = batch["z_free_tokens"], batch["z_free_loss_mask"]
        token_nll = losses.masked_token_nll_from_hidden(
            model(tokens),
            model.unembedding,
            tokens,
            loss_mask,
            chunk_size=self.chunk_size,
            precision=self.logit_precision,
        )
        example_loss = losses.token_weighted_masked_nll_per_example(token_nll, loss_mask[..., 1:])
        return losses.masked_mean_over_examples(example_loss, self.counted(batch), axis_name), {}

    def counted(self, batch: Batch) -> Array:
        """`[B]`, the examples that `loss` is a mean over."""
        return batch["example_mask"]

    def update(
        self, state: TrainState, value: tuple[Array, Any], gradients: Any
    ) -> tuple[TrainState, dict[str, Array]]:
        """The state after one update, and the metrics of the step."""
        metrics = {"reference_loss": value[0], "gradient_norm": optax.tree.norm(gradients)}
        return state.apply_gradients(gradients, self.optimizer), metrics

    def score(self, params: Any, batch: Batch, name: str = "base_token_nll") -> Array:
        """One of the `REFERENCE_SCORES`, `[B, S-1]`: what `reference_scoring: cached` stores, by the function that
        `online` runs inside the step."""
        tokens, loss_mask = batch["z_free_tokens"], batch["z_free_loss_mask"]
        return REFERENCE_SCORES[name](reference_apply(self.decoder), params, tokens, loss_mask)
