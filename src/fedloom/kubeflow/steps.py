"""Tasks of a pipeline. The components (components/) are thin: each calls one function of this module.

Every task starts a new Python process, so torch is only imported where needed: ``fetch``, ``partition`` and ``report``
do without it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fedloom.core.files import copy_atomically, copy_folder, storing, write_atomically
from fedloom.core.processes import listen_to_parent, show_traceback, tell_failure
from fedloom.errors import STORAGE_FAILURES, DataError, ExperimentError, FedloomError, QuorumError, as_storage_error

if TYPE_CHECKING:
    from fedloom.kubeflow.planning import Plan

P = ParamSpec("P")
R = TypeVar("R")

FAILURE_MARK = "fedloom failure | "
"""Prefix of the line of JSON that a failing task prints; `fedloom pipeline wait` reads it in the task's log."""

MARK = "fedloom | "
"""Prefix of lines of progress, which distinguishes them from the output of Kubeflow's executor."""

CREDENTIALS = Path("/etc/fedloom/serve")
"""Mount path of the Secret for access to a model server (:mod:`fedloom.kubeflow.task_settings`)."""

LINE_EVERY_S = 10.0
WITHOUT = shutil.ignore_patterns("checkpoints", "states", "logs", "figures", "report.html")
"""Files of a run's folder that reports and comparisons do not read."""


def say(text: str) -> None:
    """Print the progress of a task."""
    for line in text.splitlines():
        print(f"{MARK}{line}", flush=True)


def step(body: Callable[P, R]) -> Callable[P, R]:
    """Wrap a task so that a known error ends it with one message and its exit code, without a traceback."""

    @functools.wraps(body)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        listen_to_parent()  # the parent is `fedloom pipeline local`
        try:
            return body(*args, **kwargs)
        except FedloomError as error:
            failure = error
        except OSError as error:
            if error.errno not in STORAGE_FAILURES:
                raise
            failure = as_storage_error(error)
        except Exception:  # a bug: Kubeflow's executor lets Python show it, in the log of the pod
            sys.excepthook = lambda kind, error, trace: show_traceback(error)
            raise
        print(f"error: {failure}", file=sys.stderr, flush=True)
        failure = failure.within(body.__name__.removesuffix("_task"))
        print(f"{FAILURE_MARK}{json.dumps(failure.as_json())}", flush=True)
        tell_failure(failure)
        raise SystemExit(int(failure.exit_code))

    return wrapped


@step
def plan_task(experiment: str, overrides: Sequence[str]) -> Plan:
    """Validate an experiment: see :func:`fedloom.kubeflow.planning.plan`."""
    from fedloom.kubeflow import planning

    return planning.plan(experiment, overrides)


@step
def grid_task(experiment: str, methods: Sequence[str], seeds: Sequence[float]) -> list[dict[str, str]]:
    """Return the runs of a comparison: see :func:`fedloom.kubeflow.planning.grid`."""
    from fedloom.kubeflow import planning

    return planning.grid(experiment, methods, seeds)


@step
def fetch_task(dataset: str, out: Path, root: str = "", source: str = "") -> dict[str, Any]:
    """Copy a data set to a folder; fetch it first unless this machine has it.

    Raise DataError if it cannot be fetched.

    Parameters
    ----------
    out
        Will hold ``datasets/<name>`` for the data set and those that it needs.
    root
        Folder for data sets of this machine; empty for the default.
    source
        Folder or ``s3://bucket/prefix`` with the official files, or with those that the user created; empty to download
        them from the data set's publisher.

    Returns
    -------
    dict
        Metadata: ``dataset``, ``title``, ``classes``, ``licence``, ``bytes``.
    """
    from fedloom.data import datasets
    from fedloom.data.folders import data_root

    data_set, size = datasets.find_dataset(dataset), 0
    with storing(out):
        (out / "datasets").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        in_pod = "KFP_POD_NAME" in os.environ  # a pod keeps nothing for the next task, and may have no home
        home = data_root(root or (folder if in_pod else None))
        if not data_set.synthetic:
            files = _source_files(source, Path(folder) / "brought")
            datasets.fetch_dataset(data_set, home, copy_from=files, on_progress=_Lines(dataset))
        for stored_folder in (one.folder(home) for one in (data_set, *data_set.needs) if not one.synthetic):
            copy_folder(stored_folder, out / "datasets" / stored_folder.name)
            size += sum(file.stat().st_size for file in stored_folder.rglob("*") if file.is_file())
    metadata = {
        "dataset": dataset,
        "title": data_set.title,
        "classes": data_set.spec.classes,
        "licence": data_set.licence,
    }
    write_atomically(out / "about.json", f"{json.dumps(metadata)}\n".encode())  # a store keeps no empty folder
    return metadata | {"bytes": size}


