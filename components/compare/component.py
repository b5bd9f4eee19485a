"""Component that compares runs."""

from typing import List  # noqa: UP035 (Kubeflow reads this annotation, and knows no other)

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Markdown, Model, Output

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def compare(models: Input[List[Model]], page: Output[HTML], table: Output[Markdown], files: Output[Artifact]) -> None:  # noqa: UP006
    """Compare the clients' results across runs; runs that differ only in seed become one row, mean and deviation.

    Args:
        models: Runs from `federate`.
        page: The comparison as a self-contained page.
        table: The result that each client would get.
        files: The comparison as CSV, LaTeX and SVG.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    runs = [(model.metadata["label"], Path(model.path)) for model in models]
    steps.compare_task(runs, Path(page.path), Path(table.path), Path(files.path))
