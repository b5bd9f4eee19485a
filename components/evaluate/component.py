"""Component that evaluates a trained model on every client of a partition, seen or new."""

from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from fedloom.kubeflow.catalog import IMAGE


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
    """Give every client its own model and evaluate it; clients of another partition get theirs by Algorithm 1 alone.

    Args:
        model: The run from `federate`.
        shards: The partition the run was trained on, or another of the same data set, whose clients are all new.
        evaluation: Output in the layout of a run's folder, with everything a report needs.
        metrics: Accuracies; the file is the one that `fedloom evaluate --out` writes.
        confusion: Confusion matrix over all clients.
        checkpoint: last, best or a round.
        serve: HOST:PORT of a server that provides models of this run; empty to compute them here.
    """
    import json
    from pathlib import Path

    from fedloom.kubeflow import steps

    found = steps.evaluate_task(Path(model.path), Path(shards.path), checkpoint, Path(evaluation.path), serve)
    matrix = found.pop("confusion")
    if matrix is not None:
        confusion.log_confusion_matrix(matrix["class_names"], matrix["rows"])
    Path(confusion.path).write_text(json.dumps(matrix))
    steps.log(metrics, json.dumps(found))
