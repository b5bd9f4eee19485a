"""Authentication at the Kubeflow Pipelines API: bearer tokens that are renewed, session cookies, refusals explained.

A multi-user Kubeflow identifies a request in one of two ways (kubeflow/manifests, ``common/oauth2-proxy``): by a JWT in
``Authorization``, which a service account or the identity provider issues, or by the cookie of a session behind
oauth2-proxy. Both can expire while a command waits for a run.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from fedloom.core.urls import service_url
from fedloom.core.words import parsed_json
from fedloom.errors import ExperimentError, FedloomError, RefusedError, StorageError, argument

log = logging.getLogger("fedloom.kubeflow")

IN_CLUSTER_HOST = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
TOKEN_FILE = "/var/run/secrets/kubeflow/pipelines/token"
"""Default path of a pod's token for the Pipelines API; ``$KF_PIPELINES_SA_TOKEN_PATH`` overrides it."""

AUDIENCE = "pipelines.kubeflow.org"
"""Audience of a service account's token (``TOKEN_REVIEW_AUDIENCE`` of kubeflow/pipelines)."""

COMMAND_S = 60.0
"""Seconds that a command for a token may take."""

COOKIE = "cookie"
"""Name of credentials that are sent in the header ``Cookie``; others are bearer tokens."""

SPARE_S = 60.0
"""Seconds before its expiry at which a token is replaced."""

DENIED = re.compile(
    r"User '(?P<user>[^']*)' is not authorized .*?ResourceAttributes\{Namespace:(?P<namespace>[^,]*),"
    r"Verb:(?P<verb>[^,]*),Group:[^,]*,Version:[^,]*,Resource:(?P<resource>[^,]*),"
)
"""Pattern of a refused right (kubeflow/pipelines, ``IsAuthorized`` in ``resource_manager.go``)."""


class Credential:
    """Secret that is sent with each request, and read again when it has been replaced.

    ``kfp.Client(credentials=...)`` accepts it, too: it has the hook of kfp's ``TokenCredentialsBase``.

    Parameters
    ----------
    read
        Returns the current secret.
    name
        Its kind in messages: token or cookie.
    kept
        Keep the secret until shortly before it expires, instead of reading it for each request.

    Raises
    ------
    RefusedError
        If it cannot be read at first.
    """

    def __init__(self, read: Callable[[], str], name: str = "token", *, kept: bool = False) -> None:
        self.name = name
        self._read, self._kept = read, kept
        self._value = read()

    @property
    def value(self) -> str:
        """Current secret.

        Raises
        ------
        StorageError
            If it has expired, and a new one cannot be read.
        """
        ends = expiry_of(self._value)
        if self._kept and (ends is None or ends - time.time() > SPARE_S):
            return self._value
        try:
            self._value = self._read_again()
        except StorageError as error:
            if not self._kept or ends is None or ends <= time.time():
                raise
            log.warning("the %s expires soon: %s", self.name, error)
        return self._value

    def renew(self) -> bool:
        """Read the secret again; return False if it is the one that was refused.

        Raises
        ------
        StorageError
            If it cannot be read.
        """
        before, self._value = self._value, self._read_again()
        return self._value != before

    def _read_again(self) -> str:
        try:
            return self._read()
        except RefusedError as error:  # it could be read before: the network or the file may return
            raise StorageError(f"a new {self.name} cannot be read: {error.message}", hint=error.hint) from error

    def describe(self) -> str:
        """Return the owner, audience and expiry that a JWT states; empty for other secrets."""
        claims = _claims(self._value)
        parts = [f"of {claims['sub']}"] if "sub" in claims else []
        parts += [f"for {_listed(claims['aud'])}"] if "aud" in claims else []
        if (ends := expiry_of(self._value)) is not None:
            parts.append(
                f"{'expired' if ends <= time.time() else 'expires'} at {datetime.fromtimestamp(ends, UTC):%FT%TZ}"
            )
        return f" (a token {', '.join(parts)})" if parts else ""

    def refresh_api_key_hook(self, configuration: Any) -> None:
        """Set the token of a request; the generated client calls this before each."""
        configuration.api_key["authorization"] = self.value


