"""The decoder against a NumPy one, K latents over one prefix against K whole sequences, router and posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from surprisal_jax.config import ModelConfig
from surprisal_jax.losses import logits_from_hidden, masked_token_nll_from_hidden, masked_token_nll_per_position
from surprisal_jax.models.latent import PosteriorNetwork, branch_tokens, redraw_latent_embeddings, router_log_probs
from surprisal_jax.models.transformer import Decoder, Prefix, new_module, rotate
from surprisal_jax.sequences import Vocabulary, build_conditioned, build_sequences

# One worker compiles what the tests of this file share.
pytestmark = pytest.mark.xdist_group("models")

K = 3
VOCABULARY = Vocabulary(tuple("abcdefg"), num_latents=K)
LATENTS = VOCABULARY.latent_ids

# Ragged in x and in y, longest x beside shortest y; as many examples as latents.
TEXTS = [("a b c d e f", "g"), ("b", "a c c e b d"), ("c a b", "d f a")]
PAIRS = [(VOCABULARY.encode(x.split()), VOCABULARY.encode(y.split())) for x, y in TEXTS]
ARRAYS = build_sequences(PAIRS, VOCABULARY)

PLAIN = ModelConfig(
    num_layers=1, width=24, num_heads=4, num_kv_heads=4, head_dim=6, mlp_width=40, rope_theta=100.0, norm_epsilon=1e-5
)
BIASED = replace(PLAIN, num_layers=2, qkv_bias=True, qk_norm=True)
UNTIED = replace(PLAIN, tied_embeddings=False)
CONFIGS = {
    "plain, one layer": PLAIN,
    "bias and norms, two layers": BIASED,
    "grouped queries, three layers": replace(PLAIN, num_layers=3, num_kv_heads=2),
    "untied, one layer": UNTIED,
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

Params = dict[str, Any]


def randomized(params: Params, seed: int) -> Params:
    """Values at which every parameter counts: no scale of 1, no bias of 0, attention that is far from uniform."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = str(path[-1].key)
        noise = rng.standard_normal(leaf.shape)
        if name == "scale":
            value = 1.0 + 0.4 * noise
        elif name == "bias":
            value = 0.5 * noise
        elif name == "kernel":
            value = 1.3 * noise / np.sqrt(leaf.shape[0])
        else:
            value = 0.5 * noise
        return jnp.asarray(value, leaf.dtype)

    drawn: Params = jax.tree_util.tree_map_with_path(draw, params)
    return drawn


