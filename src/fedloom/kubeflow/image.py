"""Image of the components: one for all, fixed when a pipeline is compiled."""

from __future__ import annotations

import os

import fedloom
from fedloom.cluster.settings import check_image
from fedloom.errors import ExperimentError, argument

VARIABLE = "FEDLOOM_IMAGE"
"""Environment variable that names another image while pipelines are compiled."""


def component_image() -> str:
    """Return the image that the components are compiled for: ``$FEDLOOM_IMAGE``, else this version's.

    Raises
    ------
    ExperimentError
        If it has neither a tag nor a digest, or its tag is ``latest``. Kubeflow's cache compares image names, so a
        moving tag would make cached results untraceable.
    """
    image = os.environ.get(VARIABLE) or f"fedloom/components:{fedloom.__version__}"
    try:
        return check_image(image)
    except ValueError as error:
        raise ExperimentError(f"{argument('image')} or ${VARIABLE}: {error}") from error


def __getattr__(name: str) -> str:
    if name == "IMAGE":  # read when a component is created, so that `--image` can be set before
        return component_image()
    raise AttributeError(name)
