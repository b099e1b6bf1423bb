"""Serve the routes: SageMaker's contract, Prometheus' metrics, and the page.

Bodies have limits of size and time.
"""

import asyncio
import base64
import hashlib
import html
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kd.deploy.serve import responses
from kd.deploy.serve.bodies import is_gzip, media_type, parse_top
from kd.deploy.serve.limits import MIB, PROBLEM, Problem, busy, hung_up, no_memory
from kd.deploy.serve.metrics import MEDIA_TYPE
from kd.deploy.serve.service import Service

log = logging.getLogger("kd.serve")
Handler = Callable[[Request], Awaitable[Response]]
# routes polled every few seconds: their usual responses are not logged
QUIET = ("ping", "metrics")
# an oversized body is read and discarded up to this many times `max_body`
DISCARD_FACTOR = 4
MAX_QUERY = 256  # bytes of a query; chosen: several times the longest meaningful one
# allowed request ids of clients: they are logged and sent back
REQUEST_ID = "[0-9A-Za-z_.:-]{1,64}"


def build(service: Service, ui: bool = True) -> Starlette:
    """Return the application. `service` may still be loading."""
    model = service.description

    async def ping(request: Request) -> Response:
        if service.ready:
            return Response(status_code=200)
        reason = "The server is ending." if service.draining else service.reason
        return _problem_response(busy(reason))

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=MEDIA_TYPE)

    invocations = _invocations(service)
    handlers: dict[str, tuple[str, Handler]] = {
        "/ping": ("GET", ping),
        "/metrics": ("GET", metrics),
        "/invocations": ("POST", invocations),
    }
    if ui and not model.output.embeds:  # the page shows labels
        handlers["/"] = ("GET", _page(service))
    routes = []
    for path, (method, handler) in handlers.items():
        recorded = recording(service, path.strip("/") or "page", handler)
        routes += [
            Route(spelling, recorded, methods=[method])
            for spelling in {path, path.rstrip("/") + "/"}
        ]
    # AWS's clients with `endpoint_url` use SageMaker's public path, not the
    # container's.
    routes.append(
        Route(
            "/endpoints/{name}/invocations",
            recording(service, "invocations", invocations),
            methods=["POST"],
        )
    )
    application = Starlette(
        routes=routes, exception_handlers={HTTPException: _no_route(service)}
    )
    application.router.redirect_slashes = False
    return application


