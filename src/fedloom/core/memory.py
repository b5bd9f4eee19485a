"""Control of Python's garbage collector and of the C library's memory allocator; memory backed by files."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

KEPT_BYTES = 64 << 20
LARGEST_BYTES = 32 << 20  # glibc allows no more
SPOOLED_BYTES = 32 << 20

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


def spooled(nbytes: int) -> mmap.mmap | None:
    """Return large memory as a temporary file without a name, whose pages the system can write out and drop.

    Return None if the memory is below ``SPOOLED_BYTES``, or the folder (that of ``TMPDIR``) has no space for it. The
    space is allocated at once, because a write to a mapped page of a full disk would kill the process.
    """
    if nbytes >= SPOOLED_BYTES and hasattr(os, "posix_fallocate"):
        with suppress(OSError), tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    return None


def large_array(count: int, dtype: Any) -> Any:
    """Return a numpy array for values that are rarely used, in :func:`spooled` memory if it is large."""
    import numpy as np

    file = spooled(count * np.dtype(dtype).itemsize)
    return np.empty(count, dtype) if file is None else np.frombuffer(file, dtype)


def return_freed_memory() -> None:
    """Return memory that has been freed to the system, which takes milliseconds; only with glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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
