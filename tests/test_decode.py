"""Greedy decoding with a cache against a loop that recomputes the whole sequence for every new token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from surprisal_jax.config import ModelConfig
from surprisal_jax.evaluation.decode import decode_branches
from surprisal_jax.models.latent import router_log_probs
from surprisal_jax.models.transformer import Decoder
from surprisal_jax.sequences import Vocabulary, build_sequences

# One worker compiles what the tests of this file share.
pytestmark = pytest.mark.xdist_group("decode")

K = 3
VOCABULARY = Vocabulary(tuple("abcdefgh"), num_latents=K)
LATENTS = VOCABULARY.latent_ids
FORCED = tuple(VOCABULARY.encode(["</z>", "<y>"]))
NO_TOKEN = -1  # as eos_id: nothing ends

PROMPTS = [VOCABULARY.encode(x.split()) for x in ("a b c d e f", "b", "g c a b")]
ARRAYS = build_sequences([(x, []) for x in PROMPTS], VOCABULARY)
NEW = 10

SMALL = replace(
    ModelConfig(num_layers=2, width=24, num_heads=4, num_kv_heads=2, head_dim=6, mlp_width=32, rope_theta=100.0),
    qkv_bias=True,
    qk_norm=True,
    tied_embeddings=False,
)
CHAIN = ModelConfig(num_layers=1, width=32, num_heads=2, num_kv_heads=2, head_dim=4, mlp_width=8, tied_embeddings=False)

Params = dict[str, Any]


def abstract_decoder(config: ModelConfig) -> tuple[nnx.GraphDef[Any], Params]:
    """A definition and the shapes of its parameters, which the tests fill in."""
    definition, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, VOCABULARY.size, rngs=nnx.Rngs(0))), nnx.Param)
    return definition, nnx.to_pure_dict(state)


@cache
def random_decoder() -> tuple[nnx.GraphDef[Any], Params]:
    """Large weights: attention far from uniform, and decodes that depend on the prompt, the latent and the past."""
    definition, params = abstract_decoder(SMALL)
    rng = np.random.default_rng(6)

    def draw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        scale = 3.0 if "embedding" in str(path[-1]) else 1.4
        noise = scale * rng.standard_normal(leaf.shape) / np.sqrt(leaf.shape[0])
        return jnp.asarray((leaf.ndim == 1) + noise, leaf.dtype)

    return definition, jax.tree_util.tree_map_with_path(draw, params)


@partial(jax.jit, static_argnums=0)
def last_logits(definition: Any, params: Params, tokens: Any, length: Any) -> Any:
    model = nnx.merge(definition, params)
    return model(tokens[None])[0, length - 1] @ model.unembedding


@cache
def slow_decode(max_new_tokens: int) -> np.ndarray:
    """`[N, K, max_new_tokens]`, without an end, one branch and one token at a time."""
    definition, params = random_decoder()
    output = np.zeros((len(PROMPTS), K, max_new_tokens), np.int32)
    width = max(map(len, PROMPTS)) + 7 + max_new_tokens
    for n, x in enumerate(PROMPTS):
        for k in range(K):
            start = VOCABULARY.encode(["<bos>", "<x>", *VOCABULARY.decode(x), "</x>", "<z>", f"<z_{k}>", "</z>", "<y>"])
            row, length = np.zeros(width, np.int32), len(start)
            row[:length] = start
            for step in range(max_new_tokens):
                logits = np.asarray(last_logits(definition, params, row, length))
                second, first = np.sort(logits)[-2:]
                assert first - second > 1e-3  # far from a tie: rounding decides nothing
                output[n, k, step] = row[length] = np.argmax(logits)
                length += 1
    return output


def ended(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """`eos_id` everywhere after a branch's first one."""
    after = np.cumsum(tokens == eos_id, axis=-1) > 0
    return np.where(after, eos_id, tokens)


compiled_decode: Any = jax.jit(
    decode_branches, static_argnums=0, static_argnames=("latent_ids", "forced_ids", "eos_id", "max_new_tokens")
)


