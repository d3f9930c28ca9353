"""Greedy decoding with a cache against a loop that recomputes the whole sequence for every new token."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from surprisal_jax.config import ModelConfig
from surprisal_jax.evaluation.decode import greedy_decode
from surprisal_jax.models.latent import router_log_probs
from surprisal_jax.models.transformer import Decoder, new_module
from surprisal_jax.sequences import Vocabulary, build_sequences

K = 3
VOCABULARY = Vocabulary(tuple("abcdefgh"), num_latents=K)
LATENTS = VOCABULARY.latent_ids
FORCED = VOCABULARY.encode(["</z>", "<y>"])
NO_TOKEN = -1  # as eos_id: nothing ends

PROMPTS = [VOCABULARY.encode(x.split()) for x in ("a b c d e f", "b", "g c a b")]
ARRAYS = build_sequences([(x, []) for x in PROMPTS], VOCABULARY)
NEW = 10

SMALL = ModelConfig(
    num_layers=2, width=24, num_heads=4, num_kv_heads=2, head_dim=6, mlp_width=32, rope_theta=100.0, qkv_bias=True
)
CHAIN = ModelConfig(num_layers=1, width=32, num_heads=2, num_kv_heads=2, head_dim=4, mlp_width=8, tied_embeddings=False)

Params = dict[str, Any]

# Compiling is most of what these tests do; unoptimised code takes half the time and computes the same.
fast_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@cache
def random_decoder() -> tuple[nnx.GraphDef[Any], Params]:
    """Large weights: attention far from uniform, and decodes that depend on the prompt, the latent and the past."""
    definition, params = new_module(lambda rngs: Decoder(SMALL, VOCABULARY.size, rngs=rngs), jax.random.key(0))
    rng = np.random.default_rng(4)
    return definition, jax.tree.map(
        lambda leaf: leaf + jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype) / np.sqrt(leaf.shape[0]), params
    )


@partial(fast_jit, static_argnums=0)
def last_logits(definition: Any, params: Params, tokens: Any, length: Any) -> jax.Array:
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
                output[n, k, step] = row[length] = np.argmax(logits)
                length += 1
    return output


def ended(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """`eos_id` everywhere after a branch's first one."""
    after = np.cumsum(tokens == eos_id, axis=-1) > 0
    return np.where(after, eos_id, tokens)


