"""Tasks of pipelines that hand a trained model to others: export for KServe, and registration."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fedloom.errors import ExperimentError, QuorumError
from fedloom.kubeflow.steps import say, step
from fedloom.storage.folder import copy_atomically, copy_folder, storing


@step
def export_task(model: Path, shards: Path, checkpoint: str, model_format: str, out: Path) -> dict[str, Any]:
    """Save the models of a partition's clients for KServe; return metadata.

    Parameters
    ----------
    model, checkpoint
        A run's folder, and ``last``, ``best`` or a round.
    shards
        The partition.
    model_format
        ``fedloom``: a copy of the run with ``models/ID.pt2``, for ``fedloom serve``. ``onnx``: ``ID/1/model.onnx``.
    out
        New folder, or an empty one.

    Raises
    ------
    ExperimentError
        If the format is not one of these, or the models cannot be exported.
    QuorumError
        If a client got no model.
    """
    from fedloom.runner.client_models import save_models
    from fedloom.runner.saved_models import MODELS

    if model_format not in ("fedloom", "onnx"):
        raise ExperimentError(
            f"format must be fedloom or onnx (got {model_format}).",
            key="format",
            found=model_format,
            allowed=["fedloom", "onnx"],
        )
    with tempfile.TemporaryDirectory() as folder:
        suffix = ".pt2" if model_format == "fedloom" else ".onnx"
        made = save_models(model, Path(folder) / MODELS, checkpoint, shards, suffix=suffix)
        if made.lost:
            client, reason = next(iter(made.lost.items()))
            raise QuorumError(f"{len(made.lost)} clients got no model; client {client}: {reason}")
        if model_format == "fedloom":
            copy_folder(model, out)
        for client in made.saved:
            place = out / MODELS / f"{client}.pt2" if model_format == "fedloom" else out / client / "1" / "model.onnx"
            with storing(place):
                place.parent.mkdir(parents=True, exist_ok=True)
            copy_atomically(Path(folder) / MODELS / f"{client}{suffix}", place)
    return {"format": model_format, "clients": len(made.saved)}


@step
def register_task(
    model: Path, registry: str, run_id: str, name: str = "", version: str = "", checkpoint: str = "last", uri: str = ""
) -> str:
    """Register a run's model: see :func:`fedloom.kubeflow.registration.register_run`; return the version's id."""
    from fedloom.cluster.api import SERVICE_ACCOUNT
    from fedloom.kubeflow.registration import Lineage, RegistrySettings, register_run

    namespace = SERVICE_ACCOUNT / "namespace"
    found = register_run(
        RegistrySettings.of(registry).connect(),
        str(model),
        model=name or None,
        version=version or None,
        checkpoint=checkpoint,
        uri=uri or None,
        lineage=Lineage(run_id, namespace.read_text().strip() if namespace.exists() else None),
    )
    say(f"{found.model} {found.version}: version {found.version_id} of model {found.model_id} in {registry}")
    return found.version_id
