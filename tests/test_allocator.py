"""Freed memory is kept, in a process of its own: the setting is for good."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from surprisal_jax.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import numpy as np

def use():
    for _ in range(20):
        np.ones(5_000_000)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library, left as it is"
)
def test_memory_that_was_used_before_is_not_mapped_again() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "leave")
    }
    assert faults["keep"] < 0.1 * faults["leave"]