@step
def partition_task(data: str, files: Path, out: Path) -> dict[str, Any]:
    """Partition a data set among clients, into a folder with a manifest and one file per client.

    Raise ExperimentError if the data cannot satisfy the scheme; DataError if the data are missing or damaged.

    Parameters
    ----------
    data
        As in :class:`Plan`.
    files
        From :func:`fetch_task`.

    Returns
    -------
    dict
        Metadata: ``fingerprint``, ``dataset``, ``scheme``, ``seed``, ``clients``, ``unseen_clients``.
    """
    from pydantic import TypeAdapter

    from fedloom.data.assignment import PartitionSettings
    from fedloom.data.manifest import read_manifest
    from fedloom.data.partition import partition_dataset
    from fedloom.data.schemes import Scheme

    settings = json.loads(data)
    scheme = TypeAdapter[Any](Scheme).validate_json(json.dumps(settings.pop("partition")))
    with storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        root = tempfile.TemporaryDirectory(dir=out.parent)
    with root as folder:
        (Path(folder) / "datasets").symlink_to((files / "datasets").resolve())
        partition_dataset(settings.pop("dataset"), PartitionSettings(scheme, **settings), root=folder).replace(out)
    manifest = read_manifest(out)
    return {
        "fingerprint": manifest.fingerprint,
        "dataset": manifest.dataset,
        "scheme": manifest.scheme["scheme"],
        "seed": manifest.seed,
        "clients": len(manifest.clients),
        "unseen_clients": len(manifest.unseen),
    }


