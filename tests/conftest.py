"""Eight simulated devices and a strict JAX for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        *os.environ.get("XLA_FLAGS", "").split(),
        "--xla_force_host_platform_device_count=8",
        # Hundreds of small programs run once: compiling them is the time of the suite, and unoptimised it is halved.
        # The whole runs of test_run.py are compiled as users compile them.
        "--xla_backend_optimization_level=0",
    ]
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
