"""Run the server process: its port, signals, threads and shutdown.

HTTP itself is granian's.
"""

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kd.core.errors import KdError
from kd.core.host import cores, open_files
from kd.core.options import one_of, option, whole_number
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.logs import to_stderr
from kd.deploy.serve.service import Service

log = logging.getLogger("kd.serve")
# errors of `bind` about the port; all others concern the address
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
POLL_SECONDS = 0.01  # between two tries to connect to the port that is being opened
# open files that are no connections; chosen: five times those of a server without
# clients
OTHER_FILES = 128
SETTLE_SECONDS = 0.5
"""Seconds from SIGTERM to the closing of the port, at least. Responses say `connection:
close` meanwhile, so that no client sends a request on a kept connection while it is
closed: 0 in 20 ends under eight clients, without it 9.
"""
# connections that wait to be accepted: twice what 512 clients at once need
BACKLOG = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of kd-serve."""

    folder: Path = option(metavar="FOLDER")
    """export folder; the bare word `serve`: /opt/ml/model, on 0.0.0.0"""
    file: str = option("", "FILE")
    """the graph (default: the one that kd-export --accept chose, or model.onnx)"""
    second: Path | None = option(None, "EXPORT", Path)
    """another export, such as the teacher's, for images on which the first is unsure
    (kd-export --defer)
    """
    host: str = option("127.0.0.1", "HOST")
    """interface (default 127.0.0.1: only this machine)"""
    port: int = option(8080, "PORT", whole_number(0, 65535))
    """0: any free one, which is printed (default 8080, or $SAGEMAKER_BIND_TO_PORT)"""
    cores: int = option(
        0,
        "N",
        lambda text: 0 if text == "auto" else whole_number(1, 4096)(text),
        flag="--threads",
    )
    """cores to use (default auto: all that affinity and cgroup allow)"""
    slots: int = option(0, "N", whole_number(1, 1024))
    """requests computed in parallel, each with threads / slots threads (default: as
    many as threads)
    """
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
    """Serve an export until a signal, then finish all accepted requests and return."""
    from kd.deploy.serve.cascade import describe_pair

    writer = to_stderr(settings.quiet, settings.log_format)
    # No warnings about a client's EXIF or palette.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    description, second = describe_pair(
        settings.folder, settings.file, settings.second, settings.self_check
    )
    usable_cores = settings.cores or cores()
    slots = settings.slots or usable_cores
    threads = max(1, usable_cores // slots)
    service = Service(description, settings.limits, slots, threads, second)
    service.metrics.watch_log(writer)
    host, port = _free_address(settings.host, settings.port)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    announcement = (
        f"kd-serve: {description.name} {description.version}, {len(description.labels)}"
        f" classes, at {url} ({slots} slots x {threads} threads)"
    )
    if description.folder != settings.folder:
        announcement += f", from {description.folder}"
    try:
        asyncio.run(Endpoint(service, settings.ui).run(host, port, announcement))
    finally:
        service.close()
        writer.finish()


class Endpoint:
    """One process that serves one `Service` until a signal ends it."""

    def __init__(self, service: Service, ui: bool) -> None:
        self.service = service
        self._ui = ui
        self._stop = asyncio.Event()
        self._error: Exception | None = None

    async def run(self, host: str, port: int, announcement: str) -> None:
        """Serve until a signal or an error of loading the model.

        `announcement` is printed when the port is open.
        """
        with self._signals_handled():
            await self._serve(host, port, announcement)
        if self._error:
            raise self._error

    async def _serve(self, host: str, port: int, announcement: str) -> None:
        loop = asyncio.get_running_loop()
        loading = threading.Thread(
            target=self._load, args=(loop,), name="kd-load", daemon=True
        )
        server = _server(self.service, self._ui, host, port)
        serving = loop.create_task(server.serve())
        serving.add_done_callback(lambda _: self._end())
        await _wait_until_open(host, port, serving)
        print(announcement, flush=True)
        loading.start()
        await self._stop.wait()
        seconds = self.service.limits.end_seconds
        log.info("ending: %d requests are in progress", self.service.in_progress)
        server.stop()
        await self._finish(serving, seconds)
        if unanswered := self.service.in_progress:
            log.warning(
                "ended: %d requests were not answered within %g s", unanswered, seconds
            )
        # A process that exits while OpenVINO loads a graph is aborted: SIGABRT in 8 of
        # 30 exits, in 0 of 20 if joined.
        loading.join(seconds)

    async def _finish(self, serving: asyncio.Task[None], seconds: float) -> None:
        """Wait until the server has ended, at most some seconds.

        Without a request in progress it waits `SETTLE_SECONDS`. What is left then are
        connections that have sent a part of a header.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.wait({serving}, timeout=SETTLE_SECONDS)
            if serving.done() or not self.service.in_progress:
                break
        if serving.done():
            serving.result()
        else:
            serving.cancel()

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        # Windows' loops take no handlers; Ctrl-C raises KeyboardInterrupt there.
        if sys.platform == "win32":
            yield
            return
        loop = asyncio.get_running_loop()
        seconds = max(self.service.limits.drain_seconds, SETTLE_SECONDS)
        loop.add_signal_handler(signal.SIGTERM, self._drain, seconds)
        loop.add_signal_handler(signal.SIGHUP, self._drain, seconds)
        loop.add_signal_handler(signal.SIGINT, self._drain, SETTLE_SECONDS)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.service.load()
            gc.collect()
            # Else each full collection scans all imported modules and stops every
            # thread for 0.3 s.
            gc.freeze()
        except Exception as error:
            # Else it is ending already, and its threads accept no work.
            if not self._stop.is_set():
                self._error = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end)

    def _drain(self, seconds: float) -> None:
        """Fail health checks, and serve on until load balancers have seen that."""
        if self._stop.is_set():
            return
        if self.service.model is None:
            seconds = 0.0
        log.info("ending: health checks fail, the port closes in %g s", seconds)
        self.service.draining = True
        asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        self.service.draining = True
        self._stop.set()


def _server(service: Service, ui: bool, host: str, port: int):
    from granian.constants import HTTPModes, Interfaces
    from granian.http import HTTP1Settings
    from granian.server.embed import Server

    from kd.deploy.serve import app

    limits = service.limits
    connection = HTTP1Settings(
        header_read_timeout=round(1000 * limits.idle_seconds),
        max_buffer_size=limits.max_header_bytes,
    )
    return Server(
        app.build(service, ui),
        address=host,
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        http1_settings=connection,
        websockets=False,
        backlog=BACKLOG,
        backpressure=open_files(limits.max_connections + OTHER_FILES) - OTHER_FILES,
        log_enabled=False,
    )


async def _wait_until_open(host: str, port: int, serving: asyncio.Task[None]) -> None:
    while not serving.done():
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return
        await asyncio.sleep(POLL_SECONDS)


def _free_address(host: str, port: int) -> tuple[str, int]:
    """Return the address to listen at, as numbers.

    granian shares a port that another server listens at (SO_REUSEPORT), so this is
    tried without. Raises KdError if the address is taken, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            host, port = probe.getsockname()[:2]
            return host, port
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        wrong = f"cannot listen at {host}:{port} ({reason})"
        if getattr(error, "errno", None) in PORT_ERRORS:
            raise KdError("--port", wrong, "", "Choose another --port") from error
        allowed = "An address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"
        raise KdError("--host", wrong, allowed, "Choose another --host") from error
