"""Stand-in for the login of a multi-user Kubeflow: its gateway, and the API's own check of a token.

The names of the source files say which project shows it:

- The gateway sends requests without ``Authorization`` to oauth2-proxy, and verifies the JWT of all others
  (kubeflow/manifests, ``common/oauth2-proxy/components/istio-external-auth``).
- oauth2-proxy answers a request without a session that accepts JSON, or whose path has ``/apis/``, with 401 and
  ``{}``; others with 403 and a page to sign in, or, where ``skip_provider_button`` is set, with 302 to the provider
  (oauth2-proxy, ``oauthproxy.go``, ``Proxy``, ``isAjax``, ``errorJSON``; kubeflow/manifests,
  ``common/oauth2-proxy/base/oauth2_proxy.cfg``: ``api_routes``, ``login_url``, ``cookie_name``). Before Kubeflow 1.9,
  and with other providers, the redirect comes for every path.
- A JWT that has ended gets 401 and "Jwt is expired"; one of an issuer that no RequestAuthentication names, as that of
  a service account is under ``overlays/m2m-dex-only``, "Jwt issuer is not configured" (google/jwt_verify_lib,
  ``src/status.cc``).
- The API reviews the token of a request that came without the gateway, and tells nothing but that the identity is
  empty, whatever is wrong with it (kubeflow/pipelines, ``backend/src/apiserver/resource/resource_manager.go``,
  ``IsAuthorized``); its health asks for none (``server/healthz_server.go``).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EMPTY_IDENTITY = (
    "Unauthenticated: Failed to check authorization. User identity is empty in the request header: [Request header "
    "error: there is no user identity header., Authentication failure: Unauthenticated: Review.Status.Authenticated is "
    "false. Error [invalid bearer token, service account token has expired]: Failed to authenticate token review]"
)


def jwt(number: int = 0, *, lasts_s: float = 3600.0, **claims: Any) -> str:
    """Return a token as ``kubectl create token`` prints it, with a signature that is never checked."""
    reported = {
        "aud": ["pipelines.kubeflow.org"],
        "exp": int(time.time() + lasts_s),
        "sub": "system:serviceaccount:team-a:default-editor",
        "jti": number,
        **claims,
    }
    parts = [json.dumps(part).encode() for part in ({"alg": "RS256"}, reported)]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (*parts, b"signature"))


def right_of(method: str, path: str) -> tuple[str, str]:
    """Return verb and resource of the right that a request to the API needs.

    kubeflow/pipelines: ``server/pipeline_server.go``, where a version is its pipeline's, ``server/run_server.go``,
    and ``server/job_server.go``, where recurring runs are jobs.
    """
    parts = path.split("/")[1:]
    verb = {"GET": "get" if len(parts) % 2 == 0 else "list", "DELETE": "delete"}.get(method, "create")
    verb = path.rpartition(":")[2] if ":" in path else verb
    return verb, {"recurringruns": "jobs"}.get(parts[0], parts[0])


def denied(user: str, namespace: str, verb: str, resource: str) -> str:
    """Return the API's message for a missing right (``resource_manager.go``, ``IsAuthorized``)."""
    request = (
        f"&ResourceAttributes{{Namespace:{namespace},Verb:{verb},Group:pipelines.kubeflow.org,Version:v1beta1,"
        f"Resource:{resource},Subresource:,Name:,}}"
    )
    return f"PermissionDenied: User '{user}' is not authorized with reason:  (request: {request}): Unauthorized access"


class Page(NamedTuple):
    """An answer of another service than the API."""

    status: int
    kind: str
    body: bytes
    location: str | None = None


@dataclass
class Gateway:
    """Gateway in front of the API.

    Attributes
    ----------
    session
        Value of the cookie of a session; None: there is no session.
    trusts_accounts
        Whether its issuers include the cluster (overlay ``m2m-dex-and-kind``).
    redirects
        Whether oauth2-proxy redirects every request without a session to the provider.
    """

    session: str | None = None
    trusts_accounts: bool = True
    redirects: bool = False
    cookies: list[str | None] = field(default_factory=list)

    def answer(self, path: str, headers: Mapping[str, str], *, known: bool) -> Page | None:
        """Return the answer to a request that does not reach the API; None if it does."""
        if headers.get("Authorization") is not None:
            if not self.trusts_accounts:
                return Page(401, "text/plain", b"Jwt issuer is not configured")
            return None if known else Page(401, "text/plain", b"Jwt is expired")
        self.cookies.append(headers.get("Cookie"))
        if self.session is not None and headers.get("Cookie") == f"oauth2_proxy_kubeflow={self.session}":
            return None
        if self.redirects:
            return Page(302, "text/html", b"<a>Found</a>", f"/dex/auth?client_id=kubeflow-oidc-authservice&rd={path}")
        if "application/json" in headers.get("Accept", "") or "/apis/" in path:
            return Page(401, "application/json", b"{}")
        return Page(403, "text/html; charset=utf-8", b'<!DOCTYPE html><form method="GET" action="/oauth2/start">')
