"""Component that lists the runs of a comparison: every method with every seed."""

from kfp import dsl

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def grid(experiment: str, methods: list[str], seeds: list[int]) -> list[dict[str, str]]:
    """List the runs of a comparison.

    Args:
        experiment: Complete experiment as JSON, from `plan`.
        methods: Changes that each method makes: texts `key=value; key=value`; an empty text changes nothing.
        seeds: Numbers such as [1, 2, 3]; empty for the experiment's own.

    Returns:
        One mapping per run, with the keys label, experiment and data.
    """
    from fedloom.kubeflow import steps

    return steps.grid_task(experiment, methods, seeds)
