"""Pure loss functions: arrays in, arrays out. They never see a model, a configuration or a batch dictionary.

Every public function bears any leading axes, works under `jit`, `vmap`, `grad`, `pmap`, `shard_map` and `scan`,
computes in float32 nats whatever dtype comes in, and takes masks as bool or 0/1. `loss_mask` is per token `[..., T]`;
`mask` is per scored position `[..., T-1]`, `loss_mask[..., 1:]`: position t of a result scores token t + 1.
"""

from surprisal_jax.losses.divergence import (
    categorical_kl,
    inter_latent_divergence,
    inter_latent_divergence_from_hidden,
)
from surprisal_jax.losses.objective import (
    ObjectiveTerms,
    amortized_log_posterior,
    categorical_entropy,
    closed_form_log_posterior,
    expectation_under_posterior,
    mean_over_examples,
    prior_kl,
    router_marginal_kl,
    weighted_total,
)
from surprisal_jax.losses.reconstruction import ReconstructionTerms, reconstruction_terms
from surprisal_jax.losses.reductions import AxisName, all_sum, masked_mean_over_examples
from surprisal_jax.losses.token_nll import (
    logits_from_hidden,
    marginal_token_nll,
    masked_token_nll_from_hidden,
    masked_token_nll_per_position,
    predictive_entropy,
    score_reference,
)
from surprisal_jax.losses.token_weighting import (
    TokenWeighting,
    align_to_conditioned,
    compute_token_weighting,
    surprisal_share_weights,
    token_weighted_masked_nll_per_example,
)

__all__ = [
    "AxisName",
    "ObjectiveTerms",
    "ReconstructionTerms",
    "TokenWeighting",
    "align_to_conditioned",
    "all_sum",
    "amortized_log_posterior",
    "categorical_entropy",
    "categorical_kl",
    "closed_form_log_posterior",
    "compute_token_weighting",
    "expectation_under_posterior",
    "inter_latent_divergence",
    "inter_latent_divergence_from_hidden",
    "logits_from_hidden",
    "marginal_token_nll",
    "masked_mean_over_examples",
    "masked_token_nll_from_hidden",
    "masked_token_nll_per_position",
    "mean_over_examples",
    "predictive_entropy",
    "prior_kl",
    "reconstruction_terms",
    "router_marginal_kl",
    "score_reference",
    "surprisal_share_weights",
    "token_weighted_masked_nll_per_example",
    "weighted_total",
]
