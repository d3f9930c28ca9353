"""Eight simulated devices and a strict JAX for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [*os.environ.get("XLA_FLAGS", "").split(), "--xla_force_host_platform_device_count=8"]
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
