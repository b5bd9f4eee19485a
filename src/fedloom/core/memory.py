"""Control of Python's garbage collector, and of the C library's memory allocator."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection within the block.

    Imports make many objects but no garbage, so they take a fifth less time without it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def imports_frozen() -> Iterator[None]:
    """Keep the objects that exist now out of collections within the block, unless the process froze some itself.

    Imported objects are never garbage, and scanning them would slow every collection. All objects are unfrozen at the
    end, because the process may continue and must be able to free those that were not imported.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
