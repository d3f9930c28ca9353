"""Every case of the token-weighting oracle in float32: plain, under `jit`, under `vmap`, at the oracle's tolerances."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from surprisal_jax.losses import (
    ReconstructionTerms,
    TokenWeighting,
    align_to_conditioned,
    categorical_kl,
    closed_form_log_posterior,
    compute_token_weighting,
    inter_latent_divergence,
    inter_latent_divergence_from_hidden,
    masked_mean_over_examples,
    reconstruction_terms,
    surprisal_share_weights,
    token_weighted_masked_nll_per_example,
    weighted_total,
)

ORACLE = json.loads((Path(__file__).parent / "data" / "token_weighting.json").read_text(encoding="utf-8"))
# cases that carry no tolerance of their own hold at most three tokens at alpha 1: the tolerance of P01, the like case
RELATIVE = 1.69e-6
DIVERGENCE = {"rtol": 1e-5, "atol": 2e-6}
TERMS = (
    "raw",
    "baseline_normalized",
    "example_normalized",
    "token_weighted",
    "normalized_token_weighted",
    "normalized_inverse_token_weighted",
)
TRANSFORMS = ("plain", "jit", "vmap")


def cases(kind: str) -> Any:
    found = ORACLE[kind]
    assert len(found) == ORACLE["counts"][kind]
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


transforms = pytest.mark.parametrize("transform", TRANSFORMS)


def floats(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float64).astype(np.float32))


def bools(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, bool))


@functools.cache
def compiled(transform: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled program a function, shared by the cases: most of the time of this file would go into compiling."""
    return jax.jit(jax.vmap(function) if transform == "vmap" else function)


def padded(transform: str, values: Any, length: int, fill: float = 0.0) -> np.ndarray:
    """Plain calls compile each operation for each shape: there the cases share one shape, filled up off the mask."""
    values = np.asarray(values, np.float64)
    missing = length - values.shape[-1] if transform == "plain" else 0
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)], constant_values=fill)


def run(transform: str, function: Callable[..., Any], *arguments: jax.Array) -> Any:
    """Under vmap the case travels beside two others, so that a reduction over the wrong axis shows."""
    if transform == "plain":
        return function(*arguments)
    if transform == "jit":
        return compiled(transform, function)(*arguments)
    batched = [
        jnp.stack([x + 1 if jnp.issubdtype(x.dtype, jnp.floating) else x, x, jnp.zeros_like(x)]) for x in arguments
    ]
    return jax.tree.map(lambda x: x[1], compiled(transform, function)(*batched))


def assert_weights(actual: Any, expected: Any, rtol: float) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    tiny = expected < 1e-30
    assert np.all(actual[tiny] >= 0) and np.all(actual[tiny] <= 1e-29)
    assert np.all(actual[expected == 0] <= 1e-29)
    np.testing.assert_allclose(actual[~tiny], expected[~tiny], rtol=rtol, atol=0)
    supervised = expected.sum(-1) > 0
    np.testing.assert_allclose(actual.sum(-1)[supervised], 1, rtol=0, atol=1e-6)


def assert_losses(actual: Any, expected: Any, rtol: float) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-28)


def assert_weighting(weighting: TokenWeighting, expected: dict[str, Any], rtol: float) -> None:
    for name, value in expected.items():
        check = assert_weights if name.endswith("token_weights") else assert_losses
        check(getattr(weighting, name), value, rtol)


def bundle(b: jax.Array, mask: jax.Array, alpha: jax.Array, offsets: jax.Array) -> TokenWeighting:
    return compute_token_weighting(b, mask, mask, offsets, alpha)


def bundle_at_the_limit(b: jax.Array, mask: jax.Array, alpha: jax.Array, offsets: jax.Array) -> TokenWeighting:
    return compute_token_weighting(b, mask, mask, offsets, alpha, inverse_nll_floor=0.0)


def bundle_of(case: dict[str, Any], transform: str, function: Callable[..., TokenWeighting]) -> TokenWeighting:
    length = len(case["b"])
    b, mask = padded(transform, case["b"], 4, fill=float("nan")), padded(transform, case["mask"], 4)
    found = run(transform, function, floats(b), bools(mask), floats(case["alpha"]), jnp.zeros((), jnp.int32))
    for leaf in jax.tree.leaves(found):
        if leaf.ndim:
            np.testing.assert_array_equal(np.asarray(leaf)[length:], 0)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:length] if leaf.ndim else leaf, found)


