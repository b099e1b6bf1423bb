"""The routes: SageMaker's contract, Prometheus, KServe's protocol version 2, and the page."""

from __future__ import annotations

import base64
import hashlib
import html
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kd.serve import answers, bodies, v2
from kd.serve.metrics import MEDIA_TYPE
from kd.serve.problems import CLIENT_GONE, Problem, busy, no_memory
from kd.serve.request_body import RequestBody
from kd.serve.service import Service

log = logging.getLogger("kd.serve")
Handler = Callable[[Request], Awaitable[Response]]
TOP = 5
HEALTH = ("/ping", "/v2/health/live", "/v2/health/ready")
MAX_QUERY = 256


def build(service: Service, ui: bool = True) -> Starlette:
    """Return the application. `service` may still be loading."""

    async def ping(request: Request) -> Response:
        if service.ready:
            return Response(status_code=200)
        return busy("The server is ending." if service.draining else "The model is still being loaded.").response()

    async def metrics(request: Request) -> Response:
        text = service.metrics.text(service.ready, service.in_flight, service.buffered)
        return PlainTextResponse(text, media_type=MEDIA_TYPE)

    async def invocations(request: Request) -> Response:
        kind = bodies.media_type(request.headers.get("content-type", ""))
        accept = answers.negotiate(request.headers.get("accept", ""))
        top = _top(request, len(service.description.labels))
        header = request.headers.get("content-type", "")
        async with RequestBody(request, service) as body:
            values, request.state.summary = await service.run(
                lambda model: service.classify(model, kind, header, body), request.receive
            )
        output = service.description.output
        if output.embeds:
            found = answers.embeddings(values)
        else:
            found = answers.predictions(values, service.description.labels, top, output.thresholds)
        return Response(
            answers.write(accept, found, service.description.name, service.description.version), media_type=accept
        )

    routes = [
        Route("/ping", ping, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/invocations", observed(service, "invocations", invocations), methods=["POST"]),
        *v2.Protocol(service).routes(lambda handler: observed(service, "v2", handler)),
    ]
    if ui and not service.description.output.embeds:  # the page shows labels
        routes.append(Route("/", _page(service), methods=["GET"]))
    handlers: dict[Any, Any] = {Problem: _problem, HTTPException: _http_error, Exception: _bug}
    return Starlette(routes=routes, exception_handlers=handlers)


def health_only(application: Starlette) -> ASGIApp:
    """Return the application for connections beyond the limit: it answers health checks, and 503 to the rest."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH:
            await application(scope, receive, send)
            return
        problem = busy("Too many connections are open.")
        problem.headers["connection"] = "close"
        await problem.response()(scope, receive, send)

    return answer


def _top(request: Request, classes: int) -> int:
    if len(request.url.query) > MAX_QUERY:
        raise Problem(400, f"The query is longer than {MAX_QUERY} characters.")
    text = request.query_params.get("top", str(TOP))
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise Problem(400, "The parameter `top` must be a whole number from 1.")
    return min(int(text), classes)


def observed(service: Service, route: str, handler: Handler) -> Handler:
    """Wrap a handler: count and log its requests with sizes, times and status. The content is never logged."""

    async def handle(request: Request) -> Response:
        start, identity = time.perf_counter(), uuid.uuid4().hex[:16]
        request.state.summary = ""
        status = 500
        try:
            response = await handler(request)
        except Problem as problem:
            response = problem.response()
            request.state.summary = problem.detail
        except HTTPException:
            raise
        except MemoryError:
            response = no_memory().response()
        except Exception as error:
            response = _bug_response(error, identity)
        status = response.status_code
        seconds = time.perf_counter() - start
        service.metrics.request(route, status, seconds)
        if status != CLIENT_GONE:
            description = request.state.summary
            log.info("%s %s %d %.1fms %s", identity, route, status, 1000 * seconds, description)
        response.headers["x-request-id"] = identity
        if service.draining:
            response.headers["connection"] = "close"
        return response

    return handle


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = {404: "There is nothing at this path.", 405: "This method is not allowed here."}
    problem = Problem(error.status_code, detail.get(error.status_code, str(error.detail)), error.headers or {})
    return problem.response()


async def _bug(request: Request, error: Exception) -> Response:
    return _bug_response(error, "-")


def _bug_response(error: Exception, identity: str) -> Response:
    """Answer 500 and log where the error was raised. Values are not logged: they may be a client's data."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else "?"
    log.error("%s bug: %s at %s", identity, type(error).__name__, place)
    return Problem(500, "This is a bug of the server, not of the request.").response()


def _page(service: Service) -> Handler:
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    description = service.description
    for key, value in (
        ("NAME", description.name),
        ("VERSION", description.version),
        ("CLASSES", str(len(description.labels))),
    ):
        text = text.replace(f"[[{key}]]", html.escape(value))
    text = text.replace("[[LIMIT]]", f"{service.limits.max_body / 2**20:g}")

    def allowed(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in found)

    policy = (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def page(request: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return page
