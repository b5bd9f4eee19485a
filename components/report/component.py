"""Component that writes a report: a page and a table."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Markdown, Metrics, Output

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def report(run: Input[Artifact], metrics: Input[Metrics], page: Output[HTML], table: Output[Markdown]) -> None:
    """Write the report of a run or an evaluation.

    Args:
        run: The run from `federate`, or the evaluation from `evaluate`.
        metrics: Metrics from `evaluate`.
        page: The report as a self-contained page.
        table: Accuracies by client group.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    steps.report_task(Path(run.path), Path(metrics.path), Path(page.path), Path(table.path))
