"""Credentials of the store from a Secret with keys of its own, such as the one that Kubeflow keeps in each profile.

A profile has the Secret ``mlpipeline-minio-artifact`` with ``accesskey`` and ``secretkey``, and no endpoint
(kubeflow/pipelines 2.17.0, ``manifests/kustomize/base/installs/multi-user/pipelines-profile-controller/sync.py``).
Kubeflow fixes the keys that a task reads when a pipeline is compiled, so they are set in its compiled form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.core.words import parsed_json
from fedloom.kubeflow.compiling import edited

ACCESS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Variables that every pod with access to the store needs."""

_ENDPOINT = "FEDLOOM_S3_ENDPOINT"


@dataclass(frozen=True)
class StoreSecret:
    """Keys of the Secret with the store's credentials, and the store's endpoint.

    Attributes
    ----------
    keys
        Key for each environment variable; others keep the key of their own name.
    endpoint
        URL of the store; None if the Secret has it, or the store is Amazon's.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    endpoint: str | None = None

    def apply(self, path: Path) -> None:
        """Change the tasks with access to the store in a compiled pipeline; by default the file is not touched."""
        if self == StoreSecret():
            return
        with edited(path) as (spec, platform):
            for name, config in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].items():
                for secret in config.get("secretAsEnv", ()):
                    known = {one["envVar"]: one["secretKey"] for one in secret["keyToEnv"]}
                    if ACCESS_KEYS[0] not in known:
                        continue
                    known |= self.keys
                    if self.endpoint is not None:
                        known.pop(_ENDPOINT, None)
                        container = spec["deploymentSpec"]["executors"][name]["container"]
                        container["env"] = [*container.get("env", ()), {"name": _ENDPOINT, "value": self.endpoint}]
                    secret["keyToEnv"] = [{"secretKey": key, "envVar": variable} for variable, key in known.items()]

    def for_client_pods(self, cluster: str) -> str:
        """Return cluster settings as JSON, with these keys and this endpoint where they give none."""
        given: dict[str, Any] = {}
        if self.keys:
            given["storage_secret_keys"] = {**{name: name for name in ACCESS_KEYS}, **self.keys}
        if self.endpoint is not None:
            given["s3_endpoint"] = self.endpoint
        return json.dumps({**given, **parsed_json(cluster)}) if given and cluster else cluster