@cache
def decoder(config: ModelConfig) -> tuple[nnx.GraphDef[Any], Params]:
    """As `new_module` gives it, without the compilation of an initialisation that is thrown away."""
    abstract = nnx.eval_shape(lambda: Decoder(config, VOCABULARY.size, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(abstract, nnx.Param)
    return definition, randomized(nnx.to_pure_dict(state), seed=1)


class Outputs(NamedTuple):
    prefix: Any  # [N, P, D]
    suffix: Any  # [N, K, U, D]
    router: Any  # [N, K]
    unembedding: Any


@partial(jax.jit, static_argnums=0)
def run_decoder(definition: Any, params: Params, tokens: Any) -> Any:
    return nnx.merge(definition, params)(tokens)


@partial(jax.jit, static_argnums=0)
def run_branches(definition: Any, params: Params, prefix_tokens: Any, lengths: Any, suffix_tokens: Any) -> Outputs:
    model = nnx.merge(definition, params)
    prefix = model.prefix(prefix_tokens, lengths)
    router = router_log_probs(model, prefix, LATENTS)
    return Outputs(prefix.hidden, model.suffix(suffix_tokens, prefix), router, model.unembedding)


BRANCHES = np.repeat(ARRAYS.suffix_tokens[:, None], K, axis=1)
BRANCHES[:, :, 0] = LATENTS


def hidden_states(config: ModelConfig, tokens: Any = ARRAYS.z_free_tokens) -> np.ndarray:
    return np.asarray(run_decoder(*decoder(config), tokens))


def branches(config: ModelConfig, suffix_tokens: Any = BRANCHES, prefix_tokens: Any = ARRAYS.prefix_tokens) -> Outputs:
    outputs = run_branches(*decoder(config), prefix_tokens, ARRAYS.prefix_lengths, suffix_tokens)
    return Outputs(*jax.device_get(outputs))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """To `tolerance` relative to the largest entry."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    largest = np.max(np.abs(expected))
    assert largest > 0
    assert np.max(np.abs(actual - expected)) <= tolerance * largest


def same_structure(one: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    return bool(structures[0] == structures[1])


# A decoder of one sequence in NumPy float64, written from the architecture.


def rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return np.asarray(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale)


def complex_rotation(x: np.ndarray, position: float, theta: float) -> np.ndarray:
    """Entry i and entry i + D/2 of a head are one complex number, turned by position * theta^(-2i/D)."""
    half = len(x) // 2
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * theta ** (-2.0 * np.arange(half) / len(x)))
    return np.concatenate([turned.real, turned.imag])


def linear(x: np.ndarray, layer: Params) -> np.ndarray:
    return np.asarray(x @ layer["kernel"] + layer.get("bias", 0.0))


def numpy_attention(x: np.ndarray, layer: Params, config: ModelConfig) -> np.ndarray:
    length, size = len(x), config.head_dim

    def heads(name: str, count: int) -> np.ndarray:
        return linear(x, layer[name]).reshape(length, count, size)

    query, key, value = (
        heads("query", config.num_heads),
        heads("key", config.num_kv_heads),
        heads("value", config.num_kv_heads),
    )
    if config.qk_norm:
        query = rms_norm(query, layer["query_norm"]["scale"], config.norm_epsilon)
        key = rms_norm(key, layer["key_norm"]["scale"], config.norm_epsilon)
    mixed = np.zeros((length, config.num_heads, size))
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        for t in range(length):
            turned = complex_rotation(query[t, head], t, config.rope_theta)
            scores = np.asarray(
                [
                    turned @ complex_rotation(key[s, shared], s, config.rope_theta) / np.sqrt(size)
                    for s in range(t + 1)  # causal
                ]
            )
            weights = np.exp(scores - scores.max())
            mixed[t, head] = (weights / weights.sum()) @ value[: t + 1, shared]
    return linear(mixed.reshape(length, -1), layer["output"])


def numpy_hidden(params: Params, tokens: Any, config: ModelConfig) -> np.ndarray:
    """Final hidden states `[T, D]` of one sequence `[T]`."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = params["embedding"][np.asarray(tokens)]
    assert len(params["blocks"]) == config.num_layers
    for index in range(config.num_layers):
        block = params["blocks"][index]
        x = x + numpy_attention(
            rms_norm(x, block["attention_norm"]["scale"], config.norm_epsilon), block["attention"], config
        )
        y = rms_norm(x, block["mlp_norm"]["scale"], config.norm_epsilon)
        gate = linear(y, block["gate"])
        x = x + linear(gate / (1.0 + np.exp(-gate)) * linear(y, block["up"]), block["down"])
    return rms_norm(x, params["norm"]["scale"], config.norm_epsilon)


def numpy_logits(params: Params, tokens: Any, config: ModelConfig) -> np.ndarray:
    matrix = params["embedding"].T if config.tied_embeddings else params["output_embedding"]
    return numpy_hidden(params, tokens, config) @ np.asarray(matrix, np.float64)


def numpy_log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def logits_of(hidden: Any, config: ModelConfig) -> jax.Array:
    return logits_from_hidden(hidden, nnx.merge(*decoder(config)).unembedding, jax.lax.Precision.HIGHEST)


@every_config
def test_the_decoder_equals_a_numpy_one(config: ModelConfig) -> None:
    hidden, params = hidden_states(config), decoder(config)[1]
    logits = logits_of(hidden, config)
    for n, (x, y) in enumerate(PAIRS):
        length = len(x) + len(y) + 6
        row = ARRAYS.z_free_tokens[n, :length]
        assert_close(hidden[n, :length], numpy_hidden(params, row, config))
        assert_close(logits[n, :length], numpy_logits(params, row, config))


@every_config
def test_the_suffixes_equal_a_numpy_decoder_on_whole_sequences(config: ModelConfig) -> None:
    hidden, params = branches(config).suffix, decoder(config)[1]
    for n, (x, y) in enumerate(PAIRS):
        for k in range(K):
            whole_tokens = build_conditioned(PAIRS[n : n + 1], VOCABULARY, k)[0][0]
            assert_close(hidden[n, k, : len(y) + 5], numpy_hidden(params, whole_tokens, config)[len(x) + 4 :])


# K latents over a shared prefix.

# One weight for each supervised token of each latent: a gradient that no two positions share.
COTANGENTS = [np.random.default_rng(n).standard_normal((K, len(y) + 2)) for n, (_, y) in enumerate(PAIRS)]
ROUTER_COTANGENT = np.random.default_rng(9).standard_normal((len(PAIRS), K)).astype(np.float32)


def spread(loss_mask: np.ndarray) -> np.ndarray:
    """`COTANGENTS` laid out over the scored positions of `[N, K, T]` masks."""
    layout = np.zeros((*loss_mask.shape[:2], loss_mask.shape[2] - 1), np.float32)
    for n, weights in enumerate(COTANGENTS):
        for k in range(K):
            layout[n, k, np.flatnonzero(loss_mask[n, k]) - 1] = weights[k]
    return layout


def supervised(nll: Any, loss_mask: np.ndarray) -> np.ndarray:
    """NLL of all supervised tokens, in the order of the text, latent by latent."""
    nll = np.asarray(nll)
    return np.concatenate([nll[n, k, loss_mask[n, k, 1:]] for n in range(len(PAIRS)) for k in range(K)])


def branched(model: Decoder, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """NLL `[N, K, U - 1]` and router `[N, K]`, over one prefix an example."""
    prefix = model.prefix(jnp.asarray(ARRAYS.prefix_tokens), jnp.asarray(ARRAYS.prefix_lengths))
    tokens = branch_tokens(jnp.asarray(ARRAYS.suffix_tokens), LATENTS)
    mask = jnp.broadcast_to(jnp.asarray(ARRAYS.suffix_loss_mask)[:, None], tokens.shape)
    nll = masked_token_nll_from_hidden(
        model.suffix(tokens, prefix), model.unembedding, tokens, mask, chunk_size=chunk_size
    )
    return nll, router_log_probs(model, prefix, LATENTS)


WHOLE = [build_conditioned(PAIRS, VOCABULARY, k) for k in range(K)]
WHOLE_TOKENS = np.stack([tokens for tokens, _ in WHOLE], axis=1)
WHOLE_MASK = np.stack([mask for _, mask in WHOLE], axis=1)


def whole(model: Decoder) -> tuple[jax.Array, jax.Array]:
    """NLL `[N, K, T - 1]` of N * K sequences and the next-token distribution after <z>, over the latent tokens."""
    hidden = model(jnp.asarray(WHOLE_TOKENS.reshape(len(PAIRS) * K, -1)))
    logits = logits_from_hidden(hidden, model.unembedding, jax.lax.Precision.HIGHEST)
    logits = logits.reshape(*WHOLE_TOKENS.shape, -1)
    nll = masked_token_nll_per_position(logits, jnp.asarray(WHOLE_TOKENS), jnp.asarray(WHOLE_MASK))
    after_z = jnp.stack([logits[n, 0, len(x) + 3] for n, (x, _) in enumerate(PAIRS)])
    return nll, jax.nn.log_softmax(after_z[:, jnp.asarray(LATENTS)], axis=-1)


def value_and_gradient(
    config: ModelConfig, forward: Callable[[Decoder], tuple[jax.Array, jax.Array]], cotangent: np.ndarray
) -> tuple[tuple[jax.Array, jax.Array], Params]:
    definition, params = decoder(config)

    def total(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        nll, router = forward(nnx.merge(definition, params))
        return jnp.sum(nll * cotangent) + jnp.sum(router * ROUTER_COTANGENT), (nll, router)

    (_, values), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return values, gradient


@every_config
def test_latents_over_one_prefix_equal_whole_sequences(config: ModelConfig) -> None:
    suffix_mask = np.broadcast_to(ARRAYS.suffix_loss_mask[:, None], (len(PAIRS), K, ARRAYS.suffix_tokens.shape[1]))
    one, one_gradient = value_and_gradient(config, lambda model: branched(model, chunk_size=7), spread(suffix_mask))
    many, many_gradient = value_and_gradient(config, whole, spread(WHOLE_MASK))
    assert_close(supervised(one[0], suffix_mask), supervised(many[0], WHOLE_MASK))
    assert_close(one[1], many[1])
    assert same_structure(one_gradient, many_gradient)
    for actual, expected in zip(jax.tree.leaves(one_gradient), jax.tree.leaves(many_gradient), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("config", [PLAIN, UNTIED], ids=["tied", "untied"])
def test_the_router_is_the_next_token_distribution_over_latent_tokens(config: ModelConfig) -> None:
    params = decoder(config)[1]
    router = branches(config).router
    assert router.dtype == np.float32
    np.testing.assert_allclose(np.exp(router).sum(axis=-1), 1.0, rtol=1e-6)
    for n, (x, _) in enumerate(PAIRS):
        after_z = numpy_logits(params, ARRAYS.prefix_tokens[n, : len(x) + 4], config)[-1]
        assert_close(router[n], numpy_log_softmax(after_z[list(LATENTS)]))


def test_branches_differ_in_the_latent_token_alone() -> None:
    branches = np.asarray(branch_tokens(jnp.asarray(ARRAYS.suffix_tokens), LATENTS))
    assert branches.shape == (len(PAIRS), K, ARRAYS.suffix_tokens.shape[1])
    for k in range(K):
        assert VOCABULARY.decode(branches[:, k, 0]) == [f"<z_{k}>"] * len(PAIRS)
        np.testing.assert_array_equal(branches[:, k, 1:], ARRAYS.suffix_tokens[:, 1:])


# Padding and causality.


def padded(tokens: np.ndarray, lengths: np.ndarray, more: int, seed: int) -> np.ndarray:
    """The same rows, wider, with random ids in the padding."""
    noise = np.random.default_rng(seed).integers(VOCABULARY.size, size=(tokens.shape[0], tokens.shape[1] + more))
    keep = np.arange(noise.shape[1])[None] < lengths[:, None]
    return np.where(keep, np.pad(tokens, [(0, 0), (0, more)]), noise).astype(np.int32)


def real(values: Any, lengths: np.ndarray) -> np.ndarray:
    """The values `[N, ..., T, D]` of real positions, flat."""
    return np.concatenate([row[..., :length, :].ravel() for row, length in zip(values, lengths, strict=True)])


LENGTHS = {
    "prefix": ARRAYS.prefix_lengths,
    "suffix": np.asarray([len(y) + 5 for _, y in PAIRS]),
    "z_free": np.asarray([len(x) + len(y) + 6 for x, y in PAIRS]),
}


@pytest.mark.parametrize("more", [0, 5])
def test_padding_never_matters(more: int) -> None:
    def outputs(pad: Callable[[str], np.ndarray]) -> list[np.ndarray]:
        suffix_tokens = np.asarray(branch_tokens(jnp.asarray(pad("suffix")), LATENTS))
        out = branches(BIASED, suffix_tokens, pad("prefix"))
        return [
            real(hidden_states(BIASED, pad("z_free")), LENGTHS["z_free"]),
            real(out.prefix, LENGTHS["prefix"]),
            real(out.suffix, LENGTHS["suffix"]),
            out.router,
        ]

    before = outputs(lambda field: getattr(ARRAYS, f"{field}_tokens"))
    after = outputs(lambda field: padded(getattr(ARRAYS, f"{field}_tokens"), LENGTHS[field], more, seed=more))
    for one, other in zip(before, after, strict=True):
        if more == 0:
            np.testing.assert_array_equal(one, other)
        else:  # another width may sum in another order
            assert_close(other, one, 2e-6)


@pytest.mark.parametrize("position", [1, 4, 9])
def test_a_later_token_changes_no_earlier_hidden_state(position: int) -> None:
    tokens = np.random.default_rng(0).integers(VOCABULARY.size, size=ARRAYS.z_free_tokens.shape, dtype=np.int32)
    changed = tokens.copy()
    changed[:, position] = (changed[:, position] + 1) % VOCABULARY.size
    before, after = hidden_states(BIASED, tokens), hidden_states(BIASED, changed)
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert np.all(np.any(before[:, position:] != after[:, position:], axis=-1))


def test_a_suffix_sees_its_own_past_and_no_other_branch() -> None:
    tokens = np.random.default_rng(0).integers(VOCABULARY.size, size=BRANCHES.shape, dtype=np.int32)
    changed = tokens.copy()
    changed[0, 1, 3] = (changed[0, 1, 3] + 1) % VOCABULARY.size
    before, after = branches(BIASED, tokens).suffix, branches(BIASED, changed).suffix
    expected = np.zeros(tokens.shape, bool)
    expected[0, 1, 3:] = True
    np.testing.assert_array_equal(np.any(before != after, axis=-1), expected)


def test_a_suffix_reads_the_whole_prefix_of_its_own_example() -> None:
    before = branches(BIASED).suffix
    for position in range(int(ARRAYS.prefix_lengths[0])):
        changed = ARRAYS.prefix_tokens.copy()
        changed[0, position] = (changed[0, position] + 1) % VOCABULARY.size
        difference = np.any(branches(BIASED, prefix_tokens=changed).suffix != before, axis=-1)
        assert np.all(difference[0]), position
        assert not np.any(difference[1:]), position


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_step_at_a_time_equals_the_whole_suffix(dtype: Any) -> None:
    config = replace(UNTIED if dtype == "bfloat16" else BIASED, compute_dtype=dtype)
    definition, params = decoder(config)
    length = BRANCHES.shape[-1]

    @jax.jit
    def stepwise(params: Params) -> jax.Array:
        model = nnx.merge(definition, params)
        prefix = model.prefix(jnp.asarray(ARRAYS.prefix_tokens), jnp.asarray(ARRAYS.prefix_lengths))

        def step(caches: Any, inputs: Any) -> tuple[Any, jax.Array]:
            hidden, caches = model.decode_step(*inputs, prefix, caches)
            return caches, hidden

        inputs = (jnp.moveaxis(jnp.asarray(BRANCHES), -1, 0), jnp.arange(length))
        return jax.lax.scan(step, model.empty_cache(len(PAIRS), K, length + 2), inputs)[1]

    hidden = stepwise(params)
    assert hidden.dtype == dtype
    expected = np.asarray(branches(config).suffix, np.float32)
    assert_close(np.moveaxis(np.asarray(hidden, np.float32), 0, 2), expected, 3e-2 if dtype == "bfloat16" else 1e-5)


# Rotary positions.

run_rotate = jax.jit(rotate, static_argnums=2)


@pytest.mark.parametrize("theta", [100.0, 10000.0])
@pytest.mark.parametrize("size", [2, 6, 16])
def test_rotation_equals_multiplication_of_complex_numbers(theta: float, size: int) -> None:
    x = np.random.default_rng(size).standard_normal((2, 3, 4, 2, size)).astype(np.float32)
    positions = np.random.default_rng(0).integers(300, size=(2, 3, 4))
    expected = np.empty(x.shape)
    for index in np.ndindex(*x.shape[:4]):
        expected[index] = complex_rotation(x[index].astype(np.float64), int(positions[index[:3]]), theta)
    np.testing.assert_allclose(run_rotate(x, positions, theta), expected, atol=1e-4)


def test_rotation_at_position_zero_is_the_identity() -> None:
    x = np.random.default_rng(0).standard_normal((2, 1, 3, 4, 8)).astype(np.float32)
    np.testing.assert_array_equal(run_rotate(x, np.zeros((2, 1, 3), np.int32), 10000.0), x)
    assert np.all(run_rotate(x, np.ones((2, 1, 3), np.int32), 10000.0) != x)


def test_attention_scores_depend_on_relative_positions_alone() -> None:
    query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 1, 16)).astype(np.float32)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            np.asarray(run_rotate(x, np.full((1, 1, 1), position), 100.0))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float(np.sum(turned[0] * turned[1]))

    distances = np.asarray([[score(start + distance, start) for distance in range(8)] for start in (0, 1, 17, 90)])
    np.testing.assert_allclose(distances[1:], np.broadcast_to(distances[:1], (3, 8)), atol=1e-4)
    ordered = np.sort(distances[0])
    assert np.min(np.diff(ordered)) > 1e-2
    assert abs(score(0, 3) - score(3, 0)) > 1e-2


def test_angles_are_float32_whatever_the_compute_dtype() -> None:
    """1001 is no bfloat16 number: its neighbours are 1000 and 1004."""
    x = np.ones((1, 1, 1, 1, 8), np.float32)
    turned = run_rotate(x.astype(jnp.bfloat16), np.full((1, 1, 1), 1001), 10000.0)
    assert turned.dtype == jnp.bfloat16
    expected = complex_rotation(x[0, 0, 0, 0].astype(np.float64), 1001, 10000.0)
    np.testing.assert_allclose(np.asarray(turned, np.float32)[0, 0, 0, 0], expected, atol=1e-2)


# Types.


def test_bfloat16_compute_keeps_float32_logits() -> None:
    half = replace(UNTIED, compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder(half)[1])} == {jnp.dtype(jnp.float32)}
    out, exact = branches(half), branches(UNTIED)
    assert out.unembedding.dtype == np.float32
    assert out.router.dtype == np.float32
    np.testing.assert_allclose(np.exp(out.router).sum(axis=-1), 1.0, rtol=1e-6)
    for hidden, other in (
        (hidden_states(half), hidden_states(UNTIED)),
        (out.prefix, exact.prefix),
        (out.suffix, exact.suffix),
    ):
        assert hidden.dtype == jnp.bfloat16
        logits = logits_of(hidden, half)
        assert logits.dtype == jnp.float32
        assert np.all(np.isfinite(logits))
        assert_close(logits, logits_of(other, UNTIED), 5e-2)


# Parameters.


def only_dicts_and_arrays(tree: Any) -> bool:
    if type(tree) is dict:
        return all(only_dicts_and_arrays(value) for value in tree.values())
    return isinstance(tree, jax.Array)


def new_posterior(config: ModelConfig, key: int = 0) -> tuple[nnx.GraphDef[Any], Params]:
    return new_module(lambda rngs: PosteriorNetwork(config, VOCABULARY.size, K, rngs=rngs), jax.random.key(key))


posterior = cache(new_posterior)


def test_parameters_are_plain_nested_dictionaries() -> None:
    _, params = posterior(BIASED)
    assert only_dicts_and_arrays(params)
    definition, inner = decoder(BIASED)
    assert only_dicts_and_arrays(inner)
    # The posterior starts from a decoder's weights, and a checkpoint gives back what went in.
    assert same_structure(params["decoder"], inner)
    state = nnx.to_pure_dict(nnx.split(nnx.merge(definition, inner), nnx.Param)[1])
    assert same_structure(state, inner)
    assert all(a is b for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(inner), strict=True))


def test_two_builds_share_one_compilation() -> None:
    traces = []

    def forward(definition: nnx.GraphDef[Any], params: Params, tokens: jax.Array) -> Any:
        traces.append(1)
        return nnx.merge(definition, params)(tokens)

    def build(config: ModelConfig, key: int) -> tuple[nnx.GraphDef[Any], Params]:
        return new_module(lambda rngs: Decoder(config, VOCABULARY.size, rngs=rngs), jax.random.key(key))

    compiled = jax.jit(forward, static_argnums=0)
    tokens = jnp.asarray(ARRAYS.z_free_tokens)
    builds = [build(replace(PLAIN), 0), build(replace(PLAIN), 1)]
    outputs = [np.asarray(compiled(definition, params, tokens)) for definition, params in builds]
    assert hash(builds[0][0]) == hash(builds[1][0])
    assert builds[0][0] == builds[1][0] == decoder(PLAIN)[0]
    assert len(traces) == 1
    assert not np.array_equal(outputs[0], outputs[1])
    assert decoder(replace(PLAIN, rope_theta=10.0))[0] != builds[0][0]


def test_initial_parameters_follow_the_key() -> None:
    one, again, other = (new_posterior(PLAIN, key)[1] for key in (0, 0, 1))
    for a, b, c in zip(*(jax.tree.leaves(tree) for tree in (one, again, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        if a.ndim == 2:
            assert not np.array_equal(a, c)
    kernels = [leaf for leaf in jax.tree.leaves(one) if leaf.ndim == 2]
    assert len({leaf.tobytes() for leaf in map(np.asarray, kernels)}) == len(kernels)


# Latent embeddings.


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_redrawn_latent_rows_have_the_asked_spread(scale: float) -> None:
    rng = np.random.default_rng(0)
    embedding = (0.2 * rng.standard_normal((100, 48))).astype(np.float32)
    latents = range(9, 73)
    embedding[9:73] = 50.0  # what they were before must not count
    redrawn = np.asarray(redraw_latent_embeddings(jnp.asarray(embedding), latents, scale, jax.random.key(0)))
    others = [row for row in range(100) if row not in latents]
    np.testing.assert_array_equal(redrawn[others], embedding[others])
    rows, spread_of_others = redrawn[9:73], np.std(embedding[others])
    # 64 * 48 draws: the standard error of the ratio is 1 / sqrt(2 * 3072) = 0.013.
    assert np.std(rows) / spread_of_others == pytest.approx(scale, rel=0.06)
    assert abs(np.mean(rows)) < 5 * scale * spread_of_others / np.sqrt(rows.size)
    # Drawn one by one: no row repeats another, no column another.
    correlation = np.corrcoef(rows)
    np.fill_diagonal(correlation, 0.0)
    assert np.max(np.abs(correlation)) < 0.8
    other_key = redraw_latent_embeddings(jnp.asarray(embedding), latents, scale, jax.random.key(1))
    assert np.all(np.any(np.asarray(other_key)[9:73] != rows, axis=1))


# The posterior network.


@partial(jax.jit, static_argnums=0)
def run_posterior(definition: Any, params: Params, tokens: Any, mask: Any) -> Any:
    return nnx.merge(definition, params)(tokens, mask)


def posterior_logits(
    config: ModelConfig, params: Params, tokens: Any = ARRAYS.z_free_tokens, mask: Any = ARRAYS.z_free_loss_mask
) -> np.ndarray:
    return np.asarray(run_posterior(posterior(config)[0], params, tokens, mask))


def test_the_posterior_is_a_linear_head_on_the_mean_of_supervised_hidden_states() -> None:
    params = randomized(posterior(PLAIN)[1], seed=2)
    logits = posterior_logits(PLAIN, params)
    assert logits.dtype == np.float32
    for n, (x, y) in enumerate(PAIRS):
        hidden = numpy_hidden(params["decoder"], ARRAYS.z_free_tokens[n], PLAIN)
        first = len(x) + 4  # the first token of y
        pooled = hidden[first : first + len(y) + 2].mean(axis=0)
        head = params["head"]
        expected = pooled @ np.asarray(head["kernel"], np.float64) + np.asarray(head["bias"], np.float64)
        assert_close(logits[n], expected)


def test_padding_does_not_reach_the_posterior() -> None:
    params = randomized(posterior(PLAIN)[1], seed=2)
    before = posterior_logits(PLAIN, params)
    for more in (0, 4):
        tokens = padded(ARRAYS.z_free_tokens, LENGTHS["z_free"], more, seed=3)
        mask = np.pad(ARRAYS.z_free_loss_mask, [(0, 0), (0, more)])
        assert_close(posterior_logits(PLAIN, params, tokens, mask), before, 2e-6)


def test_the_posterior_pools_supervised_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states elsewhere may be anything, NaN too, in value and in gradient."""
    definition, params = posterior(PLAIN)
    network = nnx.merge(definition, randomized(params, seed=2))
    mask = jnp.asarray(ARRAYS.z_free_loss_mask)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((*mask.shape, PLAIN.width)), jnp.float32)

    def value_and_gradient(hidden: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        def total(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            monkeypatch.setattr(Decoder, "__call__", lambda self, tokens: hidden)
            logits = network(jnp.asarray(ARRAYS.z_free_tokens), mask)
            return jnp.sum(logits[:, 0]), logits

        gradient, logits = jax.grad(total, has_aux=True)(hidden)
        return np.asarray(logits), np.asarray(gradient)

    logits, gradient = value_and_gradient(hidden)
    for junk in (1e6, jnp.nan):
        other = value_and_gradient(jnp.where(mask[..., None], hidden, junk))
        np.testing.assert_array_equal(other[0], logits)
        np.testing.assert_array_equal(other[1], gradient)
    np.testing.assert_array_equal(np.any(gradient != 0.0, axis=-1), ARRAYS.z_free_loss_mask)


def test_an_example_without_supervised_tokens_has_the_logits_of_the_bias() -> None:
    params = randomized(posterior(PLAIN)[1], seed=2)
    mask = ARRAYS.z_free_loss_mask.copy()
    mask[1] = False
    logits = posterior_logits(PLAIN, params, mask=mask)
    np.testing.assert_array_equal(logits[1], params["head"]["bias"])
    assert np.all(np.isfinite(logits))


def test_a_bfloat16_posterior_pools_in_float32() -> None:
    params = randomized(posterior(PLAIN)[1], seed=2)
    logits = posterior_logits(replace(PLAIN, compute_dtype="bfloat16"), params)
    exact = posterior_logits(PLAIN, params)
    assert logits.dtype == np.float32
    assert_close(logits, exact, 5e-2)


def test_a_prefix_keeps_its_true_lengths() -> None:
    definition, params = decoder(PLAIN)
    prefix = jax.jit(lambda *arrays: nnx.merge(definition, params).prefix(*arrays))(
        ARRAYS.prefix_tokens, ARRAYS.prefix_lengths
    )
    assert isinstance(prefix, Prefix)
    np.testing.assert_array_equal(prefix.lengths, ARRAYS.prefix_lengths)
    assert prefix.hidden.shape == (*ARRAYS.prefix_tokens.shape, PLAIN.width)
    for layer in prefix.caches:
        assert layer.keys.shape == (*ARRAYS.prefix_tokens.shape, PLAIN.num_kv_heads, PLAIN.head_dim)
