"""Protection of the page: methods, host names, tokens, and headers that keep a browser from other hosts."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from pydantic import SecretStr
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedloom.core.address import is_loopback, split_address
from fedloom.errors import ExperimentError, argument
from fedloom.security.access import Access, Action, Admitted, Denied, PeerCredentials

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",  # figures have inline styles
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""

COOKIE = "fedloom-ui"
OPEN = ("/static/", "/healthz")
"""Beginnings of paths that need no token."""

MOST_SESSIONS = 1000
MOST_BYTES = 4096
"""Maximum size of the login form."""


def check_listen(address: str, access: Access | None, *, insecure: bool) -> None:
    """Raise ExperimentError if other machines could read the page without a token, or a token in transit."""
    host, _ = split_address(address, what=argument("listen"), lowest=0)
    if is_loopback(host) or (access is not None and insecure):
        return
    reason = (
        "without a token; listen on 127.0.0.1, or add tokens.json to the credentials (`fedloom token new`)"
        if access is None
        else "in plaintext; listen on 127.0.0.1 behind a proxy with TLS, or accept the risk with "
        f"{argument('insecure')}"
    )
    raise ExperimentError(
        f"{argument('listen')} is {host}, which other machines can reach, {reason}.", key="listen", found=host
    )


class PageRefusal(NamedTuple):
    """Refused request: its status, and the reason in a sentence."""

    status: HTTPStatus
    reason: str


class BrowserGuard:
    """ASGI middleware that admits GET and HEAD, of known host names or with a token, and adds :data:`HEADERS`.

    Without ``access``, the request must name this machine as its host: a foreign page whose name resolves to 127.0.0.1
    is refused. With it, a token or the cookie of a login is needed, which a foreign page does not have.
    """

    def __init__(self, app: ASGIApp, access: Access | None, refuse: Callable[[Request, PageRefusal], Response]) -> None:
        self._app, self._access, self._refuse = app, access, refuse
        self._sessions: dict[str, Admitted] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        request = Request(scope, receive)
        if scope["path"] == "/login" and request.method == "POST" and self._access is not None:
            answer: ASGIApp = await self._login(request)
        else:
            refusal = self._refusal(request)
            answer = self._app if refusal is None else self._refuse(request, refusal)
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> PageRefusal | None:
        if request.method not in ("GET", "HEAD"):
            return PageRefusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} is not allowed; the page only reads.")
        if request.scope["path"].startswith(OPEN):  # its URL would depend on the Host header
            return None
        if self._access is None:
            if is_loopback(_host_name(request.headers.get("host", ""))):
                return None
            return PageRefusal(
                HTTPStatus.MISDIRECTED_REQUEST, "Open this page as localhost or 127.0.0.1; another name needs a token."
            )
        try:
            session = self._sessions.get(request.cookies.get(COOKIE, ""))
            if session is not None:
                self._access.refresh()
                self._access.check(session, Action.WATCH)
            else:
                scheme, _, token = request.headers.get("authorization", "").partition(" ")
                if scheme.lower() != "bearer":
                    return PageRefusal(HTTPStatus.UNAUTHORIZED, "")
                self._admitted(token)
        except Denied as denied:
            return PageRefusal(HTTPStatus.UNAUTHORIZED, f"Not admitted: {denied}.")
        return None

    def _admitted(self, token: str) -> Admitted:
        assert self._access is not None
        self._access.refresh()
        return self._access.admit(PeerCredentials(token=SecretStr(token.strip())), Action.WATCH)

    async def _login(self, request: Request) -> Response:
        """Return the answer to the login form: the page that was asked for, with a cookie, or the form again."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                return Response("The form is too large.", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        form = parse_qs(body.decode("latin-1"))
        try:
            admitted = self._admitted(form.get("token", [""])[0])
        except Denied as denied:
            return self._refuse(request, PageRefusal(HTTPStatus.UNAUTHORIZED, f"Not admitted: {denied}."))
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = secrets.token_urlsafe(32)
        self._sessions[session] = admitted
        page = form.get("next", ["/"])[0]
        is_ours = page.startswith("/") and not page.startswith(("//", "/\\"))
        answer = RedirectResponse(page if is_ours else "/", HTTPStatus.SEE_OTHER)
        answer.set_cookie(COOKIE, session, httponly=True, samesite="strict")
        return answer


def _host_name(header: str) -> str:
    """Return the name in a Host header; empty if it is malformed."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
