"""Lists of the Kubeflow Pipelines API, v2beta1: filters, order, pages and errors, as in its API server.

Sources, of kubeflow/pipelines 2.17: ``backend/src/apiserver/filter/filter.go`` (keys and operations of a filter),
``backend/src/apiserver/list/list.go`` (20 items a page, at most 200; a token for the next page), and
``APIToModelFieldMap`` of ``backend/src/apiserver/model`` (keys by which each kind can be filtered and sorted).
"""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

KEYS = {
    "pipelines": {"pipeline_id", "display_name", "name", "created_at", "description", "namespace"},
    "pipeline_versions": {"pipeline_version_id", "display_name", "name", "created_at", "description", "status"},
    "experiments": {"experiment_id", "display_name", "name", "created_at", "description", "namespace"},
    "runs": {"run_id", "display_name", "name", "created_at", "description", "state", "experiment_id", "namespace"},
    "recurringRuns": {"recurring_run_id", "display_name", "name", "created_at", "description"},
}
DEFAULT_PAGE, LARGEST_PAGE = 20, 200


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
