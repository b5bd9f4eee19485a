"""Sources: the official data sets, one small module each, and the registry that names them.

To add one: a module with a :class:`~fedloom.data.sources.base.Source`, and its place in ``SOURCES``.
"""

from __future__ import annotations

from fedloom.data.sources.base import Pool, Progress, Source
from fedloom.data.sources.fashion_mnist import FASHION_MNIST
from fedloom.data.sources.fetching import fetch, load
from fedloom.data.sources.mnist import MNIST
from fedloom.errors import ExperimentError

__all__ = ["SOURCES", "Pool", "Progress", "Source", "fetch", "find", "load"]

SOURCES: dict[str, Source] = {source.name: source for source in (FASHION_MNIST, MNIST)}
"""All sources by the name an experiment file uses."""


def find(name: str) -> Source:
    """Return a source by its name.

    Raises
    ------
    ExperimentError
        If there is none of that name.
    """
    if name not in SOURCES:
        raise ExperimentError(f"data.dataset: found {name!r}; allowed: {', '.join(SOURCES)}")
    return SOURCES[name]
