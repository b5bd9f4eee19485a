"""Findings of ``fedloom doctor --cluster``."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.cluster.api import FORWARDING, Api
from fedloom.core.checks import CheckResult, checked
from fedloom.errors import RefusedError


def check_cluster() -> Iterator[CheckResult]:
    """Yield findings about the current cluster: whether it answers, and rights that the credentials lack."""
    apis: list[Api] = []

    def reached() -> str:
        apis.append(Api(patience_s=0.0))
        apis[0].select("Job", "app=fedloom-doctor")
        return f"it answers, and namespace {apis[0].namespace} can be read"

    found = checked("cluster", reached)
    yield found
    if apis and found.state == "ok":
        yield checked("rights to run federations", lambda: _rights(apis[0]))
        yield checked("rights to show progress", lambda: _forwarding(apis[0]))


def _rights(api: Api) -> str:
    if missing := api.missing_rights():
        hint = "bind the role of components/federate/rbac.yaml to this user or service account"
        raise RefusedError(f"missing: {', '.join(missing)}", hint=hint)
    return "all"


def _forwarding(api: Api) -> CheckResult | str:
    if missing := api.missing_rights(FORWARDING):
        remedy = "outside of the cluster, progress is not shown without them"
        return CheckResult("rights to show progress", "warning", f"missing: {', '.join(missing)}", remedy)
    return "all"