def test_the_cases_are_the_ones_these_tests_were_written_for() -> None:
    assert ORACLE["schema"] == "surprisal-share-oracle/1"
    assert set(ORACLE["counts"]) == {"token_weighting", "batch", "detach", "alignment", "kl", "jsd", "reconstruction"}


@cases("token_weighting")
def test_float64_reference_agrees_with_the_oracle(case: dict[str, Any]) -> None:
    """The reference is a source of its own: it has to be right before it judges anything."""
    b = [float(value) for value in case["b"]]
    found = reference.token_weighting(b, case["mask"], case["alpha"], inverse_nll_floor=0.0)
    for name, value in case["expected"].items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=0, err_msg=name)
    formula = reference.relative_tolerance(b, case["mask"], case["alpha"])
    assert formula == pytest.approx(case["fp32_rtol"], rel=5e-3)


@transforms
@cases("token_weighting")
def test_bundle_at_the_exact_limit(case: dict[str, Any], transform: str) -> None:
    weighting = bundle_of(case, transform, bundle_at_the_limit)
    assert_weighting(weighting, case["expected"], case["fp32_rtol"])
    aligned = [float(value) if flag else 0.0 for value, flag in zip(case["b"], case["mask"], strict=True)]
    np.testing.assert_array_equal(np.asarray(weighting.aligned_base_token_nll), np.float32(aligned))


@transforms
@cases("token_weighting")
def test_bundle_with_the_default_floor(case: dict[str, Any], transform: str) -> None:
    """`rho` comes from max(b, 1e-6); the rest of the bundle does not know the floor."""
    weighting = bundle_of(case, transform, bundle)
    unfloored = {name: value for name, value in case["expected"].items() if not name.startswith("inverse_token")}
    assert len(unfloored) == 4
    assert_weighting(weighting, unfloored, case["fp32_rtol"])
    b = [float(value) if flag else 0.0 for value, flag in zip(case["b"], case["mask"], strict=True)]
    expected = reference.token_weighting(b, case["mask"], case["alpha"], inverse_nll_floor=1e-6)
    floored = [max(value, 1e-6) for value in b]
    rtol = reference.relative_tolerance(floored, case["mask"], case["alpha"])
    if floored == b:
        assert rtol == pytest.approx(case["fp32_rtol"], rel=5e-3)
    assert_weighting(weighting, {k: v for k, v in expected.items() if k.startswith("inverse_token")}, rtol)


@transforms
@cases("token_weighting")
def test_shares_and_masked_means_by_themselves(case: dict[str, Any], transform: str) -> None:
    b = floats(padded(transform, case["b"], 4, fill=float("inf")))
    mask, alpha = bools(padded(transform, case["mask"], 4)), floats(case["alpha"])
    expected = {
        name: padded(transform, value, 4) if np.ndim(value) else value for name, value in case["expected"].items()
    }
    rtol = case["fp32_rtol"]
    weights = run(transform, surprisal_share_weights, b, mask, alpha)
    assert_weights(weights, expected["token_weights"], rtol)
    inverse = run(transform, surprisal_share_weights, b, mask, -alpha)
    assert_weights(inverse, expected["inverse_token_weights"], rtol)
    mean = run(transform, token_weighted_masked_nll_per_example, b, mask)
    assert_losses(mean, expected["example_base_loss"], rtol)
    for own, name in ((weights, "token_weighted_base_loss"), (inverse, "inverse_token_weighted_base_loss")):
        assert_losses(run(transform, token_weighted_masked_nll_per_example, b, mask, own), expected[name], rtol)