@step
def federate_task(
    experiment: str,
    shards: Path,
    out: Path,
    *,
    backend: str,
    cluster: str,
    storage_secret: str,
    run_id: str,
    task: str,
    task_config: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Run a federation, and leave the complete run folder in ``out``.

    Raise the federation's error, of the class in docs/troubleshooting.md.

    Parameters
    ----------
    experiment
        As in :class:`Plan`.
    shards
        From :func:`partition_task`.
    backend
        ``local``: processes of this machine or pod. ``kubernetes``: pods.
    cluster
        ``ClusterSettings`` as JSON; for ``kubernetes``.
    storage_secret
        Secret with the credentials of ``storage``, if the cluster settings name none.
    run_id, task
        Together they identify the federation: a repeated task continues what it had started.
    task_config
        Resources, tolerations, node selector and affinity set on the task, for the worker pods.

    Returns
    -------
    dict
        Metadata: description of the run, and accuracies of the last round.
    """
    from fedloom.cluster.settings import ClusterSettings

    settings = ClusterSettings.from_json(cluster)
    if backend == "local":
        from fedloom.cluster import local

        with tempfile.TemporaryDirectory() as folder:  # `fedloom run` validates it; doing so here would import torch
            path = Path(folder) / "experiment.yaml"
            write_atomically(path, experiment.encode(), durably=False)
            url = _run_url(experiment, run_id, task)
            local.run_locally(path, shards, out, publish=url, deadline_s=settings.deadline_s, say=say)
    else:
        from fedloom import experiment as experiments
        from fedloom.cluster.federate import federate as launch
        from fedloom.storage import location_of

        e = experiments.parse_experiment(experiment)
        place = location_of(e.storage or "")
        if settings.storage_secret is None and storage_secret and place is not None and place.credentials:
            settings = settings.model_copy(update={"storage_secret": storage_secret})
        launch(
            e,
            shards,
            out,
            backend=backend,
            cluster=settings,
            run_id=run_id,
            task=task,
            task_config=task_config,
            say=say,
        )
    from fedloom.kubeflow import results
    from fedloom.runs.folder import RunFolder

    return {"label": task, **results.run_metadata(RunFolder(out).json("summary.json"))}


def _run_url(experiment: str, run_id: str, task: str) -> str | None:
    """Return the URL of a run's own place in the store; None if the experiment has no store."""
    from fedloom.cluster.manifests import run_path
    from fedloom.core.urls import is_url

    e = json.loads(experiment)
    if not is_url(e.get("storage") or ""):
        return None
    return f"{e['storage'].rstrip('/')}/{run_path(e['name'], run_id, task)}"


@step
def evaluate_task(
    model: Path, shards: Path, checkpoint: str, out: Path, serve: str = "", credentials: Path = CREDENTIALS
) -> dict[str, Any]:
    """Evaluate a trained model on the clients of a partition, and write the results to a folder like a run's.

    If the partition is not the training partition, all its clients are new: they get their models by Algorithm 1 alone,
    and count as unseen.

    Parameters
    ----------
    model
        A run's folder.
    checkpoint
        ``last``, ``best`` or a round.
    serve
        ``HOST:PORT`` of a server of this run's models: all clients request their models from it, and are evaluated with
        them, whichever round it serves. Empty: models are made here, from ``checkpoint``.
    credentials
        Folder with the credentials for the server, if it exists: ``ca.crt``, ``tls.crt`` and ``tls.key``, ``token``.

    Returns
    -------
    dict
        The statistics, as ``fedloom evaluate --out`` writes them, and ``confusion``: ``class_names``, and ``rows``, one
        for each true class, over all clients; None for other tasks than classification.
    """
    from fedloom.data.manifest import read_manifest
    from fedloom.engine import trained
    from fedloom.engine.results import write_evaluation
    from fedloom.runs.folder import RunFolder
    from fedloom.serving.personal import evaluate_served

    if serve:
        if checkpoint != "last":
            raise ExperimentError(
                f"checkpoint must be last with serve, because the server chooses the round (got {checkpoint})",
                key="checkpoint",
                found=checkpoint,
            )
        has_credentials = any(credentials.glob("[!.]*"))  # an optional Secret that does not exist is an empty folder
        result = evaluate_served(model, serve, shards, credentials if has_credentials else None)
    else:
        result = trained.evaluate(model, checkpoint, shards)
    mask = result.parts.experiment.evaluation.label_mask
    manifest, evaluation = read_manifest(shards), result.evaluation
    copy_folder(model, out, ignore=WITHOUT)
    for stale in ("summary.json", "descriptors.json", "uncertainty.json", "examples.json", "journal.jsonl"):
        (out / stale).unlink(missing_ok=True)
    spent = [line for line in RunFolder.open(model).metrics() if line["round"] <= evaluation.round]
    write_evaluation(RunFolder(out), evaluation, manifest, spent[-1], label_mask=mask)
    rows = evaluation.confusion[:, evaluation.predictors.index("personal")].sum(0).tolist()  # counts, [C, C]
    confusion = {"class_names": list(manifest.spec.class_names), "rows": rows} if evaluation.classes else None
    return {**result.statistics, "confusion": confusion}


@step
def report_task(run: Path, statistics: Path, page: Path, table: Path) -> None:
    """Write a run's report as one HTML page, and the results of :func:`evaluate_task` (JSON) as a Markdown table."""
    from fedloom.kubeflow import results
    from fedloom.reporting.report import write_report

    with tempfile.TemporaryDirectory() as folder:  # inputs must not be modified
        copy_folder(run, Path(folder) / "run", ignore=WITHOUT)
        copy_atomically(write_report(Path(folder) / "run"), page)
    write_atomically(table, results.table_of_results(json.loads(statistics.read_text(encoding="utf-8"))).encode())


@step
def compare_task(runs: Sequence[tuple[str, Path]], page: Path, table: Path, out: Path) -> None:
    """Compare runs, by label: an HTML page, a Markdown table, and a folder as from ``fedloom compare --out``."""
    from fedloom.kubeflow import results
    from fedloom.reporting.compare import compare_runs
    from fedloom.reporting.compare_page import write_comparison

    if len({label for label, _ in runs}) < len(runs):
        labels = ", ".join(label for label, _ in runs)
        raise ExperimentError(f"every run needs a unique label (got {labels})", key="runs")
    with tempfile.TemporaryDirectory() as folder:  # runs are named by their folders, artifacts all alike
        for label, run in runs:
            copy_folder(run, Path(folder) / label, ignore=WITHOUT)
        compared = compare_runs([Path(folder)])
        copy_atomically(write_comparison(compared, out), page)
    write_atomically(table, results.comparison(compared).encode())


@step
def export_task(model: Path, shards: Path, checkpoint: str, model_format: str, out: Path) -> dict[str, Any]:
    """Save the models of a partition's clients for KServe; return metadata.

    Raise ExperimentError if the format is not one of these, or the models cannot be exported; QuorumError if a client
    got no model.

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
    """
    from fedloom.serving.client_models import save_models
    from fedloom.serving.saved_models import MODELS

    if model_format not in ("fedloom", "onnx"):
        raise ExperimentError(
            f"format must be fedloom or onnx (got {model_format}).",
            key="format",
            found=model_format,
            allowed=["fedloom", "onnx"],
        )
    with tempfile.TemporaryDirectory() as folder:
        suffix = ".pt2" if model_format == "fedloom" else ".onnx"
        export = save_models(model, Path(folder) / MODELS, checkpoint, shards, suffix=suffix)
        if export.lost:
            client, reason = next(iter(export.lost.items()))
            raise QuorumError(f"{len(export.lost)} clients got no model; client {client}: {reason}")
        if model_format == "fedloom":
            copy_folder(model, out)
        for client in export.saved:
            place = out / MODELS / f"{client}.pt2" if model_format == "fedloom" else out / client / "1" / "model.onnx"
            with storing(place):
                place.parent.mkdir(parents=True, exist_ok=True)
            copy_atomically(Path(folder) / MODELS / f"{client}{suffix}", place)
    return {"format": model_format, "clients": len(export.saved)}


@step
def cleanup_task(backend: str, run_id: str, cluster: str) -> None:
    """Remove the objects that a pipeline run's federations left on the cluster."""
    if backend == "kubernetes":
        from fedloom.cluster.federate import cleanup as remove
        from fedloom.cluster.settings import ClusterSettings

        remove(run_id, ClusterSettings.from_json(cluster).namespace)


def log(metrics: Any, text: str) -> None:
    """Write statistics to a Metrics artifact: each number for the Kubeflow UI, and the whole text as its file.

    Parameters
    ----------
    metrics
        ``kfp.dsl.Metrics``.
    text
        JSON with ``seen``, ``unseen`` and ``global``.
    """
    from fedloom.kubeflow import results

    for name, value in results.scores(json.loads(text)).items():
        metrics.log_metric(name, value)
    write_atomically(Path(metrics.path), text.encode())


def _source_files(source: str, downloads: Path) -> Path | None:
    """Return the folder of the source files; those in a store are downloaded first."""
    from fedloom.core.urls import is_url
    from fedloom.storage import open_store

    if not source:
        return None
    if not is_url(source):
        return Path(source)
    store = open_store(source)
    store.check(writing=False)
    names = [entry.name for entry in store.entries()]
    if not names:
        raise DataError(f"{source} is empty; it must hold the files of a data set")
    for name in names:
        store.download(name, downloads / name)
    return downloads


class _Lines:
    """Progress callback that prints a line every few seconds; a pod's log has no progress bar."""

    def __init__(self, title: str) -> None:
        self._what, self._said = title, time.monotonic()

    def __call__(self, now: Any) -> None:
        if time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            total = f" of {now.total / 1e6:.0f}" if now.total else ""
            say(f"{self._what}: {now.doing}, {now.done / 1e6:.0f}{total} MB")
