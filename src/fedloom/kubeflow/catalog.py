"""Components and pipelines by name, and their compilation to the YAML that a cluster runs.

They are files at the top of a checkout or inside an installed wheel, loaded only when needed: kfp takes two seconds to
import.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import yaml

import fedloom
from fedloom.cluster.settings import check_image
from fedloom.core.files import write_atomically
from fedloom.errors import ExperimentError

HERE = Path(__file__).parent
ROOT = HERE if (HERE / "components").is_dir() else HERE.parents[2]
"""Folder that contains ``components`` and ``pipelines``."""

NAMES = ("personalized_federation", "compare_methods", "unseen_clients")
"""Names of the pipelines."""

IMAGE_VARIABLE = "FEDLOOM_IMAGE"
"""Environment variable that names another image while pipelines are compiled."""


def component(name: str) -> Any:
    """Return a component, such as ``federate``, for use in a custom pipeline."""
    return getattr(_load(ROOT / "components" / name / "component.py", f"fedloom_component_{name}"), name)


def component_image() -> str:
    """Return the image that the components are compiled for: ``$FEDLOOM_IMAGE``, else this version's.

    Raise ExperimentError if it has neither a tag nor a digest, or its tag is ``latest``. Kubeflow's cache compares
    image names, so a moving tag would make cached results untraceable.
    """
    try:
        return check_image(os.environ.get(IMAGE_VARIABLE) or f"fedloom/components:{fedloom.__version__}")
    except ValueError as error:
        raise ExperimentError(f"image or ${IMAGE_VARIABLE}: {error}") from error


def use_image(image: str | None) -> None:
    """Set the image to compile for, if one is given; call this before the first pipeline is loaded.

    Raise ExperimentError like :func:`component_image`.
    """
    if image is not None:
        os.environ[IMAGE_VARIABLE] = image
        component_image()


def __getattr__(name: str) -> str:
    if name == "IMAGE":  # read when a component is created, so that the image can be set before
        return component_image()
    raise AttributeError(name)


def check_name(name: str) -> str:
    """Return the name of a pipeline; hyphens and underscores are equivalent.

    Raise ExperimentError if there is no pipeline of that name.
    """
    if (canonical := name.replace("-", "_")) in NAMES:
        return canonical
    raise ExperimentError(
        f"there is no pipeline {name!r}; choose one of {', '.join(NAMES)}", key="pipeline", found=name, allowed=NAMES
    )


def pipeline(name: str) -> Any:
    """Return a pipeline for kfp, given its name.

    Raise ExperimentError if there is no pipeline of that name, or kfp is not installed.
    """
    canonical = check_name(name)
    try:
        return getattr(_load(ROOT / "pipelines" / f"{canonical}.py", f"fedloom_pipeline_{canonical}"), canonical)
    except ModuleNotFoundError as error:
        raise ExperimentError(
            f"pipelines need the package {error.name}, which is not installed", hint="pip install 'fedloom[kubeflow]'"
        ) from error


def check_parameters(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ExperimentError if a pipeline has no such parameter, or a required one is missing."""
    is_required = {key: not spec.optional for key, spec in pipeline(name).component_spec.inputs.items()}
    missing = [key for key, required in is_required.items() if required and key not in arguments]
    unknown = [key for key in arguments if key not in is_required]
    if missing or unknown:
        wrong = f"needs {', '.join(missing)}" if missing else f"has no parameter {', '.join(unknown)}"
        raise ExperimentError(
            f"{name} {wrong}; its parameters are {', '.join(is_required)}",
            key=[*missing, *unknown][0],
            allowed=list(is_required),
        )


def compile_to(name: str, path: Path) -> None:
    """Write a pipeline's compiled form; the same pipeline produces the same bytes."""
    from kfp.compiler import Compiler

    Compiler().compile(pipeline(name), str(path))


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


@cache
def _load(path: Path, name: str) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # kfp looks up a function's source and annotations here
    spec.loader.exec_module(module)
    return module