@pytest.mark.parametrize("offset", [0, 3, -2])
def test_all_cases_in_one_padded_batch(offset: int) -> None:
    """Rows of unequal length and unequal alpha side by side, under nested vmap: padding changes nothing."""
    width, rows = 6, ORACLE["token_weighting"]
    b, mask = np.full((len(rows), width), np.nan), np.zeros((len(rows), width), bool)
    start = 2
    for row, case in enumerate(rows):
        b[row, start : start + len(case["b"])] = [float(value) for value in case["b"]]
        mask[row, start : start + len(case["b"])] = np.asarray(case["mask"], bool)
    conditioned = np.zeros((len(rows), width + 3), bool)
    for row, case in enumerate(rows):
        conditioned[row, start + offset : start + offset + len(case["b"])] = np.asarray(case["mask"], bool)

    weighting = jax.jit(jax.vmap(lambda *args: compute_token_weighting(*args, inverse_nll_floor=0.0)))(
        floats(b),
        bools(mask),
        bools(conditioned),
        jnp.full((len(rows),), offset, jnp.int32),
        floats([case["alpha"] for case in rows]),
    )
    for row, case in enumerate(rows):
        where = slice(start + offset, start + offset + len(case["b"]))
        leaves = jax.tree.map(lambda x, row=row, where=where: x[row, where] if x.ndim == 2 else x[row], weighting)
        assert_weighting(leaves, case["expected"], case["fp32_rtol"])
        off = ~conditioned[row]
        for name in ("token_weights", "inverse_token_weights", "aligned_base_token_nll"):
            np.testing.assert_array_equal(np.asarray(getattr(weighting, name))[row, off], 0)


@transforms
@cases("batch")
def test_batch_normalises_per_example(case: dict[str, Any], transform: str) -> None:
    b, mask, conditioned_nll = floats(case["b"]), bools(case["mask"]), floats(case["conditioned_nll"])
    offsets = jnp.zeros((len(case["b"]),), jnp.int32)
    expected = case["expected"]

    def losses(b: jax.Array, mask: jax.Array, offsets: jax.Array, nll: jax.Array) -> tuple[Any, ...]:
        weighting = compute_token_weighting(b, mask, mask, offsets, case["alpha"], inverse_nll_floor=0.0)
        conditioned = token_weighted_masked_nll_per_example(nll, mask, weighting.token_weights)
        counted = jnp.any(mask, axis=-1)
        means = tuple(
            masked_mean_over_examples(values, counted)
            for values in (
                weighting.token_weighted_base_loss,
                weighting.example_base_loss,
                weighting.token_concentration_factor,
                conditioned,
            )
        )
        return weighting, conditioned, means

    weighting, conditioned, means = run(transform, losses, b, mask, offsets, conditioned_nll)
    names = ("token_weights", "example_base_loss", "token_weighted_base_loss")
    assert_weighting(weighting, {name: expected[name] for name in names}, RELATIVE)
    assert_losses(conditioned, expected["token_weighted_conditioned_loss"], RELATIVE)
    for mean, name in zip(
        means,
        (
            "batch_mean_token_weighted_base_loss",
            "batch_mean_example_base_loss",
            "batch_mean_concentration",
            "batch_mean_token_weighted_conditioned_loss",
        ),
        strict=True,
    ):
        assert_losses(mean, expected[name], RELATIVE)


@transforms
@pytest.mark.parametrize("source", ["bundle", "shares"])
@cases("detach")
def test_weights_carry_no_gradient(case: dict[str, Any], source: str, transform: str) -> None:
    def loss(b: jax.Array, mask: jax.Array, offsets: jax.Array) -> jax.Array:
        if source == "shares":
            weights = surprisal_share_weights(b, mask, case["alpha"])
        else:
            weights = compute_token_weighting(b, mask, mask, offsets, case["alpha"]).token_weights
        return token_weighted_masked_nll_per_example(b, mask, weights)

    gradient = run(transform, jax.grad(loss), floats(case["b"]), bools(case["mask"]), jnp.zeros((), jnp.int32))
    assert_losses(gradient, case["expected"]["grad_weights_detached"], RELATIVE)


def bundle_of_aligned(*arguments: jax.Array) -> TokenWeighting:
    return compute_token_weighting(*arguments)


@transforms
@cases("alignment")
def test_alignment(case: dict[str, Any], transform: str) -> None:
    assert len(case["conditioned_mask"][0]) == case["conditioned_length"]
    rows = [
        (
            floats(padded(transform, b, 3, fill=float("nan"))),
            bools(padded(transform, source_mask, 3)),
            bools(padded(transform, target_mask, 5)),
            jnp.asarray(offset, jnp.int32),
        )
        for b, source_mask, target_mask, offset in zip(
            case["b"], case["zfree_mask"], case["conditioned_mask"], case["alignment_offsets"], strict=True
        )
    ]
    if transform == "plain":  # row by row
        found = [(align_to_conditioned(*row), bundle_of_aligned(*row, floats(case["alpha"]))) for row in rows]
        (values, mask), weighting = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    else:
        arrays = [jnp.stack(column) for column in zip(*rows, strict=True)]
        values, mask = run(transform, align_to_conditioned, *arrays)
        weighting = run(transform, bundle_of_aligned, *arrays, floats(case["alpha"]))
    filled, aligned_mask = (padded(transform, case[name], 5) for name in ("aligned_b_zero_filled", "aligned_mask"))
    np.testing.assert_array_equal(np.asarray(values), filled.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(mask).astype(bool), aligned_mask.astype(bool))
    np.testing.assert_array_equal(np.asarray(weighting.aligned_base_token_nll), filled.astype(np.float32))
    assert_weights(weighting.token_weights, padded(transform, case["weights_align_then_normalise"], 5), RELATIVE)


