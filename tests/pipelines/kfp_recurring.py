"""Recurring runs, and lists of all kinds, of the Kubeflow Pipelines API, v2beta1, for :class:`kfp_api.KubeflowApi`.

Sources, of kubeflow/pipelines 2.17:

- fields and paths: ``backend/api/v2beta1/recurring_run.proto``; 64-bit integers are texts in JSON;
- what is refused: ``toModelJob`` of ``backend/src/apiserver/server/api_converter.go`` (concurrency, cron, interval);
- cron: ``Parse`` of ``github.com/robfig/cron`` v1.2.0 takes five fields for second to month, with any day of the week;
- ``status`` and ``mode`` of an answer: ``toApiRecurringRun`` of the same file;
- deletion: workflows in progress are owned by the recurring run, and go with it unless they are orphaned
  (``SetOwnerReferences`` of ``backend/src/crd/controller/scheduledworkflow/util/scheduled_workflow.go``);
- lists: ``backend/src/apiserver/filter/filter.go`` (keys and operations of a filter), ``apiserver/list/list.go`` (20
  items a page, at most 200; a token for the next page), and ``APIToModelFieldMap`` of ``apiserver/model`` (keys by
  which each kind can be filtered and sorted).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfp_api import KubeflowApi

Json = dict[str, Any]

KEYS = {
    "pipelines": {"pipeline_id", "display_name", "name", "created_at", "description", "namespace"},
    "pipeline_versions": {"pipeline_version_id", "display_name", "name", "created_at", "description", "status"},
    "experiments": {"experiment_id", "display_name", "name", "created_at", "description", "namespace"},
    "runs": {"run_id", "display_name", "name", "created_at", "description", "state", "experiment_id", "namespace"},
    "recurringRuns": {"recurring_run_id", "display_name", "name", "created_at", "description"},
}
DEFAULT_PAGE, LARGEST_PAGE = 20, 200
CRON_BOUNDS = {"second": 59, "minute": 59, "hour": 23, "day": 31, "month": 12, "weekday": 6}


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def listed(kind: str, found: list[Json], query: Json) -> Json:
    """Return a page of a list: the items that a filter's predicates match, in order."""
    for predicate in json.loads(query["filter"])["predicates"] if query.get("filter") else ():
        known(kind, predicate["key"])
        value = predicate.get("stringValue", predicate.get("string_value"))
        if predicate["operation"] not in (1, 2, "EQUALS", "NOT_EQUALS"):
            raise Refused(400, 3, f"Invalid input error: operation {predicate['operation']} is not known here")
        wanted = predicate["operation"] in (1, "EQUALS")
        found = [one for one in found if (one.get(predicate["key"]) == value) == wanted]
    key, _, order = (query.get("sort_by") or "created_at").partition(" ")
    known(kind, key)
    found = sorted(found, key=lambda one: str(one.get(key)), reverse=order == "desc")
    size = min(int(query.get("page_size") or 0) or DEFAULT_PAGE, LARGEST_PAGE)
    start = int(query.get("page_token") or 0)
    rest = {"next_page_token": str(start + size)} if start + size < len(found) else {}
    return {kind: found[start : start + size], "total_size": len(found), **rest}


def known(kind: str, key: str) -> None:
    """Reject a key by which this kind cannot be filtered or sorted."""
    if key not in KEYS[kind]:
        raise Refused(400, 3, f"Invalid input error: no support for filtering on unrecognized field {key!r}")


def create(api: KubeflowApi, query: Json, body: Json) -> Json:
    """Create a recurring run, after a check of its pipeline's parameters."""
    experiment = api.found(api.experiments, body["experiment_id"], "experiment")
    api.may(experiment["namespace"])
    if not body.get("display_name"):
        raise Refused(400, 3, "Recurring run's name cannot be empty")
    if not 1 <= int(body.get("max_concurrency", 0)) <= 10:
        raise Refused(400, 3, "Max concurrency of a recurring run must be at least 1 and at most 10")
    trigger = body["trigger"]
    if "cron_schedule" in trigger:
        parsed(trigger["cron_schedule"]["cron"])
    elif int(trigger["periodic_schedule"]["interval_second"]) < 1:
        raise Refused(400, 3, "Found invalid period schedule interval. Set at interval to least 1 second")
    api.check_parameters(body)
    status = {"ENABLE": "ENABLED", "DISABLE": "DISABLED"}[body["mode"]]
    stored = {**body, "namespace": experiment["namespace"], "status": status}
    return api.kept(api.recurring, "recurring_run_id", stored)


def read(api: KubeflowApi, run: str, query: Json, body: Any) -> Json:
    """Return a recurring run."""
    return api.found(api.recurring, run, "recurring run")


def list_all(api: KubeflowApi, query: Json, body: Any) -> Json:
    """List the recurring runs of an experiment or a namespace."""
    if "experiment_id" in query:
        namespace = api.found(api.experiments, query["experiment_id"], "experiment")["namespace"]
        mine = [one for one in api.recurring.values() if one["experiment_id"] == query["experiment_id"]]
    else:
        namespace = query.get("namespace", "")
        mine = [one for one in api.recurring.values() if one["namespace"] == namespace]
    api.may(namespace)
    return listed("recurringRuns", mine, query)


def enable(api: KubeflowApi, run: str, query: Json, body: Any) -> Json:
    """Resume starting runs."""
    api.found(api.recurring, run, "recurring run").update(status="ENABLED", mode="ENABLE")
    return {}


def disable(api: KubeflowApi, run: str, query: Json, body: Any) -> Json:
    """Stop starting runs."""
    api.found(api.recurring, run, "recurring run").update(status="DISABLED", mode="DISABLE")
    return {}


def delete(api: KubeflowApi, run: str, query: Json, body: Any) -> Json:
    """Delete a recurring run and, unless they are orphaned, the workflows that it owns."""
    api.found(api.recurring, run, "recurring run")
    del api.recurring[run]
    for one in api.runs.values():
        if one.get("recurring_run_id") == run and query.get("propagation_policy") != "ORPHAN":
            one["state"] = "FAILED"
    return {}


def trigger_now(api: KubeflowApi, run: str) -> Json:
    """Start a run of a recurring run, as the controller does on schedule."""
    one = api.recurring[run]
    keys = ("experiment_id", "pipeline_version_reference", "runtime_config")
    body = {key: one[key] for key in keys} | {"display_name": f"{one['display_name']}-1", "recurring_run_id": run}
    return api.kept(api.runs, "run_id", {**body, "state": "RUNNING", "looks": 0})


def parsed(cron: str) -> dict[str, str]:
    """Return the fields of a cron expression as robfig/cron parses them; reject what it rejects."""
    parts = cron.split()
    if len(parts) not in (5, 6):
        raise Refused(400, 3, f"Schedule cron is not a supported format. Expected 5 to 6 fields, found {len(parts)}")
    fields = dict(zip(CRON_BOUNDS, [*parts, "*"], strict=False))
    for name, part in fields.items():
        for number in re.findall(r"(?<![/\d])\d+", part):
            if int(number) > CRON_BOUNDS[name]:
                raise Refused(400, 3, f"End of range ({number}) above maximum ({CRON_BOUNDS[name]}): {part}")
    return fields
