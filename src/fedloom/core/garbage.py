"""Control of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
