"""Gaussian examples around a mean for each client, drawn by the scheme ``means`` (papers/004, §4 and §6)."""

from __future__ import annotations

from collections.abc import Mapping

from fedloom.data.sources.base import RawDataset, Source
from fedloom.errors import DataError


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Raise: there is nothing to read.

    Raises
    ------
    DataError
        Always.
    """
    del contents
    raise DataError(
        "gaussian has no files: its examples are drawn when a partition is made", hint="fedloom partition EXPERIMENT"
    )


GAUSSIAN = Source(
    name="gaussian",
    title="Gaussian examples",
    class_names=(),
    input_shape=(1,),
    licence="none: drawn from the experiment's seed",
    files=(),
    fetchers=(),
    read=read,
    kind="features",
    synthetic=True,
)
