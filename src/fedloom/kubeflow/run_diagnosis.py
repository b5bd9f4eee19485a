"""Reasons why pods of a Kubeflow run do not start or end early, which the Kubeflow API does not report."""

from __future__ import annotations

import logging

from fedloom.cluster.api import Api
from fedloom.errors import FedloomError

log = logging.getLogger("fedloom.kubeflow")

RUN_LABEL = "pipeline/runid"
"""Label of a run's Workflow and pods (kubeflow/pipelines, ``backend/src/apiserver/template/v2_template.go``)."""
UNFINISHED = ("Pending", "Failed", "Error")
"""Phases of nodes that have a reason to report (argo-workflows, ``workflow/controller/operator.go``)."""
REASONS = 3
LENGTH = 400


def diagnostic_command(namespace: str, run: str) -> str:
    """Return the command that shows why pods of a run do not start."""
    return f"kubectl describe workflows,pods -n {namespace} -l {RUN_LABEL}={run}"


def cluster_reasons(namespace: str, run: str) -> list[str]:
    """Return why pods of a run do not start, were not created or ended early, according to its Workflow.

    It uses the credentials of ``fedloom cluster``.

    Parameters
    ----------
    namespace
        Namespace of the run's pods.
    run
        Id of the run.

    Returns
    -------
    list of str
        At most three texts ``POD: REASON``; none without credentials for the cluster or without the right to list
        Workflows.
    """
    try:
        workflows = Api(namespace, patience_s=0.0).select("Workflow", f"{RUN_LABEL}={run}")[0]
    except FedloomError as error:
        log.debug("cannot read the workflow of run %s: %s", run, error)
        return []
    nodes = [node for workflow in workflows for node in ((workflow.get("status") or {}).get("nodes") or {}).values()]
    reasons = [
        f"{node.get('displayName') or node.get('id')}: {' '.join(node['message'].split())}"[:LENGTH]
        for node in nodes
        if node.get("type") == "Pod" and node.get("phase") in UNFINISHED and node.get("message")
    ]
    return list(dict.fromkeys(reasons))[:REASONS]
