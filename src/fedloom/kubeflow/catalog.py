"""Components and pipelines by name, loaded from files at the top of a checkout or inside an installed wheel."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE if (HERE / "components").is_dir() else HERE.parents[2]
"""Folder that contains ``components`` and ``pipelines``."""


def component(name: str) -> Any:
    """Return a component, such as ``federate``, for use in a custom pipeline."""
    return getattr(_load(ROOT / "components" / name / "component.py", f"fedloom_component_{name}"), name)


def pipeline(name: str) -> Any:
    """Return a pipeline, such as ``personalized_federation``."""
    return getattr(_load(ROOT / "pipelines" / f"{name}.py", f"fedloom_pipeline_{name}"), name)


@cache
def _load(path: Path, name: str) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # kfp looks up a function's source and annotations here
    spec.loader.exec_module(module)
    return module
