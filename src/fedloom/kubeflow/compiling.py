"""Compilation of a pipeline function to the YAML that a cluster runs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import fedloom
from fedloom.errors import ExperimentError
from fedloom.kubeflow import catalog
from fedloom.kubeflow.image import VARIABLE, component_image
from fedloom.storage.folder import write_atomically

NAMES = ("personalized_federation", "compare_methods", "unseen_clients")
"""Names of the pipelines, which are loaded only when needed: kfp takes two seconds to import."""


def check_name(name: str) -> str:
    """Return the name of a pipeline; hyphens and underscores are equivalent.

    Raises
    ------
    ExperimentError
        If there is no pipeline of that name.
    """
    if (known := name.replace("-", "_")) in NAMES:
        return known
    raise ExperimentError(
        f"there is no pipeline {name!r}; choose one of {', '.join(NAMES)}", key="pipeline", found=name, allowed=NAMES
    )


def load_pipeline(name: str) -> Any:
    """Return a pipeline for kfp, given its name.

    Raises
    ------
    ExperimentError
        If there is no pipeline of that name, or kfp is not installed.
    """
    known = check_name(name)
    try:
        return catalog.pipeline(known)
    except ModuleNotFoundError as error:
        raise ExperimentError(
            f"pipelines need the package {error.name}, which is not installed", hint="pip install 'fedloom[kubeflow]'"
        ) from error


def parameters(name: str) -> dict[str, bool]:
    """Return the parameters of a pipeline, each with True if it is required."""
    return {key: not spec.optional for key, spec in load_pipeline(name).component_spec.inputs.items()}


def use_image(image: str) -> None:
    """Set the image to compile for; call this before the first pipeline is loaded.

    Raises
    ------
    ExperimentError
        If it has neither a tag nor a digest, or its tag is ``latest``.
    """
    os.environ[VARIABLE] = image
    component_image()


def compile_to(name: str, path: Path) -> None:
    """Write a pipeline's compiled form; the same pipeline produces the same bytes."""
    from kfp.compiler import Compiler

    Compiler().compile(load_pipeline(name), str(path))


@contextmanager
def edited(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the documents of a compiled pipeline, its specification and that of its platform, and write them back."""
    text = path.read_text(encoding="utf-8")
    head = re.match(r"(#.*\n)*", text)
    spec, platform = yaml.safe_load_all(text)
    yield spec, platform
    documents = yaml.dump_all([spec, platform], sort_keys=True)
    write_atomically(path, ((head[0] if head else "") + documents).encode(), durably=False)


def version_of(path: Path) -> str:
    """Return the version name of a compiled pipeline: FedLoom's version, and a digest of the content."""
    return f"{fedloom.__version__}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