def decode(
    definition: Any, params: Params, *, eos_id: int, max_new_tokens: int = NEW, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    run = partial(
        greedy_decode,
        definition,
        **{"latent_ids": LATENTS, "forced_ids": FORCED, "eos_id": eos_id, "max_new_tokens": max_new_tokens, **options},
    )
    tokens, router = jax.device_get(fast_jit(run)(params, ARRAYS.prefix_tokens, ARRAYS.prefix_lengths))
    return tokens, router


def test_the_reference_loop_says_something() -> None:
    """The tests below compare with it: it must differ between latents, prompts and steps."""
    tokens = slow_decode(NEW)
    assert len({branch.tobytes() for example in tokens for branch in example}) == len(PROMPTS) * K
    assert min(len(set(branch.tolist())) for example in tokens for branch in example) >= 3


@pytest.mark.parametrize("new", [NEW, 4, 1])
def test_greedy_decoding_equals_the_slow_loop(new: int) -> None:
    tokens, _ = decode(*random_decoder(), eos_id=NO_TOKEN, max_new_tokens=new)
    assert tokens.shape == (len(PROMPTS), K, new)
    assert np.issubdtype(tokens.dtype, np.integer)
    np.testing.assert_array_equal(tokens, slow_decode(NEW)[..., :new])


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


def test_a_branch_stops_at_eos_and_holds_it() -> None:
    candidates = ends()
    assert len(candidates) >= 2
    for eos_id in candidates[:2]:
        expected = ended(slow_decode(NEW), eos_id)
        assert np.any(expected[..., -1] == eos_id)
        assert np.any(expected[..., -1] != eos_id)
        tokens, _ = decode(*random_decoder(), eos_id=eos_id)
        np.testing.assert_array_equal(tokens, expected)


def test_the_router_comes_with_the_tokens() -> None:
    definition, params = random_decoder()
    _, router = decode(definition, params, eos_id=NO_TOKEN, max_new_tokens=1)
    model = nnx.merge(definition, params)

    @fast_jit
    def expected(params: Params) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(definition, params)
        prefix = model.prefix(jnp.asarray(ARRAYS.prefix_tokens), jnp.asarray(ARRAYS.prefix_lengths))
        return router_log_probs(model, prefix, LATENTS), prefix.hidden

    direct, hidden = expected(params)
    assert router.shape == (len(PROMPTS), K)
    np.testing.assert_allclose(router, direct, rtol=1e-5, atol=1e-6)
    for n, x in enumerate(PROMPTS):
        logits = (np.asarray(hidden[n, len(x) + 3], np.float64) @ np.asarray(model.unembedding, np.float64))[9:12]
        np.testing.assert_allclose(router[n], logits - np.log(np.exp(logits).sum()), rtol=1e-5, atol=1e-5)


def test_some_of_the_latents_in_any_order_with_other_forced_tokens() -> None:
    """Branch k starts with the k-th latent id and goes on with as many forced tokens as are given."""
    latents = (LATENTS[1], LATENTS[2])
    tokens, router = decode(*random_decoder(), eos_id=NO_TOKEN, max_new_tokens=3, latent_ids=latents)
    np.testing.assert_array_equal(tokens, slow_decode(NEW)[:, 1:, :3])
    assert router.shape == (len(PROMPTS), 2)
    # The first new token forced as well: the decode goes on from there.
    first = int(slow_decode(NEW)[0, 0, 0])
    forced = (*FORCED, first)
    tokens, _ = decode(*random_decoder(), eos_id=NO_TOKEN, max_new_tokens=3, forced_ids=forced)
    np.testing.assert_array_equal(tokens[0, 0], slow_decode(NEW)[0, 0, 1:4])


def test_padding_does_not_change_the_decode() -> None:
    definition, params = random_decoder()
    noise = np.random.default_rng(0).integers(VOCABULARY.size, size=(len(PROMPTS), ARRAYS.prefix_tokens.shape[1] + 3))
    noise = noise.astype(np.int32)
    for n, length in enumerate(ARRAYS.prefix_lengths):
        noise[n, :length] = ARRAYS.prefix_tokens[n, :length]
    run = partial(greedy_decode, definition, latent_ids=LATENTS, forced_ids=FORCED, eos_id=NO_TOKEN, max_new_tokens=NEW)
    tokens, _ = fast_jit(run)(params, noise, ARRAYS.prefix_lengths)
    np.testing.assert_array_equal(tokens, slow_decode(NEW))


# A decoder that says the alphabet: the next token depends on the last one alone, and is known by hand.


def chain_decoder(following: dict[str, str]) -> tuple[nnx.GraphDef[Any], Params]:
    """One-hot embeddings, layers that add nothing, and an output matrix that maps each token to the next."""
    definition, params = new_module(lambda rngs: Decoder(CHAIN, VOCABULARY.size, rngs=rngs), jax.random.key(0))
    params = jax.tree.map(jnp.zeros_like, params)
    params["norm"]["scale"] = jnp.ones_like(params["norm"]["scale"])
    embedding = np.zeros((VOCABULARY.size, CHAIN.width), np.float32)
    np.fill_diagonal(embedding, 1.0)
    output = np.zeros((CHAIN.width, VOCABULARY.size), np.float32)
    for token, then in following.items():
        output[VOCABULARY.id(token), VOCABULARY.id(then)] = 1.0
    return definition, {**params, "embedding": jnp.asarray(embedding), "output_embedding": jnp.asarray(output)}


ALPHABET = {"<y>": "a", "a": "b", "b": "c", "c": "</y>", "</y>": "<eos>", "<eos>": "h", "h": "h"}


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every decoding step that is executed, also inside a compiled loop."""
    executed: list[int] = []
    step = Decoder.decode_step

    def counted(self: Decoder, tokens: Any, index: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda index: executed.append(int(index)), index)
        return step(self, tokens, index, *rest)

    monkeypatch.setattr(Decoder, "decode_step", counted)
    return executed


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (9, "a b c </y> <eos> <eos> <eos> <eos> <eos>"),
        (5, "a b c </y> <eos>"),
        (4, "a b c </y>"),
        (1, "a"),
    ],
)
def test_the_alphabet_ends_where_it_should(new: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = count_steps(monkeypatch)
    tokens, _ = decode(*chain_decoder(ALPHABET), eos_id=VOCABULARY.id("<eos>"), max_new_tokens=new)
    jax.effects_barrier()
    for branch in tokens.reshape(-1, new):
        assert " ".join(VOCABULARY.decode(branch)) == expected
    # <z_k> and </z> are read before the first new token, <y> gives it; <eos> itself is never read.
    assert sorted(executed) == list(range(2 + min(new, 5)))


def test_the_loop_goes_on_until_every_branch_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An <eos> of one branch ends neither the others nor the loop."""
    executed = count_steps(monkeypatch)
    eos_id = ends()[0]
    tokens, _ = decode(*random_decoder(), eos_id=eos_id)
    jax.effects_barrier()
    np.testing.assert_array_equal(tokens, ended(slow_decode(NEW), eos_id))
    assert sorted(executed) == list(range(2 + NEW))


def test_eos_in_the_prompt_or_before_y_ends_nothing() -> None:
    """Only what is decoded can end a branch: here a forced tag and a token of x are the <eos>."""
    for eos in ("</z>", "b"):
        following = {"<y>": "a", "a": "c", "c": eos, eos: "h", "h": "h"}
        tokens, _ = decode(*chain_decoder(following), eos_id=VOCABULARY.id(eos), max_new_tokens=6)
        for branch in tokens.reshape(-1, 6):
            assert VOCABULARY.decode(branch) == ["a", "c", eos, eos, eos, eos]


def test_bfloat16_decodes_the_alphabet() -> None:
    definition, params = chain_decoder(ALPHABET)
    half, _ = new_module(
        lambda rngs: Decoder(ModelConfig(**{**vars(CHAIN), "compute_dtype": "bfloat16"}), VOCABULARY.size, rngs=rngs),
        jax.random.key(0),
    )
    assert half != definition
    tokens, router = decode(half, params, eos_id=VOCABULARY.id("<eos>"), max_new_tokens=6)
    assert router.dtype == np.float32
    for branch in tokens.reshape(-1, 6):
        assert " ".join(VOCABULARY.decode(branch)) == "a b c </y> <eos> <eos>"
