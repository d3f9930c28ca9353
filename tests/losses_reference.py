"""Float64 NumPy versions of the losses, plain loops written from the equations: the independent source of the tests.

Nothing is vectorised or shares a line with the package. Functions take one example; `loop_over_leading` the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

EPSILON32 = float(np.finfo(np.float32).eps)


def as_float64(values: Any) -> Vector:
    """Values as the device holds them: rounded to float32 (or kept in bfloat16) and only then widened."""
    array = np.asarray(values)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return array.astype(np.float64)


def loop_over_leading(function: Callable[..., Any], core_ranks: Sequence[int], *arrays: Any) -> Vector:
    """Call `function` on every element of the shared leading axes; `core_ranks`: the rank it takes of each array."""
    arrays_ = [np.asarray(array) for array in arrays]
    leading = arrays_[0].shape[: arrays_[0].ndim - core_ranks[0]]
    for array, rank in zip(arrays_, core_ranks, strict=True):
        assert array.shape[: array.ndim - rank] == leading, (array.shape, rank, leading)
    results = [
        function(*(array[index] for array in arrays_))
        for index in itertools.product(*(range(size) for size in leading))
    ]
    stacked = np.asarray(results, np.float64)
    return stacked.reshape(leading + stacked.shape[1:])


# token NLL


def nll_of_logits(logits: Vector, target: int) -> float:
    """-log softmax(logits)[target], accurate also where it is tiny."""
    others = [float(value) - float(logits[target]) for index, value in enumerate(logits) if index != target]
    largest = max([0.0, *others])
    if largest == 0.0:
        return math.log1p(math.fsum(math.exp(value) for value in others))
    total = math.exp(-largest) + math.fsum(math.exp(value - largest) for value in others)
    return largest + math.log(total)


def softmax(logits: Vector) -> Vector:
    largest = max(float(value) for value in logits)
    exponentials = [math.exp(float(value) - largest) for value in logits]
    return np.asarray(exponentials) / math.fsum(exponentials)


def nll_logit_gradient(logits: Vector, target: int) -> Vector:
    """softmax - onehot; the target's entry as minus the sum of the others, so that it keeps its relative accuracy."""
    gradient = softmax(logits)
    gradient[target] = -math.fsum(float(p) for index, p in enumerate(gradient) if index != target)
    return gradient


def token_nll_per_position(logits: Vector, tokens: Sequence[int], loss_mask: Sequence[Any]) -> Vector:
    """[T, V], [T], [T] -> [T-1]: position t scores token t+1."""
    result = np.zeros(len(tokens) - 1)
    for position in range(len(tokens) - 1):
        if loss_mask[position + 1]:
            result[position] = nll_of_logits(logits[position], int(tokens[position + 1]))
    return result


def token_nll_logit_gradient(
    logits: Vector, tokens: Sequence[int], loss_mask: Sequence[Any], cotangent: Vector
) -> Vector:
    """Gradient in the logits [T, V] of `sum_t cotangent_t * nll_t`."""
    gradient = np.zeros(np.shape(logits))
    for position in range(len(tokens) - 1):
        if loss_mask[position + 1]:
            gradient[position] = cotangent[position] * nll_logit_gradient(logits[position], int(tokens[position + 1]))
    return gradient


# weights


def power_weights(b: Sequence[float], mask: Sequence[Any], alpha: float) -> Vector:
    """m_t b_t^alpha / sum_s m_s b_s^alpha with the exact limits."""
    supervised = [index for index, flag in enumerate(mask) if flag]
    weights = np.zeros(len(b))
    if not supervised:
        return weights
    zeros = [index for index in supervised if b[index] == 0]
    if alpha == 0 or len(zeros) == len(supervised):
        for index in supervised:
            weights[index] = 1 / len(supervised)
        return weights
    if alpha < 0 and zeros:
        for index in zeros:
            weights[index] = 1 / len(zeros)
        return weights
    logarithms = {index: alpha * math.log(b[index]) for index in supervised if b[index] > 0}
    largest = max(logarithms.values())
    total = math.fsum(math.exp(value - largest) for value in logarithms.values())
    for index, value in logarithms.items():
        weights[index] = math.exp(value - largest) / total
    return weights


def masked_sum(values: Sequence[float], mask: Sequence[Any], weights: Sequence[float] | None = None) -> float:
    """sum_t w_t v_t over the supervised tokens; without weights the uniform mean; 0 where nothing is supervised."""
    supervised = [index for index, flag in enumerate(mask) if flag]
    if not supervised:
        return 0.0
    if weights is None:
        return math.fsum(values[index] for index in supervised) / len(supervised)
    return math.fsum(weights[index] * values[index] for index in supervised)


def align(
    values: Sequence[float], source_mask: Sequence[Any], target_mask: Sequence[Any], offset: int
) -> tuple[Vector, npt.NDArray[np.bool_]]:
    """Position j reads source position j - offset; nothing to read, or read nothing supervised: value 0, mask False."""
    aligned = np.zeros(len(target_mask))
    aligned_mask = np.zeros(len(target_mask), bool)
    for position in range(len(target_mask)):
        source = position - offset
        if 0 <= source < len(values) and source_mask[source] and target_mask[position]:
            aligned[position] = values[source]
            aligned_mask[position] = True
    return aligned, aligned_mask