def _invocations(service: Service) -> Handler:
    model = service.description

    async def invocations(request: Request) -> Response:
        options = refusal = None
        try:
            options = RequestOptions.of(request)
        except Problem as problem:
            refusal = problem.copy()
        async with request_body(request, service, refusal) as body:
            assert options is not None
            predictions, request.state.summary = await service.run(
                lambda model: service.classify(
                    model,
                    options.kind,
                    options.content_type,
                    body,
                    options.gzip,
                    options.tops,
                ),
                request.receive,
            )
        if watch := service.watch:
            for prediction in predictions:
                for line in watch.add(
                    prediction.counted, prediction.measures, prediction.row
                ):
                    log.warning(line)
        rows = [prediction.row for prediction in predictions]
        content = responses.write(options.accept, rows, model.name, model.version)
        return Response(content, media_type=options.accept)

    return invocations


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The headers and the query of a request for predictions."""

    content_type: str
    kind: str  # media type of the body, normalized
    gzip: bool
    accept: str  # media type of the response
    tops: list[str]  # values of `top`

    @staticmethod
    def of(request: Request) -> "RequestOptions":
        """Read a request; raise a Problem if it is not supported."""
        content_type = request.headers.get("content-type", "")
        return RequestOptions(
            content_type,
            media_type(content_type),
            is_gzip(_list_header(request, "content-encoding")),
            responses.negotiate(_list_header(request, "accept")),
            _top_values(request),
        )


def _list_header(request: Request, name: str) -> str:
    """Return a list header, whose lines are joined (RFC 9110 5.3)."""
    return ", ".join(line for line in request.headers.getlist(name) if line.strip())


def _top_values(request: Request) -> list[str]:
    if len(request.url.query) > MAX_QUERY:
        raise Problem(400, f"The query is longer than {MAX_QUERY} characters.")
    tops = request.query_params.getlist("top")
    parse_top(tops)  # before the body is read
    return tops


def recording(service: Service, route: str, handler: Handler) -> Handler:
    """Return a handler that also counts and logs its requests, never their content."""

    async def handle(request: Request) -> Response:
        start = time.perf_counter()
        request_id = request.headers.get("x-request-id", "")
        if not re.fullmatch(REQUEST_ID, request_id):
            request_id = uuid.uuid4().hex[:16]
        request.state.summary = ""
        try:
            response = await handler(request)
        except Problem as problem:
            response = _problem_response(problem)
            request.state.summary = problem.detail
        except MemoryError:
            response = _problem_response(no_memory())
        except Exception as error:
            response = _bug_response(error, request_id)
        if route not in QUIET or response.status_code not in (200, 503):
            seconds = time.perf_counter() - start
            summary = request.state.summary
            _log_request(
                service, route, request_id, response.status_code, seconds, summary
            )
        response.headers["x-request-id"] = request_id
        if service.draining:
            response.headers["connection"] = "close"
        return response

    return handle


def _log_request(
    service: Service,
    route: str,
    request_id: str,
    status: int,
    seconds: float,
    summary: str,
) -> None:
    """Count a request and write its line of the log."""
    service.metrics.request(route, status, seconds)
    ms = round(1000 * seconds, 1)
    fields = {"request": request_id, "route": route, "status": status, "ms": ms}
    line = "%s %s %d %.1fms %s"
    log.info(line, *fields.values(), summary, extra={"fields": fields})


@asynccontextmanager
async def request_body(
    request: Request, service: Service, refusal: Problem | None = None
) -> AsyncIterator[bytes]:
    """Yield the body of a request, counted in `service.buffered` while it is used.

    Raises `refusal`, if given, or the Problem of a body that is refused. That body is
    also read to its end and discarded: a client that is still writing when the
    connection closes never reads the response.
    """
    body = bytearray()
    try:
        service.receiving += 1
        try:
            content = await _receive(request, service, body, refusal)
        finally:
            service.receiving -= 1
        yield content
    finally:
        service.buffered -= len(body)


async def _receive(
    request: Request, service: Service, body: bytearray, refusal: Problem | None
) -> bytes:
    seconds = service.limits.body_seconds
    refusal = refusal or _refuse_by_headers(request, service)
    try:
        # With `Expect: 100-continue` the client waits for permission and has sent no
        # body yet.
        if not (refusal and "expect" in request.headers):
            reading = _read_stream(request, service, body, refusal)
            refusal = await asyncio.wait_for(reading, seconds)
    except asyncio.TimeoutError as error:
        if refusal is None:
            detail = f"The body did not arrive within {seconds:g} seconds."
            refusal = Problem(408, detail, {"connection": "close"})
        raise refusal.copy() from error
    except ClientDisconnect as error:
        raise hung_up() from error
    if refusal:
        raise refusal.copy()
    return bytes(body)


async def _read_stream(
    request: Request, service: Service, body: bytearray, refusal: Problem | None
) -> Problem | None:
    """Read the stream into `body`, or discard it, and return why it was refused."""
    limits = service.limits
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limits.max_body:  # counted, because a chunked body declares no length
            refusal = refusal or _too_large(limits.max_body)
        elif service.buffered + len(chunk) > limits.max_buffered:
            refusal = refusal or busy("Too many bodies are being received.")
        if refusal is None:
            body += chunk
            service.buffered += len(chunk)
            continue
        service.buffered -= len(body)
        body.clear()
        if size > DISCARD_FACTOR * limits.max_body:
            break
    return refusal


def _refuse_by_headers(request: Request, service: Service) -> Problem | None:
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal():
        return Problem(
            400, "The content-length is not a number.", {"connection": "close"}
        )
    if int(declared[:20]) > service.limits.max_body:
        return _too_large(service.limits.max_body)
    return service.admission_error()


def _too_large(max_body: int) -> Problem:
    return Problem(
        413, f"The body is larger than {max_body} bytes.", {"connection": "close"}
    )


def _problem_response(problem: Problem) -> Response:
    return Response(problem.body, problem.status, problem.headers, PROBLEM)


def _no_route(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of requests without a route."""

    async def handle(request: Request, error: Exception) -> Response:
        async def refuse(request: Request) -> Response:
            assert isinstance(error, HTTPException)
            if request.scope["path"] == "*":  # of the whole server (RFC 9110 9.3.7)
                return Response(status_code=204, headers={"allow": "GET, HEAD, POST"})
            details = {
                404: "There is nothing at this path. Allowed are /invocations, /ping"
                " and /metrics.",
                405: "This method is not allowed here.",
            }
            status = error.status_code
            detail = details.get(status, str(error.detail))
            raise Problem(status, detail, error.headers or {})

        return await recording(service, "other", refuse)(request)

    return handle


def _bug_response(error: Exception, request_id: str) -> Response:
    """Log where the error was raised, without a client's data, and respond with 500."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = "?"
    if trace is not None:
        line = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
    log.error("%s bug: %s at %s", request_id, type(error).__name__, line)
    problem = Problem(500, "This is a bug of the server, not of the request.")
    return _problem_response(problem)


def _page(service: Service) -> Handler:
    content = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    model = service.description
    values = {
        "NAME": model.name,
        "VERSION": model.version,
        "CLASSES": str(len(model.labels)),
        "LIMIT": f"{service.limits.max_body / MIB:g}",
    }
    for key, value in values.items():
        content = content.replace(f"[[{key}]]", html.escape(value))

    def hashes(tag: str) -> str:
        elements = re.findall(f"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
        digests = [hashlib.sha256(element.encode()).digest() for element in elements]
        return " ".join(
            f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests
        )

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src"
        f" {hashes('style')}; img-src blob: data:; connect-src 'self'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    headers |= {"referrer-policy": "no-referrer", "cache-control": "no-cache"}

    async def page(request: Request) -> Response:
        return HTMLResponse(content, headers=headers)

    return page
