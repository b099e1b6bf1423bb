"""Run an untrusted graph in a child process with limits of time and memory."""

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from kd.core.errors import ModelError, in_short
from kd.core.host import end_with
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
        argv = [sys.executable, "-m", __name__, str(path)]
        self.path, self.width = path, width
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=none, preexec_fn=end_with()
        )

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        return self._asked(pixels)[0]

    def cpu_ms(self, pixels: np.ndarray) -> float:
        """Return the median CPU milliseconds of a prediction."""
        return statistics.median([self._asked(pixels)[1] for _ in range(TURNS)])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _asked(self, pixels: np.ndarray) -> tuple[np.ndarray, float]:
        watch = threading.Timer(SECONDS, self.process.kill)
        watch.start()
        try:
            head, content = self._exchanged(pixels)
        except (OSError, ValueError):  # the child has ended
            late = not watch.is_alive()
            wrong = (
                f"takes more than {SECONDS:g} s"
                if late
                else "ends its process: it crashes, or wants more memory"
            )
            raise self._wrong(wrong) from None
        finally:
            watch.cancel()
        if "error" in head:
            raise self._wrong(f"cannot be run ({head['error']})")
        if head["shape"] != [len(pixels), self.width]:
            raise self._wrong(
                f"returns {head['shape']}, not {[len(pixels), self.width]}"
            )
        return np.frombuffer(content, np.float32).reshape(head["shape"]), head["ms"]

    def _exchanged(self, pixels: np.ndarray) -> tuple[dict, bytes]:
        to, back = self.process.stdin, self.process.stdout
        assert to is not None
        assert back is not None
        to.write(json.dumps(pixels.shape).encode() + b"\n" + pixels.tobytes())
        to.flush()
        head = json.loads(back.readline(LINE))
        if head.get("shape") != [len(pixels), self.width]:
            return head, b""
        size = 4 * math.prod(head["shape"])
        content = back.read(size)
        if len(content) < size:
            raise ValueError
        return head, content

    def _wrong(self, text: str) -> ModelError:
        return ModelError(f"export.{self.path.name}", text, "", "Do not serve it")


def main(path: Path) -> None:
    """Serve requests on standard input: a line with the shape, then pixels."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 1
    )  # a runtime's prints must not mix with the results
    if sys.platform != "win32":
        import resource  # not on Windows, which then has no memory limit

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    run, failed = None, ""
    try:
        run = open_graph(path)
    except Exception as error:  # runtimes have their own, unrelated error types
        failed = in_short(error)
    while line := sys.stdin.buffer.readline():
        shape = json.loads(line)
        pixels = np.frombuffer(
            sys.stdin.buffer.read(math.prod(shape)), np.uint8
        ).reshape(shape)
        answer, begin = np.zeros(0), time.process_time()
        try:
            answer = np.asarray(run(pixels), np.float32) if run is not None else answer
        except Exception as error:
            failed = in_short(error)
        head = (
            {"error": failed}
            if failed
            else {"shape": answer.shape, "ms": 1000 * (time.process_time() - begin)}
        )
        out.write(
            json.dumps(head).encode() + b"\n" + (b"" if failed else answer.tobytes())
        )
        out.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
