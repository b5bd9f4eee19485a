"""Measure a trained model on every client of a partition, seen or new."""

from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from fedloom.kubeflow.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    model: Input[Model],
    shards: Input[Dataset],
    evaluation: Output[Artifact],
    metrics: Output[Metrics],
    confusion: Output[ClassificationMetrics],
    checkpoint: str = "last",
    serve: str = "",
) -> None:
    """Give every client its own model and measure it; clients of another partition get theirs by Algorithm 1 alone.

    Args:
        model: The run, from `federate`.
        shards: The partition it was trained on, or another of the same data set, whose clients are all new.
        evaluation: Will hold what a report needs, as a run's folder does.
        metrics: Accuracies; the file is what `fedloom evaluate --out` writes.
        confusion: Which class was taken for which, over all clients.
        checkpoint: last, best or a round.
        serve: HOST:PORT of a server that hands out models of this run, to be asked for them; empty: they are made here.
    """
    import json
    from pathlib import Path

    from fedloom.kubeflow import steps

    found = steps.evaluate(Path(model.path), Path(shards.path), checkpoint, Path(evaluation.path), serve)
    matrix = found.pop("confusion")
    if matrix is not None:
        confusion.log_confusion_matrix(matrix["class_names"], matrix["rows"])
    Path(confusion.path).write_text(json.dumps(matrix))
    steps.log(metrics, json.dumps(found))
