"""Findings of ``fedloom doctor --kubeflow``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import fedloom
from fedloom.core.checks import CheckResult, checked
from fedloom.errors import FedloomError, RefusedError
from fedloom.kubeflow import catalog
from fedloom.kubeflow.client import Kubeflow, KubeflowSettings
from fedloom.storage import open_store

LISTS = {
    "pipelines": "pipeline_service_list_pipelines",
    "experiments": "experiment_service_list_experiments",
    "runs": "run_service_list_runs",
    "schedules": "recurring_run_service_list_recurring_runs",
}
"""Kinds of objects that commands list in a namespace, and the method of kfp's client that lists each."""


def check_kubeflow(option: str) -> Iterator[CheckResult]:
    """Yield findings about the installation that ``--kubeflow`` names: API, version, rights, store and image."""
    apis: list[Kubeflow] = []

    def reached() -> str:
        api = Kubeflow(KubeflowSettings.from_option(option))
        api.check()
        apis.append(api)
        return f"{api} answers, for {'several users' if api.namespace else 'a single user'}"

    yield checked("kubeflow", reached)
    for api in apis:  # none if it is not reached
        yield checked("kubeflow, version", lambda api=api: _version(api))  # type: ignore[misc]
        yield checked("kubeflow, rights", lambda api=api: _rights(api))  # type: ignore[misc]
        yield checked("kubeflow, store", lambda api=api: _store(api.settings.pipeline_root))  # type: ignore[misc]
    yield checked("kubeflow, image", _image)


def _version(api: Kubeflow) -> CheckResult | str:
    ours, theirs = version("kfp"), api.version()
    if theirs is None:
        return f"the installation does not tell its version; the SDK is kfp {ours}"
    words = f"Kubeflow Pipelines {theirs}, and the SDK is kfp {ours}"
    if _release(theirs) < _release(ours):
        remedy = f"if a pipeline is refused, compile with the SDK of the installation: pip install kfp=={theirs}"
        return CheckResult("kubeflow, version", "warning", f"{words}, which is newer", remedy)
    return words


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _rights(api: Kubeflow) -> str:
    denied: dict[str, FedloomError] = {}
    for name, method in LISTS.items():
        try:
            api.call(f"list {name}", method, page_size=1, **api.in_namespace())
        except RefusedError as error:
            denied[name] = error
    if denied:
        first = next(iter(denied.values()))
        raise RefusedError(f"it refuses to list {', '.join(denied)}: {first.message}", hint=first.hint)
    where = f" of {api.namespace}" if api.namespace else ""
    return f"{', '.join(LISTS)}{where} can be listed; the first submission shows whether they can be created"


def _store(root: str | None) -> str:
    if root is None:
        return "artifacts go to the installation's own (pipeline_root is not set)"
    store = open_store(root)
    store.check()
    return f"{store.url} can be read and written to"


def _image() -> CheckResult | str:
    image = catalog.component_image()
    tag = image.rpartition(":")[2]
    words = f"components run in {image}; see that the cluster's nodes can pull it"
    if "@" not in image and tag != fedloom.__version__:
        remedy = f"use an image of fedloom {fedloom.__version__}, since components and commands are of one release"
        return CheckResult("kubeflow, image", "warning", words, remedy)
    return words