def decode(
    model: tuple[nnx.GraphDef[Any], Params],
    *,
    eos_id: int = NO_TOKEN,
    max_new_tokens: int = NEW,
    latent_ids: tuple[int, ...] = tuple(LATENTS),
    forced_ids: tuple[int, ...] = FORCED,
    prefix_tokens: np.ndarray = ARRAYS.prefix_tokens,
) -> tuple[np.ndarray, np.ndarray]:
    tokens, router = compiled_decode(
        *model,
        prefix_tokens,
        ARRAYS.prefix_lengths,
        latent_ids=latent_ids,
        forced_ids=forced_ids,
        eos_id=eos_id,
        max_new_tokens=max_new_tokens,
    )
    return np.asarray(tokens), np.asarray(router)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every decoding step that is executed, also inside a compiled loop."""
    compiled_decode.clear_cache()
    executed: list[int] = []
    step = Decoder.decode_step

    def counted(self: Decoder, tokens: Any, index: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda index: executed.append(int(index)), index)
        return step(self, tokens, index, *rest)

    monkeypatch.setattr(Decoder, "decode_step", counted)
    return executed


def test_the_reference_loop_says_something() -> None:
    """The tests below compare with it: it must differ between latents, prompts and steps."""
    tokens = slow_decode(NEW)
    assert len({branch.tobytes() for example in tokens for branch in example}) == len(PROMPTS) * K
    assert min(len(set(branch.tolist())) for example in tokens for branch in example) >= 3


def test_greedy_decoding_equals_the_slow_loop() -> None:
    tokens, _ = decode(random_decoder())
    assert tokens.shape == (len(PROMPTS), K, NEW)
    assert np.issubdtype(tokens.dtype, np.integer)
    np.testing.assert_array_equal(tokens, slow_decode(NEW))


def ends() -> list[int]:
    """Every token that, taken for <eos>, ends some branch before its last step and leaves another to the end."""
    tokens = slow_decode(NEW)
    candidates = []
    for token in range(VOCABULARY.size):
        found = np.any(tokens == token, axis=-1)
        early = np.any(tokens[..., : NEW - 2] == token, axis=-1)
        if np.any(early) and not np.all(found):
            candidates.append(token)
    return candidates


def test_a_branch_stops_at_eos_and_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The <eos> of one branch ends neither the others nor the loop."""
    executed = count_steps(monkeypatch)
    eos_id = ends()[0]
    expected = ended(slow_decode(NEW), eos_id)
    assert np.any(expected[..., -1] == eos_id)
    assert np.any(expected[..., -1] != eos_id)
    tokens, _ = decode(random_decoder(), eos_id=eos_id)
    jax.effects_barrier()
    np.testing.assert_array_equal(tokens, expected)
    assert sorted(executed) == list(range(2 + NEW))


def test_the_router_comes_with_the_tokens() -> None:
    definition, params = random_decoder()
    _, router = decode((definition, params))

    @jax.jit
    def expected(params: Params) -> tuple[jax.Array, jax.Array, jax.Array]:
        model = nnx.merge(definition, params)
        prefix = model.prefix(jnp.asarray(ARRAYS.prefix_tokens), jnp.asarray(ARRAYS.prefix_lengths))
        return router_log_probs(model, prefix, LATENTS), prefix.hidden, model.unembedding

    direct, hidden, unembedding = jax.device_get(expected(params))
    assert router.shape == (len(PROMPTS), K)
    np.testing.assert_allclose(router, direct, rtol=1e-5, atol=1e-6)
    for n, x in enumerate(PROMPTS):
        logits = (hidden[n, len(x) + 3].astype(np.float64) @ unembedding.astype(np.float64))[9:12]
        np.testing.assert_allclose(router[n], logits - np.log(np.exp(logits).sum()), rtol=1e-5, atol=1e-5)


