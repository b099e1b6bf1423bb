"""Run an untrusted graph in a child process with limits of time and memory."""

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import ModelError, first_sentence
from kd.core.host import terminate_with_parent
from kd.deploy.serve.engines import open_graph

SECONDS = 120.0  # seconds for one batch, with loading. Chosen, not measured
MEMORY = 8 << 30  # bytes of address space. Chosen, not measured
LINE = 2000  # bytes of the child's header before its numbers
TURNS = 12  # timed predictions


class Sandbox:
    """A graph in a child process: called with uint8 [B, 3, S, S], it returns float32
    [B, width].

    Any call may raise ModelError: the graph cannot be loaded or run, returns another
    shape, or exceeds a limit.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.failed = False
        self.path = path
        self.width = width
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=terminate_with_parent(),
        )

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        return self.predict(pixels)[0]

    def median_cpu_ms(self, pixels: np.ndarray) -> float:
        """Return the median CPU milliseconds of a prediction."""
        return statistics.median([self.predict(pixels)[1] for _ in range(TURNS)])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def predict(self, pixels: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the outputs, and the CPU milliseconds of the prediction."""
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        try:
            header, content = self._exchange(pixels)
        except (OSError, ValueError):  # the child has ended
            wrong = "ends its process: it crashes, or wants more memory"
            if not timer.is_alive():
                wrong = f"takes more than {SECONDS:g} s"
            raise self._error(wrong) from None
        finally:
            timer.cancel()
        if "error" in header:
            raise self._error(f"cannot be run ({header['error']})")
        shape = [len(pixels), self.width]
        if header["shape"] != shape:
            raise self._error(f"returns {header['shape']}, not {shape}")
        return np.frombuffer(content, np.float32).reshape(shape), header["ms"]

    def _exchange(self, pixels: np.ndarray) -> tuple[dict, bytes]:
        """Send pixels to the child; return its header and, if it fits, its numbers."""
        stdin = self.process.stdin
        stdout = self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(pixels.shape).encode() + b"\n" + pixels.tobytes())
        stdin.flush()
        header = json.loads(stdout.readline(LINE))
        if header.get("shape") != [len(pixels), self.width]:
            return header, b""
        size = 4 * len(pixels) * self.width
        content = stdout.read(size)
        if len(content) < size:
            raise ValueError
        return header, content

    def _error(self, wrong: str) -> ModelError:
        self.failed = True
        return ModelError(f"export.{self.path.name}", wrong, "", "Do not serve it")


class Sandboxes(ExitStack):
    """The graphs' child processes: a graph runs in one until it fails.

    `trust`: graphs that are code may run in this process.
    """

    def __init__(self, trust: bool) -> None:
        super().__init__()
        self.trust = trust
        self.running: dict[Path, Sandbox] = {}
        self.callback(self.running.clear)

    def open(self, path: Path, width: int) -> Sandbox:
        """Return the graph in its process, which is started the first time."""
        run = self.running.get(path)
        if run is None or run.failed or run.width != width:
            run = self.enter_context(closing(Sandbox(path, width)))
            self.running[path] = run
        return run


def main(path: Path) -> None:
    """Serve requests on standard input: a line with the shape, then pixels."""
    stdout = os.fdopen(os.dup(1), "wb")
    # a runtime's prints must not mix with the results
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if sys.platform != "win32":
        import resource  # not on Windows, which then has no memory limit

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    graph = None
    error_text = ""
    try:
        graph = open_graph(path)
    except Exception as error:  # runtimes have their own, unrelated error types
        error_text = first_sentence(error)
    while line := sys.stdin.buffer.readline():
        shape = json.loads(line)
        pixels = np.frombuffer(
            sys.stdin.buffer.read(math.prod(shape)), np.uint8
        ).reshape(shape)
        logits = np.zeros(0)
        start = time.process_time()
        try:
            if graph is not None:
                logits = np.asarray(graph(pixels), np.float32)
        except Exception as error:
            error_text = first_sentence(error)
        milliseconds = 1000 * (time.process_time() - start)
        header: dict[str, Any] = {"shape": logits.shape, "ms": milliseconds}
        content = logits.tobytes()
        if error_text:
            header = {"error": error_text}
            content = b""
        stdout.write(json.dumps(header).encode() + b"\n" + content)
        stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
