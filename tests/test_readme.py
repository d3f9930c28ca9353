"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_losses_in_somebody_elses_step() -> None:
    """The twelve lines, run as they are printed, against the two terms written out in NumPy."""
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": jnp.asarray(rng.integers(0, 7, (3, 6))),
        "loss_mask": jnp.asarray([[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]], bool),
        "b": jnp.asarray(rng.uniform(0.1, 2, (3, 5)), jnp.float32),
        "b_mask": jnp.asarray([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0]], bool),
        "alignment_offsets": jnp.zeros(3, jnp.int32),
    }
    params = {"table": jnp.asarray(rng.normal(size=(7, 7)), jnp.float32)}
    namespace = {"model": SimpleNamespace(apply=lambda params, tokens: params["table"][tokens])}
    exec(compile(block, "README.md", "exec"), namespace)
    value, gradient = jax.value_and_grad(namespace["loss_fn"])(params, batch, 1.0, 0.5)
    logits = np.asarray(params["table"], np.float64)[np.asarray(batch["tokens"])][:, :-1]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, np.asarray(batch["tokens"])[:, 1:, None], -1)[..., 0]
    mask, b = np.asarray(batch["loss_mask"])[:, 1:], np.asarray(batch["b"], np.float64)
    expected = [n[m].mean() + 2 * (s[m] / s[m].sum() * n[m]).sum() for n, m, s in zip(nll, mask, b, strict=True)]
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-5)
    assert float(jnp.abs(gradient["table"]).max()) > 0


def test_files_and_flags_that_the_readme_names_exist() -> None:
    from surprisal_jax.config import all_settings

    flags = {item.flag for item in all_settings().values()} | {"--config", "--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]+", README)) - {"--zone", "--worker", "--command", "--logdir"}
    named -= {"--block"}  # of make study
    assert {flag.rstrip(".") for flag in named if not flag.startswith("--...")} <= flags
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for config in re.findall(r"configs/\w+\.yaml", README):
        assert (ROOT / config).exists(), config