def api_host(host: str | None, *, in_cluster: bool) -> str:
    """Return the URL of the API, in a pod by default that of its Service.

    Raises
    ------
    ExperimentError
        If the URL is malformed or missing.
    """
    host = host or (IN_CLUSTER_HOST if in_cluster else None)
    if host is None:
        raise ExperimentError(
            f"Give the URL of Kubeflow Pipelines as {argument('kubeflow')}, or in-cluster in a pod.",
            key="kubeflow.host",
        )
    form = "a URL such as https://kubeflow.example/pipeline"
    return service_url(host, argument("kubeflow"), form, key="kubeflow.host", path=True)


def api_credential(
    token: str | None = None, *, token_command: str | None = None, cookie: str | None = None, in_cluster: bool = False
) -> Credential | None:
    """Return the credential for the API; None if no way to authenticate is given.

    The parameters are those of :class:`~fedloom.kubeflow.settings.KubeflowSettings`.

    Raises
    ------
    ExperimentError
        If two ways are given.
    RefusedError
        If the token or the cookie cannot be read.
    """
    ways = {"token": token, "token_command": token_command, "cookie": cookie, "in_cluster": in_cluster or None}
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise ExperimentError(
            f"{argument('kubeflow')} has {' and '.join(given)}; give one of them.", key=f"kubeflow.{given[0]}"
        )
    if in_cluster:
        mounted = Path(os.environ.get("KF_PIPELINES_SA_TOKEN_PATH") or TOKEN_FILE)
        hint = "label the pod so that Kubeflow mounts it (PodDefault access-ml-pipeline)"
        return Credential(lambda: _token(_text(mounted, hint), str(mounted)))
    if token_command:
        return Credential(lambda: _printed(token_command), kept=True)
    if token:
        return Credential(lambda: _token(secret_text(token), "token"))
    return Credential(lambda: _cookie(secret_text(cookie)), COOKIE) if cookie else None


def secret_text(secret: str) -> str:
    """Return a secret, from its file if it is ``@FILE``; raise RefusedError if that cannot be read."""
    return _text(Path(secret[1:])) if secret.startswith("@") else secret.strip()


def _text(path: Path, hint: str | None = None) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:  # its text would show the secret
        raise RefusedError(f"{path} has no token: byte {error.start} is not ASCII", hint=hint) from None
    except OSError as error:
        raise RefusedError(f"{path} has no token: {error}", hint=hint) from error


def _token(text: str, source: str) -> str:
    if not re.fullmatch(r"[ -~]+", text):
        raise RefusedError(
            f"{source} must be a token on one line ({len(text)} characters found)", hint=_how_to_log_in(None)
        )
    return text


def _cookie(text: str) -> str:
    if not re.fullmatch(r"[^=;,\s]+=[!-~]+(; *[^=;,\s]+=[!-~]+)*", text):
        raise RefusedError(
            "cookie must be NAME=VALUE on one line, as a browser sends it", hint="its name is oauth2_proxy_kubeflow"
        )
    return text


def _printed(command: str) -> str:
    """Return the token that a command prints; its output is never shown."""
    try:
        words = shlex.split(command)
        done = subprocess.run(words, capture_output=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL, check=False)
    except (ValueError, IndexError) as error:
        raise ExperimentError(f"token_command is not a command: {error}", key="kubeflow.token_command") from error
    except subprocess.TimeoutExpired:
        raise RefusedError(f"token_command did not end within {COMMAND_S:g} s", hint="run it by hand") from None
    except OSError as error:
        raise RefusedError(f"token_command cannot run: {error}", hint="give a program of $PATH, or a path") from error
    if done.returncode:
        message = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        raise RefusedError(f"token_command ended with {done.returncode}: {message}", hint="run it by hand")
    return _token(done.stdout.decode(errors="replace").strip(), "the output of token_command")


def expiry_of(token: str) -> float | None:
    """Return the time at which a JWT expires, in seconds of the epoch; None if it states none. It is not verified."""
    ends = _claims(token).get("exp")
    return float(ends) if isinstance(ends, int | float) and abs(ends) < 1e11 else None


