"""Settings of a Kubeflow installation, for ``fedloom pipeline submit|wait|stop``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from fedloom.cluster.settings import Public, completed_from, settings_from_file
from fedloom.core.settings import Settings
from fedloom.kubeflow.api import Kubeflow
from fedloom.kubeflow.authentication import api_credential, api_host
from fedloom.kubeflow.store_secret import StoreSecret

VARIABLES = {"host": "KF_PIPELINES_ENDPOINT", "ca_file": "SSL_CERT_FILE"}
"""Environment variables for keys that are not given."""

LOGIN_VARIABLES = {"token": "FEDLOOM_KUBEFLOW_TOKEN", "cookie": "FEDLOOM_KUBEFLOW_COOKIE"}
"""Environment variables for the way to authenticate, where none is given."""


class KubeflowSettings(Settings):
    """Kubeflow installation, and how runs are submitted to it."""

    host: str | None = Field(
        default=None, description="URL of Kubeflow Pipelines; in a pod, by default the API's Service."
    )
    token: str | None = Field(
        default=None, repr=False, description="Bearer token, or @FILE, which is reread when needed."
    )
    token_command: str | None = Field(
        default=None,
        description="Command that prints a bearer token, run without a shell; it runs again shortly before the token "
        "expires, and when it is refused.",
    )
    cookie: str | None = Field(
        default=None,
        repr=False,
        description="Cookie of a session behind oauth2-proxy, oauth2_proxy_kubeflow=VALUE, or @FILE.",
    )
    in_cluster: bool = Field(default=False, description="Use the token that Kubeflow mounted into this pod.")
    ca_file: str | None = Field(default=None, description="File of certificates to trust.")
    namespace: str | None = Field(default=None, description="Your profile's namespace, if Kubeflow has several users.")
    experiment: str = Field(
        default="fedloom", description="Kubeflow experiment that shows the runs; created if needed."
    )
    service_account: str | None = Field(default=None, description="Service account of the runs' pods.")
    pipeline_root: str | None = Field(default=None, description="URL for the runs' artifacts.")
    image: str | None = Field(default=None, description="Image of the components, with tag or digest.")
    storage_secret: str | None = Field(default=None, description="Secret with the credentials of `storage`.")
    storage_secret_keys: dict[str, str] = Field(
        default={}, description="Key of that Secret for each environment variable, where it is not the variable's name."
    )
    s3_endpoint: Public | None = Field(default=None, description="Endpoint of the store, if that Secret has none.")
    serve_secret: str | None = Field(
        default=None, description="Secret with the credentials for --serve: ca.crt; tls.crt and tls.key, or token."
    )

    @classmethod
    def of(cls, where: str | None, environment: Mapping[str, str] = os.environ) -> KubeflowSettings:
        """Return the settings of an installation, completed from the environment.

        Parameters
        ----------
        where
            URL of Kubeflow Pipelines, ``in-cluster``, a YAML file with these settings, or None.

        Raises
        ------
        ExperimentError
            If the file cannot be read, or a setting is invalid.
        """
        if where is None or "://" in where:
            found = cls(host=where)
        elif where == "in-cluster":
            found = cls(in_cluster=True)
        else:
            found = settings_from_file(cls, Path(where))
        identified = found.token or found.token_command or found.cookie or found.in_cluster
        return completed_from(found, VARIABLES if identified else VARIABLES | LOGIN_VARIABLES, environment)

    @property
    def store(self) -> StoreSecret:
        """Keys of the Secret with the store's credentials, and the store's endpoint."""
        return StoreSecret(self.storage_secret_keys, self.s3_endpoint)

    def connect(self) -> Kubeflow:
        """Return the API of the installation.

        Raises
        ------
        ExperimentError
            If the settings name no installation, or kfp is not installed.
        RefusedError
            If the token or the cookie cannot be read.
        """
        host = api_host(self.host, in_cluster=self.in_cluster)
        credential = api_credential(
            self.token, token_command=self.token_command, cookie=self.cookie, in_cluster=self.in_cluster
        )
        return Kubeflow(host, self.namespace, credential, self.ca_file)
