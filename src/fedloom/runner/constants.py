"""Comparison of the tensors of a model that no run stores or sends: frozen parameters, and buffers that do not move."""

from __future__ import annotations

from collections.abc import Mapping

from fedloom.errors import DataError
from fedloom.models.flat import FlatModel
from fedloom.models.module_state import digests_of
from fedloom.runs.files import CONSTANTS, RunFiles


def write_constants(folder: RunFiles, model: FlatModel) -> None:
    """Write the digests of the model's constants to a run's folder, if it has some."""
    if model.constants:
        folder.write_json(CONSTANTS, {"tensors": digests_of(model.constants)})


def check_run_constants(folder: RunFiles, model: FlatModel) -> None:
    """Raise unless the model's constants are those of a run; a run without the file recorded none.

    Raises
    ------
    DataError
        If they differ.
    """
    if folder.has(CONSTANTS):
        check_constants(model, folder.json(CONSTANTS)["tensors"], f"the run {folder.path}")


def check_constants(model: FlatModel, expected: Mapping[str, str], whose: str) -> None:
    """Raise unless the model's constants have these digests.

    Raises
    ------
    DataError
        If one differs; the message names the first.
    """
    found = digests_of(model.constants)
    for name in (*expected, *found):
        here, there = found.get(name), expected.get(name)
        if here != there:
            what = (
                f"has digest {here} here and {there} in {whose}"
                if here and there
                else f"exists only {'here' if here else f'in {whose}'}"
            )
            raise DataError(
                f"model.factory: the constant tensor {name!r} {what}. Frozen parameters and fixed buffers are never "
                "sent, so every process must make the same",
                key="model.factory",
                hint="use the same factory with the same pretrained weights everywhere",
            )