def _claims(token: str) -> Mapping[str, Any]:
    parts = token.split(".")
    with suppress(ValueError):
        if len(parts) == 3:
            claims = parsed_json(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
            return claims if isinstance(claims, dict) else {}
    return {}


def _listed(audience: Any) -> str:
    return " ".join(map(str, audience)) if isinstance(audience, list) else str(audience)


@dataclass(frozen=True)
class Place:
    """Installation and namespace to which a request was sent."""

    host: str
    namespace: str | None

    def __str__(self) -> str:
        return self.host + (f", namespace {self.namespace}" if self.namespace else "")


def explain_denial(what: str, place: Place, error: Any, credential: Credential | None) -> FedloomError | None:
    """Return the error if a gateway or the API denied a request; None for other errors.

    Parameters
    ----------
    what
        The request, as in "not allowed to ...".
    place
        Where it was sent.
    error
        The generated client's exception, with ``status``, ``headers`` and ``body``.
    credential
        Sent with it; None if there is none.
    """
    page = "html" in str((error.headers or {}).get("Content-Type"))
    body = body_text(error.body or error.reason or "")
    answer = "a login page" if page else message_of(body)
    if 300 <= error.status < 400:
        target = urlsplit(urljoin(f"{place.host}/", str((error.headers or {}).get("Location") or "")))
        root, api, _ = target.path.partition("/apis/")
        if api:  # only the scheme, the host or the prefix differs
            moved = target._replace(path=root, query="", fragment="").geturl()
            return ExperimentError(f"{place.host} redirects to {moved}; give that URL.", key="kubeflow.host")
        answer = f"a redirect to {target._replace(query='', fragment='').geturl()}"
    elif error.status == 403 and not page:
        return _forbidden(what, place, body, answer, credential)
    elif error.status not in (401, 403):
        return None
    return login_required(place, answer.replace("{}", "") or f"status {error.status}", credential)


def asks_for_login(error: Any) -> bool:
    """Return True if a response of the generated client says that the credential is missing, unknown or expired."""
    page = "html" in str((error.headers or {}).get("Content-Type"))
    return error.status == 401 or 300 <= error.status < 400 or (error.status == 403 and page)


def login_required(place: Place, answer: str, credential: Credential | None) -> RefusedError:
    """Return the error for a request without a valid credential.

    Parameters
    ----------
    place
        Where it was sent.
    answer
        Its answer.
    credential
        Sent with it; None if there is none.
    """
    sent, hint = "requests without a token or cookie are", _how_to_log_in(place.namespace)
    if credential is not None:
        sent = f"the {credential.name} is"
        answer += credential.describe()
    if credential is not None and credential.name == COOKIE:
        hint = "log in again with a browser, and copy its cookie oauth2_proxy_kubeflow to the file that cookie names"
    if "issuer is not configured" in answer:
        hint = (
            "this gateway does not trust the service accounts of the cluster (overlay m2m-dex-only of "
            "kubeflow/manifests); give a cookie, or use: kubectl port-forward -n kubeflow svc/ml-pipeline 8888"
        )
    return RefusedError(f"{place}: {sent} not accepted: {answer}", hint=hint)


def _how_to_log_in(namespace: str | None) -> str:
    return (
        f"give token_command in the file of {argument('kubeflow')}: kubectl create token default-editor -n "
        f"{namespace or 'PROFILE'} --audience={AUDIENCE}; or, for the session of a browser, cookie: @FILE, a file with "
        "oauth2_proxy_kubeflow=VALUE"
    )


def _forbidden(what: str, place: Place, body: str, answer: str, credential: Credential | None) -> RefusedError:
    if (found := DENIED.search(body)) is not None:
        right = f"{found['verb']} {found['resource']} in namespace {found['namespace'] or '(none)'}"
        answer = f"{found['user']} is not authorized to {right}"
        hint = (
            f"check namespace in the file of {argument('kubeflow')}; contributors of a profile have the right, and "
            "accounts with a RoleBinding to the ClusterRole kubeflow-edit there"
        )
        return RefusedError(f"{place}: not allowed to {what}: {answer}", hint=hint)
    hint = "check the namespace and your rights"
    if answer == "RBAC: access denied":  # Envoy's answer: a policy of the mesh, before the API was asked
        hint = "an AuthorizationPolicy refuses the request; " + (
            "give the URL of the gateway" if credential is not None else _how_to_log_in(place.namespace)
        )
    return RefusedError(f"{place}: not allowed to {what}: {answer}", hint=hint)


def body_text(body: Any) -> str:
    """Return a response's body as text."""
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body)


def message_of(body: Any) -> str:
    """Return the API's error message on one line."""
    text = body_text(body)
    with suppress(ValueError, KeyError, TypeError):
        text = str(parsed_json(text)["message"])
    return " ".join(text.split())[:500]
