"""Sources: the official data sets, one small module each, and their registry.

To add a source, write a module with a :class:`~fedloom.data.sources.base.Source` and list it in ``SOURCES``; or, in
another package, use the entry point ``fedloom.sources`` (docs/extending.md).
"""

from __future__ import annotations

from fedloom.data.sources.base import Owners, Pool, Progress, RawDataset, Source
from fedloom.data.sources.cifar10 import CIFAR10
from fedloom.data.sources.cifar100 import CIFAR100
from fedloom.data.sources.fashion_mnist import FASHION_MNIST
from fedloom.data.sources.femnist import FEMNIST
from fedloom.data.sources.fetching import checksums, fetch, load, size
from fedloom.data.sources.gaussian import GAUSSIAN
from fedloom.data.sources.mnist import MNIST
from fedloom.data.sources.qmnist import QMNIST
from fedloom.data.sources.shakespeare import SHAKESPEARE
from fedloom.data.sources.vowel import VOWEL
from fedloom.errors import ExperimentError
from fedloom.plugins import plugins

__all__ = [
    "SOURCES",
    "Owners",
    "Pool",
    "Progress",
    "RawDataset",
    "Source",
    "checksums",
    "fetch",
    "find",
    "load",
    "size",
]

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        *(FASHION_MNIST, MNIST, CIFAR10, CIFAR100, QMNIST, FEMNIST, SHAKESPEARE, VOWEL, GAUSSIAN),
        *plugins("fedloom.sources", Source),
    )
}
"""All sources, by the name that experiment files use."""


def find(name: str) -> Source:
    """Return a source by its name.

    Raises
    ------
    ExperimentError
        If there is no source of that name.
    """
    if name not in SOURCES:
        raise ExperimentError(f"data.dataset: found {name!r}; allowed: {', '.join(SOURCES)}")
    return SOURCES[name]
