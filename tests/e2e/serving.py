"""A real kd-serve process on a free loopback port, and what a client needs to talk to
it.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pieces import wait_until

from kd.deploy.export.package import seal

ROOT = Path(__file__).parents[2]


LIMITED = """
import sys
from pathlib import Path
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.server import ServeOptions, serve
serve(ServeOptions(folder=Path(sys.argv[1]), port=0, limits=Limits(%s)))
"""


class Reply(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Running:
    """A server process; use it as a context manager."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        wait: bool = True,
        cwd: Path | None = None,
        limits: str = "",
    ) -> None:
        argv = [
            sys.executable,
            "-m",
            "kd.cli",
            "serve",
            str(folder),
            "--port",
            "0",
            *options,
        ]
        if limits:  # which no option of the command sets
            argv = [sys.executable, "-c", LIMITED % limits, str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        # Not a pipe: nobody reads it while the server runs, and a full pipe stops
        # whoever writes.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=cwd,
        )
        line = self.process.stdout.readline()
        if " at http://" not in line:
            self.process.communicate(timeout=20)
            raise AssertionError(self._logged())
        self.host, port = line.split(" at http://")[1].split()[0].rsplit(":", 1)
        self.port = int(port)
        self.errors = ""
        if wait:
            wait_until(lambda: self.get("/ping").status == 200)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, seconds: float = 40) -> int:
        """Send SIGTERM, wait, and return the exit code; what it wrote to stderr is in
        `errors`.
        """
        if self.process.returncode is None:
            self.process.terminate()
        return self.wait(seconds)

    def wait(self, seconds: float = 40) -> int:
        """Wait for its end; `stop` without the signal."""
        if self.process.returncode is None:
            try:
                self.process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
                raise
            finally:
                self.errors = self._logged()
        return self.process.returncode

    def _logged(self) -> str:
        with self._log:
            self._log.seek(0)
            return self._log.read()

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request(
                method,
                path,
                body,
                {key.replace("_", "-"): value for key, value in headers.items()},
            )
            response = connection.getresponse()
            received = {key.lower(): value for key, value in response.getheaders()}
            return Reply(response.status, received, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.call("GET", path)

    def post(
        self,
        body: bytes,
        kind: str = "application/x-image",
        path: str = "/invocations",
        **headers: str,
    ) -> Reply:
        return self.call("POST", path, body, content_type=kind, **headers)

    def raw(self, data: bytes, seconds: float = 10) -> bytes:
        """Send bytes as they are and return all that comes back until the server
        closes.
        """
        with socket.create_connection(
            (self.host, self.port), timeout=seconds
        ) as connection:
            received = b""
            # a server may respond and close before it has read all
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while block := connection.recv(65536):
                    received += block
            return received

    def memory_mb(self, key: str = "VmRSS") -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(
            int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")
        )


def images(*files: bytes) -> bytes:
    """Return a JSON body of several images."""
    return json.dumps(
        {"images": [base64.b64encode(data).decode() for data in files]}
    ).encode()


def validation(photos: Path) -> list[tuple[bytes, str]]:
    """Return files and labels of the validation split."""
    return [
        (path.read_bytes(), path.parent.name)
        for path in sorted((photos / "val").rglob("*.jpg"))
    ]


def with_other_weights(export: Path, target: Path) -> Path:
    """Copy an export, with a last layer as of a later step; hashes and checksum are
    made to fit.
    """
    import onnx
    from onnx import numpy_helper

    folder = shutil.copytree(export, target)
    model = onnx.load(folder / "model.onnx")
    (head,) = (
        tensor
        for tensor in model.graph.initializer
        if tensor.name.endswith("head.weight")
    )
    head.CopyFrom(
        numpy_helper.from_array(
            numpy_helper.to_array(head) * np.float32(1.05), head.name
        )
    )
    onnx.save(model, folder / "model.onnx")
    manifest = json.loads((folder / "manifest.json").read_text())
    seal(
        folder,
        {
            key: value
            for key, value in manifest.items()
            if key not in ("files", "checksum")
        },
    )
    return folder
