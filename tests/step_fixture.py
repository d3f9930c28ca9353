"""A small latent step with random parameters and a ragged batch: what the tests of the step share."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from surprisal_jax.config import DataConfig, DisentangleConfig, ExperimentConfig, ModelConfig, ReconstructionLossConfig
from surprisal_jax.models.latent import PosteriorNetwork
from surprisal_jax.models.transformer import Decoder, new_module
from surprisal_jax.sequences import Vocabulary, build_sequences
from surprisal_jax.training.sharding import compile_step, make_mesh, over_mesh
from surprisal_jax.training.state import TrainState, make_optimizer
from surprisal_jax.training.step import Hyperparameters, LatentStep, make_hyperparameters, make_latent_step

EVERY_TERM = ReconstructionLossConfig(
    raw_weight=1.0,
    baseline_normalized_weight=0.3,
    example_normalized_weight=0.2,
    token_weighted_weight=2.0,
    normalized_token_weighted_weight=0.1,
    normalized_inverse_token_weighted_weight=0.05,
)

CONFIG = ExperimentConfig(
    posterior="closed_form",
    latent_scope="group",
    inter_latent_divergence_weight=0.1,
    router_marginal_kl_weight=0.2,
    chunk_size=50,
    reconstruction=EVERY_TERM,
    model=ModelConfig(num_layers=1, width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=32),
    data=DataConfig(group_size=2),
    disentangle=DisentangleConfig(batch_size=16, warmup_steps=0, learning_rate=3e-3, steps=100),
)

C_BASE = 0.7


# One object, so that equal steps are equal keys of the compilation caches below.
_OPTIMIZER = make_optimizer(CONFIG.disentangle)


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradient(step: LatentStep, *arguments: Any) -> Any:
    return jax.value_and_grad(step.loss, has_aux=True)(*arguments)


@functools.partial(jax.jit, static_argnums=0)
def _score(step: LatentStep, batch: Any, reference: Any) -> Any:
    return step.reference_scores(batch, reference)["base_token_nll"]


@functools.lru_cache(maxsize=4)
def _modules(model: ModelConfig, vocabulary_size: int, num_latents: int) -> Any:
    """Reference, posterior and generator, drawn once for all tests."""
    return (
        new_module(lambda rngs: Decoder(model, vocabulary_size, rngs=rngs), jax.random.key(1)),
        new_module(lambda rngs: PosteriorNetwork(model, vocabulary_size, num_latents, rngs=rngs), jax.random.key(2)),
        new_module(lambda rngs: Decoder(model, vocabulary_size, rngs=rngs), jax.random.key(3)),
    )


class StepFixture:
    """Everything one call of a training step needs, made from a configuration; every method gives fresh buffers."""

    def __init__(self, config: ExperimentConfig = CONFIG, **changes: Any) -> None:
        self.config = replace(config, **changes)
        vocabulary = Vocabulary(tuple("abcdefgh"), self.config.num_latents)
        rng = np.random.default_rng(0)
        pairs = [
            (rng.integers(12, 20, rng.integers(1, 5)).tolist(), rng.integers(12, 20, rng.integers(2, 7)).tolist())
            for _ in range(self.config.disentangle.batch_size)
        ]
        self.vocabulary = vocabulary
        (decoder, reference), (posterior, posterior_params), (_, model_params) = _modules(
            self.config.model, vocabulary.size, self.config.num_latents
        )
        self.reference = jax.tree.map(lambda x: x.copy(), reference)
        self._params = {"model": model_params, "posterior": posterior_params}
        step: LatentStep = make_latent_step(self.config, decoder, posterior, tuple(vocabulary.latent_ids))
        self.step = replace(step, optimizer=_OPTIMIZER)
        self.hyperparameters: Hyperparameters = make_hyperparameters(self.config, C_BASE)
        arrays = build_sequences(pairs, vocabulary)
        batch = {**vars(arrays), "example_mask": np.ones(len(pairs), bool)}
        # One group is short and one example supervises nothing, so that examples are unevenly spread over devices.
        batch["example_mask"][-1] = False
        batch["suffix_loss_mask"][4] = False
        batch["z_free_loss_mask"][4] = False
        scored = _score(replace(self.step, online_reference=True), batch, self.reference)
        self.batch = {**batch, "base_token_nll": np.asarray(scored)}

    def state(self) -> TrainState:
        return TrainState.create(self._params, self.step.optimizer, jax.random.key(4))

    def params(self) -> dict[str, Any]:
        return jax.tree.map(lambda x: x.copy(), self._params)

    @property
    def online_batch(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in self.batch.items() if name != "base_token_nll"}

    def value_and_gradient(self, batch: Any = None, reference: Any = None) -> Any:
        return _value_and_gradient(self.step, self.params(), batch or self.batch, self.hyperparameters, reference)

    def compiled(self, data_parallel: int, fsdp: int = 1) -> Any:
        mesh = make_mesh(replace(self.config, data_parallel=data_parallel, fsdp=fsdp))
        return compile_step(over_mesh(self.step, mesh)), mesh


def assert_trees_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Every leaf within `tolerance` of the largest entry of the whole expected tree."""
    scale = max(float(np.abs(np.asarray(leaf)).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=0, atol=tolerance * scale),
        actual,
        expected,
    )