def test_some_of_the_latents_and_other_forced_tokens() -> None:
    """Branch k starts with the k-th latent id and goes on with as many forced tokens as are given."""
    slow = slow_decode(NEW)
    # The first new token of one branch is forced on all: that branch goes on as before.
    forced = (*FORCED, int(slow[0, 2, 0]))
    tokens, router = decode(random_decoder(), max_new_tokens=3, latent_ids=tuple(LATENTS)[1:], forced_ids=forced)
    assert tokens.shape == (len(PROMPTS), 2, 3)
    assert router.shape == (len(PROMPTS), 2)
    np.testing.assert_array_equal(tokens[0, 1], slow[0, 2, 1:4])
    for n, k in np.argwhere(slow[:, 1:, 0] == forced[-1]):
        np.testing.assert_array_equal(tokens[n, k], slow[n, k + 1, 1:4])


def test_the_ids_of_padding_do_not_change_the_decode() -> None:
    noise = np.random.default_rng(0).integers(VOCABULARY.size, size=ARRAYS.prefix_tokens.shape, dtype=np.int32)
    for n, length in enumerate(ARRAYS.prefix_lengths):
        noise[n, :length] = ARRAYS.prefix_tokens[n, :length]
    assert np.any(noise != ARRAYS.prefix_tokens)
    tokens, router = decode(random_decoder(), prefix_tokens=noise)
    np.testing.assert_array_equal(tokens, slow_decode(NEW))
    np.testing.assert_array_equal(router, decode(random_decoder())[1])


# A decoder that says the alphabet: the next token depends on the last one alone, and is known by hand.


def chain_decoder(following: dict[str, str], dtype: Any = "float32") -> tuple[nnx.GraphDef[Any], Params]:
    """One-hot embeddings, layers that add nothing, and an output matrix that maps each token to the next."""
    definition, params = abstract_decoder(replace(CHAIN, compute_dtype=dtype))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    params["norm"]["scale"] = jnp.ones_like(params["norm"]["scale"])
    embedding = np.zeros((VOCABULARY.size, CHAIN.width), np.float32)
    np.fill_diagonal(embedding, 1.0)
    output = np.zeros((CHAIN.width, VOCABULARY.size), np.float32)
    for token, then in following.items():
        output[VOCABULARY.id(token), VOCABULARY.id(then)] = 1.0
    return definition, {**params, "embedding": jnp.asarray(embedding), "output_embedding": jnp.asarray(output)}


ALPHABET = {"<y>": "a", "a": "b", "b": "c", "c": "</y>", "</y>": "<eos>", "<eos>": "h", "h": "h"}


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (9, "a b c </y> <eos> <eos> <eos> <eos> <eos>"),
        (4, "a b c </y>"),
    ],
)
def test_the_alphabet_ends_where_it_should(new: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = count_steps(monkeypatch)
    tokens, _ = decode(chain_decoder(ALPHABET), eos_id=VOCABULARY.id("<eos>"), max_new_tokens=new)
    jax.effects_barrier()
    for branch in tokens.reshape(-1, new):
        assert " ".join(VOCABULARY.decode(branch)) == expected
    # <z_k> and </z> are read before the first new token, <y> gives it; <eos> itself is never read.
    assert sorted(executed) == list(range(2 + min(new, 5)))


def test_an_eos_that_was_not_decoded_ends_nothing() -> None:
    """Here the forced tag and a token of every x are the <eos>."""
    tag = VOCABULARY.id("b")
    following = {"<y>": "a", "a": "c", "c": "b", "b": "h", "h": "h"}
    tokens, _ = decode(chain_decoder(following), eos_id=tag, max_new_tokens=6, forced_ids=(tag, FORCED[1]))
    for branch in tokens.reshape(-1, 6):
        assert VOCABULARY.decode(branch) == ["a", "c", "b", "b", "b", "b"]


def test_bfloat16_decodes_the_alphabet() -> None:
    tokens, router = decode(chain_decoder(ALPHABET, "bfloat16"), eos_id=VOCABULARY.id("<eos>"), max_new_tokens=6)
    assert router.dtype == np.float32
    for branch in tokens.reshape(-1, 6):
        assert " ".join(VOCABULARY.decode(branch)) == "a b c </y> <eos> <eos>"