@transforms
@pytest.mark.parametrize("direction", ["kl_p_q", "kl_q_p"])
@cases("kl")
def test_kl(case: dict[str, Any], direction: str, transform: str) -> None:
    def log_probabilities(values: list[float]) -> jax.Array:
        return jnp.log(floats(values)) if case["input"] == "probs" else jax.nn.log_softmax(floats(values))

    first, second = log_probabilities(case["p"]), log_probabilities(case["q"])
    if direction == "kl_q_p":
        first, second = second, first
    value = run(transform, categorical_kl, first, second)
    assert value.dtype == jnp.float32 and value.shape == ()
    np.testing.assert_allclose(float(value), case["expected"][direction], **DIVERGENCE)


def divergence_of_hidden_logits(hidden: jax.Array, loss_mask: jax.Array, weights: jax.Array) -> jax.Array:
    identity = jnp.eye(hidden.shape[-1], dtype=jnp.float32)
    return inter_latent_divergence_from_hidden(hidden, identity, loss_mask, weights, chunk_size=2)


@transforms
@pytest.mark.parametrize("form", ["logits", "hidden"])
@cases("jsd")
def test_jsd(case: dict[str, Any], form: str, transform: str) -> None:
    assert set(case["weights"]) == {1 / case["num_distributions"]}
    with np.errstate(divide="ignore"):
        log_p = np.log(np.asarray(case["distributions"], np.float64))
    # two positions, of which the first scores token 1; the second has no target
    log_p = padded(transform, log_p, 3, fill=-np.inf)
    logits = np.stack([log_p, np.flip(log_p, -1)], axis=1)
    loss_mask, weights = bools([0, 1]), floats([1.0])
    if form == "logits":
        value = run(transform, inter_latent_divergence, floats(logits), loss_mask, weights)
    else:
        hidden = np.maximum(logits, -1e4)  # a matmul cannot carry -inf; exp(-1e4) is 0 in float32 too
        value = run(transform, divergence_of_hidden_logits, floats(hidden), loss_mask, weights)
    assert value.dtype == jnp.float32 and value.shape == ()
    np.testing.assert_allclose(float(value), case["expected"]["jsd_nats"], **DIVERGENCE)
    np.testing.assert_allclose(
        float(value) / case["expected"]["upper_bound_nats"], case["expected"]["jsd_over_bound"], **DIVERGENCE
    )


def as_terms(values: dict[str, Any]) -> ReconstructionTerms:
    return ReconstructionTerms(**{f"{name}_reconstruction_loss": floats(values[name]) for name in TERMS})


def terms_with_floor(
    nll: jax.Array, b: jax.Array, mask: jax.Array, alpha: jax.Array, offsets: jax.Array, c_base: jax.Array
) -> ReconstructionTerms:
    return reconstruction_terms(nll, mask, bundle(b, mask, alpha, offsets), c_base, latent_axis=-2)


def terms_without_floor(
    nll: jax.Array, b: jax.Array, mask: jax.Array, alpha: jax.Array, offsets: jax.Array, c_base: jax.Array
) -> ReconstructionTerms:
    weighting = bundle(b, mask, alpha, offsets)
    return reconstruction_terms(nll, mask, weighting, c_base, latent_axis=-2, divisor_floor=0.0)


def oracle_terms(case: dict[str, Any], transform: str, floor: bool = True) -> ReconstructionTerms:
    """Terms with one entry per latent, as the oracle writes them."""
    token_nll = np.asarray(case["token_nll"], np.float64)
    token_nll = token_nll[None] if token_nll.ndim == 1 else token_nll

    return run(
        transform,
        terms_with_floor if floor else terms_without_floor,
        floats(token_nll),
        floats(case["b"]),
        bools(case["mask"]),
        floats(case["alpha"]),
        jnp.zeros((), jnp.int32),
        floats(case["c_base"]),
    )