def token_weighting(
    b: Sequence[float], mask: Sequence[Any], alpha: float, inverse_nll_floor: float = 1e-6
) -> dict[str, Any]:
    """The bundle of one example, `b` already aligned."""
    clean = [float(value) if flag else 0.0 for value, flag in zip(b, mask, strict=True)]
    weights = power_weights(clean, mask, alpha)
    inverse = power_weights([max(value, inverse_nll_floor) for value in clean], mask, -alpha)
    example = masked_sum(clean, mask)
    weighted = masked_sum(clean, mask, weights)
    inverse_weighted = masked_sum(clean, mask, inverse)
    return {
        "token_weights": weights,
        "inverse_token_weights": inverse,
        "aligned_base_token_nll": np.asarray(clean),
        "example_base_loss": example,
        "token_weighted_base_loss": weighted,
        "inverse_token_weighted_base_loss": inverse_weighted,
        "token_concentration_factor": weighted / example if example > 0 else 1.0,
        "inverse_token_base_scale_factor": inverse_weighted / example if example > 0 else 1.0,
    }


def relative_tolerance(b: Sequence[float], mask: Sequence[Any], alpha: float) -> float:
    """The oracle's float32 tolerances as a formula: eps * (8 + |alpha| (4 + 2 max |log b|)) over supervised b > 0."""
    logarithms = [abs(math.log(value)) for value, flag in zip(b, mask, strict=True) if flag and value > 0]
    return EPSILON32 * (8 + abs(alpha) * (4 + 2 * max(logarithms, default=0.0)))


# the six terms


def reconstruction(
    nll: Sequence[float],
    mask: Sequence[Any],
    weighting: Mapping[str, Any],
    c_base: float,
    divisor_floor: float = 1e-3,
) -> dict[str, float]:
    """The six terms of one example and one latent."""
    raw = masked_sum(nll, mask)
    weighted = masked_sum(nll, mask, weighting["token_weights"])
    inverse = masked_sum(nll, mask, weighting["inverse_token_weights"])
    return {
        "raw": raw,
        "baseline_normalized": raw / max(c_base, divisor_floor),
        "example_normalized": raw / max(weighting["example_base_loss"], divisor_floor),
        "token_weighted": weighted,
        "normalized_token_weighted": weighted / max(weighting["token_weighted_base_loss"], divisor_floor),
        "normalized_inverse_token_weighted": inverse
        / max(weighting["inverse_token_weighted_base_loss"], divisor_floor),
    }


# divergences


def log_softmax(logits: Vector) -> Vector:
    largest = max(float(value) for value in logits)
    normaliser = largest + math.log(math.fsum(math.exp(float(value) - largest) for value in logits))
    return np.asarray([float(value) - normaliser for value in logits])


def kl(log_q: Sequence[float], log_p: Sequence[float]) -> float:
    """KL(q || p) in nats."""
    terms = []
    for left, right in zip(log_q, log_p, strict=True):
        if left == -math.inf:
            continue
        if right == -math.inf:
            return math.inf
        terms.append(math.exp(left) * (left - right))
    return math.fsum(terms)


def log_ratio(log_p: float, mixture: float) -> float:
    """log(p / m), without cancellation where p is close to m."""
    relative = (math.exp(log_p) - mixture) / mixture
    return math.log1p(relative) if abs(relative) < 0.1 else log_p - math.log(mixture)


def jsd(logits: Vector) -> float:
    """Jensen-Shannon divergence of K categoricals from logits [K, V], uniform mixture: mean_k KL(p_k || m)."""
    log_p = [log_softmax(row) for row in logits]
    latents, symbols = len(log_p), len(log_p[0])
    terms = []
    for symbol in range(symbols):
        mixture = math.fsum(math.exp(row[symbol]) for row in log_p) / latents
        for row in log_p:
            if row[symbol] != -math.inf and mixture > 0:
                # p log(p/m) - p + m is never negative and sums to the same: no cancellation at small values
                p = math.exp(row[symbol])
                terms.append((p * log_ratio(row[symbol], mixture) - (p - mixture)) / latents)
            else:
                terms.append(mixture / latents)
    return math.fsum(terms)


def jsd_logit_gradient(logits: Vector) -> Vector:
    """Gradient of `jsd` in the logits [K, V]: p_kv (log(p_kv / m_v) - KL(p_k || m)) / K."""
    log_p = [log_softmax(row) for row in logits]
    latents, symbols = len(log_p), len(log_p[0])
    mixture = [math.fsum(math.exp(row[symbol]) for row in log_p) / latents for symbol in range(symbols)]
    gradient = np.zeros((latents, symbols))
    for latent, row in enumerate(log_p):
        ratios = [
            log_ratio(row[symbol], mixture[symbol]) if math.exp(row[symbol]) > 0 else 0.0 for symbol in range(symbols)
        ]
        divergence = math.fsum(math.exp(row[symbol]) * ratios[symbol] for symbol in range(symbols))
        for symbol in range(symbols):
            gradient[latent, symbol] = math.exp(row[symbol]) * (ratios[symbol] - divergence) / latents
    return gradient


def latent_divergence(logits: Vector, loss_mask: Sequence[Any], token_weights: Sequence[float]) -> float:
    """[K, T, V], [T], [T-1] -> sum over supervised positions of w_t JSD_t."""
    return math.fsum(
        float(token_weights[position]) * jsd(logits[:, position])
        for position in range(len(loss_mask) - 1)
        if loss_mask[position + 1]
    )


# the posterior


def log_posterior(log_router: Sequence[float], reconstruction_loss: Sequence[float], beta: float) -> Vector:
    return log_softmax(
        np.asarray([prior - loss / beta for prior, loss in zip(log_router, reconstruction_loss, strict=True)])
    )


def variational_objective(
    log_q: Sequence[float], log_router: Sequence[float], reconstruction_loss: Sequence[float], beta: float
) -> float:
    """E_q[R] + beta KL(q || router)."""
    expected = math.fsum(math.exp(q) * loss for q, loss in zip(log_q, reconstruction_loss, strict=True))
    return expected + beta * kl(log_q, log_router)
