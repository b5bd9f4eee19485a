"""Set runs side by side."""

from typing import List  # noqa: UP035 (Kubeflow reads this annotation, and knows no other)

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Markdown, Model, Output

from fedloom.kubeflow.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def compare(models: Input[List[Model]], page: Output[HTML], table: Output[Markdown], files: Output[Artifact]) -> None:  # noqa: UP006
    """Compare what clients get; runs that differ in the seed alone are one line, mean and standard deviation.

    Args:
        models: Runs, from `federate`.
        page: The comparison, self-contained.
        table: What each client would get.
        files: The same as CSV, LaTeX and SVG.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    runs = [(model.metadata["label"], Path(model.path)) for model in models]
    steps.compare(runs, Path(page.path), Path(table.path), Path(files.path))
