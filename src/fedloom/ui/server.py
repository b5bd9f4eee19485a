"""ASGI application of the page."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fedloom.errors import FedloomError
from fedloom.reporting.page import page_templates
from fedloom.security.access import Access
from fedloom.ui.access import BrowserGuard, PageRefusal
from fedloom.ui.pages import NoSuchPage, Site

NEEDS = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"},
}
"""Headers that say what a refused request lacks."""


def application(site: Site, access: Access | None = None) -> Starlette:
    """Return the application; with ``access``, its pages need a token that may watch runs."""

    def page(build: Callable[[Request], str]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            body = build(request).encode(errors="replace")  # names of files may hold bytes that are not UTF-8
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            same = request.headers.get("if-none-match") == tag
            return HTMLResponse(b"" if same else body, 304 if same else 200, {"ETag": tag})

        return answer

    def failed(request: Request, error: Exception) -> Response:
        missing = isinstance(error, NoSuchPage)
        title = "No such page" if missing else "This page cannot be shown"
        status = HTTPStatus.NOT_FOUND if missing else HTTPStatus.UNPROCESSABLE_ENTITY
        return HTMLResponse(site.message(title, str(error)).encode(errors="replace"), status)

    def refused(request: Request, refusal: PageRefusal) -> Response:
        form = refusal.status == HTTPStatus.UNAUTHORIZED
        query = request.scope["query_string"].decode("latin-1")
        target = quote(request.scope["path"]) + (f"?{query}" if query else "")
        body = site.message(
            "Token needed" if form else "Refused",
            refusal.reason,
            "login.html.j2" if form else "site.html.j2",
            **({"target": target if request.method == "GET" else "/"} if form else {}),
        )
        return HTMLResponse(body, refusal.status, NEEDS.get(refusal.status))

    style = page_templates("fedloom.ui").get_template("site.css.j2").render()
    pages: dict[str, Callable[[Request], str]] = {
        "/": lambda request: site.list_page(request.query_params.get("q", ""), request.query_params.get("sort", "")),
        "/run/{name:path}": lambda request: site.run_page(request.path_params["name"]),
        "/report/{name:path}": lambda request: site.report(request.path_params["name"]),
        "/client/{name:path}": lambda request: site.client_page(
            request.path_params["name"], request.query_params.get("id", "")
        ),
        "/compare": lambda request: site.comparison(request.query_params.getlist("run")),
        "/federation": lambda request: site.federation(),
    }
    handlers: dict[Any, Any] = {
        FedloomError: failed,
        404: lambda request, error: failed(request, NoSuchPage("This address is that of no page.")),
    }
    return Starlette(
        routes=[
            *(Route(path, page(build)) for path, build in pages.items()),
            Route("/healthz", lambda request: PlainTextResponse("ok")),
            Route("/static/site.css", lambda request: Response(style, media_type="text/css")),
            Mount("/static", StaticFiles(packages=[("fedloom.ui", "static")])),
        ],
        middleware=[Middleware(BrowserGuard, access=access, refuse=refused)],
        exception_handlers=handlers,
    )
