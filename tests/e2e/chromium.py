"""A headless Chromium, spoken to through its debugging pipe (file descriptors 3 and 4):
no package needed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
# Chromium reads from 3 and writes to 4, which may be taken here: a child moves its
# copies there and becomes Chromium.
BECOME = """
import os, sys
for place, end in ((903, sys.argv[1]), (904, sys.argv[2])):
    os.dup2(int(end), place)
for place in (3, 4):
    os.dup2(900 + place, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def path() -> str | None:
    """Return where Chromium is, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One open page; use it as a context manager."""

    def __init__(self, profile: Path, width: int = 900, height: int = 1000) -> None:
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        place = (
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        )
        argv = [
            sys.executable,
            "-c",
            BECOME,
            str(read_end),
            str(write_end),
            str(path()),
            *FLAGS,
            *place,
        ]
        nothing = subprocess.DEVNULL
        self.process = subprocess.Popen(
            argv, pass_fds=(read_end, write_end), stdout=nothing, stderr=nothing
        )
        for end in (read_end, write_end):
            os.close(end)
        self._count = 0
        self._buffer = b""
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        """What was asked for, in order."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *args: object) -> None:
        os.close(self._write)
        os.close(self._read)
        self.process.terminate()
        self.process.wait(20)

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol; what the page complains about meanwhile is
        kept in `problems`.
        """
        self._count += 1
        message: dict[str, Any] = {
            "id": self._count,
            "method": method,
            "params": parameters,
        }
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(answer["params"]))
            elif answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._read, 1 << 16)
            if not block:
                raise RuntimeError("chromium ended")
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """Evaluate JavaScript and return its value."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 10) -> Any:
        """Wait until JavaScript evaluates to something true, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {script}")
            time.sleep(0.03)
        return value

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until(
            "document.readyState === 'complete' &&"
            f" location.href.startsWith({json.dumps(url)})"
        )

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an input, as the dialog does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(file)], nodeId=node)

    def screenshot(self, target: Path) -> None:
        """Save what is seen as PNG."""
        target.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
