"""The server process: its socket, signals, threads and shutdown."""

import errno
import functools
import gc
import logging
import os
import signal
import socket
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from kd.core.errors import KdError
from kd.core.host import cores
from kd.core.options import one_of, option, whole_number
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.metrics import to_stderr

log = logging.getLogger("kd.serve")
OF_PORT = (errno.EADDRINUSE, errno.EACCES)  # errors of `bind` about the port; all others concern the address


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of kd-serve."""

    folder: Path = option(metavar="FOLDER")
    """export folder; the bare word `serve`: /opt/ml/model, on 0.0.0.0"""
    file: str = option("", "FILE")
    """the graph (default: the one that kd-export --accept chose, or model.onnx)"""
    second: Path | None = option(None, "EXPORT", Path)
    """another export, such as the teacher's, for images on which the first is unsure (kd-export --defer)"""
    host: str = option("127.0.0.1", "HOST")
    """interface (default 127.0.0.1: only this machine)"""
    port: int = option(8080, "PORT", whole_number(0, 65535))
    """0: any free one, which is printed (default 8080, or $SAGEMAKER_BIND_TO_PORT)"""
    cores: int = option(0, "N", lambda text: 0 if text == "auto" else whole_number(1, 4096)(text), flag="--threads")
    """cores to use (default auto: all that affinity and cgroup allow)"""
    slots: int = option(0, "N", whole_number(1, 1024))
    """requests computed in parallel, each with threads / slots threads (default: as many as threads)"""
    ui: bool = option(True)
    """the page at /"""
    quiet: bool = option(False)
    """do not log requests"""
    self_check: bool = option(True)
    """run the self-check first; serve nothing if it fails"""
    log_format: str = option("text", "FORMAT", one_of("text", "json"))
    """text, or json: one object per line"""
    limits: Limits = field(default_factory=Limits)


def serve(settings: ServeOptions) -> None:
    """Serve an export until SIGTERM or SIGINT, then finish all accepted requests and return."""
    # Pillow reads this at import and keeps this many blocks of pixels for later images. Freeing and reallocating them
    # causes page faults (600 x 450 JPEG: decode 2.5 instead of 3.7 ms, three runs, busy machine).
    os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")
    import uvicorn

    from kd.deploy.serve import app
    from kd.deploy.serve.cascade import describe_pair
    from kd.deploy.serve.connection import Connection, DrainingServer, Shared
    from kd.deploy.serve.service import Service

    lines = to_stderr(settings.quiet, settings.log_format)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # no warnings about a client's EXIF or palette
    description, second = describe_pair(settings.folder, settings.file, settings.second, settings.self_check)
    usable = settings.cores or cores()
    slots = settings.slots or usable
    service = Service(description, settings.limits, slots, max(1, usable // slots), second)
    service.metrics.log = lines
    listener = _listen(settings.host, settings.port)
    application = app.build(service, settings.ui)
    refused = functools.partial(app.refused, service)
    shared = Shared(settings.limits, app.health_only(application, service), refused)
    config = uvicorn.Config(
        application,
        http=functools.partial(Connection, shared=shared),  # type: ignore[arg-type]  # uvicorn only calls it
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.limits.idle_seconds,  # type: ignore[arg-type]  # it may be a fraction
        timeout_graceful_shutdown=int(settings.limits.end_seconds),
    )
    server = DrainingServer(config, service)
    errors: list[Exception] = []
    loading = threading.Thread(target=_load, args=(service, server, errors), name="kd-load", daemon=True)
    loading.start()
    host, port = listener.getsockname()[:2]
    print(
        f"kd-serve: {description.name} {description.version}, {len(description.labels)} classes, "
        f"at http://{f'[{host}]' if ':' in host else host}:{port} ({slots} slots x {service.threads} threads)"
        + f", from {description.folder}"
        * (description.folder != settings.folder),
        flush=True,
    )
    _run(server, listener)
    # A process that exits while OpenVINO loads a graph is aborted: SIGABRT in 8 of 30 exits, in 0 of 20 when joined.
    loading.join(settings.limits.end_seconds)
    service.close()
    lines.finish()
    if errors:
        raise errors[0]


def _load(service, server, errors: list[Exception]) -> None:
    try:
        service.load()
        gc.collect()
        gc.freeze()  # else each full collection scans all imported modules and stops every thread for 0.3 s
    except Exception as error:
        if not server.should_exit:  # else it is ending already, and its threads accept no work
            errors.append(error)
        server.should_exit = True


def _run(server, listener: socket.socket) -> None:
    # uvicorn raises the signal again after its shutdown; this handler keeps it from killing the process. A signal
    # before uvicorn handles signals also ends the server.
    before = {sig: signal.signal(sig, server.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is IPPROTO_TCP. Without it a response waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        option = "--port" if getattr(error, "errno", None) in OF_PORT else "--host"
        allowed = "" if option == "--port" else "An address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"
        raise KdError(
            option, f"cannot listen at {host}:{port} ({reason})", allowed, f"Choose another {option}"
        ) from error
    return listener
