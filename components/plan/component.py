"""Component that checks an experiment and fills in its defaults, before anything is fetched or started."""

from typing import NamedTuple

from kfp import dsl

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def plan(experiment: str, overrides: list[str]) -> NamedTuple(  # type: ignore[valid-type]
    "Plan", [("experiment", str), ("data", str), ("dataset", str), ("root", str)]
):
    """Check an experiment and fill in its defaults.

    Args:
        experiment: Text of an experiment file, YAML or JSON.
        overrides: Texts `key=value`, as for `fedloom run --set`.

    Returns:
        experiment: The complete experiment as JSON.
        data: The settings that determine its partition, as JSON.
        dataset: Name of the data set.
        root: Folder for data sets on this machine; empty for the default.
    """
    from fedloom.kubeflow import steps

    return steps.plan_task(experiment, overrides)
