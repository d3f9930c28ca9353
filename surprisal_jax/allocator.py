"""What the C library does with memory that a step has freed."""

from __future__ import annotations

import ctypes
import sys

# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_AT_LEAST_BYTES = 2**31 - 1


def keep_freed_memory() -> None:
    """Let the allocator keep large blocks for the next request rather than give them back to the kernel.

    On a CPU, XLA asks for the temporaries of a step anew in every step. Blocks of more than 32 MiB at the latest are
    mapped for each request by default, and the kernel zeroes every page of them again: 12,000 page faults a step and
    30% of its time for the reference of `configs/linear_equations.yaml`. Call it before anything large is allocated.
    Nothing happens where the C library is another one.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _AT_LEAST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _AT_LEAST_BYTES)
