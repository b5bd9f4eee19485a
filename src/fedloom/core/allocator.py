"""The C library's memory allocator."""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20
LARGEST_BYTES = 32 << 20  # glibc allows no more

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Keep up to 64 MiB of freed memory in the process, in each of the allocator's arenas.

    By default, glibc returns a block of some 100 KiB to the system when it is freed. The next one then costs a page
    fault for each 4 KiB, more than filling it does. This has no effect with other C libraries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, LARGEST_BYTES)
    mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
