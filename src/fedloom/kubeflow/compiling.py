"""From a pipeline's function to the YAML that a cluster is given."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import fedloom
from fedloom.errors import ExperimentError
from fedloom.kubeflow import catalog
from fedloom.kubeflow.image import VARIABLE, component_image

NAMES = ("personalized_federation", "compare_methods", "unseen_clients")
"""The pipelines. They are loaded only when one is needed: kfp takes two seconds to import."""


def check_name(name: str) -> str:
    """Return the name of a pipeline; hyphens are as good as underscores.

    Raises
    ------
    ExperimentError
        If there is none of that name.
    """
    if (known := name.replace("-", "_")) in NAMES:
        return known
    raise ExperimentError(f"pipeline: found {name!r}; allowed: {', '.join(NAMES)}")


def pipeline(name: str) -> Any:
    """Return a pipeline, by its name, for kfp.

    Raises
    ------
    ExperimentError
        If there is none of that name, or kfp is not installed.
    """
    known = check_name(name)
    try:
        return catalog.pipeline(known)
    except ModuleNotFoundError as error:
        raise ExperimentError(
            f"pipelines need the package {error.name}, which is not installed", hint="pip install 'fedloom[kubeflow]'"
        ) from error


def parameters(name: str) -> dict[str, bool]:
    """Return the parameters of a pipeline, and whether each must be given."""
    return {key: not spec.optional for key, spec in pipeline(name).component_spec.inputs.items()}


def use_image(image: str) -> None:
    """Compile for this image from now on; to be called before the first pipeline is loaded.

    Raises
    ------
    ExperimentError
        If it has neither a tag nor a digest, or its tag is ``latest``.
    """
    os.environ[VARIABLE] = image
    component_image()


def compile_to(name: str, path: Path) -> None:
    """Write a pipeline's compiled form; the same pipeline gives the same bytes."""
    from kfp.compiler import Compiler

    Compiler().compile(pipeline(name), str(path))


def version_of(path: Path) -> str:
    """Return what a compiled pipeline is called as a version: that of FedLoom, and a digest of the content."""
    return f"{fedloom.__version__}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