@transforms
@pytest.mark.parametrize("floor", [False, True], ids=["no_floor", "floor"])
@cases("reconstruction")
def test_reconstruction_terms(case: dict[str, Any], floor: bool, transform: str) -> None:
    terms = oracle_terms(case, transform, floor)
    expected = case.get("expected_floored_1e-3", case["expected"]) if floor else case["expected"]
    for name in TERMS:
        assert_losses(getattr(terms, f"{name}_reconstruction_loss"), expected[name], RELATIVE)


@transforms
@cases("reconstruction")
def test_reconstruction_total(case: dict[str, Any], transform: str) -> None:
    terms = oracle_terms(case, transform)
    total = weighted_total(terms, as_terms(case["coefficients"]))
    assert_losses(total, case["expected_total"], RELATIVE)
    if "q" in case:
        q = floats(case["q"])
        for name in TERMS:
            mean = jnp.sum(q * getattr(terms, f"{name}_reconstruction_loss"))
            assert_losses(mean, case["expected_q_mean"][name], RELATIVE)
        assert_losses(jnp.sum(q * total), case["expected_total_q_mean"], RELATIVE)


@transforms
def test_reconstruction_of_one_sequence_needs_no_latent_axis(transform: str) -> None:
    case = next(case for case in ORACLE["reconstruction"] if np.ndim(case["token_nll"]) == 1)

    def terms(nll: jax.Array, b: jax.Array, mask: jax.Array, offsets: jax.Array) -> Any:
        weighting = compute_token_weighting(b, mask, mask, offsets, case["alpha"])
        return reconstruction_terms(nll, mask, weighting, case["c_base"])

    found = run(
        transform,
        terms,
        floats(case["token_nll"]),
        floats(case["b"]),
        bools(case["mask"]),
        jnp.zeros((), jnp.int32),
    )
    for name in TERMS:
        assert_losses(getattr(found, f"{name}_reconstruction_loss"), case["expected"][name][0], RELATIVE)


@transforms
def test_the_floor_acts_on_the_divisor_itself(transform: str) -> None:
    """One near-certain token drives `sum rho b` far below the floor while the uniform mean is large."""
    cases_ = {
        "near_certain_token": ([1e-5, 4.0, 2.0], [1, 1, 1], 1.0, [0.5, 1.0, 2.0], 0.7),
        "everything_near_certain": ([2e-5, 1e-5, 9.0], [1, 1, 0], 1.0, [0.5, 1.0, 2.0], 1e-4),
        "nothing_supervised": ([1.0, 2.0, 3.0], [0, 0, 0], 1.0, [0.5, 1.0, 2.0], 0.7),
        "large_alpha": ([1e-4, 4.0, 2.0], [1, 1, 1], 8.0, [0.5, 1.0, 2.0], 0.0),
    }
    for name, (b, mask, alpha, nll, c_base) in cases_.items():
        case = {"b": b, "mask": mask, "alpha": alpha, "token_nll": nll, "c_base": c_base}
        terms = oracle_terms(case, transform)
        b32 = [float(np.float32(value)) for value in b]
        weighting = reference.token_weighting(b32, mask, alpha)
        expected = reference.reconstruction(nll, mask, weighting, c_base)
        rtol = reference.relative_tolerance(b, mask, alpha)
        if name == "near_certain_token":
            assert weighting["example_base_loss"] > 1 > 1e-3 > weighting["inverse_token_weighted_base_loss"]
        for term in TERMS:
            found = getattr(terms, f"{term}_reconstruction_loss")
            assert_losses(found, [expected[term]], 2 * rtol)


def test_closed_form_posterior_of_a_worked_example() -> None:
    """Prior [1/2, 1/4, 1/4], R = beta * [ln 4, ln 2, 0]: posterior proportional to [1/8, 1/8, 1/4]."""
    beta = 0.1
    log_q = closed_form_log_posterior(jnp.log(floats([0.5, 0.25, 0.25])), beta * jnp.log(floats([4.0, 2.0, 1.0])), beta)
    np.testing.assert_allclose(np.exp(np.asarray(log_q)), [0.25, 0.25, 0.5], rtol=2e-6)
