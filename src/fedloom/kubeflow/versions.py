"""Removal of old versions of a pipeline that FedLoom uploaded."""

from __future__ import annotations

import json
from typing import Any

from fedloom.kubeflow.api import Gone, Kubeflow
from fedloom.kubeflow.submit import ENDS, UPLOADED

NOT_EQUALS = 2
"""Operation of a filter (``filter.proto``)."""


def remove_old_versions(kubeflow: Kubeflow, pipeline: str, keep: int) -> list[str]:
    """Delete all but the newest versions of a pipeline, and return the names of those deleted.

    Parameters
    ----------
    pipeline
        Id of the pipeline.
    keep
        Versions to keep. Those that runs in progress or schedules use also remain, and those that others uploaded.

    Raises
    ------
    FedloomError
        If Kubeflow rejects a request or fails.
    """
    versions = kubeflow.pages(
        "list the versions",
        "PipelineServiceApi",
        "pipeline_service_list_pipeline_versions",
        "pipeline_versions",
        pipeline,
        sort_by="created_at desc",
    )
    old = [one for one in versions if one.description == UPLOADED][keep:]
    used = _used(kubeflow) if old else set()
    removed = []
    for one in old:
        if one.pipeline_version_id not in used:
            try:
                kubeflow.delete_version(pipeline, one.pipeline_version_id)
            except Gone:  # deleted meanwhile
                continue
            removed.append(one.display_name)
    return removed


def _used(kubeflow: Kubeflow) -> set[str]:
    """Return the ids of the versions that runs in progress and schedules use."""
    unfinished = [{"operation": NOT_EQUALS, "key": "state", "stringValue": state} for state in ENDS]
    runs = kubeflow.pages(
        "list the runs",
        "RunServiceApi",
        "run_service_list_runs",
        "runs",
        filter=json.dumps({"predicates": unfinished}),
        **kubeflow.in_namespace(),
    )
    return {_version(one) for one in (*runs, *recurring_runs(kubeflow))}


def _version(run: Any) -> str:
    reference = run.pipeline_version_reference
    return "" if reference is None else reference.pipeline_version_id or ""


def recurring_runs(kubeflow: Kubeflow, **which: str) -> list[Any]:
    """Return the recurring runs of the namespace, or of a Kubeflow experiment (``experiment_id``)."""
    return list(
        kubeflow.pages(
            "list the schedules",
            "RecurringRunServiceApi",
            "recurring_run_service_list_recurring_runs",
            "recurring_runs",
            **which,
            **kubeflow.in_namespace(),
        )
    )
