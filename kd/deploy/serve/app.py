"""The routes: SageMaker's contract, Prometheus, and the page. Bodies have limits of
size and time.
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
from kd.deploy.serve.bodies import is_gzip, media_type, top_of
from kd.deploy.serve.limits import PROBLEM, Problem, busy, hung_up, no_memory
from kd.deploy.serve.metrics import MEDIA_TYPE
from kd.deploy.serve.service import Service

log = logging.getLogger("kd.serve")
Handler = Callable[[Request], Awaitable[Response]]
QUIET = (
    "ping",
    "metrics",
)  # routes polled every few seconds: their usual responses are not logged
DISCARD_FACTOR = (
    4  # an oversized body is read and discarded up to this many times `max_body`
)
MAX_QUERY = 256  # bytes of a query; chosen: several times the longest meaningful one
REQUEST_ID = (  # allowed request ids of clients: they are logged and sent back
    "[0-9A-Za-z_.:-]{1,64}"
)


def build(service: Service, ui: bool = True) -> Starlette:
    """Return the application. `service` may still be loading."""
    model = service.description

    async def ping(request: Request) -> Response:
        if service.ready:
            return Response(status_code=200)
        return _answer(
            busy("The server is ending." if service.draining else service.reason)
        )

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=MEDIA_TYPE)

    invocations = _invocations(service)
    found: dict[str, tuple[str, Handler]] = {
        "/ping": ("GET", ping), "/metrics": ("GET", metrics), "/invocations": ("POST", invocations),
    }  # fmt: skip
    if ui and not model.output.embeds:  # the page shows labels
        found["/"] = ("GET", _page(service))
    routes = []
    for path, (method, handler) in found.items():
        watched = observed(service, path.strip("/") or "page", handler)
        routes += [
            Route(each, watched, methods=[method])
            for each in {path, path.rstrip("/") + "/"}
        ]
    # AWS's clients with `endpoint_url` use SageMaker's public path, not the
    # container's.
    routes.append(
        Route(
            "/endpoints/{name}/invocations",
            observed(service, "invocations", invocations),
            methods=["POST"],
        )
    )
    application = Starlette(
        routes=routes, exception_handlers={HTTPException: _refuser(service)}
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
    """Content types, codings and `top` of a request for predictions, from its headers
    and query.
    """

    content_type: str
    kind: str  # media type of the body, normalized
    gzip: bool
    accept: str  # media type of the response
    tops: list[str]  # values of `top`

    @staticmethod
    def of(request: Request) -> "RequestOptions":
        """Read a request; a Problem if it is not supported."""
        content_type = request.headers.get("content-type", "")
        return RequestOptions(
            content_type,
            media_type(content_type),
            is_gzip(_list(request, "content-encoding")),
            responses.negotiate(_list(request, "accept")),
            _tops(request),
        )


def _list(request: Request, name: str) -> str:
    """Return a list header, whose lines are joined (RFC 9110 5.3)."""
    return ", ".join(line for line in request.headers.getlist(name) if line.strip())


def _tops(request: Request) -> list[str]:
    if len(request.url.query) > MAX_QUERY:
        raise Problem(400, f"The query is longer than {MAX_QUERY} characters.")
    tops = request.query_params.getlist("top")
    top_of(tops)  # before the body is read
    return tops


def observed(service: Service, route: str, handler: Handler) -> Handler:
    """Wrap a handler: count and log its requests with sizes, times and status. The
    content is never logged.
    """

    async def handle(request: Request) -> Response:
        start, identity = time.perf_counter(), request.headers.get("x-request-id", "")
        if not re.fullmatch(REQUEST_ID, identity):
            identity = uuid.uuid4().hex[:16]
        request.state.summary = ""
        try:
            response = await handler(request)
        except Problem as problem:
            response = _answer(problem)
            request.state.summary = problem.detail
        except MemoryError:
            response = _answer(no_memory())
        except Exception as error:
            response = _bug_response(error, identity)
        if route not in QUIET or response.status_code not in (200, 503):
            record(
                service,
                route,
                identity,
                response.status_code,
                time.perf_counter() - start,
                request.state.summary,
            )
        response.headers["x-request-id"] = identity
        if service.draining:
            response.headers["connection"] = "close"
        return response

    return handle


def record(
    service: Service,
    route: str,
    identity: str,
    status: int,
    seconds: float,
    summary: str,
) -> None:
    """Count a request and write its line of the log."""
    service.metrics.request(route, status, seconds)
    ms = round(1000 * seconds, 1)
    fields = {"request": identity, "route": route, "status": status, "ms": ms}
    log.info(
        "%s %s %d %.1fms %s",
        identity,
        route,
        status,
        ms,
        summary,
        extra={"fields": fields},
    )


@asynccontextmanager
async def request_body(
    request: Request, service: Service, refusal: Problem | None = None
) -> AsyncIterator[bytes]:
    """Yield the body of a request, counted in `service.buffered` until the `async with`
    block ends.

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
            refusal = await asyncio.wait_for(
                _read(request, service, body, refusal), seconds
            )
    except asyncio.TimeoutError as error:
        late = f"The body did not arrive within {seconds:g} seconds."
        raise (
            refusal.copy() if refusal else Problem(408, late, {"connection": "close"})
        ) from error
    except ClientDisconnect as error:
        raise hung_up() from error
    if refusal:
        raise refusal.copy()
    return bytes(body)


async def _read(
    request: Request, service: Service, body: bytearray, refusal: Problem | None
) -> Problem | None:
    """Read the stream into `body`, or discard it after a refusal; return the
    refusal.
    """
    limits, size = service.limits, 0
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


def _answer(problem: Problem) -> Response:
    return Response(problem.body, problem.status, problem.headers, PROBLEM)


def _refuser(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of requests without a route."""

    async def answer(request: Request, error: Exception) -> Response:
        async def refuse(request: Request) -> Response:
            assert isinstance(error, HTTPException)
            if request.scope["path"] == "*":  # of the whole server (RFC 9110 9.3.7)
                return Response(status_code=204, headers={"allow": "GET, HEAD, POST"})
            nothing = (
                "There is nothing at this path. Allowed are /invocations, /ping and"
                " /metrics."
            )
            detail = {404: nothing, 405: "This method is not allowed here."}
            raise Problem(
                error.status_code,
                detail.get(error.status_code, str(error.detail)),
                error.headers or {},
            )

        return await observed(service, "other", refuse)(request)

    return answer


def _bug_response(error: Exception, identity: str) -> Response:
    """Respond with 500 and log where the error was raised. Values are not logged: they
    may be a client's data.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = (
        f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        if trace is not None
        else "?"
    )
    log.error("%s bug: %s at %s", identity, type(error).__name__, line)
    return _answer(Problem(500, "This is a bug of the server, not of the request."))


def _page(service: Service) -> Handler:
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    model, limit = service.description, f"{service.limits.max_body / 2**20:g}"
    values = {
        "NAME": model.name,
        "VERSION": model.version,
        "CLASSES": str(len(model.labels)),
        "LIMIT": limit,
    }
    for key, value in values.items():
        text = text.replace(f"[[{key}]]", html.escape(value))

    def hashes(tag: str) -> str:
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(c.encode()).digest()).decode()}'"
            for c in contents
        )

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src"
        f" {hashes('style')}; img-src blob: data:; connect-src 'self'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    headers |= {"referrer-policy": "no-referrer", "cache-control": "no-cache"}

    async def page(request: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return page
